// Ranks against layers: which rank, which part of the model. A click narrows the selection to both.

import { FONT } from "./axes.js";
import { cell, WIDE_ENOUGH } from "./cells.js";
import { canvas, make } from "./dom.js";
import { number } from "./format.js";
import { diamond } from "./marks.js";
import { ranges } from "./scope.js";
import { colour, onTheme } from "./theme.js";

const LEFT = 56;
const HEAD = 18;

export class HeatMap {
  constructor(data, selection, ramp) {
    Object.assign(this, { data, selection, ramp });
    this.box = make("div", { class: "heat" });
    this.said = make("span", { class: "said" });
    this.node = make(
      "section",
      { class: "panel heat-panel", "aria-label": "Ranks and layers" },
      make("div", { class: "panel-head" }, make("h2", {}, "Rank × layer"), this.said),
      this.box,
    );
    onTheme(() => this.draw());
    new ResizeObserver(() => this.#fit()).observe(this.box);
    selection.listen((changed) => {
      if (changed.has("step")) this.start();
      else if (changed.has("rank") || changed.has("module")) this.draw();
    });
  }

  start() {
    this.#measure();
    this.draw();
  }

  /** The greatest size and the births of each rank and layer in the step. */
  #measure() {
    const { ranks, layers, modules } = this.data.head;
    const [module, birth] = [this.data.column("module"), this.data.column("birth")];
    this.sizes = new Float64Array(ranks.length * layers.length).fill(NaN);
    this.births = new Uint32Array(this.sizes.length);
    for (const { rank, begin, end } of ranges(this.data, this.selection.get("step"), null)) {
      const from = ranks.indexOf(rank) * layers.length;
      for (let row = begin; row < end; row++) {
        const layer = modules.layer[module[row]];
        if (layer < 0) continue;
        const size = this.data.sizeOf(row);
        if (!Number.isNaN(size) && !(this.sizes[from + layer] >= size)) this.sizes[from + layer] = size;
        this.births[from + layer] += birth[row];
      }
    }
    const step = this.selection.get("step");
    this.said.textContent = `${step === null ? "all steps" : `step ${step}`} · click narrows`;
  }

  draw() {
    const { ranks, layers } = this.data.head;
    this.drawn = this.box.clientWidth;
    const width = Math.max(200, this.drawn);
    const cellWidth = (width - LEFT) / Math.max(1, layers.length);
    const cellHeight = ranks.length <= 16 ? 18 : Math.max(2, Math.min(12, 240 / ranks.length));
    const { node, context: pen } = canvas(width, HEAD + cellHeight * ranks.length, {
      role: "img",
      "aria-label": `errors of ${ranks.length} ranks in ${layers.length} layers`,
    });
    const gap = Math.min(cellWidth, cellHeight) > 6 ? 1 : 0;
    this.sizes.forEach((size, at) => {
      const [x, y] = [LEFT + (at % layers.length) * cellWidth, HEAD + Math.floor(at / layers.length) * cellHeight];
      const shift = this.births[at] ? 10 : 0; // the number stands beside the mark
      cell(pen, this.ramp, size, [x, y, cellWidth - gap, cellHeight - gap], shift);
    });
    this.#labels(pen, cellWidth, cellHeight);
    this.#chosen(pen, cellWidth, cellHeight);
    this.births.forEach((many, at) => {
      const [x, y] = [LEFT + (at % layers.length) * cellWidth, HEAD + Math.floor(at / layers.length) * cellHeight];
      const shift = cellWidth >= WIDE_ENOUGH + 20 ? -cellWidth / 2 + 12 : 0;
      if (many) diamond(pen, x + cellWidth / 2 + shift, y + cellHeight / 2, Math.max(4, Math.min(6, cellHeight / 2.5)));
    });
    const find = (event) => {
      const box = node.getBoundingClientRect();
      const layer = Math.floor((event.clientX - box.left - LEFT) / cellWidth);
      const rank = Math.floor((event.clientY - box.top - HEAD) / cellHeight);
      return [rank, layer < layers.length ? layer : -1];
    };
    node.addEventListener("mousemove", (event) => (node.title = this.#tell(...find(event))));
    node.addEventListener("click", (event) => this.#choose(...find(event)));
    this.box.replaceChildren(node);
  }

  #fit() {
    if (this.sizes && this.drawn !== this.box.clientWidth) this.draw();
  }

  #labels(pen, cellWidth, cellHeight) {
    const { ranks, layers } = this.data.head;
    pen.fillStyle = colour("muted");
    pen.font = `11px ${FONT}`;
    pen.textBaseline = "middle";
    let free = -Infinity;
    layers.forEach(({ label }, at) => {
      const x = LEFT + at * cellWidth;
      if (x < free) return;
      const text = label.length > 14 ? `…${label.slice(-13)}` : label;
      const wide = pen.measureText(text).width;
      if (x + wide > LEFT + layers.length * cellWidth + 2) return;
      pen.fillText(text, x, HEAD / 2);
      free = x + wide + 10;
    });
    const every = Math.ceil(14 / cellHeight);
    ranks.forEach((rank, at) => {
      if (at % every === 0) pen.fillText(`rank ${rank}`, 0, HEAD + (at + 0.5) * cellHeight);
    });
  }

  #chosen(pen, cellWidth, cellHeight) {
    const { ranks, layers, modules } = this.data.head;
    const rank = ranks.indexOf(this.selection.get("rank"));
    const layer = layers.findIndex(({ module }) => modules.name[module] === this.selection.get("module"));
    if (rank < 0) return;
    pen.strokeStyle = colour("text");
    pen.lineWidth = 1.5;
    const [x, width] = layer < 0 ? [LEFT, layers.length * cellWidth] : [LEFT + layer * cellWidth, cellWidth];
    pen.strokeRect(x, HEAD + rank * cellHeight, width - 1, cellHeight - 1);
  }

  #tell(rank, layer) {
    const { ranks, layers, modules } = this.data.head;
    if (rank < 0 || rank >= ranks.length) return "";
    if (layer < 0) return `rank ${ranks[rank]}`;
    const at = rank * layers.length + layer;
    const born = this.births[at] ? `, ${this.births[at]} born here` : "";
    return `rank ${ranks[rank]} · ${modules.shown[layers[layer].module]}: ${number(this.sizes[at])}${born}`;
  }

  /** The same cell once more takes the choice back. */
  #choose(rank, layer) {
    const { ranks, layers, modules } = this.data.head;
    if (rank < 0 || rank >= ranks.length) return;
    const wanted = { rank: ranks[rank], module: layer < 0 ? null : modules.name[layers[layer].module] };
    const same = wanted.rank === this.selection.get("rank") && wanted.module === this.selection.get("module");
    this.selection.set(same ? { rank: null, module: null } : wanted);
  }
}
