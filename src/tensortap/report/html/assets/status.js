// What a pair or a record can be. Never colour alone: each has a glyph and a word, and the class that colours them.

import { make } from "./dom.js";

const STATUSES = {
  equal: ["=", "equal"],
  close: ["≈", "close"],
  diverged: ["✖", "diverged"],
  nonfinite: ["✖", "NaN/Inf"],
  shape: ["✖", "shape"],
  unjudged: ["?", "unjudged"],
  unmatched: ["∅", "unmatched"],
  ok: ["·", "ok"],
  exploding: ["▲", "exploding"],
  dead: ["○", "dead"],
  vanishing: ["▽", "vanishing"],
};

/** The nodes that say a status: its glyph and its word; of a birth, that it is one. */
export function glyph(status, birth = false) {
  const [sign, word] = STATUSES[status] ?? ["?", status];
  const said = birth ? make("span", { class: "born" }, "born here ◀") : word;
  return [make("span", { class: `glyph ${status}`, "aria-hidden": "true" }, sign), " ", said];
}
