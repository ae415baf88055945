// Puts the page together: one state, and whoever shows a part of it.
import { byId, make, put, figure, grouped, counted, table, copyFrom } from "./words.js";
import { normOf } from "./decode.js";
import { openSource } from "./source.js";
import { MODES, ORDERS, stateOfHash, remember } from "./state.js";
import { switchTheme, followSystem, onPaper } from "./theme.js";
import { blocksOf, rowFacts, arrangedRows, MANY_ROWS } from "./rows.js";
import { cellOfStep } from "./view.js";
import { HeatMapView } from "./heat.js";
import { Lines } from "./lines.js";
import { Spectrum } from "./spectrum.js";
import { showVerdict, showFindings, asMarkdown } from "./findings.js";
import { showSections } from "./sections.js";
import { showExperts } from "./experts.js";
import { bindKeys } from "./keys.js";

const LABELS = { norm: "norm", deviation: "deviation", update: "update / weight", weight: "weight RMS", change: "update RMS", zeros: "share of zeros" };

const CHARTS_EVERY = 1000;
/** The parts of the data from which the lower sections are made. */
const SECTIONS = ["samples", "memory", "incidents", "dumps", "blind", "cost", "notes", "config"];

const MOST_PINS = 4;

class Page {
  constructor(source) {
    this.source = source;
    this.data = source.data;
    this.rows = this.data.heat.rows;
    this.blocks = blocksOf(this.rows);
    this.folded = new Set();
    this.pins = []; // rows whose lines stay while others are pointed at
    this.state = stateOfHash(location.hash);
    this.lines = new Lines(this.data, {
      zoom: (from, to) => this.zoom(from, to), point: step => this.pointAt(step) });
    this.spectrum = new Spectrum(this.data.histograms, this.rows);
    this.heat = new HeatMapView(source, { fold: block => this.fold(block) });
  }

  async start() {
    await this.lines.load();
    this.words();
    if (!this.source.levels("norm").length) { await this.withoutMap(); return; }
    this.level = await this.source.level("norm", 0);
    this.facts = rowFacts(this.level, this.rows.length);
    this.first = this.level.starts[0];
    this.last = Math.max(this.data.steps.last ?? 0, this.level.lasts[this.level.columns - 1]);
    if (this.rows.length > MANY_ROWS) this.foldAll();
    this.marksOf();
    this.choices();
    this.bind();
    this.apply();
    this.heat.retell();
    document.documentElement.dataset.ready = "";
    // What is below the first screen can come after it.
    await this.spectrum.load();
    this.spectrum.show(null);
    await showExperts(this.data.experts);
    this.largest();
    this.source.watch(changed => this.more(changed));
  }

  /** A page that is served is told of further steps, and which of its words have changed. */
  async more(changed) {
    await this.lines.load();
    this.level = this.source.ready("norm", 0);
    this.last = Math.max(this.data.steps.last ?? 0, this.level.lasts[this.level.columns - 1]);
    this.marksOf();
    this.words(changed);
    if (changed.has("maps")) {
      this.choices();
      Object.assign(byId("mode"), { value: this.state.mode });
      Object.assign(byId("order"), { value: this.state.order });
    }
    if (this.heat.drag) return;
    this.draw();
    this.heat.retell();
    // Charts that are made anew twice a second would be of no use to whoever points at them.
    this.charting ??= setTimeout(() => { this.charting = null; this.rechart(); }, CHARTS_EVERY);
    if (changed.has("experts")) await showExperts(this.data.experts);
    if (!changed.has("histograms")) return;
    const { row } = this.spectrum;
    this.spectrum = new Spectrum(this.data.histograms, this.rows);
    await this.spectrum.load();
    this.spectrum.show(row ?? null);
  }

  rechart() {
    this.facts = rowFacts(this.level, this.rows.length);
    this.lines.row = null;
    this.lines.build({ from: this.from, to: this.to });
    this.row = null;
    this.choose(this.heat.cursor?.row ?? this.guilty());
    if (byId("largest").open) this.largest();
  }

