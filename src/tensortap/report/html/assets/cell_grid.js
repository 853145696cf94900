// A map of cells on a canvas, with mouse and keyboard access. Nothing within a canvas can have the focus, so one element is
// placed over the current cell and describes it.

import { canvas, make, styled } from "./dom.js";

const PAGE = 10; // rows

/**
 * `describe(row, column)` returns the description of a cell; `act(row, column)` handles a click or Enter, if given;
 * `chosen(row, column)` returns whether the cell is selected.
 */
export class CellGrid {
  constructor({ describe, act = null, chosen = null }) {
    Object.assign(this, { describe, act, chosen });
    this.row = 0;
    this.column = 0;
    this.canvas = make("canvas");
    this.cell = make("div", { class: "cell", tabIndex: 0 });
    this.line = make("div", { role: "row" }, this.cell);
    this.grid = make("div", { class: act ? "map acts" : "map", role: "grid" }, this.canvas, this.line);
    this.tip = make("div", { class: "tip", "aria-live": "polite" });
    this.node = make("div", { class: "map-frame" }, this.grid, this.tip);
    this.grid.addEventListener("mousemove", (event) => this.#hover(event));
    this.grid.addEventListener("click", (event) => this.#click(event));
    this.cell.addEventListener("keydown", (event) => this.#key(event));
    this.cell.addEventListener("focus", () => this.go(this.row, this.column));
  }

  /**
   * Makes a canvas for cells of `wide` times `high` pixels with a margin, and returns its context. A map is `headed` if the
   * margin left of a row stands for the whole row; it counts as column -1.
   */
  begin({ label, rows, columns, wide, high, left = 0, top = 0, foot = 0, headed = false }) {
    this.whole = { width: left + wide * columns, height: top + high * rows + foot };
    Object.assign(this, { rows, columns, wide, high, left, top, least: headed ? -1 : 0 });
    const { node, context } = canvas(this.whole.width, this.whole.height, { "aria-hidden": "true" });
    this.canvas.replaceWith(node);
    this.canvas = node;
    Object.assign(this.grid, { ariaLabel: label, ariaRowCount: String(rows), ariaColCount: String(columns - this.least) });
    this.line.hidden = !rows || !columns;
    this.go(this.row, this.column);
    return context;
  }

  /** [x, y, width, height] of a cell, in pixels. */
  box(row, column) {
    if (column < 0) return [0, this.top + row * this.high, this.left, this.high];
    return [this.left + column * this.wide, this.top + row * this.high, this.wide, this.high];
  }

  /** Moves to a cell, or to the nearest one. */
  go(row, column) {
    if (this.line.hidden) return;
    this.row = Math.max(0, Math.min(this.rows - 1, row));
    this.column = Math.max(this.least, Math.min(this.columns - 1, column));
    const said = this.describe(this.row, this.column);
    const [x, y, width, height] = this.box(this.row, this.column);
    const share = (part, whole) => `${(100 * part) / whole}%`;
    styled(this.cell, {
      left: share(x, this.whole.width),
      top: share(y, this.whole.height),
      width: share(width, this.whole.width),
      height: share(height, this.whole.height),
    });
    this.line.ariaRowIndex = String(this.row + 1);
    Object.assign(this.cell, {
      role: this.column < 0 ? "rowheader" : "gridcell",
      ariaLabel: said,
      ariaColIndex: String(this.column - this.least + 1),
      ariaSelected: this.chosen ? String(this.chosen(this.row, this.column)) : null,
    });
    if (this.cell === document.activeElement) this.#say(said);
  }

  focus() {
    this.cell.focus();
  }

  /** Places the description below the cell and within the frame, aligned with the cell. */
  #say(words) {
    const share = (100 * this.cell.offsetLeft) / Math.max(1, this.node.clientWidth);
    if (this.tip.textContent !== words) this.tip.textContent = words;
    styled(this.tip, {
      top: `${this.cell.offsetTop + this.cell.offsetHeight + 8}px`,
      left: `${share}%`,
      transform: `translateX(-${share}%)`,
    });
  }

  /** [row, column] under the mouse, or null. */
  #under(event) {
    const box = this.canvas.getBoundingClientRect();
    const x = ((event.clientX - box.left) / box.width) * this.whole.width - this.left;
    const y = ((event.clientY - box.top) / box.height) * this.whole.height - this.top;
    const [row, column] = [Math.floor(y / this.high), Math.max(-1, Math.floor(x / this.wide))];
    const known = row >= 0 && row < this.rows && column >= this.least && column < this.columns;
    return known ? [row, column] : null;
  }

  #hover(event) {
    const at = this.#under(event);
    this.canvas.title = at ? this.describe(...at) : "";
  }

  #click(event) {
    const at = this.#under(event);
    if (!at) return;
    this.go(...at);
    this.act?.(...at);
  }

  #key(event) {
    const { row, column } = this;
    const act = () => this.act?.(row, column);
    const acts = {
      ArrowDown: () => this.#step(row + 1, column),
      ArrowUp: () => this.#step(row - 1, column),
      ArrowRight: () => this.#step(row, column + 1),
      ArrowLeft: () => this.#step(row, column - 1),
      PageDown: () => this.#step(row + PAGE, column),
      PageUp: () => this.#step(row - PAGE, column),
      Home: () => this.#step(row, this.least),
      End: () => this.#step(row, this.columns - 1),
      Enter: act,
      " ": act,
    };
    if (!(event.key in acts) || event.ctrlKey || event.metaKey || event.altKey) return;
    event.preventDefault();
    event.stopPropagation();
    acts[event.key]();
  }

  #step(row, column) {
    this.go(row, column);
    this.cell.scrollIntoView({ block: "nearest", inline: "nearest" });
  }
}
