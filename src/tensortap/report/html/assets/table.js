// All rows: filtered by words, sorted by any column, with a selected row.

import { make } from "./dom.js";
import { filtered } from "./filter.js";
import { count } from "./format.js";
import { sortKeys, tableColumns } from "./measures.js";
import { sorted } from "./order.js";
import { VirtualTable } from "./virtual.js";

const LONG = 300_000; // rows above which filtering waits until typing stops
const PAUSE = 150; // ms

export class Table {
  constructor(data, selection, scope) {
    Object.assign(this, { data, selection, scope });
    this.keys = new Map();
    this.grid = new VirtualTable({
      name: "row",
      label: data.compares ? "All pairs" : "All records",
      columns: tableColumns(data),
      rows: data.rows,
      chosen: (row) => selection.set({ row }),
      sorted: (column) => selection.set({ sort: nextSort(selection.get("sort"), column) }),
    });
    this.input = make("input", {
      type: "search",
      id: "filter",
      placeholder: "module, tensor, class, dtype…",
      "aria-label": "Filter by words",
      autocomplete: "off",
      spellcheck: false,
      oninput: () => this.#typed(),
    });
    this.failing = make("input", {
      type: "checkbox",
      id: "failing",
      onchange: () => selection.set({ failing: this.failing.checked }),
    });
    this.said = make("output", { class: "said", "aria-live": "polite" });
    this.node = make(
      "section",
      { class: "panel table-panel", "aria-label": "All tensors" },
      make(
        "div",
        { class: "panel-head" },
        make("h2", {}, data.compares ? "All pairs" : "All records"),
        make("label", { class: "filter" }, make("kbd", { "aria-hidden": "true" }, "/"), this.input),
        make("label", { class: "check" }, this.failing, data.compares ? "failing only" : "suspicious only"),
        this.said,
      ),
      this.grid.node,
    );
    selection.listen((changed) => this.#changed(changed));
  }

  /** The first drawing. */
  start() {
    this.#controls();
    this.#rows();
    this.grid.mark(this.selection.get("row"));
  }

  /** After more columns arrived. */
  refresh() {
    if (this.selection.get("sort") || this.selection.get("text")) this.#rows();
    this.grid.mark(this.selection.get("row"));
  }

  move(distance) {
    const row = this.grid.neighbour(distance);
    if (row !== null) this.selection.set({ row });
  }

  #typed() {
    clearTimeout(this.timer);
    const apply = () => this.selection.set({ text: this.input.value });
    if (this.data.rows <= LONG) apply();
    else this.timer = setTimeout(apply, PAUSE);
  }

  #changed(changed) {
    this.#controls();
    if (["step", "rank", "module", "text", "failing", "sort"].some((name) => changed.has(name))) this.#rows();
    if (changed.has("row")) this.grid.mark(this.selection.get("row"));
  }

  #controls() {
    if (this.input.value !== this.selection.get("text")) this.input.value = this.selection.get("text");
    this.failing.checked = this.selection.get("failing");
  }

  #rows() {
    const { data, selection } = this;
    const all = this.scope.rows();
    const some = filtered(data, all, selection.get("text"), selection.get("failing"));
    const sort = selection.get("sort");
    const descending = sort.startsWith("-");
    const id = sort.replace(/^-/, "");
    const keys = id ? this.#keysOf(id) : null;
    this.grid.show(keys === null ? some : sorted(some, keys, descending));
    this.grid.sortedBy(keys === null ? "" : id, descending);
    const shown = some.length === all.length ? count(all.length) : `${count(some.length)} of ${count(all.length)}`;
    this.said.textContent = `${shown} ${all.length === 1 ? "row" : "rows"}${keys === null ? ", in execution order" : ""}`;
  }

  /** Null for a column that the page does not have or has not loaded. */
  #keysOf(id) {
    if (!this.keys.has(id)) {
      const known = ["tensor", "dtype", "shape"].includes(id) || this.data.columns.has(id);
      if (!known || (this.data.columns.has(id) && this.data.column(id) === null)) return null;
      if (["dtype", "shape"].includes(id) && !this.data.complete) return null;
      this.keys.set(id, sortKeys(this.data, id));
    }
    return this.keys.get(id);
  }
}

/** The sort order after a click on a heading: numbers greatest first, names from A; then reversed; then execution order. */
function nextSort(sort, column) {
  const ways =
    column.number || column.id === "status" ? [`-${column.id}`, column.id, ""] : [column.id, `-${column.id}`, ""];
  return ways[(ways.indexOf(sort) + 1) % ways.length];
}
