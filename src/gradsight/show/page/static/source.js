// Where the page gets what it shows. The page asks a source and does not know which one it is.
//
//   data                  the payload of payload.py: words, rows, lines; levels still packed
//   levels(map)           what is known of a map's levels, the coarsest first: [{columns, factor}]
//   level(map, index, from, to)   a promise of a level as `unpackLevel` gives it; of a page that
//                         is served, one that holds these steps at least
//   ready(map, index, from, to)   the same level if it is here already, else undefined
//   watch(changed)        calls `changed(parts)` whenever there is more to show, with the names of
//                         the parts of the data that are others now; a file never does
import { byId } from "./words.js";
import { unpackLevel } from "./decode.js";
import { servedSource } from "./served.js";

/** Everything is in the file itself. */
export function embeddedSource(data) {
  const rows = data.heat.rows.length, asked = new Map(), here = new Map();
  const key = (map, index) => `${map}/${index}`;
  return {
    data,
    levels: map => data.heat.maps[map] ?? [],
    level(map, index) {
      const name = key(map, index);
      if (!asked.has(name)) {
        const unpacked = unpackLevel(data.heat.maps[map][index], rows);
        asked.set(name, unpacked.then(level => { here.set(name, level); return level; }));
      }
      return asked.get(name);
    },
    ready: (map, index) => here.get(key(map, index)),
    watch() {},
  };
}

/** The source of this page. */
export async function openSource() {
  const data = JSON.parse(byId("data").textContent);
  return data.live ? servedSource(data) : embeddedSource(data);
}