  async withoutMap() {
    byId("scroll").hidden = true;
    put(byId("empty"), "No gradient was recorded: watch(model, optimizer, run_dir=...) sees one when the optimizer steps.").hidden = false;
    this.first = this.data.steps.first ?? 0;
    this.last = this.data.steps.last ?? 1;
    this.choices();
    this.bindButtons();
    this.lines.build({ from: this.first, to: this.last });
    await this.spectrum.load();
    this.spectrum.show(null);
    await showExperts(this.data.experts);
    document.documentElement.dataset.ready = "";
    this.source.watch(changed => this.words(changed));
  }

  words(changed = null) {
    const { lines } = this.lines, ends = line => line && `${figure(line.first)} → ${figure(line.last)}`;
    const parameters = this.rows.filter(row => !row.of).length;
    showVerdict(this.data, [ends(lines.loss) && `loss ${ends(lines.loss)}`,
      ends(lines.total_norm) && `gradient norm ${ends(lines.total_norm)}`, counted(parameters, "parameter")]);
    // What has not changed stays: somebody may be reading or selecting it.
    if (!changed || changed.has("findings")) showFindings(this.data, finding => this.goTo(finding));
    if (!changed || SECTIONS.some(part => changed.has(part))) showSections(this.data);
    this.explain();
  }

  /** What the colours are, and what was thinned. */
  explain() {
    const explained = { update: "How much a step changed a weight, as a share of its norm.", zeros: "The share of entries that are exactly zero.",
      weight: "Root mean square of a weight's entries before the step.", change: "Root mean square of what the step added to them.",
      deviation: "How far a norm is from its row's usual, as the judge sees it: median and spread of the last 50 steps." };
    byId("thinned").textContent = [explained[this.state.mode] ?? this.data.measured, this.thinned()].filter(Boolean).join(" ");
  }

  /** What was left out of the picture, in words. */
  thinned() {
    const named = new Set(this.rows.map(row => row.name));
    const frozen = (this.data.config.parameters ?? []).filter(each => each.trainable === false && !named.has(each.name)).length;
    const left = frozen ? `${counted(frozen, "frozen parameter")} without a gradient have no row. ` : "";
    return left + this.columnsText();
  }

  columnsText() {
    if (["update", "weight", "change"].includes(this.state.mode)) return "Measured on the steps of the histograms' schedule; a block shows the largest of its parameters.";
    if (this.state.mode === "zeros") return "Counted on the steps of the histograms' schedule.";
    const levels = this.source.levels("norm");
    if (!levels.length || levels[0].factor === 1) return "Every step is a column of its own.";
    const coarse = levels[0].factor, fine = levels[levels.length - 1].factor;
    const near = fine > 1 && this.data.findings.length ? " Around findings every step is kept." : "";
    const closer = fine === 1 ? " Zoomed in, every step is shown." : fine < coarse ? ` Zoomed in, a column stands for ${fine}.` : "";
    return `A column stands for ${coarse} steps; its minimum and maximum are kept.${closer}${near} A cell has the colour of its middle, or of the step that lies more than 6 spreads from the row's usual.`;
  }

  marksOf() {
    const findings = this.data.findings.map(finding => ({ step: finding.first_step, severity: finding.severity }));
    const incidents = this.data.incidents.map(incident => ({ step: incident.step }));
    this.heat.marks = this.lines.marks = [...findings, ...incidents];
  }

  choices() {
    const has = mode => mode === "deviation" ? this.source.levels("norm").length : this.source.levels(mode).length;
    put(byId("mode"), ...MODES.map(mode => make("option", LABELS[mode], { value: mode, disabled: !has(mode), title: has(mode) ? "" : "not measured in this run" })));
    put(byId("order"), ...ORDERS.map(order => make("option", order, { value: order })));
    if (!has(this.state.mode)) this.state.mode = "norm";
  }

  // --- state -----------------------------------------------------------------------------------

  get from() { return clamped(this.state.from ?? this.first, this.first, this.last); }

  get to() { return clamped(this.state.to ?? this.last, this.from, this.last); }

  /** Shows the state, whole. */
  apply() {
    const { state } = this, row = this.rows.findIndex(each => each.name === state.row);
    byId("mode").value = state.mode;
    byId("order").value = state.order;
    this.explain();
    if (byId("filter").value !== state.rows) byId("filter").value = state.rows;
    this.arrange();
    if (row >= 0 && state.step !== null) this.heat.cursor = { row, step: state.step };
    else if (state.step !== null) this.heat.cursor = { row: this.guilty(), step: state.step };
    this.draw();
    this.lines.build({ from: this.from, to: this.to });
    this.choose(this.heat.cursor?.row ?? this.guilty());
    if (this.heat.cursor) this.lines.cursorAt(this.heat.cursor.step);
  }

