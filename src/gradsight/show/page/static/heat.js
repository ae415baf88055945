// The heat map: parameters x steps on a canvas, with labels, marks, a cursor and a legend.
// Only the rows that can be seen are painted, so that thousands of them scroll as quickly as ten.
import { byId, make, put, figure, grouped, stepTicks, percent } from "./words.js";
import { ZERO, ABSENT, normOf } from "./decode.js";
import { cssColour } from "./theme.js";
import { colourTable, specialPixels, cssOf } from "./colours.js";
import { cellsOf, cellAtPixel, cellOfStep, cellValue, FAR } from "./view.js";

const TOP = 18, BOTTOM = 24, LEAST_ROW = 4, NAMED_ROW = 13, MOST_ROW = 22, SPREADS = 8;

/** How each mode is coloured: the map it reads, the ramp, and what its numbers are. */
export const PAINTS = {
  norm: { map: "norm", ramp: "ink", noun: "norm" },
  deviation: { map: "norm", ramp: "poles", noun: "norm" },
  update: { map: "update", ramp: "ink", noun: "update / weight" },
  weight: { map: "weight", ramp: "ink", noun: "weight RMS" },
  change: { map: "change", ramp: "ink", noun: "update RMS" },
  zeros: { map: "zeros", ramp: "ink", noun: "share of zeros" },
};

export class HeatMapView {
  /** told: {choose(row, step), zoom(from, to), fold(block)} */
  constructor(source, told) {
    this.source = source;
    this.told = told;
    this.rows = source.data.heat.rows;
    this.canvas = byId("heat");
    this.over = byId("over");
    this.shown = [];
    this.mode = "norm";
    this.cursor = null; // {row, step}
    this.marks = [];
    this.drag = null;
    this.wanted = null;
  }

  get paint() { return PAINTS[this.mode]; }

  /** Shows these rows, steps from..to, in a mode; `folded` are the blocks whose members are away. */
  show({ shown, from, to, mode, folded }) {
    Object.assign(this, { shown, from, to, mode, folded });
    this.measure();
    this.pickLevel();
    this.draw();
  }

  measure() {
    const room = Math.max(320, Math.min(680, innerHeight * 0.72));
    const fits = Math.floor(room / Math.max(1, this.shown.length));
    // A little more than fits, where every row gets its name by that.
    this.rowHeight = fits > NAMED_ROW - 4 ? Math.max(NAMED_ROW, Math.min(MOST_ROW, fits)) : Math.max(LEAST_ROW, fits);
    const whole = this.shown.length * this.rowHeight;
    const most = this.rowHeight === NAMED_ROW ? room + 180 : room;
    this.visible = Math.max(1, Math.min(this.shown.length, Math.floor(most / this.rowHeight)));
    this.height = this.visible * this.rowHeight;
    byId("scroll").style.height = byId("stage").style.height = `${this.height + TOP + BOTTOM}px`;
    byId("tall").style.height = `${whole + TOP + BOTTOM}px`;
    this.width = Math.max(60, Math.floor(byId("plot").clientWidth));
    this.ratio = Math.min(2, devicePixelRatio || 1);
    this.pixels = Math.round(this.width * this.ratio);
    this.rowPixels = Math.max(1, Math.round(this.rowHeight * this.ratio));
  }

  /** The first row that is seen. Asking where something is scrolled to is slow: once per drawing. */
  findFirstRow() {
    const most = this.shown.length - this.visible;
    this.firstRow = Math.max(0, Math.min(most, Math.round(byId("scroll").scrollTop / this.rowHeight)));
  }

  /** The coarsest level that is as fine as the pixels; until it is here, the one that is. */
  pickLevel() {
    const map = this.paint.map, levels = this.source.levels(map), steps = this.to - this.from + 1;
    let index = levels.findIndex(level => (level.factor ?? 1) * this.pixels <= steps);
    if (index < 0) index = levels.length - 1;
    this.wanted = `${map}/${index}/${this.from}/${this.to}`;
    const here = this.source.ready(map, index, this.from, this.to);
    if (here) { this.level = here; return; }
    const asked = this.wanted;
    this.source.level(map, index, this.from, this.to).then(level => {
      if (this.wanted === asked) { this.level = level; this.draw(); this.retell(); }
    });
    const others = levels.map((_, at) => this.source.ready(map, at, this.from, this.to));
    this.level = others.findLast(level => level) ?? null;
  }

