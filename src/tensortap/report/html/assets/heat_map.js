// Errors by rank and layer. A click or Enter narrows the selection to both. Where the records of several ranks were joined,
// a rank has the errors of all records that it holds a part of, and rows are labelled by the position in the mesh.

import { FONT } from "./axes.js";
import { CellGrid } from "./cell_grid.js";
import { cell, WIDE_ENOUGH } from "./cells.js";
import { make } from "./dom.js";
import { number } from "./format.js";
import { diamond } from "./marks.js";
import { ranges } from "./scope.js";
import { colour, onTheme } from "./theme.js";

const LEFT = 56;
const OF_AXIS = 34;
const HEAD = 18;

export class HeatMap {
  constructor(data, selection, ramp) {
    Object.assign(this, { data, selection, ramp });
    this.mesh = data.head.mesh ?? null;
    this.ranks = this.mesh ? this.mesh.ranks.map(({ rank }) => rank) : data.head.ranks;
    this.left = Math.max(LEFT, OF_AXIS * (this.mesh?.axes.length ?? 0));
    this.cells = new CellGrid({
      describe: (...at) => this.#describe(...at),
      act: (...at) => this.#choose(...at),
      chosen: (...at) => this.#isChosen(...at),
    });
    this.box = make("div", { class: "heat" }, this.cells.node);
    this.said = make("span", { class: "said" });
    this.node = make(
      "section",
      { class: "panel heat-panel", "aria-label": "Ranks and layers" },
      make("div", { class: "panel-head" }, make("h2", {}, this.#title()), this.said),
      this.box,
    );
    onTheme(() => this.draw());
    new ResizeObserver(() => this.#fit()).observe(this.box);
    selection.listen((changed) => {
      if (changed.has("step")) this.start();
      else if (changed.has("rank") || changed.has("module")) this.draw();
    });
  }

  #title() {
    return this.mesh?.axes.length ? `Rank (${this.mesh.axes.join(" × ")}) × layer` : "Rank × layer";
  }

  #label(rank) {
    const at = this.mesh?.ranks[rank].at ?? [];
    return at.length ? at.map((place, axis) => `${this.mesh.axes[axis]} ${place}`).join(" ") : `rank ${this.ranks[rank]}`;
  }

  start() {
    this.#measure();
    this.draw();
  }

  /** The greatest size and the births of each rank and layer in the step. */
  #measure() {
    const { layers, modules } = this.data.head;
    const step = this.selection.get("step");
    const [module, birth] = [this.data.column("module"), this.data.column("birth")];
    const holders = this.mesh && this.data.column("holders");
    const placed = new Set(this.mesh?.births.map(({ row }) => row));
    this.sizes = new Float64Array(this.ranks.length * layers.length).fill(NaN);
    this.births = new Uint32Array(this.sizes.length);
    for (const { rank, begin, end } of ranges(this.data, step, null)) {
      const alone = [this.ranks.indexOf(rank)];
      for (let row = begin; row < end; row++) {
        const layer = modules.layer[module[row]];
        if (layer < 0) continue;
        const size = this.data.sizeOf(row);
        for (const holder of holders ? this.mesh.holders[holders[row]] : alone) {
          const at = holder * layers.length + layer;
          if (!Number.isNaN(size) && !(this.sizes[at] >= size)) this.sizes[at] = size;
          if (!placed.has(row)) this.births[at] += birth[row];
        }
      }
    }
    for (const born of this.mesh?.births ?? []) {
      const layer = modules.layer[born.module];
      if (layer < 0 || (step !== null && born.step !== step)) continue;
      for (const rank of born.ranks) this.births[rank * layers.length + layer] += 1;
    }
    this.said.textContent = `${step === null ? "all steps" : `step ${step}`} · click or Enter narrows`;
  }