  /** The first parameter of the worst finding, or the first row. */
  guilty() {
    const name = this.data.findings.find(finding => finding.parameters.length)?.parameters[0];
    const row = this.rows.findIndex(each => each.name === name);
    if (row >= 0 && this.shown.includes(row)) return row;
    const block = row >= 0 ? this.rows.findIndex(each => each.of && each.block === this.rows[row].block) : -1;
    return block >= 0 && this.shown.includes(block) ? block : this.shown[0] ?? 0;
  }

  arrange() {
    const { rows: wanted, order } = this.state;
    this.shown = arrangedRows(this.rows, this.blocks, this.facts, { wanted, order, folded: this.folded });
    this.heat.filtered = wanted.trim() !== "";
    const folds = this.blocks.filter(block => block.head !== null);
    byId("fold").textContent = folds.length && folds.every(block => this.folded.has(block.name)) ? "Unfold blocks" : "Fold blocks";
    byId("fold").disabled = !folds.length || this.heat.filtered;
    const none = !this.shown.length;
    byId("empty").hidden = !none;
    byId("scroll").hidden = none;
    if (none) byId("empty").textContent = `No name has “${wanted}” in it.`;
  }

  draw() {
    if (!this.shown.length) return;
    this.heat.show({ shown: this.shown, from: this.from, to: this.to, mode: this.state.mode, folded: this.folded });
    const what = this.rows.filter(row => !row.of).length;
    this.heat.canvas.setAttribute("aria-label", `Gradient norms of ${counted(what, "parameter")} over steps ${grouped(this.from)} to ${grouped(this.to)}. ${this.data.sentence}. Arrow keys move from cell to cell.`);
  }

  /** Another filter, order, mode or fold: the picture changes, the lines stay. */
  redraw() {
    this.arrange();
    this.draw();
    this.heat.retell();
    remember(this.state);
  }

  zoom(from, to) {
    const least = Math.min(4, this.last - this.first);
    if (to - from < least) { const middle = (from + to) / 2; from = middle - least / 2; to = middle + least / 2; }
    if (from < this.first) { to += this.first - from; from = this.first; }
    if (to > this.last) { from -= to - this.last; to = this.last; }
    from = Math.max(this.first, Math.round(from));
    to = Math.min(this.last, Math.round(to));
    const whole = from <= this.first && to >= this.last;
    this.state.from = whole ? null : from;
    this.state.to = whole ? null : to;
    this.draw();
    this.heat.retell();
    this.lines.zoomTo({ from: this.from, to: this.to });
    remember(this.state);
  }

  /** Around the cursor or the middle, to `factor` times as many steps. */
  zoomBy(factor, around = null) {
    const { from, to } = this, span = (to - from + 1) * factor, cursor = this.heat.cursor?.step;
    const middle = around ?? (cursor !== undefined && cursor >= from && cursor <= to ? cursor : (from + to) / 2);
    const share = (middle - from) / Math.max(1, to - from);
    this.zoom(middle - span * share, middle + span * (1 - share));
  }

  zoomAll() { this.zoom(this.first, this.last); }

  pan(steps) {
    const span = this.to - this.from, from = clamped(this.from + steps, this.first, this.last - span);
    this.zoom(from, from + span);
  }

  /** A cell was chosen on the map: its row's line, and the cursor of all lines. */
  chosen() {
    const { row, step } = this.heat.cursor;
    this.state.row = this.rows[row].name;
    this.state.step = step;
    this.choose(row);
    this.lines.cursorAt(step);
  }

  choose(row) {
    if (this.row === row && this.lines.row) return;
    this.row = row;
    const pinned = this.pins.filter(pin => pin !== row).map(pin => ({ name: this.rows[pin].name, columns: this.heat.rowLine(pin) }));
    this.lines.choose({ name: this.rows[row].name, columns: this.heat.rowLine(row), pinned });
    clearTimeout(this.later);
    this.later = setTimeout(() => this.spectrum.steps && this.spectrum.show(row), 150);
  }

