// The differences within a tensor: tiles with their greatest difference. With a server, a click or Enter zooms in, down to
// single elements.

import { asked, fromBase64, isServed } from "./blocks.js";
import { CellGrid } from "./cell_grid.js";
import { make } from "./dom.js";
import { count, number } from "./format.js";
import { css, Ramp } from "./ramp.js";
import { ELEMENTS, valuesTable } from "./slice.js";
import { colour, theme } from "./theme.js";

const WIDTH = 360;
const TALLEST = 220;
const WIDEST = 24; // a tile
const CLOSER = 4;

export class ErrorMap {
  constructor(row, map) {
    this.row = row;
    this.whole = map;
    this.map = map;
    this.tiles = new CellGrid({
      describe: (...at) => this.#describe(...at),
      act: isServed() ? (...at) => this.#closer(...at) : null,
    });
    this.about = make("p", { class: "hint" });
    this.more = make("div");
    this.node = make("div", { class: "error-map" }, this.tiles.node, this.about, this.more);
    this.draw();
  }

  draw() {
    const { map } = this;
    const values = Array.from(fromBase64(map.codes), (code) => decoded(map, code));
    const differing = values.some((value) => value > 0 && value < Infinity);
    const ramp = differing ? new Ramp(map.low, map.high) : new Ramp(0.1, 1);
    ramp.dark = theme() === "dark";
    this.values = values;
    const wide = Math.min(WIDTH / map.width, WIDEST);
    const high = Math.min(TALLEST / map.height, wide);
    const pen = this.tiles.begin({
      label: `Greatest difference in ${map.height} by ${map.width} tiles`,
      rows: map.height,
      columns: map.width,
      wide,
      high,
    });
    values.forEach((value, at) => {
      pen.fillStyle = value === Infinity ? colour("nonfinite-mark") : paint(ramp, value);
      const [x, y] = this.tiles.box(Math.floor(at / map.width), at % map.width);
      pen.fillRect(x, y, wide + 0.5, high + 0.5);
    });
    const lost = values.filter((value) => value === Infinity).length;
    this.about.textContent = this.#about(differing, lost);
    this.more.replaceChildren(...this.#buttons());
  }

  #about(differing, lost) {
    const { map } = this;
    const [firstRow, lastRow, firstColumn, lastColumn] = map.window;
    const part =
      lastRow - firstRow === map.whole[0] && lastColumn - firstColumn === map.whole[1]
        ? `${count(map.whole[0])} × ${count(map.whole[1])}`
        : `rows ${firstRow}–${lastRow - 1}, columns ${firstColumn}–${lastColumn - 1}`;
    const range = differing
      ? `greatest difference of a tile ${number(map.low)} to ${number(map.high)}`
      : "no finite difference";
    const tiles = lost ? ` · ${count(lost)} of ${count(map.height * map.width)} tiles not finite on one side` : "";
    return `${part} · ${map.folded} · ${range}${tiles}`;
  }

  /** The rows and columns that a tile stands for. */
  #tile(row, column) {
    const [firstRow, lastRow, firstColumn, lastColumn] = this.map.window;
    const cut = (first, last, parts, at) => [
      first + Math.floor(((last - first) * at) / parts),
      first + Math.max(Math.floor(((last - first) * at) / parts) + 1, Math.floor(((last - first) * (at + 1)) / parts)),
    ];
    return [...cut(firstRow, lastRow, this.map.height, row), ...cut(firstColumn, lastColumn, this.map.width, column)];
  }

  #describe(row, column) {
    const [firstRow, lastRow, firstColumn, lastColumn] = this.#tile(row, column);
    const range = (first, last) => (last - first > 1 ? `${first}–${last - 1}` : String(first));
    const size = number(this.values[row * this.map.width + column]);
    return `row ${range(firstRow, lastRow)}, column ${range(firstColumn, lastColumn)}: ${size}`;
  }

  #buttons() {
    if (!isServed()) return [];
    const buttons = [make("button", { type: "button", onclick: () => this.#values() }, "show values")];
    if (this.map !== this.whole) {
      buttons.unshift(make("button", { type: "button", onclick: () => this.#back() }, "whole tensor"));
    }
    return [make("p", { class: "buttons" }, buttons)];
  }

  /** Shows another part; keys continue from the tile of an element. */
  #become(map, row, column) {
    this.map = map;
    this.draw();
    const last = (many, begin, place) => Array.from({ length: many }, (_, at) => at).findLast((at) => begin(at) <= place);
    const down = last(map.height, (at) => this.#tile(at, 0)[0], row);
    this.tiles.go(down, last(map.width, (at) => this.#tile(0, at)[2], column));
  }

  #back() {
    const [row, , column] = this.map.window;
    this.#become(this.whole, row, column);
    this.tiles.focus(); // the button is gone
  }

  async #closer(row, column) {
    const [firstRow, lastRow, firstColumn, lastColumn] = this.map.window;
    const [top, , left] = this.#tile(row, column);
    const around = (at, first, last) => {
      const size = Math.max(1, Math.ceil((last - first) / CLOSER));
      const begin = Math.max(first, Math.min(last - size, at - Math.floor(size / 2)));
      return [begin, begin + size];
    };
    const closer = [...around(top, firstRow, lastRow), ...around(left, firstColumn, lastColumn)];
    await this.#ask(`map?row=${this.row}&window=${closer.join(",")}`, (map) => this.#become(map, top, left));
  }

  async #values() {
    const [firstRow, lastRow, firstColumn, lastColumn] = this.map.window;
    const part = [
      firstRow,
      Math.min(lastRow, firstRow + ELEMENTS),
      firstColumn,
      Math.min(lastColumn, firstColumn + ELEMENTS),
    ];
    await this.#ask(`slice?row=${this.row}&window=${part.join(",")}`, (slice) => {
      this.more.querySelector(".slice")?.remove();
      this.more.append(valuesTable(slice));
    });
  }

  async #ask(question, then) {
    try {
      then(await asked(question));
    } catch (error) {
      this.more.append(make("p", { class: "hint", role: "alert" }, error.message));
    }
  }
}

/** A byte stands for a difference on a logarithmic scale. */
function decoded({ low, high }, code) {
  if (code === 0 || code === 255) return code ? Infinity : 0;
  return low * (high / low) ** ((code - 1) / 253);
}

function paint(ramp, value) {
  const found = ramp.colour(value);
  return found === null ? colour("equal-fill") : css(found);
}
