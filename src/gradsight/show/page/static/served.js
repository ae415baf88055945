// The source of a page that is served: what is embedded in it, and then what its server tells.
//
// The whole run is one level, which grows at its end. Finer levels are asked for where somebody
// looks: `level` and `ready` take the steps that are seen.
import { byId, make } from "./words.js";
import { unpackLevel } from "./decode.js";

const AROUND = 0.5;       // of what is seen, on either side: panning finds it here already
const AGAIN = 2000;       // milliseconds until a server that refused is asked again

/** Columns of a level, of which those from the tail's first step on are the tail's. */
export function grown(level, tail, rows) {
  let keep = level.columns;
  while (keep > 0 && level.starts[keep - 1] >= tail.starts[0]) keep -= 1;
  const columns = keep + tail.columns, joined = { ...level, columns, whole: level.whole && tail.whole };
  for (const key of ["starts", "lasts"]) {
    joined[key] = new Float64Array(columns);
    joined[key].set(level[key].subarray(0, keep));
    joined[key].set(tail[key], keep);
  }
  const put = (key, here, there) => {
    joined[key] = new Float32Array(rows * columns);
    for (let row = 0; row < rows; row++) {
      joined[key].set(here.subarray(row * level.columns, row * level.columns + keep), row * columns);
      joined[key].set(there.subarray(row * tail.columns, (row + 1) * tail.columns), row * columns + keep);
    }
  };
  put("high", level.high, tail.high);
  put("deviation", level.deviation, tail.deviation);
  if (joined.whole) joined.low = joined.high; else put("low", level.low, tail.low);
  return joined;
}

export function servedSource(data) {
  const place = location.pathname.replace(/[^/]*$/, "");
  const rows = data.heat.rows.length, windows = new Map(), others = new Map();
  let whole, opened, events, told = () => {};

  const packed = () => data.heat.maps.norm[0];
  const unpackWhole = () => {
    opened = packed() ? unpackLevel(packed(), rows).then(level => whole = level) : undefined;
    return opened;
  };

  /** From the whole run's level down to single steps. */
  function factors() {
    const found = [];
    for (let factor = whole?.factor ?? packed()?.factor ?? 0; factor >= 1; factor /= 2) found.push(factor);
    return found;
  }

  async function ask(index, from, to) {
    const query = new URLSearchParams({ factor: factors()[index], from, to });
    const answer = await fetch(`${place}api/heat?${query}`);
    if (!answer.ok) throw new Error(`the server answers ${answer.status}`);
    const level = await unpackLevel(await answer.json(), rows);
    windows.set(index, { from, to, level });
    return level;
  }

  function window(index, from, to) {
    const found = windows.get(index);
    return found && found.from <= from && found.to >= to ? found.level : undefined;
  }

  /** A map of what is measured on some steps only; another text of it is another map. */
  function other(map, index) {
    const text = data.heat.maps[map][index];
    if (others.get(map)?.text !== text) {
      const known = { text, level: undefined };
      known.asked = unpackLevel(text, rows).then(level => known.level = level);
      others.set(map, known);
    }
    return others.get(map);
  }

  /** What the server tells, one message after the other. */
  async function take(message) {
    if (message.live.generation !== data.live.generation || (!rows && message.tail)) {
      location.reload();
      return;
    }
    data.live = message.live;
    data.steps = message.steps;
    say(message.live.trouble ?? "live", !message.live.trouble);
    if (message.reload) { await fetchAll(); listen(); told(new Set(Object.keys(data))); return; }
    if (!message.tail) { told(new Set()); return; }
    const { maps, marks, ...words } = message.parts;
    Object.assign(data, words);
    Object.assign(data.lines, message.lines, marks);
    if (maps) data.heat.maps = { ...maps, norm: data.heat.maps.norm };
    await opened;
    whole = grown(whole, await unpackLevel(message.tail, rows), rows);
    told(new Set(Object.keys(message.parts)));
    await renewWindows();
  }

  /** Finer levels that reach to where the run ended are asked for again; until then they stay. */
  async function renewWindows() {
    for (const [index, { from, to, level }] of windows)
      if (to > level.lasts[level.columns - 1]) {
        await ask(index, from, to);
        told(new Set());
      }
  }

  async function fetchAll() {
    const answer = await fetch(`${place}api/data`);
    if (!answer.ok) throw new Error(`the server answers ${answer.status}`);
    Object.assign(data, await answer.json());
    windows.clear();
    await unpackWhole();
  }

  function say(text, fine = false) {
    let field = byId("live");
    if (!field) {
      field = make("span", "", { id: "live" });
      field.setAttribute("role", "status");
      byId("steps").after(field);
    }
    if (field.textContent !== text) field.textContent = text;
    field.classList.toggle("trouble", !fine);
  }

  function listen() {
    events?.close();
    const level = whole ?? { factor: 1, starts: [-1], columns: 1 };
    const query = new URLSearchParams({ generation: data.live.generation, factor: level.factor,
      after: level.starts[level.columns - 1], parts: data.live.parts });
    events = new EventSource(`${place}api/events?${query}`);
    let queue = Promise.resolve();
    events.onmessage = event => {
      queue = queue.then(() => take(JSON.parse(event.data))).catch(error => say(`${error.message}`));
    };
    events.onerror = () => {
      say("not connected");
      // A server that refuses is not asked again by the browser itself.
      if (events.readyState === EventSource.CLOSED) setTimeout(listen, AGAIN);
    };
  }

  return {
    data,
    levels: map => map === "norm" ? factors().map(factor => ({ factor })) : data.heat.maps[map] ?? [],
    level(map, index, from, to) {
      if (map !== "norm") return other(map, index).asked;
      if (index === 0) return opened ?? unpackWhole();
      const more = Math.ceil((to - from + 1) * AROUND);
      return ask(index, from - more, to + more);
    },
    ready(map, index, from, to) {
      if (map !== "norm") return data.heat.maps[map]?.[index] && other(map, index).level;
      return index === 0 ? whole : window(index, from, to);
    },
    watch(changed) {
      told = changed;
      // The address carries the token only until the cookie is there: what is copied should not.
      const address = new URL(location.href);
      if (address.searchParams.has("token")) {
        address.searchParams.delete("token");
        history.replaceState(null, "", address);
      }
      (opened ?? Promise.resolve()).then(listen);
    },
  };
}