  /** A click keeps a row's line, a second one lets it go. */
  pin(row) {
    const others = this.pins.filter(pin => pin !== row);
    this.pins = others.length < this.pins.length ? others : [...others, row].slice(-MOST_PINS);
    this.row = null;
    this.lines.row = null;
  }

  /** The pointer is over a line: the map's cursor follows. */
  pointAt(step) {
    const row = this.heat.cursor?.row ?? this.guilty();
    if (!this.heat.level || !this.shown.includes(row) || step < this.from || step > this.to) return;
    this.heat.tell(row, cellOfStep(this.heat.level, this.heat.cells, step));
    this.state.step = this.heat.cursor.step;
    this.state.row = this.rows[row].name;
  }

  goTo(finding) {
    const step = finding.first_step, row = this.rows.findIndex(each => !each.of && finding.parameters.includes(each.name));
    if (row >= 0) this.folded.delete(this.rows[row].block);
    const reach = Math.max(24, Math.min(400, (this.last - this.first) / 40));
    this.state.rows = byId("filter").value = "";
    this.arrange();
    this.heat.cursor = { row: row >= 0 ? row : this.shown[0], step };
    this.zoom(step - reach, step + reach);
    this.heat.scrollTo(this.shown.indexOf(this.heat.cursor.row));
    this.heat.retell();
    this.chosen();
    remember(this.state);
    byId("map").scrollIntoView({ block: "center" });
    this.heat.canvas.focus({ preventScroll: true });
  }

  // --- folding -----------------------------------------------------------------------------------

  foldAll() { for (const block of this.blocks) if (block.head !== null) this.folded.add(block.name); }

  fold(name) {
    if (this.folded.has(name)) this.folded.delete(name); else this.folded.add(name);
    this.redraw();
  }

  toggleFolds() {
    const folds = this.blocks.filter(block => block.head !== null);
    if (folds.every(block => this.folded.has(block.name))) this.folded.clear(); else this.foldAll();
    this.redraw();
  }

  // --- words again ---------------------------------------------------------------------------------

  largest() {
    const { level } = this, parameters = this.rows.map((_, row) => row).filter(row => !this.rows[row].of);
    const furthest = (a, b) => { const [one, other] = [this.facts[a].most, this.facts[b].most]; return one === other ? 0 : other > one ? 1 : -1; };
    const rows = parameters.sort(furthest).slice(0, 20).map(row => {
      const { where, most } = this.facts[row], at = row * level.columns + where;
      const from = level.starts[where], to = level.lasts[where], norm = normOf(level.high[at]), low = normOf(level.low[at]);
      const away = most === Infinity ? "not finite" : `${(Math.sign(level.deviation?.[at] ?? 0) * most).toFixed(1)}`;
      return [this.rows[row].name, from === to ? grouped(from) : `${grouped(from)} to ${grouped(to)}`,
        low === norm || Number.isNaN(norm) ? figure(norm) : `${figure(low)} to ${figure(norm)}`, away];
    });
    const fold = byId("largest");
    fold.querySelector(".wide")?.remove();
    fold.append(table(["parameter", "step", "norm", "spreads from its usual"], rows, [1, 2, 3]));
  }

  // --- hands -------------------------------------------------------------------------------------

  bindButtons() {
    byId("theme").onclick = () => this.theme();
    byId("help").onclick = () => byId("keys").showModal();
    byId("copy").onclick = () => copyFrom(byId("copy"), asMarkdown(this.data));
    byId("link").onclick = () => { remember(this.state); copyFrom(byId("link"), location.href); };
    byId("numbers").ontoggle = () => {
      byId("numbers").querySelector(".wide, p")?.remove();
      if (byId("numbers").open) byId("numbers").append(this.lines.numbers());
    };
    followSystem(() => this.recolour());
    bindKeys({ move: (down, right) => this.move(down, right), zoom: factor => this.zoomBy(factor), zoomAll: () => this.zoomAll(),
      theme: () => this.theme(), help: () => byId("keys").showModal(), clear: () => this.clear(),
      fold: () => this.heat.cursor && this.fold(this.rows[this.heat.cursor.row].block) });
  }

