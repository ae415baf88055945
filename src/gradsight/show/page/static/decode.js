// Packed text back into arrays: the other half of encode.py.
import { parsed } from "./words.js";

export const ZERO = -2000;       // the height of a norm of zero
export const ABSENT = -Infinity; // no gradient at this step; an infinite norm is +Infinity
const CODE_TOP = 250, QUARTER = 0.25, PARTS = 64, WIDE_PARTS = 250, UNKNOWN = -128, NEAR = 16, NEAR_CODES = 32, FAR_CODES = 12;

/** base64 of deflated bytes as bytes. */
export async function unpack(text) {
  const packed = Uint8Array.fromBase64?.(text) ?? Uint8Array.from(atob(text), c => c.charCodeAt(0));
  const stream = new Blob([packed]).stream().pipeThrough(new DecompressionStream("deflate"));
  return new Uint8Array(await new Response(stream).arrayBuffer());
}

/** Ascending whole numbers. */
export async function unpackNumbers(text) {
  const deltas = new Uint32Array((await unpack(text)).buffer);
  const numbers = new Float64Array(deltas.length);
  let sum = 0;
  for (let at = 0; at < deltas.length; at++) numbers[at] = sum += deltas[at];
  return numbers;
}

/** Numbers of 32 bits, whose bytes lie apart by significance. */
export async function unpackFloats(text) {
  const planes = await unpack(text), count = planes.length / 4;
  const whole = new Uint8Array(planes.length);
  for (let plane = 0; plane < 4; plane++)
    for (let at = 0; at < count; at++) whole[at * 4 + plane] = planes[plane * count + at];
  return new Float32Array(whole.buffer);
}

/** A line over the steps: where its points begin and end, lowest and highest. */
export async function unpackLine(packed) {
  const [starts, lasts, high, low] = await Promise.all([
    unpackNumbers(packed.starts), unpackNumbers(packed.lasts), unpackFloats(packed.high),
    packed.low && unpackFloats(packed.low)]);
  return { ...packed, starts, lasts, high, low: low ?? high,
    first: parsed(packed.first), last: parsed(packed.last) };
}

/**
 * A level of the picture. Heights are logarithms to base two, row after row.
 * @returns {Promise<{columns: number, starts: Float64Array, lasts: Float64Array,
 *   low: Float32Array, high: Float32Array, deviation: Float32Array|null, whole: boolean,
 *   fine: Uint8Array}>}
 */
export async function unpackLevel(packed, rows) {
  const optional = text => text && unpack(text);
  const [starts, lasts, base, unit, codes, depth, deviation, fineRows, highParts, lowParts] =
    await Promise.all([unpackNumbers(packed.starts), unpackNumbers(packed.lasts),
      unpackFloats(packed.base), unpackFloats(packed.unit), unpack(packed.high),
      optional(packed.depth), optional(packed.deviation),
      packed.fine && unpackNumbers(packed.fine), optional(packed.high_parts),
      optional(packed.low_parts)]);
  const columns = packed.columns, fine = new Uint8Array(rows);
  const high = new Float32Array(rows * columns), low = packed.whole ? high : high.slice();
  const partsOf = new Map(Array.from(fineRows ?? [], (row, at) => [row, at * columns]));
  for (let row = 0; row < rows; row++) {
    const from = row * columns, scale = { base: base[row], unit: unit[row] };
    undoDeltas(codes, from, columns);
    const parts = partsOf.get(row);
    fine[row] = parts === undefined ? 0 : 1;
    fillHeights(high, from, columns, scale, codes, highParts?.subarray(parts), parts);
    if (depth) {
      for (let at = from; at < from + columns; at++) codes[at] -= depth[at];
      fillHeights(low, from, columns, scale, codes, lowParts?.subarray(parts), parts);
    }
  }
  return { columns, starts, lasts, low, high, whole: packed.whole, fine, factor: packed.factor,
    deviation: deviation && deviationsOf(deviation) };
}

function undoDeltas(codes, from, count) {
  for (let at = from + 1; at < from + count; at++) codes[at] += codes[at - 1];
}

/** Heights of one row; without a second byte, the middle of the code's step. */
function fillHeights(heights, from, count, { base, unit }, codes, parts, fine) {
  const table = new Float32Array(256), among = unit > QUARTER ? WIDE_PARTS : PARTS;
  for (let code = 1; code <= CODE_TOP; code++) table[code] = base + (code - 0.5) * unit;
  table[0] = ZERO;
  table[253] = ABSENT;
  table[254] = Infinity;
  table[255] = NaN;
  for (let at = 0; at < count; at++) {
    const code = codes[from + at];
    heights[from + at] = fine === undefined || code === 0 || code > CODE_TOP ? table[code]
      : base + (code - 1 + (parts[at] + 0.5) / among) * unit;
  }
}

/** Spreads from the usual; NaN where nothing is known. */
function deviationsOf(codes) {
  const table = new Float32Array(256);
  for (let code = -127; code < 128; code++) {
    const size = Math.abs(code);
    const away = size <= NEAR_CODES ? size * NEAR / NEAR_CODES
      : NEAR * 2 ** ((size - NEAR_CODES) / FAR_CODES);
    table[code & 255] = Math.sign(code) * away;
  }
  table[UNKNOWN & 255] = NaN;
  const spreads = new Float32Array(codes.length);
  for (let at = 0; at < codes.length; at++) spreads[at] = table[codes[at]];
  return spreads;
}

/** A height as the norm that it is the logarithm of; undefined where there is no gradient. */
export function normOf(height) {
  if (height === ABSENT) return undefined;
  return height === ZERO ? 0 : 2 ** height;
}
