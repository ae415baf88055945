// Lines over the steps, drawn by uPlot: loss, norms, learning rate, loss scale, the chosen row.
// Where steps were thinned a line is a band from the lowest to the highest value of its points.
import { byId, make, put, figure, axisFigure, grouped, counted, table } from "./words.js";
import { ABSENT, normOf, unpackLine } from "./decode.js";
import { cssColour } from "./theme.js";

const HEIGHT = 178;
const PINS = ["kind3", "clip", "kind2", "kind5"]; // colours of the style sheet
const EMPTY = {
  loss: "No loss was recorded: Watch.log(loss=...) or Watch.step(loss=...) adds it.",
  total_norm: "No gradient norm was recorded: statistics were not due (stats=Schedule(...)).",
  lr: "No learning rate was recorded: give watch(...) the optimizer, or Watch.log(lr=...).",
};

export class Lines {
  /** told: {zoom(from, to), point(step)} */
  constructor(data, told) {
    Object.assign(this, { data, told, charts: [], row: null });
    this.sync = uPlot.sync("gradsight");
  }

  /** Unpacks the lines. */
  async load() {
    this.lines = await unpackAll(this.data.lines);
  }

  charted() {
    const { lines } = this, clip = lines.clipping?.norm ?? null;
    const skipped = lines.skipped?.count ? counted(lines.skipped.count, "skipped step") : "";
    const clipped = lines.clipping?.steps ? `${grouped(lines.clipping.steps)} of ${grouped(lines.clipping.of)} steps clipped` : "";
    const list = [
      { key: "loss", title: "Loss", line: lines.loss, log: isSteep(lines.loss) },
      { key: "total_norm", title: "Total gradient norm", line: lines.total_norm, log: true,
        limit: clip, note: [clipped && (clip ? `${clipped} to ${figure(clip)}` : clipped), skipped].filter(Boolean).join(", "),
        ticks: lines.skipped?.steps ?? [] },
      { key: "row", title: "Chosen row", line: this.row?.line, log: true, note: this.row?.name ?? "point at the map",
        pinned: this.row?.pinned ?? [] },
      { key: "lr", title: "Learning rate", line: lines.lr },
    ];
    if (lines.scale) list.push({ key: "scale", title: "Loss scale", line: lines.scale, log: true, ticks: lines.skipped?.steps ?? [] });
    return list;
  }

  /** Builds every chart anew: at first, and when colours or the width change. */
  build(view) {
    this.view = view;
    for (const chart of this.charts) chart.plot?.destroy();
    this.charts = this.charted().map(spec => this.chart(spec));
    put(byId("lines"), ...this.charts.map(chart => chart.figure));
    for (const chart of this.charts) this.plot(chart);
  }

  chart(spec) {
    const caption = make("figcaption"), value = make("span", "", { className: "value" }), holder = make("div");
    caption.append(make("b", spec.title), make("span", spec.note ?? "", { className: "note", title: spec.note ?? "" }), value);
    const figureOf = make("figure");
    figureOf.append(caption, ...pinnedNames(spec.pinned ?? []), holder);
    figureOf.dataset.line = spec.key;
    return { spec, figure: figureOf, holder, value, plot: null };
  }

  plot(chart) {
    const { spec, holder } = chart, points = spec.line && pointsOf(spec.line, spec.log);
    if (!points || !points[0].length) {
      put(holder, make("p", EMPTY[spec.key] ?? (spec.key === "row" ? "Point at a row of the map." : "Not recorded."), { className: "quiet" }));
      return;
    }
    const { data, series, bands } = seriesOf(points, spec);
    const options = {
      width: Math.max(160, holder.clientWidth), height: HEIGHT, legend: { show: false }, pxAlign: 1,
      cursor: { sync: { key: this.sync.key }, y: false, points: { size: 6 }, drag: { x: true, y: false, setScale: false } },
      scales: { x: { time: false, range: () => [this.view.from, Math.max(this.view.to, this.view.from + 1)] }, y: scaleOf(spec) },
      axes: axesOf(spec), series, bands,
      hooks: {
        setCursor: [plot => this.point(chart, plot)],
        setSelect: [plot => this.select(plot)],
        draw: [plot => drawMarks(plot, spec, this.marks ?? [])],
      },
    };
    chart.plot = new uPlot(options, data, holder);
    chart.plot.root.setAttribute("role", "img");
    chart.plot.root.setAttribute("aria-label", describe(spec));
  }

  point(chart, plot) {
    const at = plot.cursor.idx;
    if (at === null || at === undefined) { chart.value.textContent = ""; return; }
    const step = plot.data[0][at], high = plot.data[1][at], low = plot.data[2]?.[at];
    const text = low === undefined || low === high ? figure(high) : `${figure(low)} to ${figure(high)}`;
    chart.value.textContent = `${text} at ${grouped(step)}`;
    if (!this.led && plot.cursor.event?.isTrusted) this.told.point(step);
  }

