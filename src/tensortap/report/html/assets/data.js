// The data of the page: the head, the columns, and the names of rows.

import { asked, isServed, jsonBlock } from "./blocks.js";
import { Columns } from "./columns.js";

/** The first columns to load: enough for the plot, the tree and the filters. */
const FIRST = ["step", "rank", "phase", "module", "kind", "path", "status", "birth"];

export class Data {
  constructor(head) {
    this.head = head;
    this.rows = head.rows;
    this.columns = new Columns(head);
    this.compares = head.page === "comparison";
    /** The column that sets colours. */
    this.size = this.compares ? "rel_l2" : "rms";
    /** Statistics that were registered in addition to the built-in ones. */
    this.added = head.statistics.filter(({ added }) => added);
    this.complete = false;
    this.failing = head.words.status.map((word) => !["equal", "close", "ok", "unjudged"].includes(word));
    this.lost = head.words.status.map((word) => ["nonfinite", "shape"].includes(word));
    this.details = new Map();
  }

  static async open() {
    const data = new Data(await jsonBlock("head"));
    const ofRanks = data.head.mesh ? ["holders"] : [];
    await data.columns.load([...FIRST, ...ofRanks, data.size, "tolerance", "exact"]);
    return data;
  }

  column(name) {
    return this.columns.get(name);
  }

  /** The text of a code. */
  word(name, row, words = name) {
    const codes = this.column(name);
    return codes === null ? "" : this.head.words[words][codes[row]];
  }

  moduleName(row) {
    return this.head.modules.shown[this.column("module")[row]];
  }

  tensorName(row) {
    return `${this.word("kind", row)} ${this.word("path", row)}`.trimEnd();
  }

  status(row) {
    return this.head.words.status[this.column("status")[row]];
  }

  isFailing(row) {
    return this.failing[this.column("status")[row]];
  }

  isBirth(row) {
    return this.column("birth")[row] === 1;
  }

  /** The size of a row for its colour; infinite if it is not finite. */
  sizeOf(row) {
    return this.lost[this.column("status")[row]] && this.compares ? Infinity : this.column(this.size)[row];
  }

  /** The detail document of a row, or null if the page has none. */
  async detail(row) {
    const id = this.head.details[row];
    if (!id && !isServed()) return null;
    const key = id ?? row;
    if (!this.details.has(key)) {
      const answer = isServed() ? asked(`detail?row=${row}`) : jsonBlock(id);
      this.details.set(key, answer);
      answer.catch(() => this.details.delete(key)); // so that the next request tries again
    }
    return this.details.get(key);
  }
}
