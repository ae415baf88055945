// The list of runs: as the server wrote it into the page, and again whenever a run changes.
const byId = id => document.getElementById(id);

function make(tag, text, className) {
  return Object.assign(document.createElement(tag), { textContent: text, className });
}

/** "3 minutes ago", in the words of the browser. */
function ago(seconds) {
  const units = [["day", 86400], ["hour", 3600], ["minute", 60], ["second", 1]];
  const passed = Math.max(0, Date.now() / 1000 - seconds);
  const [unit, size] = units.find(each => passed >= each[1]) ?? units.at(-1);
  return new Intl.RelativeTimeFormat("en", { numeric: "auto" }).format(-Math.floor(passed / size), unit);
}

function entry(run) {
  const link = make("a", "", "");
  link.href = run.href;
  Object.assign(link.dataset, { run: run.name, status: run.status, written: run.written });
  link.append(make("span", "", "dot"), make("span", run.name, "name"),
    make("span", `${run.steps.toLocaleString("en")} steps`, "number"),
    make("span", `${run.status}: ${run.text}`, "text"), make("time", ago(run.written), "when"));
  const item = document.createElement("li");
  item.append(link);
  return item;
}

function show(runs) {
  const focused = document.activeElement?.dataset?.run;
  byId("runs").replaceChildren(...runs.map(entry));
  byId("none").hidden = runs.length > 0;
  byId("runs-title").textContent = runs.length === 1 ? "1 run" : `${runs.length} runs`;
  filter();
  [...document.querySelectorAll("[data-run]")].find(each => each.dataset.run === focused)?.focus();
}

function filter() {
  const wanted = byId("filter").value.trim().toLowerCase();
  for (const link of document.querySelectorAll("[data-run]"))
    link.parentElement.hidden = !link.dataset.run.toLowerCase().includes(wanted);
}

function tellTimes() {
  for (const link of document.querySelectorAll("[data-run]"))
    link.querySelector(".when").textContent = ago(Number(link.dataset.written));
}

// The address carries the token only until the cookie is there: what is copied should not.
const address = new URL(location.href);
if (address.searchParams.has("token")) {
  address.searchParams.delete("token");
  history.replaceState(null, "", address);
}
byId("filter").addEventListener("input", filter);
addEventListener("keydown", event => {
  if (event.key === "/" && document.activeElement !== byId("filter")) {
    event.preventDefault();
    byId("filter").focus();
  }
});
tellTimes();
setInterval(tellTimes, 10_000);
const events = new EventSource("/api/changes");
events.onmessage = event => { byId("live").textContent = ""; show(JSON.parse(event.data)); };
events.onerror = () => { byId("live").textContent = "not connected"; };
document.documentElement.dataset.ready = "";