  select(plot) {
    if (plot.select.width < 6) return;
    const from = plot.posToVal(plot.select.left, "x"), to = plot.posToVal(plot.select.left + plot.select.width, "x");
    plot.setSelect({ left: 0, width: 0, top: 0, height: 0 }, false);
    this.told.zoom(Math.round(from), Math.round(to));
  }

  /** Other steps are shown. */
  zoomTo(view) {
    this.view = view;
    for (const chart of this.charts) chart.plot?.setScale("x", { min: view.from, max: Math.max(view.to, view.from + 1) });
  }

  /** Another row was chosen; `source` has its norms by column. */
  choose({ name, columns, pinned }) {
    if (this.row?.name === name) return;
    this.row = { name, line: lineOfRow(columns),
      pinned: pinned.map(each => ({ name: each.name, line: lineOfRow(each.columns) })) };
    const at = this.charts.findIndex(chart => chart.spec.key === "row");
    if (at < 0) return;
    this.charts[at].plot?.destroy();
    const chart = this.chart(this.charted().find(spec => spec.key === "row"));
    this.charts[at].figure.replaceWith(chart.figure);
    this.charts[at] = chart;
    this.plot(chart);
  }

  /** The cursor of every chart at a step. */
  cursorAt(step) {
    // uPlot takes new scales at the end of the turn: a place is known only after that.
    queueMicrotask(() => {
      this.led = true; // by the map, which must not be led back
      for (const { plot } of this.charts) plot?.setCursor({ left: plot.valToPos(step, "x"), top: 10 });
      this.led = false;
    });
  }

  /** Twenty steps of every line. */
  numbers() {
    const known = this.charted().filter(spec => spec.line && spec.key !== "row");
    if (!known.length) return make("p", "Nothing was recorded.", { className: "quiet" });
    const { from, to } = this.view, count = Math.min(20, to - from + 1);
    const steps = Array.from({ length: count }, (_, at) => Math.round(from + (to - from) * at / Math.max(1, count - 1)));
    const rows = steps.map(step => [grouped(step), ...known.map(spec => valueAt(spec.line, step))]);
    return table(["step", ...known.map(spec => spec.title)], rows, [0, ...known.map((_, at) => at + 1)]);
  }
}

/** The names of rows whose lines stay, each with its colour. */
function pinnedNames(pinned) {
  if (!pinned.length) return [];
  const list = make("div", "", { className: "pins quiet" });
  pinned.forEach(({ name }, at) => list.append(put(make("span", "", { title: name }), make("i", "", { className: `key ${PINS[at]}` }), name)));
  return [list];
}

async function unpackAll(lines) {
  const names = Object.keys(lines).filter(name => lines[name]?.starts);
  const unpacked = await Promise.all(names.map(name => unpackLine(lines[name])));
  return { ...lines, ...Object.fromEntries(names.map((name, at) => [name, unpacked[at]])) };
}

function lineOfRow({ starts, lasts, low, high, thinned }) {
  const number = height => { const norm = normOf(height); return norm === undefined || !Number.isFinite(norm) ? NaN : norm; };
  const bad = Array.from(starts).filter((_, at) => Number.isNaN(high[at]) || high[at] === Infinity);
  const highs = Float64Array.from(high, (height, at) => height === Infinity || height !== height ? number(low[at]) : height === ABSENT ? NaN : number(height));
  return { starts, lasts, high: highs, low: thinned ? Float64Array.from(low, number) : highs, bad, factor: thinned ? 2 : 1 };
}

/** uPlot's arrays: steps, highest and, where thinned, lowest. Zero has no place on a log scale. */
function pointsOf(line, log) {
  const drawable = value => Number.isNaN(value) || (log && value <= 0) ? null : value;
  const steps = Array.from(line.starts), high = Array.from(line.high, drawable);
  if (line.factor === 1 || line.low === line.high) return [steps, high];
  return [steps, high, Array.from(line.low, drawable)];
}

function seriesOf(points, spec) {
  const accent = cssColour("accent"), banded = points.length === 3;
  const series = [{}, { stroke: accent, width: 1.4, points: { show: points[0].length < 3 }, spanGaps: false }];
  const data = [...points], bands = [];
  if (banded) {
    series.push({ stroke: accent, width: 1, alpha: 0.5, points: { show: false } });
    bands.push({ series: [1, 2], fill: `color-mix(in srgb, ${accent} 22%, transparent)` });
  }
  (spec.pinned ?? []).forEach(({ line }, at) => {
    data.push(pointsOf(line, spec.log)[1]);
    series.push({ stroke: cssColour(PINS[at]), width: 1.2, points: { show: false } });
  });
  return { data, series, bands };
}

