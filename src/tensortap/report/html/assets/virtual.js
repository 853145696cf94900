// A table of any length: only visible rows exist in the document.

import { make, styled } from "./dom.js";
import { Lines } from "./lines.js";

const ROW = 26;

/**
 * A grid. `columns` is [{id, label, title, least, grow, number, stuck, sortable, fill(cell, row)}]: at least `least` pixels
 * wide, more if it may `grow`; the first ones may be `stuck`, visible at any scroll position. `name` is the prefix of the ids
 * of its rows, of which there are at most `rows`. `chosen(row)` and `sorted(column)` are called on selection.
 */
export class VirtualTable {
  constructor({ name, label, columns, rows, chosen, sorted = () => {} }) {
    this.name = name;
    this.columns = columns;
    this.chosen = chosen;
    this.order = new Uint32Array();
    this.current = null;
    this.heads = new Map();
    const tracks = columns.map(({ least, grow }) => (grow ? `minmax(${least}px, ${grow}fr)` : `${least}px`));
    const least = columns.reduce((sum, column) => sum + column.least, 16);
    this.header = make(
      "div",
      { class: "grid-row grid-head", role: "row" },
      columns.map((column) => this.#head(column, sorted)),
    );
    this.body = make("div", { class: "grid-body", role: "rowgroup" });
    const scroller = make(
      "div",
      { class: "grid-scroll", tabIndex: -1 },
      make("div", { class: "grid-inner" }, this.header, this.body),
    );
    this.node = make("div", { class: "grid", role: "grid", tabIndex: 0, "aria-label": label }, scroller);
    styled(this.node, {
      "--tracks": tracks.join(" "),
      "--least": `${least}px`,
      "--row": `${ROW}px`,
      "--whole": `${(Math.min(rows, 100) + 2) * ROW}px`,
    });
    this.lines = new Lines({
      scroller,
      body: this.body,
      high: ROW,
      headed: true,
      make: () => this.#line(),
      fill: (line, at) => this.#fill(line, at),
      drawn: () => this.#point(),
    });
    this.node.addEventListener("keydown", (event) => this.#key(event));
    this.body.addEventListener("click", (event) => this.#click(event));
  }

  /** Shows these rows, in this order. */
  show(order) {
    this.order = order;
    this.place = null;
    this.node.setAttribute("aria-rowcount", String(order.length + 1));
    this.lines.show(order.length);
  }

  /** Marks a row and scrolls to it if necessary. */
  mark(row, scroll = true) {
    this.current = row;
    this.lines.refresh(scroll ? this.#at(row) : -1);
  }

  /** The row some places after the current one, or the first. */
  neighbour(distance) {
    if (!this.order.length) return null;
    const at = this.#at(this.current);
    const next = at < 0 ? 0 : Math.max(0, Math.min(this.order.length - 1, at + distance));
    return this.order[next];
  }

  /** Shows the column that rows are sorted by: an id, and whether it is descending. */
  sortedBy(id, descending) {
    for (const [name, head] of this.heads) {
      head.setAttribute("aria-sort", name !== id ? "none" : descending ? "descending" : "ascending");
    }
  }

  #head(column, sorted) {
    const inner = column.sortable
      ? make("button", { type: "button", title: column.title ?? "", onclick: () => sorted(column) }, column.label)
      : make("span", { title: column.title ?? "" }, column.label);
    const head = this.#cell(column, "columnheader");
    head.setAttribute("aria-sort", "none");
    head.append(inner);
    if (column.sortable) this.heads.set(column.id, head);
    return head;
  }

  /** A cell; those of stuck columns stay visible when the table scrolls sideways. */
  #cell(column, role) {
    const node = make("div", { class: column.number ? "number" : "", role });
    if (!column.stuck) return node;
    node.classList.add("stuck");
    const before = this.columns.slice(0, this.columns.indexOf(column));
    return styled(node, { left: `${before.reduce((sum, each) => sum + each.least, 0)}px` });
  }

  /** The position of a row in the order, or -1. */
  #at(row) {
    if (row === null) return -1;
    if (this.place === null) this.place = new Map();
    if (!this.place.has(row)) this.place.set(row, this.order.indexOf(row));
    return this.place.get(row);
  }

  #line() {
    const cells = this.columns.map((column) => this.#cell(column, "gridcell"));
    return make("div", { class: "grid-row", role: "row" }, cells);
  }

  #fill(line, at) {
    const row = this.order[at];
    line.row = row;
    line.id = `${this.name}-${row}`;
    line.ariaRowIndex = String(at + 2);
    line.ariaSelected = String(row === this.current);
    this.columns.forEach((column, place) => column.fill(line.children[place], row));
  }

  /** Sets the attribute that names the current row, while it exists. */
  #point() {
    const line = this.lines.node(this.#at(this.current));
    if (line) this.node.setAttribute("aria-activedescendant", line.id);
    else this.node.removeAttribute("aria-activedescendant");
  }

  #click(event) {
    const line = event.target.closest(".grid-row");
    if (line) this.chosen(line.row);
  }

  #key(event) {
    const { page } = this.lines;
    const far = this.order.length;
    const moves = { ArrowDown: 1, ArrowUp: -1, PageDown: page, PageUp: -page, Home: -far, End: far };
    if (!(event.key in moves) || event.target !== this.node) return;
    event.preventDefault();
    const row = this.neighbour(moves[event.key]);
    if (row !== null) this.chosen(row);
  }
}