  /** The heights between which colours run: all shown rows over all steps, so that zooming keeps them. */
  colourRange() {
    if (this.mode === "deviation") return [-SPREADS, SPREADS];
    if (this.mode === "zeros") return [0, 1];
    const level = this.source.ready(this.paint.map, 0) ?? this.level;
    if (this.ranged?.level === level && this.ranged.shown === this.shown) return this.ranged.range;
    const range = this.heightRange(level);
    this.ranged = { level, shown: this.shown, range };
    return range;
  }

  heightRange(level) {
    const heights = [], every = 1 + Math.floor(this.shown.length * level.columns / 20000);
    let at = 0;
    for (const row of this.shown)
      for (let column = at++ % every; column < level.columns; column += every) {
        const place = row * level.columns + column, middle = (level.low[place] + level.high[place]) / 2;
        if (level.low[place] > ZERO && middle < Infinity) heights.push(middle);
      }
    if (!heights.length) return [-1, 1];
    heights.sort((a, b) => a - b);
    const share = part => heights[Math.min(heights.length - 1, Math.floor(heights.length * part))];
    const middle = share(0.5);
    return [Math.min(share(0.01) - 0.25, middle - 1.5), Math.max(share(0.998), middle + 1.5)];
  }

  draw() {
    if (!this.level) return; // it is on its way
    const { canvas, over, ratio } = this, tall = this.rowPixels * this.visible;
    this.findFirstRow();
    this.range = this.colourRange();
    this.cells = cellsOf(this.level, this.from, this.to, this.pixels);
    if (canvas.width !== this.pixels || canvas.height !== tall || this.sized !== ratio) {
      canvas.width = over.width = this.pixels;
      canvas.height = tall;
      over.height = Math.round((this.height + TOP + BOTTOM) * ratio);
      canvas.style.width = over.style.width = `${this.width}px`;
      canvas.style.height = `${this.height}px`;
      over.style.height = `${this.height + TOP + BOTTOM}px`;
      this.sized = ratio;
    }
    Object.assign(canvas.dataset, { from: this.from, to: this.to, rows: this.visible, total: this.shown.length });
    this.paintCells();
    this.drawLabels();
    this.drawOver();
    this.drawLegend();
  }

  paintCells() {
    const { cells, level, pixels, rowPixels, visible } = this, { count } = cells;
    const firsts = Int32Array.from(cells.first), lasts = Int32Array.from(cells.last), edges = Int32Array.from(cells.x);
    const image = new ImageData(pixels, Math.max(1, rowPixels * visible));
    const out = new Uint32Array(image.data.buffer), line = new Uint32Array(pixels);
    const kinds = new Uint8Array(pixels), special = specialPixels(), first = this.firstRow;
    const colour = this.colouring(special), gap = rowPixels > 7 * this.ratio ? 1 : 0;
    const flat = this.shown.every(row => this.rows[row].of || !this.hasHead(row)); // nothing to set apart
    this.seen = { nan: false, inf: false, zero: false, none: false };
    const value = { low: 0, high: 0, far: 0, deviation: 0 };
    for (let y = 0; y < visible; y++) {
      const row = this.shown[first + y];
      if (row === undefined) break;
      let hatched = false;
      for (let at = 0, x = 0; at < count; at++) {
        cellValue(level, row, firsts[at], lasts[at], value);
        const kind = value.high !== value.high ? 1 : value.high === Infinity ? 2 : 0;
        const pixel = kind ? special.bad : colour(value), end = edges[at + 1];
        if (kind) {
          if (!hatched) kinds.fill(0);
          hatched = true;
          this.seen[kind === 1 ? "nan" : "inf"] = true;
          kinds.fill(kind, x, end);
        }
        // Most cells are a pixel or two wide: a call to fill them would take longer.
        while (x < end) line[x++] = pixel;
      }
      const above = this.rows[row].of && y > 0 && !flat ? Math.min(gap + 1, rowPixels - 1) : 0;
      for (let dy = 0; dy < rowPixels; dy++) {
        const from = (y * rowPixels + dy) * pixels;
        if (dy < above || dy >= rowPixels - gap) { out.fill(special.none, from, from + pixels); continue; }
        out.set(line, from);
        if (hatched) this.hatch(out, kinds, from, y * rowPixels + dy, special.hatch);
      }
    }
    // Its pixels are written by us, all of them: on the processor they need not be brought anywhere.
    this.canvas.getContext("2d", { willReadFrequently: true }).putImageData(image, 0, 0);
  }

