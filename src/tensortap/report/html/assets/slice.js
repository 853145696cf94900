// Exact values of a part of a tensor, from the server.

import { asked } from "./blocks.js";
import { make } from "./dom.js";
import { precise } from "./format.js";

/** Values shown in each direction. */
export const ELEMENTS = 12;

/** A button that shows the values of a row's tensor, or of one side's, from a given position. */
export class Slice {
  constructor(row, side = null) {
    Object.assign(this, { row, side });
    const at = (name) => make("input", { type: "number", min: 0, value: 0, class: "at", "aria-label": `first ${name}` });
    this.from = { row: at("row"), column: at("column") };
    this.table = make("div");
    this.node = make(
      "div",
      {},
      make(
        "p",
        { class: "buttons" },
        make("button", { type: "button", onclick: () => this.#show() }, "show values"),
        make("label", {}, "from row ", this.from.row),
        make("label", {}, "column ", this.from.column),
      ),
      this.table,
    );
  }

  async #show() {
    const [top, left] = [this.from.row, this.from.column].map((input) => Math.max(0, Math.floor(input.valueAsNumber || 0)));
    const window = [top, top + ELEMENTS, left, left + ELEMENTS].join(",");
    const side = this.side === null ? "" : `&side=${this.side}`;
    try {
      const slice = await asked(`slice?row=${this.row}&window=${window}${side}`);
      [this.from.row.max, this.from.column.max] = slice.whole.map((size) => Math.max(0, size - 1));
      this.table.replaceChildren(valuesTable(slice, this.side ?? "reference"));
    } catch (error) {
      this.table.replaceChildren(make("p", { class: "hint", role: "alert" }, error.message));
    }
  }
}

/** Exact values of a window, both sides in one cell; or those of one `side`. */
export function valuesTable(slice, side = "reference") {
  const [firstRow, lastRow, firstColumn, lastColumn] = slice.window;
  const wide = lastColumn - firstColumn;
  const columns = Array.from({ length: wide }, (_, at) => make("th", { scope: "col" }, String(firstColumn + at)));
  const rows = Array.from({ length: lastRow - firstRow }, (_, row) => {
    const cells = Array.from({ length: wide }, (_, column) => {
      const at = row * wide + column;
      const lines = [make("div", { class: `key-${side}` }, precise(slice.reference[at]))];
      if (slice.candidate) lines.push(make("div", { class: "key-candidate" }, precise(slice.candidate[at])));
      return make("td", { class: "number" }, lines);
    });
    return make("tr", {}, make("th", { scope: "row" }, String(firstRow + row)), cells);
  });
  return make(
    "div",
    { class: "slice" },
    make("table", {}, make("thead", {}, make("tr", {}, make("th", {}), columns)), make("tbody", {}, rows)),
  );
}
