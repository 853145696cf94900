// Where in a tensor the differences are: tiles of its greatest difference. With a server, a click looks closer, down to
// single elements.

import { asked, fromBase64, isServed } from "./blocks.js";
import { canvas, make } from "./dom.js";
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
    this.node = make("div", { class: "error-map" });
    this.draw();
  }

  draw() {
    const { map } = this;
    const values = Array.from(fromBase64(map.codes), (code) => decoded(map, code));
    const differing = values.some((value) => value > 0 && value < Infinity);
    const ramp = differing ? new Ramp(map.low, map.high) : new Ramp(0.1, 1);
    ramp.dark = theme() === "dark";
    const tileWidth = Math.min(WIDTH / map.width, WIDEST);
    const tileHeight = Math.min(TALLEST / map.height, tileWidth);
    const { node, context } = canvas(tileWidth * map.width, tileHeight * map.height, {
      role: "img",
      "aria-label": `greatest difference in ${map.height} by ${map.width} tiles`,
      class: isServed() ? "closer" : "",
    });
    values.forEach((value, at) => {
      context.fillStyle = value === Infinity ? colour("nonfinite-mark") : paint(ramp, value);
      const [row, column] = [Math.floor(at / map.width), at % map.width];
      context.fillRect(column * tileWidth, row * tileHeight, tileWidth + 0.5, tileHeight + 0.5);
    });
    const lost = values.filter((value) => value === Infinity).length;
    const said = make("p", { class: "hint" }, this.#about(differing, lost));
    const find = (event) => {
      const box = node.getBoundingClientRect();
      const column = Math.min(map.width - 1, Math.floor(((event.clientX - box.left) / box.width) * map.width));
      const row = Math.min(map.height - 1, Math.floor(((event.clientY - box.top) / box.height) * map.height));
      return [row, column];
    };
    node.addEventListener("mousemove", (event) => {
      const [row, column] = find(event);
      node.title = `${this.#span(row, column)}: ${number(values[row * map.width + column])}`;
    });
    if (isServed()) node.addEventListener("click", (event) => this.#closer(...find(event)));
    this.node.replaceChildren(node, said, ...this.#buttons());
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

  #span(row, column) {
    const [firstRow, lastRow, firstColumn, lastColumn] = this.#tile(row, column);
    const range = (first, last) => (last - first > 1 ? `${first}–${last - 1}` : String(first));
    return `row ${range(firstRow, lastRow)}, column ${range(firstColumn, lastColumn)}`;
  }

  #buttons() {
    if (!isServed()) return [];
    const buttons = [make("button", { type: "button", onclick: () => this.#values() }, "show values")];
    if (this.map !== this.whole) {
      buttons.unshift(make("button", { type: "button", onclick: () => this.#become(this.whole) }, "whole tensor"));
    }
    return [make("p", { class: "buttons" }, buttons)];
  }

  #become(map) {
    this.map = map;
    this.draw();
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
    await this.#ask(`map?row=${this.row}&window=${closer.join(",")}`, (map) => this.#become(map));
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
      this.node.querySelector(".slice")?.remove();
      this.node.append(valuesTable(slice));
    });
  }

  async #ask(question, then) {
    try {
      then(await asked(question));
    } catch (error) {
      this.node.append(make("p", { class: "hint", role: "alert" }, error.message));
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
