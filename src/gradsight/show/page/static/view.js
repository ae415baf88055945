// Steps to pixels. A cell is what one pixel column or one data column shows, whichever is wider:
// every column is in exactly one cell, so that no step is ever left out of the picture.
import { ZERO, ABSENT } from "./decode.js";

export const FAR = 6; // spreads beyond which a cell shows its furthest step and not its middle

/** The last column that begins at or before a step. */
export function columnOf(level, step) {
  let low = 0, high = level.columns - 1;
  while (low < high) {
    const middle = (low + high + 1) >> 1;
    if (level.starts[middle] <= step) low = middle; else high = middle - 1;
  }
  return low;
}

/** The cells of the steps from..to on so many pixels: first and last column, first pixel. */
export function cellsOf(level, from, to, pixels) {
  const first = columnOf(level, from), last = columnOf(level, to);
  const scale = pixels / (to - from + 1), cells = { first: [], last: [], x: [], pixels };
  let pixel = -1;
  for (let column = first; column <= last; column++) {
    const place = Math.max(0, Math.min(pixels - 1, Math.floor((level.starts[column] - from) * scale)));
    if (place > pixel) {
      cells.first.push(column);
      cells.last.push(column);
      cells.x.push(cells.x.length ? place : 0);
      pixel = place;
    } else {
      cells.last[cells.last.length - 1] = column;
    }
  }
  cells.count = cells.x.length;
  cells.x.push(pixels);
  return cells;
}

export function cellAtPixel(cells, pixel) {
  let low = 0, high = cells.count - 1;
  while (low < high) {
    const middle = (low + high + 1) >> 1;
    if (cells.x[middle] <= pixel) low = middle; else high = middle - 1;
  }
  return low;
}

export function cellOfStep(level, cells, step) {
  const column = columnOf(level, step);
  let low = 0, high = cells.count - 1;
  while (low < high) {
    const middle = (low + high + 1) >> 1;
    if (cells.first[middle] <= column) low = middle; else high = middle - 1;
  }
  return low;
}

/**
 * What a row has in the columns a..b: the lowest that is a number, the highest (NaN if any is NaN),
 * and the deviation to show: the furthest where it is far, else the mean. Painting asks hundreds
 * of thousands of times, and gives the same object `into` to be filled.
 */
export function cellValue(level, row, a, b, into = {}) {
  const from = row * level.columns, { low, high, deviation } = level;
  let least = Infinity, most = ABSENT, nan = false, far = 0, sum = 0, known = 0;
  for (let at = from + a; at <= from + b; at++) {
    const top = high[at], bottom = low[at];
    if (top !== top) nan = true; else if (top > most) most = top;
    if (bottom >= ZERO && bottom < least) least = bottom;
    const away = deviation ? deviation[at] : NaN;
    if (away === away) {
      if (Math.abs(away) > Math.abs(far)) far = away;
      sum += away;
      known += 1;
    }
  }
  into.high = nan ? NaN : most;
  into.low = least === Infinity ? into.high : least;
  into.far = far;
  into.deviation = known ? (Math.abs(far) > FAR ? far : sum / known) : NaN;
  return into;
}
