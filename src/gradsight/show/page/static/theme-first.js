// Before the first paint: a page that turns dark after it was seen is a flash in the dark.
{
  let kept = null;
  try { kept = localStorage.getItem("gradsight-theme"); } catch { /* a file may have no storage */ }
  const dark = matchMedia("(prefers-color-scheme: dark)").matches;
  document.documentElement.dataset.theme = kept ?? (dark ? "dark" : "light");
}
