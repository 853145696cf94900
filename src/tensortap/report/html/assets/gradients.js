// Gradient norms of a run over the steps: of the whole model, and of each layer.

import { Chart, FONT, logAxis, wholeAxis } from "./axes.js";
import { CellGrid } from "./cell_grid.js";
import { cell } from "./cells.js";
import { make } from "./dom.js";
import { number } from "./format.js";
import { Ramp } from "./ramp.js";
import { colour, onTheme, theme } from "./theme.js";

const HEIGHT = 180;
const LEFT = 160;
const FOOT = 18;
const CELL = 17;

export class Gradients {
  constructor(data) {
    this.data = data;
    this.line = make("div", { class: "chart" });
    this.cells = new CellGrid({ describe: (...at) => this.#describe(...at) });
    this.box = make("div", { class: "heat" }, this.cells.node);
    this.node = make(
      "div",
      { class: "gradients" },
      make("h3", {}, "Norm of all gradients, over steps"),
      this.line,
      make("h3", {}, "Norm of each layer's gradients: layers down, steps across"),
      this.box,
    );
    this.chart = new Chart(this.line, HEIGHT);
    onTheme(() => this.draw());
  }

  draw() {
    if (!this.line.clientWidth) return;
    const { steps, by_step: byStep } = this.data.head;
    const norms = byStep.gradient_norm.map((value) =>
      Number(value) > 0 && Number.isFinite(Number(value)) ? Number(value) : null,
    );
    this.chart.draw(
      {
        scales: {
          x: { time: false },
          y: { distr: 3, range: (plot, low, high) => [low / 1.5 || 0.1, high * 1.5 || 1] },
        },
        axes: [wholeAxis({ values: (plot, splits) => splits.map((at) => `step ${at}`) }), logAxis()],
        series: [
          {},
          {
            stroke: () => colour("line-forward"),
            width: 2,
            spanGaps: true,
            points: { show: steps.length <= 100, size: 6 },
          },
        ],
        cursor: { y: false },
      },
      [steps, norms],
    );
    this.#layers();
  }

  #layers() {
    const { gradients, modules } = this.data.head;
    const { steps, layers, norm } = gradients;
    const all = norm.flat().filter((value) => value !== null && Number(value) > 0 && Number.isFinite(Number(value)));
    const bounds = all.reduce(([low, high], value) => [Math.min(low, value), Math.max(high, value)], [Infinity, 0]);
    const ramp = bounds[1] > 0 ? new Ramp(Math.max(bounds[0], bounds[1] * 1e-8), bounds[1]) : new Ramp(0.1, 1);
    ramp.dark = theme() === "dark";
    const wide = Math.min(64, (this.box.clientWidth - LEFT) / Math.max(1, steps.length));
    const pen = this.cells.begin({
      label: `Gradient norms of ${layers.length} layers in ${steps.length} steps`,
      rows: layers.length,
      columns: steps.length,
      wide,
      high: CELL,
      left: LEFT,
      foot: FOOT,
    });
    pen.font = `11px ${FONT}`;
    pen.textBaseline = "middle";
    layers.forEach((code, row) => {
      pen.fillStyle = colour("muted");
      const name = modules.shown[code];
      pen.fillText(name.length > 24 ? `…${name.slice(-23)}` : name, 0, (row + 0.5) * CELL);
      steps.forEach((_, column) => {
        const value = norm[row][column] === null ? null : Number(norm[row][column]);
        cell(pen, ramp, value, [LEFT + column * wide, row * CELL, Math.max(1, wide - 1), CELL - 1]);
      });
    });
    pen.fillStyle = colour("muted");
    const every = Math.ceil(50 / wide);
    steps.forEach((step, column) => {
      if (column % every === 0) pen.fillText(`step ${step}`, LEFT + column * wide, CELL * layers.length + FOOT / 2 + 2);
    });
  }

  #describe(row, column) {
    const { gradients, modules } = this.data.head;
    const { steps, layers, norm } = gradients;
    return `${modules.shown[layers[row]]} · step ${steps[column]}: ${number(norm[row][column])}`;
  }
}
