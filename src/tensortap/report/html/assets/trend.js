// A number over the steps: of the selected tensor on both sides, or of the whole run.

import { Chart, logAxis, numberAxis, wholeAxis } from "./axes.js";
import { make } from "./dom.js";
import { colour } from "./theme.js";

const HEIGHT = 220;
const SIDED = [
  ["l2", "L2 norm"],
  ["mean", "mean"],
  ["std", "standard deviation"],
  ["nan", "NaN"],
  ["inf", "Inf"],
];
const PAIR = [
  ["rel_l2", "relative error"],
  ["row_rel_l2", "worst row"],
  ["one_minus_cosine", "1 − cosine"],
  ["max_abs", "max abs difference"],
  ["max_ulp", "max ULP"],
  ["mismatched", "mismatched share"],
];
const RECORD = [
  ["rms", "rms"],
  ["absmax", "abs. max"],
  ["mean", "mean"],
  ["std", "standard deviation"],
  ["l2", "L2 norm"],
  ["zeros", "share of zeros"],
  ["nan", "NaN"],
  ["inf", "Inf"],
];
const WHOLE_PAIR = [
  ["step:worst", "worst relative error"],
  ["step:diverged", "diverged pairs"],
  ["step:births", "births"],
];
const WHOLE_RUN = [
  ["step:gradient_norm", "gradient norm"],
  ["step:worst", "greatest absolute value"],
];
const LOGARITHMIC = new Set([
  "rel_l2",
  "row_rel_l2",
  "one_minus_cosine",
  "max_abs",
  "max_ulp",
  "rms",
  "absmax",
  "l2",
  "std",
  "step:worst",
  "step:gradient_norm",
]);

export class Trend {
  constructor(data, selection) {
    Object.assign(this, { data, selection });
    this.choice = make(
      "select",
      { id: "trend", onchange: () => selection.set({ trend: this.choice.value }) },
      this.#options(),
    );
    this.about = make("span", { class: "said" });
    this.box = make("div", { class: "chart" });
    this.node = make(
      "div",
      { class: "trend" },
      make(
        "div",
        { class: "panel-head" },
        make("label", {}, "statistic ", this.choice),
        this.about,
        make("ul", { class: "legend", hidden: true }),
      ),
      this.box,
    );
    this.legend = this.node.querySelector(".legend");
    this.chart = new Chart(this.box, HEIGHT);
    selection.listen((changed) => {
      if (["row", "trend"].some((name) => changed.has(name))) this.draw();
    });
  }

  /** Draws if the panel is visible; a hidden one has no width. */
  draw() {
    if (!this.box.clientWidth || !this.data.complete) return;
    const name = this.#chosen();
    this.choice.value = name;
    const lines = name.startsWith("step:") ? this.#whole(name.slice(5)) : this.#tensor(name);
    if (lines === null) {
      this.chart.clear();
      this.legend.hidden = true;
      this.about.textContent = "choose a tensor in the table first";
      return;
    }
    this.about.textContent = lines.about;
    const positive = lines.values.every((values) => values.every((value) => value === null || value >= 0));
    const logarithmic =
      LOGARITHMIC.has(name) && positive && lines.values.some((values) => values.some((value) => value > 0));
    const drawn = logarithmic
      ? lines.values.map((values) => values.map((value) => (value === 0 ? null : value)))
      : lines.values;
    const series = lines.names.map((side, at) => ({
      label: side,
      stroke: () => colour(lines.colours[at]),
      width: 2,
      dash: at ? [6, 4] : [],
      points: {
        show: lines.steps.length <= 100,
        size: 6,
        fill: () => colour(lines.colours[at]),
        stroke: () => colour(lines.colours[at]),
      },
      spanGaps: true,
    }));
    this.chart.draw(
      {
        scales: {
          x: { time: false },
          y: logarithmic ? { distr: 3, range: (plot, low, high) => decades(low, high) } : {},
        },
        axes: [
          wholeAxis({ values: (plot, splits) => splits.map((at) => `step ${at}`) }),
          logarithmic ? logAxis() : numberAxis(),
        ],
        series: [{}, ...series],
        cursor: { y: false },
      },
      [lines.steps, ...drawn],
    );
    this.legend.hidden = lines.names.length < 2;
    this.legend.replaceChildren(
      make("li", { class: "key-reference" }, "━ reference"),
      make("li", { class: "key-candidate" }, "╍ candidate"),
    );
  }

  #options() {
    const { compares, columns, head } = this.data;
    const added = this.data.added.map(({ name, label }) => [name, label]);
    const option = ([value, text]) => make("option", { value }, text);
    const group = (label, entries) => (entries.length ? make("optgroup", { label }, entries.map(option)) : null);
    const there = ([name]) =>
      name.startsWith("step:") ? head.by_step[name.slice(5)] : columns.has(name) || columns.has(`${name}_reference`);
    const groups = compares
      ? [
          group("the whole run", WHOLE_PAIR.filter(there)),
          group("the tensor, difference", PAIR.filter(there)),
          group("the tensor, both sides", [...SIDED, ...added].filter(there)),
        ]
      : [group("the whole run", WHOLE_RUN.filter(there)), group("the tensor", [...RECORD, ...added].filter(there))];
    return groups.filter((each) => each !== null);
  }

  #chosen() {
    const wanted = this.selection.get("trend");
    const values = [...this.choice.options].map((option) => option.value);
    if (values.includes(wanted)) return wanted;
    const usual = this.data.compares ? "rel_l2" : "rms";
    return this.selection.get("row") === null ? values[0] : usual;
  }

  #whole(name) {
    const { by_step: byStep, steps } = this.data.head;
    const values = byStep[name].map((value) =>
      value === null || !Number.isFinite(Number(value)) ? null : Number(value),
    );
    return { steps, names: [name], colours: ["line-forward"], values: [values], about: "of the whole run" };
  }

  /** The rows that differ from the selected one only in their step. */
  #tensor(name) {
    const { data } = this;
    const row = this.selection.get("row");
    if (row === null || row >= data.rows) return null;
    const [series, step] = [data.column("series"), data.column("step")];
    const rows = [];
    for (let at = 0; at < series.length; at++) if (series[at] === series[row]) rows.push(at);
    rows.sort((one, other) => step[one] - step[other]);
    const sides = data.columns.has(name) ? [name] : [`${name}_reference`, `${name}_candidate`];
    const value = (column, at) => {
      const found = column === data.size ? data.sizeOf(at) : data.column(column)[at];
      return Number.isFinite(found) ? found : null;
    };
    return {
      steps: rows.map((at) => step[at]),
      names: sides,
      colours: sides.length > 1 ? ["reference", "candidate"] : ["line-forward"],
      values: sides.map((column) => rows.map((at) => value(column, at))),
      about: `of ${data.moduleName(row)} · ${data.tensorName(row)}`,
    };
  }
}

function decades(low, high) {
  if (!(low > 0)) return [1e-3, 1];
  return [10 ** Math.floor(Math.log10(low) - 0.05), 10 ** Math.ceil(Math.log10(high) + 0.05)];
}
