// Colours as tables of 256 pixels. One ramp of a single hue whose lightness alone tells the value,
// and one of two hues, blue and orange, that red-green blind people can tell apart.
import { themeName } from "./theme.js";

const RAMPS = {
  ink: {
    light: ["#f6f4ee", "#d3dfe6", "#93b7cd", "#4a86ab", "#1f557f", "#0c2a47"],
    dark: ["#15191d", "#1b3347", "#265a7c", "#3f8cb0", "#8cc3d6", "#f2f8ea"],
  },
  poles: {
    light: ["#0b4a86", "#3f86c2", "#a9cbe3", "#f3f1eb", "#f0c08a", "#d77f24", "#8a3b00"],
    dark: ["#9fd2fb", "#4a93cc", "#235276", "#1d2226", "#6f441a", "#c9782a", "#ffc078"],
  },
};
const SPECIAL = {
  light: { bad: "#c2188f", hatch: "#f7cfe9", zero: "#e8d9a8", none: "#ffffff" },
  dark: { bad: "#ff4fd8", hatch: "#4a123d", zero: "#5a4c1e", none: "#181c20" },
};

/** #rrggbb as a pixel of image data. */
export function pixelOf(hex) {
  const [red, green, blue] = [1, 3, 5].map(at => parseInt(hex.slice(at, at + 2), 16));
  return (255 << 24 | blue << 16 | green << 8 | red) >>> 0;
}

/** 256 pixels from one end of a ramp to the other. */
export function colourTable(name) {
  const stops = RAMPS[name][themeName()], table = new Uint32Array(256);
  for (let at = 0; at < 256; at++) {
    const place = at / 255 * (stops.length - 1), first = Math.min(stops.length - 2, Math.floor(place));
    table[at] = mixed(pixelOf(stops[first]), pixelOf(stops[first + 1]), place - first);
  }
  return table;
}

function mixed(one, other, share) {
  let pixel = 255 << 24;
  for (const shift of [0, 8, 16]) {
    const from = one >> shift & 255, to = other >> shift & 255;
    pixel |= Math.round(from + (to - from) * share) << shift;
  }
  return pixel >>> 0;
}

/** Pixels for what is not a number. */
export function specialPixels() {
  const colours = SPECIAL[themeName()];
  return Object.fromEntries(Object.entries(colours).map(([name, hex]) => [name, pixelOf(hex)]));
}

export const cssOf = pixel => `rgb(${pixel & 255} ${pixel >> 8 & 255} ${pixel >> 16 & 255})`;
