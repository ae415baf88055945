// Experts of a mixture: each one's share of the gradient over the looks, a small picture per group.
import { byId, make, put, figure, grouped, counted, table } from "./words.js";
import { unpack } from "./decode.js";
import { colourTable, specialPixels, cssOf } from "./colours.js";
import { cssColour } from "./theme.js";

const EVEN = 128, PER_DOUBLING = 16, NO_SHARE = 255, SHOWN_DOUBLINGS = 3, MOST_SHOWN = 24;
const AXIS = 18, MARGIN = 34, WIDEST_LOOK = 60;

/** A section that is there only where the model has experts. */
export async function showExperts(groups) {
  const holder = byId("experts");
  holder.closest("section").hidden = !groups?.length;
  if (!groups?.length) return;
  const all = await Promise.all(groups.map(async group => ({ ...group, codes: await unpack(group.codes) })));
  const shown = all.slice(0, MOST_SHOWN).map(picture);
  const more = all.length > MOST_SHOWN ? ` The first ${MOST_SHOWN} of ${all.length} groups are drawn.` : "";
  const said = make("p", `Each expert's share of its group's gradient norm at the steps that were looked at: orange is more than an even share, blue less, up to ${2 ** SHOWN_DOUBLINGS} times.${more}`, { className: "quiet" });
  const fold = make("details");
  fold.append(make("summary", "The last measured step as a table"), lastLook(all));
  put(holder, said, legendOfExperts(), ...shown.map(each => each.box), fold);
  for (const each of shown) each.draw();
}

const shareOfCode = code => 2 ** ((code - EVEN) / PER_DOUBLING);

function legendOfExperts() {
  const swatch = make("canvas", "", { width: 16, height: 10, className: "swatch" }), c = swatch.getContext("2d");
  c.fillStyle = cssOf(specialPixels().zero);
  c.fillRect(0, 0, 16, 10);
  return put(make("p", "", { className: "quiet" }), swatch, " no gradient: no token came to it");
}

function without(group, look) {
  let none = 0;
  for (let expert = 0; expert < group.size; expert++) none += group.codes[look * group.size + expert] === 0;
  return none;
}

function picture(group) {
  const box = make("div"), canvas = make("canvas", "", { role: "img", className: "spectrum" }), last = group.steps.length - 1;
  const words = `${counted(group.size, "expert")}, ${without(group, last)} without a gradient at step ${grouped(group.steps[last])}`;
  const said = make("span", words, { className: "quiet" });
  canvas.setAttribute("aria-label", `${group.name}: ${words}.`);
  canvas.dataset.group = group.name;
  box.append(put(make("div"), make("b", group.name), " · ", said), canvas);
  canvas.onpointermove = event => { said.textContent = underPointer(event, canvas, group) ?? words; };
  canvas.onpointerleave = () => { said.textContent = words; };
  return { box, draw: () => drawExperts(canvas, group) };
}

const expertHeight = group => Math.max(2, Math.min(12, Math.floor(192 / group.size)));

function drawExperts(canvas, group) {
  const { steps, size, codes } = group, tall = expertHeight(group), ratio = Math.min(2, devicePixelRatio || 1);
  const width = Math.max(120, Math.min(byId("experts").clientWidth, MARGIN + steps.length * WIDEST_LOOK));
  Object.assign(canvas, { width: width * ratio, height: (tall * size + AXIS) * ratio });
  canvas.style.width = `${width}px`;
  canvas.style.height = `${tall * size + AXIS}px`;
  const c = canvas.getContext("2d"), ramp = colourTable("poles"), special = specialPixels();
  c.scale(ratio, ratio);
  const wide = (width - MARGIN) / steps.length, colour = code => {
    if (code === 0) return special.zero;
    if (code === NO_SHARE) return special.bad;
    const place = 0.5 + (code - EVEN) / PER_DOUBLING / (2 * SHOWN_DOUBLINGS);
    return ramp[Math.max(0, Math.min(255, Math.round(place * 255)))];
  };
  for (let look = 0; look < steps.length; look++) for (let expert = 0; expert < size; expert++) {
    c.fillStyle = cssOf(colour(codes[look * size + expert]));
    c.fillRect(MARGIN + look * wide, expert * tall, Math.max(1, wide + 0.5), tall > 4 ? tall - 1 : tall);
  }
  c.fillStyle = cssColour("soft");
  c.font = "11px system-ui, 'Liberation Sans', sans-serif";
  c.textAlign = "right";
  const every = Math.max(1, Math.ceil(13 / tall));
  for (let expert = 0; expert < size; expert += every) c.fillText(String(expert), MARGIN - 6, expert * tall + Math.max(9, tall - 2));
  c.textAlign = "center";
  const skip = Math.ceil(steps.length / Math.max(1, Math.floor((width - MARGIN) / 90)));
  for (let look = 0; look < steps.length; look += skip)
    c.fillText(grouped(steps[look]), Math.min(width - 18, MARGIN + (look + 0.5) * wide), tall * size + AXIS - 5);
}

function underPointer(event, canvas, group) {
  const box = canvas.getBoundingClientRect(), { steps, size, codes } = group;
  const look = Math.floor((event.clientX - box.left - MARGIN) / (box.width - MARGIN) * steps.length);
  const expert = Math.floor((event.clientY - box.top) / expertHeight(group));
  if (look < 0 || look >= steps.length || expert < 0 || expert >= size) return null;
  const code = codes[look * size + expert], at = `step ${grouped(steps[look])}, expert ${expert}: `;
  if (code === 0) return `${at}no gradient`;
  return code === NO_SHARE ? `${at}not finite` : `${at}${figure(shareOfCode(code), 2)} times an even share`;
}

function lastLook(groups) {
  const rows = groups.map(group => {
    const look = group.steps.length - 1, codes = [...group.codes.subarray(look * group.size)].filter(code => code !== NO_SHARE);
    const shares = codes.map(code => code ? shareOfCode(code) : 0);
    return [group.name, String(group.size), String(without(group, look)), figure(Math.min(...shares), 2), figure(Math.max(...shares), 2)];
  });
  return table(["experts of", "how many", "without a gradient", "least share", "largest share"], rows, [1, 2, 3, 4]);
}
