// Histograms over time: how large the gradient's entries are, by powers of two.
import { byId, make, put, figure, grouped, percent, table } from "./words.js";
import { unpack, unpackNumbers } from "./decode.js";
import { colourTable, specialPixels } from "./colours.js";
import { cssColour } from "./theme.js";

const CELL = 8, LEFT = 62, WIDEST = 60;

export class Spectrum {
  constructor(packed, rows) {
    Object.assign(this, { packed, rows, row: null });
  }

  async load() {
    const { packed } = this;
    if (!packed) return;
    const [steps, together, ownSteps, own] = await Promise.all([
      unpackNumbers(packed.steps), unpack(packed.together), unpackNumbers(packed.own_steps), unpack(packed.own)]);
    Object.assign(this, { steps, together, ownSteps, own });
  }

  /** Of all gradients together, or of a row: a parameter, or the parameters of a block. */
  show(row) {
    this.row = row;
    const holder = byId("spectrum");
    holder.closest("section").classList.toggle("empty", !this.packed);
    if (!this.packed) {
      put(holder, make("p", "No histograms were recorded: watch(..., histograms=Schedule(step_interval=50)) switches them on.", { className: "quiet" }));
      return;
    }
    const { steps, codes, name } = this.chosen(), bins = this.packed.bins;
    byId("spectrum-of").textContent = name;
    const canvas = make("canvas", "", { role: "img", className: "spectrum" });
    canvas.setAttribute("aria-label", `Shares of gradient entries by power of two at ${steps.length} steps, of ${name}.`);
    const said = make("p", this.words(steps), { className: "quiet" });
    const numbers = make("details");
    numbers.append(make("summary", "The last of them as a table"), this.numbers(codes, steps, bins));
    put(holder, canvas, said, numbers);
    this.draw(canvas, steps, codes, bins);
    canvas.onpointermove = event => { said.textContent = this.under(event, canvas, steps, codes, bins); };
    canvas.onpointerleave = () => { said.textContent = this.words(steps); };
  }

  chosen() {
    const { packed } = this, all = { steps: this.steps, codes: this.together, name: "all gradients together" };
    if (this.row === null) return all;
    const entry = this.rows[this.row], size = this.ownSteps.length * packed.bins;
    const members = this.rows.map((each, at) => each.of || each.block !== entry.block ? -1 : at).filter(at => at >= 0);
    const parts = entry.of ? members : [this.row];
    const weight = parts.reduce((sum, at) => sum + packed.sizes[at], 0);
    if (!weight) return all;
    const codes = new Uint8Array(size);
    for (let cell = 0; cell < size; cell++) {
      let share = 0;
      for (const at of parts) share += shareOf(this.own[at * size + cell]) * packed.sizes[at] / weight;
      codes[cell] = share > 2 ** -25 ? Math.max(1, Math.round(255 + 10 * Math.log2(share))) : 0;
    }
    return { steps: this.ownSteps, codes, name: entry.name };
  }

  draw(canvas, steps, codes, bins) {
    const ratio = Math.min(2, devicePixelRatio || 1), width = Math.max(120, Math.min(byId("spectrum").clientWidth, LEFT + steps.length * WIDEST)), tall = bins * CELL + 22;
    Object.assign(canvas, { width: width * ratio, height: tall * ratio });
    canvas.style.width = `${width}px`;
    canvas.style.height = `${tall}px`;
    const c = canvas.getContext("2d"), ramp = colourTable("ink"), none = specialPixels().none;
    c.scale(ratio, ratio);
    const css = pixel => `rgb(${pixel & 255} ${pixel >> 8 & 255} ${pixel >> 16 & 255})`;
    const wide = (width - LEFT) / steps.length;
    for (let look = 0; look < steps.length; look++) for (let bin = 0; bin < bins; bin++) {
      const code = codes[look * bins + bin];
      // From a millionth to a third of the entries.
      c.fillStyle = css(code ? ramp[Math.max(0, Math.min(255, Math.round((code - 55) / 185 * 255)))] : none);
      c.fillRect(LEFT + look * wide, (bins - 1 - bin) * CELL, Math.max(1, wide + 0.5), CELL);
    }
    c.fillStyle = cssColour("soft");
    c.font = "11px system-ui, 'Liberation Sans', sans-serif";
    c.textAlign = "right";
    const every = Math.max(1, Math.ceil(bins / 8));
    for (let bin = 0; bin < bins; bin += every) c.fillText(figure(2 ** (this.packed.low + bin), 1), LEFT - 6, (bins - bin) * CELL);
    c.textAlign = "center";
    const most = Math.max(1, Math.floor((width - LEFT) / 90)), skip = Math.ceil(steps.length / most);
    for (let look = 0; look < steps.length; look += skip)
      c.fillText(grouped(steps[look]), Math.min(width - 18, LEFT + (look + 0.5) * wide), tall - 6);
  }

  under(event, canvas, steps, codes, bins) {
    const box = canvas.getBoundingClientRect(), look = Math.floor((event.clientX - box.left - LEFT) / (box.width - LEFT) * steps.length);
    const bin = bins - 1 - Math.floor((event.clientY - box.top) / CELL);
    if (look < 0 || look >= steps.length || bin < 0 || bin >= bins) return this.words(steps);
    const low = 2 ** (this.packed.low + bin);
    return `Step ${grouped(steps[look])}: ${percent(shareOf(codes[look * bins + bin]), 2)} of the entries are between ${figure(low)} and ${figure(2 * low)} in size.`;
  }

  words(steps) {
    const { of, sampled, size } = this.packed;
    const thinned = steps.length < of ? `${steps.length} of ${grouped(of)} recorded looks, evenly chosen. ` : "";
    const counted = sampled ? `Counted on a sample of ${grouped(sampled)} of ${grouped(size)} entries.` : `All ${grouped(size)} entries were counted.`;
    return `Magnitudes by powers of two; darker is more of them. ${thinned}${counted}`;
  }

  numbers(codes, steps, bins) {
    const last = (steps.length - 1) * bins, rows = [];
    for (let bin = bins - 1; bin >= 0; bin--) {
      const share = shareOf(codes[last + bin]), low = 2 ** (this.packed.low + bin);
      if (share >= 0.0005) rows.push([`${figure(low)} to ${figure(2 * low)}`, percent(share, 1)]);
    }
    return table(["size of the entries", `share at step ${grouped(steps[steps.length - 1])}`], rows, [1]);
  }
}

/** Ten codes per doubling; 0 is empty. */
function shareOf(code) { return code ? 2 ** ((code - 255) / 10) : 0; }
