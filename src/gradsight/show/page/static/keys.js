// The keyboard. Everything can be done without a mouse.
import { byId } from "./words.js";

const MOVES = { ArrowLeft: [0, -1], ArrowRight: [0, 1], ArrowUp: [-1, 0], ArrowDown: [1, 0] };

/** act: {move(down, right), zoom(factor), zoomAll(), theme(), help(), fold(), clear()} */
export function bindKeys(act) {
  document.addEventListener("keydown", event => {
    if (event.ctrlKey || event.metaKey || event.altKey || event.defaultPrevented) return;
    // An open dialog has keys of its own.
    if (byId("keys").open) return;
    if (event.target.matches("input, select, textarea")) {
      if (event.key === "Escape") { act.clear(); event.target.blur(); }
      return;
    }
    if (pressed(event, act)) event.preventDefault();
  });
}

function pressed(event, act) {
  const onMap = document.activeElement === byId("heat"), move = MOVES[event.key];
  if (move && onMap) {
    const times = event.shiftKey ? 10 : 1;
    act.move(move[0] * times, move[1] * times);
    return true;
  }
  if (event.key === "Enter" && onMap) { act.fold(); return true; }
  const plain = {
    "/": () => byId("filter").focus(), j: () => stepFinding(1), k: () => stepFinding(-1),
    "+": () => act.zoom(0.5), "=": () => act.zoom(0.5), "-": () => act.zoom(2), _: () => act.zoom(2),
    0: act.zoomAll, t: act.theme, "?": act.help, Escape: act.clear,
  }[event.key];
  if (!plain) return false;
  plain();
  return true;
}

/** Focuses the next or the previous finding. */
function stepFinding(by) {
  const cards = [...document.querySelectorAll("[data-finding]")];
  const at = cards.findIndex(card => card.contains(document.activeElement));
  const next = at < 0 ? (by > 0 ? 0 : cards.length - 1) : Math.max(0, Math.min(cards.length - 1, at + by));
  cards[next]?.focus();
  cards[next]?.scrollIntoView({ block: "nearest" });
}
