// Light or dark: as the system has it, unless somebody chose.

export const themeName = () => document.documentElement.dataset.theme === "dark" ? "dark" : "light";

export function switchTheme() {
  const name = themeName() === "dark" ? "light" : "dark";
  document.documentElement.dataset.theme = name;
  try { localStorage.setItem("gradsight-theme", name); } catch { /* a file may have no storage */ }
}

const knownColours = new Map();

/** A colour of the style sheet by its name; asking the style sheet takes a millisecond. */
export function cssColour(name) {
  const key = `${themeName()} ${name}`;
  if (!knownColours.has(key))
    knownColours.set(key, getComputedStyle(document.documentElement).getPropertyValue(`--${name}`).trim());
  return knownColours.get(key);
}

/** Paper is light, whatever the screen is; afterwards the screen is again as it was. */
export function onPaper(printing) {
  const { dataset } = document.documentElement;
  if (printing) dataset.screen = dataset.theme;
  dataset.theme = printing ? "light" : dataset.screen ?? dataset.theme;
}

/** Calls back when the system turns light or dark, and nobody chose. */
export function followSystem(changed) {
  matchMedia("(prefers-color-scheme: dark)").addEventListener("change", event => {
    let kept = null;
    try { kept = localStorage.getItem("gradsight-theme"); } catch { /* as above */ }
    if (kept) return;
    document.documentElement.dataset.theme = event.matches ? "dark" : "light";
    changed();
  });
}
