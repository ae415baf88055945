// What stands below the pictures: samples, memory, incidents, dumps, cost, blind spots, settings.
import { byId, make, put, figure, parsed, grouped, counted, percent, bytes, table } from "./words.js";

const KINDS = ["parameters", "gradients", "optimizer", "activations", "temporaries", "inputs"];
const quiet = text => make("p", text, { className: "quiet" });

export function showSections(data) {
  fill("samples", samples(data), data.samples);
  fill("memory", memory(data.memory), data.memory);
  fill("incidents", incidents(data), data.incidents.length);
  fill("dumps", dumps(data), data.dumps.count);
  fill("blind", [...cost(data), ...blind(data)], true);
  byId("raw").textContent = JSON.stringify(data.config, null, 1);
}

/** A part of the page; one that has nothing to show takes one line. */
export function fill(id, parts, has) {
  put(byId(id), ...parts).closest("section").classList.toggle("empty", !has);
}

// --- samples -----------------------------------------------------------------------------------

function samples(data) {
  const found = data.samples;
  if (!found) return [quiet("No sample was scored: gradsight.GhostEngine(..., run_dir=...) or `gradsight train --method GradDotProd` switches it on.")];
  const extent = `${counted(found.rows, "score")} of ${counted(found.samples, "sample")} for the target “${found.target}”, steps ${grouped(found.first)} to ${grouped(found.last)}. Above 0 a sample helped, below 0 it hurt.`;
  const parts = [quiet(extent)];
  if (found.domains.length) parts.push(domains(found));
  parts.push(distribution(found.histogram));
  const both = make("div", "", { className: "pair" });
  both.append(sampleList("Helped most", found.best), sampleList("Hurt most", found.worst));
  parts.push(both);
  if (![...found.best, ...found.worst].some(sample => sample.text !== null))
    parts.push(put(quiet(""), "Ids alone. Their text: ", make("code", `gradsight report ${data.run} --data PATH`)));
  return parts;
}

const signed = value => value === null || Number.isNaN(value) ? figure(value) : `${value > 0 ? "+" : ""}${figure(value)}`;

function sampleList(title, list) {
  const holder = make("div");
  holder.append(make("h3", title));
  const texts = list.some(sample => sample.text !== null), headings = ["score", "seen", "sample"];
  if (list.some(sample => sample.domain !== null)) headings.push("domain");
  const rows = list.map(sample => {
    const row = [signed(parsed(sample.score)), `${sample.seen}x`, sample.id];
    if (headings.includes("domain")) row.push(sample.domain ?? "–");
    if (texts) row.push(sample.text === null ? "–" : make("code", sample.text.trim().replace(/\s*\n\s*/g, " ⏎ ").slice(0, 160), { className: "text", title: sample.text }));
    return row;
  });
  if (texts) headings.push("text");
  holder.append(table(headings, rows, [0, 1]));
  return holder;
}

function domains(found) {
  const rows = found.domains.map(domain => [domain.name, signed(parsed(domain.score)), grouped(domain.samples),
    percent(domain.below_zero), curve(domain.over_time.map(parsed), found.domains)]);
  const made = table(["domain", "score", "samples", "below 0", "over time"], rows, [1, 2, 3]);
  if (found.more_domains) made.append(quiet(`${found.more_domains} more domains: gradsight influence --by domain`));
  return made;
}

/** A small curve on the scale of all domains, with a line at 0. */
function curve(values, all) {
  const finite = all.flatMap(domain => domain.over_time.map(parsed)).filter(Number.isFinite);
  const low = Math.min(0, ...finite), high = Math.max(0, ...finite), span = high - low || 1;
  const y = value => 18 - (value - low) / span * 16;
  const svg = drawn("svg", { viewBox: "0 0 120 20", width: 120, height: 20, "aria-hidden": "true", class: "curve" });
  svg.append(drawn("line", { x1: 0, x2: 120, y1: y(0), y2: y(0), class: "zero" }));
  const points = values.map((value, at) => Number.isFinite(value) ? `${at / Math.max(1, values.length - 1) * 118 + 1},${y(value).toFixed(1)}` : null);
  svg.append(drawn("polyline", { points: points.filter(Boolean).join(" ") }));
  return svg;
}

function drawn(tag, attributes) {
  const element = document.createElementNS("http://www.w3.org/2000/svg", tag);
  for (const [name, value] of Object.entries(attributes)) element.setAttribute(name, value);
  return element;
}

/** How many samples have which score, as bars; the table behind it has the numbers. */
function distribution({ counts, edges }) {
  const largest = Math.max(...counts, 1), bars = make("div", "", { className: "bars" });
  bars.setAttribute("role", "img");
  bars.setAttribute("aria-label", "How many samples have which score; the table below has the numbers.");
  counts.forEach((count, at) => {
    const column = make("i", "", { title: `${figure(edges[at])} to ${figure(edges[at + 1])}: ${counted(count, "sample")}` });
    column.style.height = `${count ? Math.max(2, count / largest * 64) : 0}px`;
    if (edges[at] < 0) column.className = "below";
    bars.append(column);
  });
  const fold = make("details");
  fold.append(make("summary", "Scores as a table"), table(["score from", "to", "samples"],
    counts.map((count, at) => [figure(edges[at]), figure(edges[at + 1]), grouped(count)]), [0, 1, 2]));
  const holder = make("div"), ends = make("div", "", { className: "ends quiet" });
  ends.append(make("span", figure(edges[0])), make("span", "score"), make("span", figure(edges[edges.length - 1])));
  holder.append(bars, ends, fold);
  return holder;
}

