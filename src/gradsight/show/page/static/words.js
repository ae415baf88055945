// Elements and numbers as text. Strangers' texts reach the page through `make`, and only as text.

export const byId = id => document.getElementById(id);

/** A new element with a text and properties; never with markup. */
export function make(tag, text = "", properties = {}) {
  return Object.assign(document.createElement(tag), { textContent: text }, properties);
}

/** Replaces what an element holds. */
export function put(parent, ...children) {
  parent.replaceChildren(...children);
  return parent;
}

/** Three digits, whatever the size. */
export function figure(value, digits = 3) {
  if (value === null || value === undefined) return "–";
  if (Number.isNaN(value)) return "NaN";
  if (!Number.isFinite(value)) return value > 0 ? "Inf" : "-Inf";
  const size = Math.abs(value);
  if (value === 0 || (size >= 1e-3 && size < 1e4)) return String(Number(value.toPrecision(digits)));
  return value.toExponential(digits - 1).replace(/\.?0+e/, "e");
}

/** The same for an axis, where numbers are round. */
export function axisFigure(value) {
  return Number.isInteger(value) && Math.abs(value) < 1e6 ? grouped(value) : figure(value);
}

/** A number of the payload: what is not finite came as text. */
export function parsed(value) {
  if (typeof value !== "string") return value;
  return { nan: NaN, inf: Infinity, "-inf": -Infinity }[value] ?? NaN;
}

const GROUPS = new Intl.NumberFormat("en"); // made once: every number's own would take as long as a frame

export const grouped = value => GROUPS.format(value);

export function counted(number, noun) {
  return `${grouped(number)} ${noun}${number === 1 ? "" : "s"}`;
}

export function percent(share, digits = 0) {
  return share === null || share === undefined ? "–" : `${(share * 100).toFixed(digits)}%`;
}

export function bytes(size) {
  const units = ["B", "kB", "MB", "GB", "TB"];
  let unit = 0;
  while (size >= 1000 && unit < units.length - 1) { size /= 1000; unit += 1; }
  return `${unit ? size.toPrecision(3) : Math.round(size)} ${units[unit]}`;
}

/** Round steps between two, at most so many. */
export function stepTicks(from, to, most) {
  const rough = Math.max(1, (to - from) / Math.max(1, most));
  const power = 10 ** Math.floor(Math.log10(rough));
  const unit = Math.max(1, [1, 2, 5, 10].map(times => times * power).find(each => each >= rough));
  const ticks = [];
  for (let step = Math.ceil(from / unit) * unit; step <= to; step += unit) ticks.push(step);
  return ticks;
}

/** A table with a heading for every column; the names in `numeric` are set to the right. */
export function table(headings, rows, numeric = []) {
  const head = make("tr");
  headings.forEach((text, at) => head.append(
    make("th", text, { scope: "col", className: numeric.includes(at) ? "n" : "" })));
  const body = make("tbody");
  for (const row of rows) {
    const line = make("tr");
    row.forEach((cell, at) => {
      const field = make("td", "", { className: numeric.includes(at) ? "n" : "" });
      field.append(cell ?? "–");
      line.append(field);
    });
    body.append(line);
  }
  const made = make("table");
  made.append(put(make("thead"), head), body);
  return put(make("div", "", { className: "wide", tabIndex: 0 }), made);
}

/** Puts a text on the clipboard and says so on the button for a moment. */
export function copyFrom(button, text) {
  const before = button.textContent;
  const said = word => {
    button.textContent = word;
    setTimeout(() => { button.textContent = before; }, 1200);
  };
  const written = navigator.clipboard?.writeText(text) ?? Promise.reject(new Error("no clipboard"));
  written.then(() => said("Copied"), () => said(copiedByHand(text) ? "Copied" : "Not allowed"));
}

/** For pages that are not served over https: the selection of a field is copied. */
function copiedByHand(text) {
  const field = make("textarea", text, { className: "unseen" });
  document.body.append(field);
  field.select();
  const done = document.execCommand("copy");
  field.remove();
  return done;
}