  /** NaN is hatched one way, infinity the other. */
  hatch(out, kinds, from, y, pixel) {
    const period = 5 * this.ratio, thick = 1.6 * this.ratio;
    for (let x = 0; x < kinds.length; x++) {
      if (!kinds[x]) continue;
      const place = kinds[x] === 1 ? x + y : x - y + 1e4 * period;
      if (place % period < thick) out[from + x] = pixel;
    }
  }

  /** The pixel of a cell's value in this mode. */
  colouring(special) {
    const ramp = colourTable(this.paint.ramp), [lo, hi] = this.range, seen = this;
    const pick = share => ramp[share <= 0 ? 0 : share >= 1 ? 255 : Math.round(share * 255)];
    const between = height => pick((height - lo) / (hi - lo));
    const plain = value => {
      if (value.high === ABSENT) { seen.seen.none = true; return special.none; }
      if (value.high === ZERO) { seen.seen.zero = true; return special.zero; }
      return null;
    };
    if (this.mode === "deviation") return value => {
      if (value.deviation !== value.deviation) return plain(value) ?? pick(0.5);
      return between(value.deviation);
    };
    if (this.mode === "zeros")
      return value => value.high === ABSENT ? plain(value) : between(normOf(value.high));
    return value => {
      const shown = plain(value);
      if (shown !== null) return shown;
      if (value.far > FAR) return between(value.high);
      if (value.far < -FAR) return value.low === ZERO ? plain({ high: ZERO }) : between(value.low);
      // A row whose usual norm is zero has no spreads: there it is the number that stands out.
      if (value.low === ZERO) return between(value.high);
      return between((value.low + value.high) / 2);
    };
  }

  hasHead(row) {
    this.heads ??= new Set(this.rows.filter(each => each.of).map(each => each.block));
    return this.heads.has(this.rows[row].block);
  }

  /** Blocks first, then whatever still has room. */
  drawLabels() {
    const first = this.firstRow, taken = [], made = [];
    const places = [...Array(this.visible).keys()].filter(y => this.shown[first + y] !== undefined);
    const isHead = row => this.rows[row].of || !this.hasHead(row);
    const rank = y => { const row = this.shown[first + y]; return this.rows[row].of ? 0 : isHead(row) ? 1 : 2; };
    for (const y of places.sort((a, b) => rank(a) - rank(b) || a - b)) {
      const row = this.shown[first + y], entry = this.rows[row];
      const top = y * this.rowHeight + this.rowHeight / 2 - 8;
      if (rank(y) === 2 && this.rowHeight < NAMED_ROW) continue;
      if (taken.some(other => Math.abs(other - top) < 13)) continue;
      taken.push(top);
      made.push([y, this.label(row, entry, top, isHead(row))]);
    }
    put(byId("labels"), ...made.sort((a, b) => a[0] - b[0]).map(each => each[1]));
  }

  label(row, entry, top, isHead) {
    const inside = isHead || this.filtered ? entry.name : entry.name.slice(entry.block.length + 1);
    const label = make(entry.of ? "button" : "span", "", { title: entry.name, className: isHead ? "head" : "" });
    const open = entry.of && !this.folded.has(entry.block);
    label.append(make("bdi", `${entry.of ? (open ? "▾ " : "▸ ") : ""}${inside}`));
    label.style.top = `${TOP + top}px`;
    if (entry.of) {
      label.type = "button";
      label.setAttribute("aria-expanded", String(open));
      label.onclick = () => this.told.fold(entry.block);
    }
    if (row === this.cursor?.row) label.classList.add("chosen");
    return label;
  }

  x(step) { return (step - this.from + 0.5) * this.width / (this.to - this.from + 1); }

  drawOver() {
    const { width, height, ratio } = this, c = this.over.getContext("2d");
    c.setTransform(ratio, 0, 0, ratio, 0, 0);
    c.clearRect(0, 0, width, height + TOP + BOTTOM);
    this.drawAxis(c);
    this.drawMarks(c);
    this.drawCursor(c);
    if (this.drag?.to !== undefined && this.drag.to !== null && !this.drag.pan) {
      c.fillStyle = cssColour("accent");
      c.globalAlpha = 0.2;
      c.fillRect(Math.min(this.drag.at, this.drag.to), TOP, Math.abs(this.drag.to - this.drag.at), height);
      c.globalAlpha = 1;
    }
  }

