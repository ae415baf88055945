// What is shown, as the page's address has it: every state is a link, on file:// too.

export const MODES = ["norm", "deviation", "update", "zeros", "weight", "change"];
export const ORDERS = ["depth", "size", "deviation", "name"];

/** rows: the filter; from, to: visible steps, null for all; step, row: the cursor. */
export function freshState() {
  return { rows: "", mode: "norm", order: "depth", from: null, to: null, step: null, row: null };
}

export function stateOfHash(hash) {
  const kept = new URLSearchParams(hash.replace(/^#/, "")), state = freshState();
  for (const key of ["from", "to", "step"]) {
    const value = kept.get(key);
    if (value !== null && value.trim() !== "" && Number.isFinite(Number(value)))
      state[key] = Math.round(Number(value));
  }
  for (const key of ["rows", "row"]) if (kept.get(key)) state[key] = kept.get(key);
  if (MODES.includes(kept.get("mode"))) state.mode = kept.get("mode");
  if (ORDERS.includes(kept.get("order"))) state.order = kept.get("order");
  return state;
}

/** Only what differs from a fresh page, so that links stay short. */
export function hashOfState(state) {
  const kept = new URLSearchParams(), usual = freshState();
  for (const [key, value] of Object.entries(state))
    if (value !== usual[key] && value !== null) kept.set(key, value);
  return kept.toString();
}

export function remember(state) {
  const hash = hashOfState(state);
  if (hash === location.hash.replace(/^#/, "")) return;
  // No entry of the history for every key: "back" leaves the page.
  history.replaceState(null, "", hash ? `#${hash}` : location.pathname + location.search);
}
