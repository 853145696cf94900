// Unmatched records: in groups, and one by one.

import { make } from "./dom.js";
import { count, shown } from "./format.js";
import { VirtualTable } from "./virtual.js";

const FIELDS = ["side", "rank", "step", "phase", "module", "call", "kind", "path", "cls", "why"];
const LEAST = [110, 52, 52, 84, 180, 48, 100, 80, 120, 240];

/** The panel about unmatched records. */
export function unmatchedPanel(unmatched) {
  const groups = unmatched.groups.map((group) => make("li", {}, make("b", {}, group.name), ` ${group.text}`));
  const given = FIELDS.filter((field, at) => field !== "why" || unmatched.rows.some((row) => row[at]));
  const grid = new VirtualTable({
    name: "unmatched",
    label: "Unmatched records",
    rows: unmatched.rows.length,
    columns: given.map((field, at) => ({
      id: field,
      label: field === "cls" ? "class" : field,
      least: LEAST[at],
      grow: { module: 3, path: 1, why: 3 }[field],
      number: ["rank", "step", "call"].includes(field),
      fill: (cell, row) => (cell.textContent = text(field, unmatched.rows[row][at])),
    })),
    chosen: (row) => grid.mark(row),
  });
  const rest = unmatched.count - unmatched.rows.length;
  const node = make(
    "div",
    { class: "unmatched" },
    make("ul", { class: "groups" }, groups),
    grid.node,
    rest > 0 ? make("p", { class: "hint" }, `and ${count(rest)} more that the page does not list`) : null,
  );
  grid.show(Uint32Array.from(unmatched.rows, (_, row) => row));
  return node;
}

function text(field, value) {
  if (field === "side") return `∅ ${value}`;
  return field === "module" ? shown(value) : String(value ?? "");
}