  draw() {
    const { layers } = this.data.head;
    const { ranks, left } = this;
    this.drawn = this.box.clientWidth;
    const width = Math.max(200, this.drawn);
    const pen = this.cells.begin({
      label: `${this.data.compares ? "Errors" : "Sizes"} of ${ranks.length} ranks in ${layers.length} layers`,
      rows: ranks.length,
      columns: layers.length,
      wide: (width - left) / Math.max(1, layers.length),
      high: ranks.length <= 16 ? 18 : Math.max(2, Math.min(12, 240 / ranks.length)),
      left,
      top: HEAD,
      headed: true,
    });
    const { wide, high } = this.cells;
    const gap = Math.min(wide, high) > 6 ? 1 : 0;
    this.sizes.forEach((size, at) => {
      const [x, y] = this.#box(at);
      const shift = this.births[at] ? 10 : 0; // the number is next to the mark
      cell(pen, this.ramp, size, [x, y, wide - gap, high - gap], shift);
    });
    this.#labels(pen, wide, high);
    this.#outline(pen);
    this.births.forEach((many, at) => {
      const [x, y] = this.#box(at);
      const shift = wide >= WIDE_ENOUGH + 20 ? -wide / 2 + 12 : 0;
      if (many) diamond(pen, x + wide / 2 + shift, y + high / 2, Math.max(4, Math.min(6, high / 2.5)));
    });
  }

  #box(at) {
    const many = this.data.head.layers.length;
    return this.cells.box(Math.floor(at / many), at % many);
  }

  #fit() {
    if (this.sizes && this.drawn !== this.box.clientWidth) this.draw();
  }

  #labels(pen, wide, high) {
    const { layers } = this.data.head;
    const { left } = this;
    pen.fillStyle = colour("muted");
    pen.font = `11px ${FONT}`;
    pen.textBaseline = "middle";
    let free = -Infinity;
    layers.forEach(({ label }, at) => {
      const x = left + at * wide;
      if (x < free) return;
      const text = label.length > 14 ? `…${label.slice(-13)}` : label;
      const long = pen.measureText(text).width;
      if (x + long > left + layers.length * wide + 2) return;
      pen.fillText(text, x, HEAD / 2);
      free = x + long + 10;
    });
    const every = Math.ceil(14 / high);
    this.ranks.forEach((_, at) => {
      if (at % every === 0) pen.fillText(this.#label(at), 0, HEAD + (at + 0.5) * high);
    });
  }

  /** Marks the selected cell, or a whole rank. */
  #outline(pen) {
    const { layers, modules } = this.data.head;
    const rank = this.mesh ? -1 : this.ranks.indexOf(this.selection.get("rank"));
    const layer = layers.findIndex(({ module }) => modules.name[module] === this.selection.get("module"));
    pen.strokeStyle = colour("text");
    pen.lineWidth = 1.5;
    if (this.mesh && layer >= 0) {
      const [x, y, width, height] = this.cells.box(0, layer);
      pen.strokeRect(x, y, width - 1, this.ranks.length * height - 1);
    }
    if (rank < 0) return;
    const [x, y, width, height] = this.cells.box(rank, Math.max(0, layer));
    pen.strokeRect(x, y, (layer < 0 ? layers.length * width : width) - 1, height - 1);
  }

  #describe(rank, layer) {
    const { layers, modules } = this.data.head;
    const label = this.#label(rank);
    const who = label.startsWith("rank") ? label : `rank ${this.ranks[rank]} (${label})`;
    if (layer < 0) return who;
    const at = rank * layers.length + layer;
    const born = this.births[at] ? `, ${this.births[at]} born here` : "";
    return `${who} · ${modules.shown[layers[layer].module]}: ${number(this.sizes[at])}${born}`;
  }

  /** The selection of a cell, or of a whole rank. */
  #meant(rank, layer) {
    const { layers, modules } = this.data.head;
    return { rank: this.mesh ? null : this.ranks[rank], module: layer < 0 ? null : modules.name[layers[layer].module] };
  }

  #isChosen(rank, layer) {
    const meant = this.#meant(rank, layer);
    const same = meant.module === this.selection.get("module");
    return this.mesh ? same && meant.module !== null : same && meant.rank === this.selection.get("rank");
  }

  /** Selecting the same cell again clears the selection. */
  #choose(rank, layer) {
    const { rank: kept, module } = this.#isChosen(rank, layer) ? { rank: null, module: null } : this.#meant(rank, layer);
    this.selection.set(this.mesh ? { module } : { rank: kept, module }); // joined records belong to no single rank
  }
}
