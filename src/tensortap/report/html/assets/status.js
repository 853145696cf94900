// The statuses of pairs and records. Each has a glyph, a word and a class for its colour, so none depends on colour alone.

import { make } from "./dom.js";

// In order of severity.
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

const LASTING = ["vanishing", "dead", "exploding"]; // not births, but first seen at a record

/** The nodes of a status: its glyph and its word, with a mark for a birth. */
export function glyph(status, birth = false) {
  const [sign, word] = STATUSES[status] ?? ["?", status];
  const said = birth ? make("span", { class: "born" }, LASTING.includes(status) ? `${word} ◀` : "born here ◀") : word;
  return [make("span", { class: `glyph ${status}`, "aria-hidden": "true" }, sign), " ", said];
}

/** The words for a birth of a status. */
export function birthWords(status) {
  return LASTING.includes(status) ? "first seen here" : "born here";
}

/** The severity of a status, for sorting; -1 for none. */
export function gravity(status) {
  return Object.keys(STATUSES).indexOf(status);
}