  drawAxis(c) {
    c.font = "11px system-ui, 'Liberation Sans', sans-serif";
    c.fillStyle = cssColour("soft");
    c.textAlign = "center";
    for (const step of stepTicks(this.from, this.to, this.width / 90)) {
      const x = this.x(step), text = grouped(step), half = c.measureText(text).width / 2;
      c.fillRect(Math.round(x), TOP + this.height, 1, 4);
      c.fillText(text, Math.max(half, Math.min(this.width - half, x)), TOP + this.height + 17);
    }
  }

  /** Findings as triangles with a line, incidents as squares. */
  drawMarks(c) {
    for (const mark of [...this.marks].reverse()) {
      if (mark.step < this.from || mark.step > this.to) continue;
      const x = this.x(mark.step);
      c.fillStyle = c.strokeStyle = cssColour(mark.severity ?? "soft");
      c.beginPath();
      if (mark.severity) { c.moveTo(x - 5.5, 4); c.lineTo(x + 5.5, 4); c.lineTo(x, 13); }
      else c.rect(x - 3, TOP - 6, 6, 4);
      c.fill();
      c.globalAlpha = 0.6;
      c.setLineDash([2, 3]);
      c.beginPath();
      c.moveTo(x, TOP);
      c.lineTo(x, TOP + this.height);
      if (mark.severity) c.stroke();
      c.setLineDash([]);
      c.globalAlpha = 1;
    }
  }

  drawCursor(c) {
    if (!this.cursor || this.cursor.step < this.from || this.cursor.step > this.to) return;
    const y = this.shown.indexOf(this.cursor.row) - this.firstRow;
    const at = cellOfStep(this.level, this.cells, this.cursor.step);
    const left = this.cells.x[at] / this.ratio, wide = (this.cells.x[at + 1] - this.cells.x[at]) / this.ratio;
    c.strokeStyle = cssColour("ink");
    c.globalAlpha = 0.35;
    c.beginPath();
    c.moveTo(left + wide / 2, TOP);
    c.lineTo(left + wide / 2, TOP + this.height);
    c.stroke();
    c.globalAlpha = 1;
    if (y < 0 || y >= this.visible) return;
    const more = Math.max(0, 4 - wide) / 2;
    c.lineWidth = 3;
    c.strokeStyle = cssColour("card");
    c.strokeRect(left - more - 1, TOP + y * this.rowHeight - 1, wide + 2 * more + 2, this.rowHeight + 2);
    c.lineWidth = 1.5;
    c.strokeStyle = cssColour("ink");
    c.strokeRect(left - more - 1, TOP + y * this.rowHeight - 1, wide + 2 * more + 2, this.rowHeight + 2);
    c.lineWidth = 1;
  }

  drawLegend() {
    const bar = make("canvas", "", { width: 120, height: 10 }), c = bar.getContext("2d");
    const ramp = colourTable(this.paint.ramp), [lo, hi] = this.range;
    for (let x = 0; x < 120; x++) { c.fillStyle = cssOf(ramp[Math.round(x / 119 * 255)]); c.fillRect(x, 0, 1, 10); }
    const ends = { deviation: [`${SPREADS} spreads below`, `${SPREADS} above its usual`], zeros: ["0%", "100%"] }[this.mode] ?? [figure(2 ** lo), figure(2 ** hi)];
    const parts = [make("span", ends[0]), bar, make("span", ends[1])];
    const special = specialPixels();
    if (this.seen.nan) parts.push(this.swatch(special, 1), make("span", "NaN"));
    if (this.seen.inf) parts.push(this.swatch(special, 2), make("span", "Inf"));
    if (this.seen.zero) parts.push(this.swatch(special, "zero"), make("span", "zero"));
    if (this.seen.none) parts.push(this.swatch(special, "none"), make("span", "none"));
    put(byId("legend"), ...parts);
  }

  swatch(special, kind) {
    const canvas = make("canvas", "", { width: 16, height: 10, className: "swatch" }), c = canvas.getContext("2d");
    for (let x = 0; x < 16; x++) for (let y = 0; y < 10; y++) {
      const place = kind === 1 ? x + y : x - y + 500;
      const hatched = typeof kind === "number" && place % 5 < 1.6;
      c.fillStyle = cssOf(hatched ? special.hatch : special[typeof kind === "number" ? "bad" : kind]);
      c.fillRect(x, y, 1, 1);
    }
    return canvas;
  }

  // --- the cell under the pointer or the cursor ------------------------------------------------

  /** Row and cell under a pointer. */
  cellAt(event) {
    const box = this.canvas.getBoundingClientRect();
    const y = Math.floor((event.clientY - box.top) / this.rowHeight);
    const place = Math.max(0, Math.min(this.visible - 1, y)) + this.firstRow;
    const pixel = (event.clientX - box.left) * this.ratio;
    return [this.shown[Math.min(this.shown.length - 1, place)], cellAtPixel(this.cells, pixel)];
  }

