// Which rows are shown, and in which order: blocks, their members, the filter.
import { ZERO } from "./decode.js";

export const MANY_ROWS = 180;

/** The blocks of a run in the model's order: [{name, head, members}]; head null: one parameter. */
export function blocksOf(rows) {
  const blocks = new Map();
  rows.forEach((row, index) => {
    if (!blocks.has(row.block)) blocks.set(row.block, { name: row.block, head: null, members: [] });
    const block = blocks.get(row.block);
    if (row.of) block.head = index; else block.members.push(index);
  });
  return [...blocks.values()];
}

/** By row: its middle height, its furthest deviation, and the column of that. */
export function rowFacts(level, rows) {
  return Array.from({ length: rows }, (_, row) => ({ size: middleHeight(level, row), ...furthest(level, row) }));
}

/** Of some columns only: to order rows by size, more of them would not help. */
function middleHeight(level, row) {
  const every = Math.ceil(level.columns / 60), heights = [];
  for (let column = 0; column < level.columns; column += every) {
    const height = level.high[row * level.columns + column];
    if (height > ZERO && height < Infinity) heights.push(height);
  }
  heights.sort((a, b) => a - b);
  return heights[heights.length >> 1] ?? ZERO;
}

function furthest(level, row) {
  const { high, deviation, columns } = level, from = row * columns;
  let most = 0, where = 0;
  for (let column = 0; column < columns; column++) {
    const height = high[from + column], far = deviation ? Math.abs(deviation[from + column]) : 0;
    // Nothing deviates more than what is no number; the first of them is the one to see.
    if (height !== height || height === Infinity) return { most: Infinity, where: column };
    if (far > most) { most = far; where = column; }
  }
  return { most, where };
}

/** The rows to show, from top to bottom; `folded` holds the names of folded blocks. */
export function arrangedRows(rows, blocks, facts, { wanted, order, folded }) {
  const text = wanted.trim().toLowerCase(), compare = comparison(rows, facts, order);
  const shown = [];
  for (const block of sortedBlocks(blocks, facts, order)) {
    let members = block.members;
    if (text) members = members.filter(row => rows[row].name.toLowerCase().includes(text));
    if (!members.length) continue;
    if (compare) members = [...members].sort(compare);
    if (block.head !== null && !text) shown.push(block.head);
    if (block.head === null || text || !folded.has(block.name)) shown.push(...members);
  }
  return shown;
}

const byName = (one, other) => one.localeCompare(other, "en", { numeric: true });

function comparison(rows, facts, order) {
  if (order === "name") return (a, b) => byName(rows[a].name, rows[b].name);
  if (order === "size") return (a, b) => facts[b].size - facts[a].size;
  if (order === "deviation") return (a, b) => greaterFirst(facts[a].most, facts[b].most);
  return null;
}

// Infinity minus infinity is no number, and sort would do as it likes.
const greaterFirst = (one, other) => one === other ? 0 : other > one ? 1 : -1;

function sortedBlocks(blocks, facts, order) {
  const lead = block => block.head ?? block.members[0];
  const most = block => Math.max(...block.members.map(row => facts[row].most));
  if (order === "name") return [...blocks].sort((a, b) => byName(a.name, b.name));
  if (order === "size") return [...blocks].sort((a, b) => facts[lead(b)].size - facts[lead(a)].size);
  if (order === "deviation")
    return [...blocks].sort((a, b) => greaterFirst(most(a), most(b)));
  return blocks;
}