  bind() {
    this.bindButtons();
    this.bindMap();
    byId("filter").oninput = () => { this.state.rows = byId("filter").value; this.redraw(); };
    byId("mode").onchange = () => { this.state.mode = byId("mode").value; this.redraw(); this.explain(); };
    byId("order").onchange = () => { this.state.order = byId("order").value; this.redraw(); };
    byId("fold").onclick = () => this.toggleFolds();
    byId("zoom-in").onclick = () => this.zoomBy(0.5);
    byId("zoom-out").onclick = () => this.zoomBy(2);
    byId("zoom-all").onclick = () => this.zoomAll();
    byId("scroll").onscroll = () => this.heat.draw();
    addEventListener("hashchange", () => { this.state = stateOfHash(location.hash); this.choices(); this.apply(); this.heat.retell(); });
    let resized = null;
    addEventListener("resize", () => { clearTimeout(resized); resized = setTimeout(() => this.recolour(), 80); });
    addEventListener("beforeprint", () => { onPaper(true); this.recolour(); });
    addEventListener("afterprint", () => { onPaper(false); this.recolour(); });
  }

  bindMap() {
    const { heat } = this, canvas = heat.canvas;
    canvas.onpointermove = event => {
      if (heat.drag) { this.dragged(event); return; }
      if (!this.shown.length || !heat.level) return;
      heat.tell(...heat.cellAt(event));
      this.soon ??= requestAnimationFrame(() => { this.soon = null; this.chosen(); });
    };
    canvas.onpointerdown = event => {
      if (event.button !== 0) return;
      heat.drag = { at: event.offsetX, to: null, step: heat.stepAt(event), from: this.from, pan: event.shiftKey || event.pointerType === "touch" };
      canvas.setPointerCapture(event.pointerId);
    };
    canvas.onpointerup = event => this.dropped(event);
    canvas.onpointercancel = () => { heat.drag = null; heat.drawOver(); };
    canvas.onpointerleave = () => remember(this.state);
    canvas.ondblclick = () => this.zoomAll();
    canvas.onfocus = () => { if (!heat.cursor) this.move(0, 0); };
    canvas.addEventListener("wheel", event => {
      if (event.ctrlKey || event.metaKey) { event.preventDefault(); this.zoomBy(event.deltaY > 0 ? 1.25 : 0.8, heat.stepAt(event)); }
      else if (Math.abs(event.deltaX) > Math.abs(event.deltaY)) { event.preventDefault(); this.pan(event.deltaX / heat.width * (this.to - this.from)); }
    }, { passive: false });
  }

  dragged(event) {
    const { drag } = this.heat;
    drag.to = event.offsetX;
    if (!drag.pan) { this.heat.drawOver(); return; }
    const moved = (drag.at - drag.to) / this.heat.width * (this.to - this.from + 1);
    this.pan(Math.round(drag.from + moved - this.from));
  }

  dropped(event) {
    const { drag } = this.heat;
    this.heat.drag = null;
    const far = drag && drag.to !== null && Math.abs(drag.to - drag.at) > 6;
    if (far && !drag.pan) {
      const [from, to] = [drag.step, this.heat.stepAt(event)].sort((a, b) => a - b);
      this.zoom(Math.floor(from), Math.ceil(to));
    } else if (!far) {
      const [row, cell] = this.heat.cellAt(event);
      this.heat.tell(row, cell);
      this.pin(row);
      this.chosen();
      remember(this.state);
    }
  }

  move(down, right) {
    if (!this.shown.length) return;
    const beyond = this.heat.move(down, right);
    if (beyond) {
      this.pan(beyond.beyond * Math.max(1, Math.round((this.to - this.from) / 4)));
      this.heat.move(0, beyond.beyond);
    }
    if (!this.heat.cursor) this.heat.move(0, 0);
    this.chosen();
    remember(this.state);
  }

  clear() {
    if (!this.state.rows) return;
    this.state.rows = byId("filter").value = "";
    this.redraw();
  }

  theme() {
    switchTheme();
    this.recolour();
  }

  /** The same again in other colours, or at another width. */
  recolour() {
    if (this.shown) { this.draw(); this.heat.retell(); }
    this.lines.row = null;
    this.lines.build({ from: this.from, to: this.to });
    if (this.level) { this.row = null; this.choose(this.heat.cursor?.row ?? this.guilty()); }
    this.spectrum.show(this.spectrum.row);
    showExperts(this.data.experts);
  }
}

const clamped = (value, low, high) => Math.max(low, Math.min(high, value));

openSource().then(source => new Page(source).start());
