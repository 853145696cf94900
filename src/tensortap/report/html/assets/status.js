// What a pair or a record can be. Never colour alone: each has a glyph and a word, and the class that colours them.

import { make } from "./dom.js";

// The graver, the later.
const STATUSES = {
  equal: ["=", "equal"],
  ok: ["·", "ok"],
  unjudged: ["?", "unjudged"],
  unmatched: ["∅", "unmatched"],
  close: ["≈", "close"],
  vanishing: ["▽", "vanishing"],
  dead: ["○", "dead"],
  exploding: ["▲", "exploding"],
  diverged: ["✖", "diverged"],
  shape: ["✖", "shape"],
  nonfinite: ["✖", "NaN/Inf"],
};

const LASTING = ["vanishing", "dead", "exploding"]; // not born at a place, but first seen there

/** The nodes that say a status: its glyph and its word; of a birth, that it is one. */
export function glyph(status, birth = false) {
  const [sign, word] = STATUSES[status] ?? ["?", status];
  const said = birth ? make("span", { class: "born" }, LASTING.includes(status) ? `${word} ◀` : "born here ◀") : word;
  return [make("span", { class: `glyph ${status}`, "aria-hidden": "true" }, sign), " ", said];
}

/** What a birth of that status is. */
export function birthWords(status) {
  return LASTING.includes(status) ? "first seen here" : "born here";
}

/** How grave a status is, to sort by; -1 for none. */
export function gravity(status) {
  return Object.keys(STATUSES).indexOf(status);
}