  stepAt(event) {
    const box = this.canvas.getBoundingClientRect(), share = (event.clientX - box.left) / box.width;
    return this.from + share * (this.to - this.from + 1);
  }

  stepOfCell(cell) { return this.level.starts[this.cells.first[cell]]; }

  /** Makes a cell the cursor, and says what it holds. */
  tell(row, cell) {
    const { level, cells } = this, a = cells.first[cell], b = cells.last[cell];
    const from = level.starts[a], to = level.lasts[b], value = cellValue(level, row, a, b);
    this.cursor = { row, step: from };
    const low = normOf(value.low), high = normOf(value.high), name = this.rows[row].name;
    const plain = number => number === undefined ? "" : String(number).toLowerCase().replace("infinity", "inf");
    const field = byId("cell");
    Object.assign(field.dataset, { parameter: name, from, to, min: plain(low), max: plain(high) });
    const steps = from === to ? `step ${grouped(from)}` : `steps ${grouped(from)} to ${grouped(to)}`;
    put(field, make("b", name), make("span", ` · ${steps} · ${this.valueText(low, high, row)}`),
      make("span", this.awayText(value)));
    this.drawOver();
  }

  valueText(low, high, row) {
    const shown = number => {
      if (this.mode === "zeros" && number !== undefined) return percent(number, 1);
      // One byte is up to 9% off, and the number says so.
      const exact = this.level.fine[row] || !Number.isFinite(number) || number === 0;
      return exact ? figure(number) : `≈ ${figure(number, 2)}`;
    };
    if (high === undefined) return this.paint.map === "norm" ? "no gradient" : "not measured";
    const noun = this.paint.noun;
    if (Number.isNaN(high) && !Number.isNaN(low)) return `${noun} NaN, else from ${shown(low)}`;
    return low === high || Number.isNaN(high) ? `${noun} ${shown(high)}` : `${noun} ${shown(low)} to ${shown(high)}`;
  }

  awayText(value) {
    const away = value.deviation;
    if (away !== away || value.high !== value.high || value.high === Infinity) return "";
    if (Math.abs(away) < 0.25) return " · as usual";
    return ` · ${Math.abs(away).toFixed(1)} spreads ${away < 0 ? "below" : "above"} its usual`;
  }

  /** Tells of the cursor's own cell again, after the picture has changed. */
  retell() {
    // A link may ask for a map that is still on its way; it is told of when it is here.
    if (!this.cursor || !this.level || !this.shown.includes(this.cursor.row)) return;
    const { row, step } = this.cursor;
    if (step < this.from || step > this.to) return;
    this.tell(row, cellOfStep(this.level, this.cells, step));
    // The step that was chosen, not the first of its cell: finer columns may be on their way.
    this.cursor.step = step;
  }

  /** Moves the cursor by so many rows and cells; at an edge the picture moves. */
  move(down, right) {
    const inView = this.cursor && this.cursor.step >= this.from && this.cursor.step <= this.to;
    const y = this.cursor ? Math.max(0, this.shown.indexOf(this.cursor.row)) : 0;
    const cell = inView ? cellOfStep(this.level, this.cells, this.cursor.step) : 0;
    const place = Math.max(0, Math.min(this.shown.length - 1, y + (this.cursor ? down : 0)));
    const wanted = cell + (this.cursor ? right : 0);
    const target = Math.max(0, Math.min(this.cells.count - 1, wanted));
    this.scrollTo(place);
    if (wanted !== target) return { row: this.shown[place], beyond: Math.sign(wanted - target) };
    this.tell(this.shown[place], target);
    return null;
  }

  scrollTo(place) {
    const scroll = byId("scroll"), first = this.firstRow;
    if (place < first) scroll.scrollTop = place * this.rowHeight;
    else if (place >= first + this.visible) scroll.scrollTop = (place - this.visible + 1) * this.rowHeight;
    else return;
    this.draw();
  }

  /** Columns of the level in the order of their steps: what a row's own line is drawn from. */
  rowLine(row) {
    const here = this.source.levels("norm").map((_, at) => this.source.ready("norm", at));
    const level = here.findLast(each => each), from = row * level.columns;
    return { starts: level.starts, lasts: level.lasts, thinned: !level.whole,
      low: level.low.subarray(from, from + level.columns), high: level.high.subarray(from, from + level.columns) };
  }
}
