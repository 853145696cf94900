// Gradient norms of a run: all of it over the steps, and each layer in each step.

import { Chart, FONT, logAxis, wholeAxis } from "./axes.js";
import { cell } from "./cells.js";
import { canvas, make } from "./dom.js";
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
    this.cells = make("div", { class: "heat" });
    this.node = make(
      "div",
      { class: "gradients" },
      make("h3", {}, "Norm of all gradients, over steps"),
      this.line,
      make("h3", {}, "Norm of each layer's gradients: layers down, steps across"),
      this.cells,
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
    const wide = Math.min(64, (this.cells.clientWidth - LEFT) / Math.max(1, steps.length));
    const { node, context: pen } = canvas(LEFT + wide * steps.length, CELL * layers.length + FOOT, {
      role: "img",
      "aria-label": `gradient norms of ${layers.length} layers in ${steps.length} steps`,
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
    node.addEventListener("mousemove", (event) => {
      const box = node.getBoundingClientRect();
      const row = Math.floor((event.clientY - box.top) / CELL);
      const column = Math.floor((event.clientX - box.left - LEFT) / wide);
      const value = norm[row]?.[column];
      node.title =
        value === undefined ? "" : `${modules.shown[layers[row]]} · step ${steps[column]}: ${number(value)}`;
    });
    this.cells.replaceChildren(node);
  }
}
