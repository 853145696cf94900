// A table of any length: only the rows on the screen exist. Beyond the greatest height that browsers allow, the scroll bar
// stands for a share of the rows instead of pixels.

import { make, styled } from "./dom.js";

const ROW = 26;
const TALLEST = 8_000_000;

/**
 * A grid. `columns` is [{id, label, title, least, grow, number, stuck, sortable, fill(cell, row)}]: `least` pixels wide, more if
 * it may `grow`; the first ones may be `stuck`, in sight whatever is scrolled. `name` begins the ids of its rows, of which there
 * are never more than `rows`. `chosen(row)` and `sorted(column)` are called when the reader picks.
 */
export class VirtualTable {
  constructor({ name, label, columns, rows, chosen, sorted = () => {} }) {
    this.name = name;
    this.columns = columns;
    this.chosen = chosen;
    this.order = new Uint32Array();
    this.current = null;
    this.pool = [];
    this.first = -1;
    this.heads = new Map();
    const tracks = columns.map(({ least, grow }) => (grow ? `minmax(${least}px, ${grow}fr)` : `${least}px`));
    const least = columns.reduce((sum, column) => sum + column.least, 16);
    this.header = make(
      "div",
      { class: "grid-row grid-head", role: "row" },
      columns.map((column) => this.#head(column, sorted)),
    );
    this.body = make("div", { class: "grid-body", role: "rowgroup" });
    this.scroller = make(
      "div",
      { class: "grid-scroll", tabIndex: -1 },
      make("div", { class: "grid-inner" }, this.header, this.body),
    );
    this.node = make("div", { class: "grid", role: "grid", tabIndex: 0, "aria-label": label }, this.scroller);
    styled(this.node, {
      "--tracks": tracks.join(" "),
      "--least": `${least}px`,
      "--row": `${ROW}px`,
      "--whole": `${(Math.min(rows, 100) + 2) * ROW}px`,
    });
    this.scroller.addEventListener("scroll", () => this.#render(), { passive: true });
    this.node.addEventListener("keydown", (event) => this.#key(event));
    this.body.addEventListener("click", (event) => this.#click(event));
    new ResizeObserver(() => this.#render(true)).observe(this.scroller);
  }

  /** Shows these rows, in this order. */
  show(order) {
    this.order = order;
    this.place = null;
    this.node.setAttribute("aria-rowcount", String(order.length + 1));
    styled(this.body, { height: `${Math.min(order.length * ROW, TALLEST)}px` });
    this.#render(true);
  }

  /** Marks a row and, unless it is in view already, brings it there. */
  mark(row, scroll = true) {
    this.current = row;
    const at = row === null ? -1 : this.#at(row);
    if (scroll && at >= 0) this.#reveal(at);
    this.#render(true);
  }

  /** The row so many places after the current one, or the first. */
  neighbour(distance) {
    if (!this.order.length) return null;
    const at = this.current === null ? -1 : this.#at(this.current);
    const next = at < 0 ? 0 : Math.max(0, Math.min(this.order.length - 1, at + distance));
    return this.order[next];
  }

  /** Says by which column the rows are sorted: an id, and whether downwards. */
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

  /** A cell; those of stuck columns stay in sight when the table is scrolled sideways. */
  #cell(column, role) {
    const node = make("div", { class: column.number ? "number" : "", role });
    if (!column.stuck) return node;
    node.classList.add("stuck");
    const before = this.columns.slice(0, this.columns.indexOf(column));
    return styled(node, { left: `${before.reduce((sum, each) => sum + each.least, 0)}px` });
  }

  #at(row) {
    if (this.place === null) this.place = new Map();
    if (!this.place.has(row)) this.place.set(row, this.order.indexOf(row));
    return this.place.get(row);
  }

  get #height() {
    return Math.max(ROW, this.scroller.clientHeight - ROW);
  }

  /** How many rows one pixel of scrolling stands for. */
  get #scale() {
    const room = this.order.length * ROW - this.#height;
    const scrolled = Math.min(this.order.length * ROW, TALLEST) - this.#height;
    return scrolled > 0 && room > scrolled ? room / scrolled : 1;
  }

  #reveal(at) {
    const top = at * ROW;
    const from = this.scroller.scrollTop * this.#scale;
    if (top >= from && top + ROW <= from + this.#height) return;
    this.scroller.scrollTop = Math.max(0, top - this.#height / 3) / this.#scale;
  }

  #render(again = false) {
    const top = this.scroller.scrollTop;
    const shifted = top * this.#scale;
    const first = Math.max(0, Math.floor(shifted / ROW) - 4);
    if (first === this.first && !again && this.#scale === 1) return;
    this.first = first;
    const many = Math.min(this.order.length - first, Math.ceil(this.#height / ROW) + 9);
    while (this.pool.length < many) this.pool.push(this.#line());
    let active = null;
    this.pool.forEach((line, at) => {
      line.node.hidden = at >= many;
      if (at >= many) {
        for (const name of ["id", "aria-selected"]) line.node.removeAttribute(name);
        return;
      }
      const row = this.order[first + at];
      line.row = row;
      styled(line.node, { transform: `translateY(${(first + at) * ROW - shifted + top}px)` });
      line.node.id = `${this.name}-${row}`;
      line.node.setAttribute("aria-rowindex", String(first + at + 2));
      line.node.setAttribute("aria-selected", String(row === this.current));
      if (row === this.current) active = line.node.id;
      this.columns.forEach((column, place) => column.fill(line.cells[place], row));
    });
    if (active) this.node.setAttribute("aria-activedescendant", active);
    else this.node.removeAttribute("aria-activedescendant");
  }

  #line() {
    const cells = this.columns.map((column) => this.#cell(column, "gridcell"));
    const node = make("div", { class: "grid-row", role: "row" }, cells);
    this.body.append(node);
    const line = { node, cells, row: null };
    node.line = line;
    return line;
  }

  #click(event) {
    const node = event.target.closest(".grid-row");
    if (node) this.chosen(node.line.row);
  }

  #key(event) {
    const page = Math.floor(this.#height / ROW) - 1;
    const far = this.order.length;
    const moves = { ArrowDown: 1, ArrowUp: -1, PageDown: page, PageUp: -page, Home: -far, End: far };
    if (!(event.key in moves) || event.target !== this.node) return;
    event.preventDefault();
    const row = this.neighbour(moves[event.key]);
    if (row !== null) this.chosen(row);
  }
}
