// The table as columns: typed arrays, decoded when needed.

import { block } from "./blocks.js";

const ARRAYS = {
  u8: Uint8Array,
  u16: Uint16Array,
  u32: Uint32Array,
  i32: Int32Array,
  f32: Float32Array,
  f64: Float64Array,
};

/** All rows of the page. `get` returns a loaded column, or null. */
export class Columns {
  constructor(head) {
    this.rows = head.rows;
    this.described = new Map(head.columns.map((column) => [column.name, column]));
    this.loading = new Map();
    this.loaded = new Map();
  }

  get(name) {
    return this.loaded.get(name) ?? null;
  }

  has(name) {
    return this.described.has(name);
  }

  /** Loads columns by name; ignores names that the page does not have. */
  async load(names) {
    await Promise.all(names.filter((name) => this.has(name)).map((name) => this.#once(name)));
  }

  async loadAll() {
    await this.load([...this.described.keys()]);
  }

  #once(name) {
    if (!this.loading.has(name)) this.loading.set(name, this.#decode(this.described.get(name)));
    return this.loading.get(name);
  }

  async #decode(column) {
    const bytes = await block(`column-${column.name}`);
    const values = plain(bytes, column, this.rows);
    if (column.xor) {
      await this.#once(column.xor);
      mixed(values, this.loaded.get(column.xor));
    }
    this.loaded.set(column.name, values);
  }
}

function plain(buffer, column, rows) {
  const kind = ARRAYS[column.type];
  const values = new kind(column.shuffled ? unshuffled(buffer, rows, kind.BYTES_PER_ELEMENT) : buffer);
  if (values.length !== rows) throw new Error(`column ${column.name} has ${values.length} rows, not ${rows}`);
  if (column.delta) for (let at = 1; at < rows; at++) values[at] += values[at - 1];
  return values;
}

function unshuffled(buffer, rows, width) {
  const from = new Uint8Array(buffer);
  const to = new Uint8Array(from.length);
  for (let byte = 0; byte < width; byte++) {
    for (let row = 0, at = byte * rows; row < rows; row++, at++) to[row * width + byte] = from[at];
  }
  return to.buffer;
}

function mixed(values, others) {
  const bytes = new Uint8Array(values.buffer);
  const mask = new Uint8Array(others.buffer);
  for (let at = 0; at < bytes.length; at++) bytes[at] ^= mask[at];
}
