// Error or size over execution order, on a logarithmic scale, with the tolerance.

import { Chart, FONT, logAxis, powersWithin, wholeAxis } from "./axes.js";
import { make, styled } from "./dom.js";
import { count, number, powerOfTen } from "./format.js";
import { cross, diamond } from "./marks.js";
import { estimated } from "./measures.js";
import { birthWords } from "./status.js";
import { colour } from "./theme.js";

const HEIGHT = 250;
const NEAR = 14; // pixels within which a click selects a birth
const STILL = 4; // pixels that the mouse may move during a click
const HIGHEST = 11; // pixels below the upper edge, so that marks are fully visible
const FEW = 600; // points are drawn one by one up to here
const LINES = [
  { phase: "forward", name: "line-forward" },
  { phase: "backward", name: "line-backward", dash: [6, 4] },
  { phase: "state", name: "line-state", dots: true },
  { phase: "eval", name: "line-eval", dash: [2, 3] },
];

export class OrderPlot {
  constructor(data, selection, scope) {
    Object.assign(this, { data, selection, scope });
    this.tip = make("div", { class: "tip", hidden: true, "aria-hidden": "true" });
    this.box = make("div", { class: "chart", role: "img", "aria-label": this.#title });
    this.legend = make("ul", { class: "legend" });
    this.node = make(
      "section",
      { class: "panel order-panel", "aria-label": this.#title },
      make("div", { class: "panel-head" }, make("h2", {}, this.#title), this.legend),
      this.box,
      this.tip,
    );
    this.chart = new Chart(this.box, HEIGHT);
    this.ring = make("div", { class: "ring", "aria-hidden": "true" });
    this.box.addEventListener("mousedown", (event) => (this.pressed = event.clientX));
    this.box.addEventListener("click", (event) => this.#click(event));
    this.box.addEventListener("mouseleave", () => (this.tip.hidden = true));
    selection.listen((changed) => {
      if (["step", "rank", "module"].some((name) => changed.has(name))) this.draw();
      else if (changed.has("row")) this.#choose();
    });
  }

  get #title() {
    return this.data.compares ? "Error over execution order" : "Size over execution order";
  }

  draw() {
    const rows = this.scope.rows();
    this.rows = rows;
    this.births = [];
    this.lost = [];
    if (!rows.length) {
      this.chart.clear();
      return;
    }
    const lines = this.#lines();
    const bounds = this.#bounds();
    const values = this.#values(lines, bounds.floor);
    this.floor = bounds.floor;
    this.top = bounds.top;
    const series = lines.map(({ name, dash, dots }) => ({
      stroke: () => colour(name),
      width: 1.5,
      dash,
      ...(dots ? { paths: () => null } : {}), // parameters do not flow from one to the next
      points: { show: dots || rows.length <= FEW, size: 4, fill: () => colour(name), stroke: () => colour(name) },
    }));
    const allowed = { stroke: () => colour("allowed"), width: 1.25, dash: [1, 3], points: { show: false } };
    this.chart.draw(
      {
        scales: {
          x: { time: false, range: (plot, low, high) => (rows.length > 1 ? padded(low, high) : [-0.5, 0.5]) },
          y: { distr: 3, range: [bounds.floor, bounds.top] },
        },
        axes: [
          wholeAxis(),
          logAxis({
            splits: (plot, _axis, low, high) => [low, ...powersWithin(low * 2, high)],
            values: (plot, splits) => splits.map((at) => this.#label(at)),
          }),
        ],
        series: [{}, ...series, ...(this.data.compares ? [allowed] : [])],
        cursor: { y: false, points: { show: false }, drag: { x: true, y: false } },
        hooks: {
          ready: [(plot) => plot.over.append(this.ring)],
          draw: [() => this.#marks()],
          setCursor: [(plot) => this.#hover(plot)],
        },
      },
      values,
    );
    this.#explain(lines);
  }

  /** The floor stands for zero, which a logarithmic scale does not have. */
  #label(at) {
    return at > this.floor * 1.001 ? powerOfTen(at) : this.data.compares ? "equal" : "0";
  }

  /** Only the phases that occur. */
  #lines() {
    const { words } = this.data.head;
    const phase = this.data.column("phase");
    const present = new Uint8Array(256);
    for (const row of this.rows) present[phase[row]] = 1;
    return LINES.filter((line) => present[words.phase.indexOf(line.phase)]);
  }

  #bounds() {
    const size = this.data.column(this.data.size);
    const allowed = this.data.column("tolerance");
    let [low, high] = [Infinity, 0];
    for (const row of this.rows) {
      const value = size[row];
      if (value > 0 && value < Infinity) {
        if (value < low) low = value;
        if (value > high) high = value;
      }
      const limit = allowed === null ? NaN : allowed[row];
      if (limit > 0 && limit < Infinity) {
        if (limit < low) low = limit;
        if (limit > high) high = limit;
      }
    }
    if (!(high > 0)) [low, high] = [1e-8, 1];
    low = Math.max(low, high * 1e-16);
    const bottom = 10 ** Math.floor(Math.log10(low));
    return { floor: bottom / 3, top: 10 ** Math.ceil(Math.log10(high) + 0.15) };
  }

  /** One list for each line; equal pairs are on the floor, values without a finite size are marked at the top. */
  #values(lines, floor) {
    const { data, rows } = this;
    const [size, phase, birth] = [data.column(data.size), data.column("phase"), data.column("birth")];
    const allowed = data.column("tolerance");
    const which = new Map(lines.map((line, at) => [data.head.words.phase.indexOf(line.phase), at]));
    const places = new Array(rows.length);
    const ys = lines.map(() => new Array(rows.length).fill(null));
    const limits = new Array(rows.length);
    for (let at = 0; at < rows.length; at++) {
      const row = rows[at];
      const value = size[row];
      places[at] = at;
      if (Number.isFinite(value) && data.sizeOf(row) !== Infinity)
        ys[which.get(phase[row])][at] = Math.max(value, floor);
      else if (data.isFailing(row)) this.lost.push(at);
      if (allowed !== null) limits[at] = allowed[row] > 0 && allowed[row] < Infinity ? allowed[row] : null;
      if (birth[row]) this.births.push(at);
    }
    return data.compares ? [places, ...ys, limits] : [places, ...ys];
  }

  #yOf(at) {
    const size = this.data.sizeOf(this.rows[at]);
    return Number.isFinite(size) ? Math.max(size, this.floor) : this.top;
  }

  /** Draws over the lines: parts of the scope, values without a finite size, and births. */
  #marks() {
    const { plot } = this.chart;
    const pen = plot.ctx;
    const scale = window.devicePixelRatio || 1;
    const { left, top, width, height } = plot.bbox;
    const at = (place) => [
      plot.valToPos(place, "x", true),
      Math.max(top + HIGHEST * scale, Math.min(top + height, plot.valToPos(this.#yOf(place), "y", true))),
    ];
    pen.save();
    pen.setLineDash([]);
    pen.beginPath();
    pen.rect(left - 11 * scale, top - 2 * scale, width + 22 * scale, height + 11 * scale);
    pen.clip();
    this.#parts(plot, pen, scale);
    for (const place of this.lost) cross(pen, ...at(place), 3 * scale, scale);
    for (const place of this.births) diamond(pen, ...at(place), 6 * scale, scale);
    pen.restore();
    this.#choose();
  }

  /** Moves the ring to the selected row. It is a separate element, so that the lines need no redraw. */
  #choose() {
    const { plot } = this.chart;
    const row = this.selection.get("row");
    const place = row === null ? -1 : this.rows.indexOf(row);
    const { min, max } = plot?.scales.x ?? {};
    this.ring.hidden = !plot || place < min || place > max || place < 0;
    if (this.ring.hidden) return;
    const [x, y] = [plot.valToPos(place, "x"), Math.max(HIGHEST, plot.valToPos(this.#yOf(place), "y"))];
    styled(this.ring, { transform: `translate(${x}px, ${y}px)` });
  }

  /** Draws the boundaries of steps or ranks, if the scope has several. */
  #parts(plot, pen, scale) {
    const parts = this.scope.parts();
    if (parts.length < 2 || parts.length > 200) return;
    const { head } = this.data;
    const name = this.selection.get("rank") === null && head.ranks.length > 1 ? "rank" : "step";
    const { left, top, width, height } = plot.bbox;
    pen.font = `${10 * scale}px ${FONT}`;
    pen.textAlign = "left";
    pen.textBaseline = "alphabetic";
    let free = -Infinity;
    let before = null;
    for (const part of parts) {
      if (part[name] === before) continue;
      before = part[name];
      const x = Math.round(plot.valToPos(part.at, "x", true)) + 0.5;
      if (x < left - 1 || x > left + width) continue;
      pen.fillStyle = colour("grid-strong");
      pen.fillRect(x, top, scale, height);
      const label = `${name} ${part[name]}`;
      if (x < free) continue;
      pen.fillStyle = colour("muted");
      pen.fillText(label, x + 4 * scale, top + 11 * scale);
      free = x + pen.measureText(label).width + 10 * scale;
    }
  }

  #hover(plot) {
    const at = plot.cursor.idx;
    if (at === null || at === undefined || plot.cursor.left < 0) {
      this.tip.hidden = true;
      return;
    }
    const place = this.#nearBirth(plot.cursor.left, plot.cursor.top) ?? at;
    const { data } = this;
    const row = this.rows[place];
    const size = data.compares
      ? `${estimated(data, row)} · allowed ${number(data.column("tolerance")[row])}`
      : `rms ${number(data.sizeOf(row))}`;
    this.tip.replaceChildren(
      make("b", {}, data.moduleName(row)),
      make(
        "span",
        {},
        `${data.tensorName(row)} · ${data.status(row)}${data.isBirth(row) ? ` · ◀ ${birthWords(data.status(row))}` : ""}`,
      ),
      make("span", {}, size),
    );
    this.tip.hidden = false;
    const over = plot.over.getBoundingClientRect();
    const box = this.node.getBoundingClientRect();
    const x = over.left - box.left + plot.valToPos(place, "x");
    const flip = x > box.width / 2;
    styled(this.tip, {
      left: flip ? "auto" : `${x + 12}px`,
      right: flip ? `${box.width - x + 12}px` : "auto",
      top: `${over.top - box.top + 8}px`,
    });
  }

  /** The birth within reach of a point of the plot, or null. */
  #nearBirth(x, y) {
    const { plot } = this.chart;
    let [best, nearest] = [null, NEAR];
    for (const place of this.births) {
      const away = Math.hypot(
        plot.valToPos(place, "x") - x,
        Math.max(HIGHEST, plot.valToPos(this.#yOf(place), "y")) - y,
      );
      if (away < nearest) [best, nearest] = [place, away];
    }
    return best;
  }

  #click(event) {
    const { plot } = this.chart;
    if (!plot || plot.cursor.idx === null || plot.cursor.idx === undefined) return;
    if (Math.abs(event.clientX - this.pressed) > STILL) return; // a drag, which zooms
    const over = plot.over.getBoundingClientRect();
    const place = this.#nearBirth(event.clientX - over.left, event.clientY - over.top) ?? plot.cursor.idx;
    this.selection.set({ row: this.rows[place] });
  }

  #explain(lines) {
    const entries = lines.map(({ phase, name, dash, dots }) =>
      legendLine(phase, name, dots ? "dots" : dash ? "dashed" : "solid"),
    );
    if (this.data.compares) entries.push(legendLine("allowed", "allowed", "dotted"));
    if (this.births.length)
      entries.push(
        make(
          "li",
          {},
          make("span", { class: "key-birth", "aria-hidden": "true" }, "◆"),
          ` ${count(this.births.length)} ${this.data.compares ? "born" : "found"}`,
        ),
      );
    if (this.lost.length)
      entries.push(
        make(
          "li",
          {},
          make("span", { class: "key-lost", "aria-hidden": "true" }, "×"),
          ` ${count(this.lost.length)} without a size`,
        ),
      );
    this.legend.replaceChildren(...entries);
  }
}

function padded(low, high) {
  const margin = Math.max(0.5, (high - low) * 0.01);
  return [low - margin, high + margin];
}

function legendLine(text, name, look) {
  const key = make(
    "span",
    { class: look === "dots" ? "key-dots" : "key-line", "aria-hidden": "true" },
    look === "dots" ? "•" : "",
  );
  styled(key, look === "dots" ? { color: `var(--${name})` } : { "border-top": `2px ${look} var(--${name})` });
  return make("li", {}, key, ` ${text}`);
}