// --- memory ------------------------------------------------------------------------------------

function memory(found) {
  if (!found) return [quiet("Nobody looked: `gradsight memory verify` measures a step with and without activation checkpointing, MemoryMonitor watches while training.")];
  const parts = [], kinds = Object.entries(found.kinds);
  if (kinds.length) parts.push(...byKind(found, kinds));
  else if (found.totals.baseline_gb !== null) parts.push(quiet(`Measured: ${bytes(found.totals.baseline_gb * 1e9)} plain, ${bytes(found.totals.optimized_gb * 1e9)} with activation checkpointing.`));
  if (found.predicted_gb !== null) parts.push(quiet(`Predicted peak of a step: ${bytes(found.predicted_gb * 1e9)}.`));
  if (found.watched.length) parts.push(table(["while training", "first", "last", "at most"],
    found.watched.map(([label, ...sizes]) => [label, ...sizes.map(bytes)]), [1, 2, 3]));
  return parts;
}

function byKind(found, kinds) {
  const order = kind => (KINDS.indexOf(kind) + 1) || 99, sorted = [...kinds].sort((a, b) => order(a[0]) - order(b[0]));
  const totals = [0, 1].map(which => sorted.reduce((sum, [, sizes]) => sum + sizes[which], 0));
  const most = Math.max(...totals, 1), holder = make("div", "", { className: "memory" });
  ["plain", "with checkpointing"].forEach((label, which) => {
    const bar = make("div", "", { className: "stack" });
    sorted.forEach(([kind, sizes], at) => {
      const part = make("i", "", { className: `kind${at % 6}`, title: `${kind}: ${bytes(sizes[which])}` });
      part.style.width = `${sizes[which] / most * 100}%`;
      bar.append(part);
    });
    holder.append(make("span", label), bar, make("span", bytes(totals[which]), { className: "n" }));
  });
  const { reduction, extra_flops } = found.totals;
  const saved = reduction === null ? "" : `${percent(reduction)} saved for ${percent(extra_flops)} more work; gradients ${found.identical ? "are bit for bit the same" : "DIFFER"}.`;
  const rows = sorted.map(([kind, sizes], at) => [put(make("span"), make("i", "", { className: `key kind${at % 6}` }), kind), ...sizes.map(bytes)]);
  return [holder, quiet(saved), table(["kind", "plain", "with checkpointing"], rows, [1, 2])];
}

// --- incidents and dumps -------------------------------------------------------------------------

function incidents(data) {
  if (!data.incidents.length) return [quiet("No incident: the flight recorder keeps one for every step that is not finite or spikes (recorder=True).")];
  return data.incidents.map(incident => {
    const holder = make("div", "", { className: "incident" });
    holder.append(make("b", `Step ${grouped(incident.step)}, ${incident.code}`), make("span", ` ${incident.reason}`));
    for (const text of incident.cause?.lines ?? []) holder.append(make("div", text, { className: "quiet" }));
    const again = incident.replayable ? `gradsight replay ${data.run}/${incident.place} --build file.py:build` : "";
    if (again) holder.append(put(make("div"), make("code", again)));
    else holder.append(make("div", "Without its batch: recorder=\"batch\" keeps it, so that `gradsight replay` can run it again.", { className: "quiet" }));
    return holder;
  });
}

function dumps(data) {
  if (!data.dumps.count) return [quiet("No gradients were dumped: watch(..., dump=GradientDumper(run_dir)) keeps them.")];
  const rows = data.dumps.rows.map(([step, ...rest]) => [grouped(step), ...rest]);
  return [quiet(`${counted(data.dumps.count, "dump")}, ${data.dumps.total}. \`gradsight dump show\` looks into them.`),
    table(["step", "kind", "size", "why", "gradient"], rows, [0, 2])];
}

// --- cost and blind spots ----------------------------------------------------------------------

function cost(data) {
  if (!data.cost) return [quiet("What the watch itself cost was not recorded.")];
  return [table(["what Gradsight took", ""], data.cost, [1])];
}

function blind(data) {
  const parts = [], { problems, abstained } = data.blind;
  if (problems.length) parts.push(make("h3", "Could not do"), listOf(problems));
  if (abstained.length) parts.push(make("h3", "Could not judge"), listOf(abstained.map(([names, why]) => `${names.join(", ")}: ${why}`)));
  if (data.notes.length) parts.push(make("h3", "The script"), listOf(data.notes));
  if (!problems.length && !abstained.length) parts.push(quiet("No check abstained and nothing went wrong."));
  return parts;
}

function listOf(texts) {
  const list = make("ul");
  for (const text of texts) list.append(make("li", text));
  return list;
}