/** Whether a plain scale would show nothing but one spike. */
function isSteep(line) {
  const values = Array.from(line?.high ?? []).filter(Number.isFinite).sort((a, b) => a - b);
  return values.length > 2 && values[0] > 0 && values.at(-1) > 20 * values[values.length >> 1];
}

function scaleOf(spec) {
  if (spec.log) return { distr: 3, range: (_, low, high) => logRange(low, high, spec.limit) };
  return { range: (_, low, high) => low === null || low === undefined ? [0, 1] : padded(low, high) };
}

function padded(low, high) {
  const more = (high - low || Math.abs(high) || 1) * 0.06;
  return [low - more, high + more];
}

function logRange(low, high, limit) {
  if (!(low > 0) || !(high > 0)) return [0.1, 10];
  const least = Math.min(low, limit ?? low), most = Math.max(high, limit ?? high);
  const more = Math.max(1.08, (most / least) ** 0.06);
  return [least / more, most * more];
}

function axesOf(spec) {
  const soft = cssColour("soft"), grid = { stroke: cssColour("line"), width: 1 };
  const font = "11px system-ui, 'Liberation Sans', sans-serif";
  const common = { stroke: soft, font, ticks: { show: false }, grid };
  return [
    { ...common, grid: { show: false }, size: 24, space: 70, values: (_, steps) => steps.map(step => Number.isInteger(step) ? grouped(step) : "") },
    { ...common, size: 58, space: 34, values: (_, values) => values.map(value => value === null ? "" : axisFigure(value)),
      ...(spec.log ? { filter: (_plot, splits) => splits, splits: (_plot, _axis, low, high) => logSplits(low, high) } : {}) },
  ];
}

/** Three round numbers or more of a logarithmic axis, however short it is. */
function logSplits(low, high) {
  const decades = Math.log10(high / low), splits = [];
  const steps = decades > 2.2 ? [1] : decades > 0.8 ? [1, 2, 5] : [1, 1.2, 1.5, 2, 2.5, 3, 4, 5, 6, 8];
  const every = Math.max(1, Math.ceil(decades / 6));
  for (let power = Math.floor(Math.log10(low)); power <= Math.ceil(Math.log10(high)); power += 1) {
    if (decades > 2.2 && power % every) continue;
    for (const step of steps) { const value = Number((step * 10 ** power).toPrecision(3)); if (value >= low && value <= high) splits.push(value); }
  }
  return splits;
}

/** Findings as lines, the clip norm as a dashed one, skipped steps and broken points as ticks. */
function drawMarks(plot, spec, marks) {
  const c = plot.ctx, { left, top, width, height } = plot.bbox, ratio = devicePixelRatio || 1;
  const inside = x => x >= left && x <= left + width;
  c.save();
  for (const mark of marks) {
    const x = plot.valToPos(mark.step, "x", true);
    if (!inside(x) || !mark.severity) continue;
    c.strokeStyle = cssColour(mark.severity);
    c.globalAlpha = 0.55;
    c.setLineDash([2 * ratio, 3 * ratio]);
    c.beginPath(); c.moveTo(x, top); c.lineTo(x, top + height); c.stroke();
  }
  c.globalAlpha = 1;
  if (spec.limit) {
    const y = plot.valToPos(spec.limit, "y", true);
    c.strokeStyle = cssColour("clip");
    c.setLineDash([6 * ratio, 4 * ratio]);
    c.beginPath(); c.moveTo(left, y); c.lineTo(left + width, y); c.stroke();
  }
  c.setLineDash([]);
  const ticks = [[spec.ticks ?? [], "soft"], [spec.line?.bad ?? [], "nan"]];
  ticks.forEach(([steps, colour]) => {
    c.fillStyle = cssColour(colour);
    for (const step of steps) { const x = plot.valToPos(step, "x", true); if (inside(x)) c.fillRect(x - ratio, top + height - 7 * ratio, 2 * ratio, 7 * ratio); }
  });
  c.restore();
}

function describe(spec) {
  const { line, title } = spec, count = line.starts.length;
  return `${title} over ${counted(count, "point")}, from ${figure(line.high[0])} to ${figure(line.high[count - 1])}.`;
}

function valueAt(line, step) {
  let at = -1;
  for (let low = 0, high = line.starts.length - 1; low <= high;) {
    const middle = (low + high) >> 1;
    if (line.starts[middle] <= step) { at = middle; low = middle + 1; } else high = middle - 1;
  }
  if (at < 0) return "–";
  const low = line.low[at], high = line.high[at];
  return low === high || Number.isNaN(low) ? figure(high) : `${figure(low)} to ${figure(high)}`;
}
