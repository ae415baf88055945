// The verdict and the findings: evidence, cause, and the fix as code.
import { byId, make, put, figure, parsed, grouped, counted, percent, copyFrom } from "./words.js";

const NAMED = 3;

/** Title, sentence and facts. */
export function showVerdict(data, facts) {
  const title = byId("verdict");
  title.textContent = data.sentence;
  title.dataset.status = data.status;
  document.title = `${data.counts} - ${data.run}`;
  byId("run").textContent = data.run;
  const { count, first, last } = data.steps;
  byId("steps").textContent = counted(count, "step");
  Object.assign(byId("steps").dataset, { first: first ?? "", last: last ?? "" });
  byId("facts").textContent = [data.findings.length ? data.counts : "", ...facts].filter(Boolean).join(" · ");
}

/** One card per finding; `goTo` shows it on the map. */
export function showFindings(data, goTo) {
  const cards = data.findings.map((finding, at) => card(data, finding, at === 0, goTo));
  if (!cards.length) {
    const text = data.judged ? "No check found anything." : "Not judged: the run was opened with health=False.";
    cards.push(make("p", text, { className: "quiet" }));
  }
  put(byId("findings"), ...cards);
}

function card(data, finding, open, goTo) {
  const article = make("article", "", { tabIndex: -1 }), heading = make("h3");
  Object.assign(article.dataset, { finding: finding.code, severity: finding.severity });
  if (finding.caused_by) article.dataset.causedBy = finding.caused_by;
  const since = `${finding.code} · ${finding.severity} · since step ${grouped(finding.first_step)}`;
  const link = make("button", "show on the map", { type: "button", className: "plain" });
  link.onclick = () => goTo(finding);
  heading.append(make("span", finding.name), make("span", since, { className: "code" }), link);
  article.append(heading, make("p", finding.message), facts(data, finding));
  for (const sample of finding.cause?.samples ?? []) article.append(guilty(sample));
  if (finding.fix && !finding.caused_by) article.append(fix(finding, open));
  return article;
}

function facts(data, finding) {
  const list = make("dl"), { cause } = finding;
  const add = (name, value) => { if (value) list.append(make("dt", name), put(make("dd"), value)); };
  add("Follows from", finding.caused_by);
  add("Leads to", finding.caused_by ? "" : data.findings.filter(each => each.caused_by === finding.code)
    .map(each => `${each.code} ${each.name} (${each.severity})`).join(", "));
  add("Evidence", finding.evidence);
  add("Where", where(finding));
  if (cause) add("Cause", lines(cause.lines));
  if (cause?.source) add("Line", source(cause.source));
  if (cause?.samples.length && !cause.samples.some(sample => sample.text !== null))
    add("Text", put(make("span"), "of the samples: ", make("code", `gradsight report ${data.run} --data PATH`)));
  if (finding.incident) add("Kept in", make("code", finding.incident));
  if (!finding.caused_by) add("What to do", finding.recommendation);
  add("More", make("code", `gradsight explain ${finding.code}`));
  return list;
}

function where(finding) {
  const total = finding.parameters.length + finding.more;
  if (!total) return null;
  if (total <= NAMED) return finding.parameters.join(", ");
  const fold = make("details", "", { className: "names" });
  fold.append(make("summary", `${finding.parameters.slice(0, NAMED).join(", ")} and ${total - NAMED} more`),
    make("p", finding.parameters.slice(NAMED).join(", ") + (finding.more ? ` and ${finding.more} more` : "")));
  return fold;
}

function lines(texts) {
  const holder = make("div");
  for (const text of texts) holder.append(make("div", text));
  return holder;
}

function source({ place, text }) {
  const line = make("code", text.trim());
  return put(make("span"), line, make("span", place ? `  ${place}` : "", { className: "quiet" }));
}

function guilty(sample) {
  const block = make("div", "", { className: "sample" });
  const share = sample.share === null ? "" : `, ${percent(sample.share)} of the squared norm`;
  block.append(make("div", `${sample.name}: norm ${figure(parsed(sample.norm))}${share}`, { className: "quiet" }));
  if (sample.text !== null) block.append(make("pre", sample.text, { tabIndex: 0 }));
  return block;
}

function fix(finding, open) {
  const fold = make("details", "", { open }), holder = make("div", "", { className: "fix" });
  const button = make("button", "Copy", { type: "button" });
  button.setAttribute("aria-label", `Copy the fix of ${finding.code}`);
  button.onclick = () => copyFrom(button, finding.fix);
  holder.append(make("pre", finding.fix, { tabIndex: 0 }), button);
  fold.append(make("summary", "The fix as code"), holder);
  return fold;
}

/** For an issue: verdict, findings, versions; never the text of a sample. */
export function asMarkdown(data) {
  const safe = text => String(text).replace(/[\\`*_[\]<>|#@]/g, "\\$&").replace(/\s*\n\s*/g, " ");
  const parts = [`**${safe(data.sentence)}** (${safe(data.counts)}, ${counted(data.steps.count, "step")})`, ""];
  for (const finding of data.findings) {
    parts.push(`- **${safe(finding.code)} ${safe(finding.name)}** (${finding.severity}, since step ${finding.first_step}${finding.caused_by ? `, follows from ${safe(finding.caused_by)}` : ""}): ${safe(finding.message)}`);
    parts.push(`  - Evidence: ${safe(finding.evidence)}`);
    if (finding.parameters.length) parts.push(`  - Where: ${finding.parameters.slice(0, NAMED).map(safe).join(", ")}${finding.parameters.length + finding.more > NAMED ? ` and ${finding.parameters.length + finding.more - NAMED} more` : ""}`);
    for (const text of finding.cause?.lines ?? []) parts.push(`  - ${safe(text)}`);
  }
  const versions = Object.entries(data.config.versions ?? {}).map(([name, version]) => `${name} ${version}`);
  if (versions.length) parts.push("", safe(versions.join(", ")));
  return parts.join("\n");
}
