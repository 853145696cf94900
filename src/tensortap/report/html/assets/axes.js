// Shared by all line plots: axes and legends that follow the theme and the size of their box.

import { styled } from "./dom.js";
import { count, number, powerOfTen } from "./format.js";
import { colour, onTheme } from "./theme.js";

export const FONT =
  '-apple-system, "Segoe UI", Roboto, "Noto Sans", Ubuntu, Cantarell, "Liberation Sans", Arial, sans-serif';

/** An axis in the page's colours. */
function axis(more = {}) {
  return {
    stroke: () => colour("muted"),
    grid: { stroke: () => colour("grid"), width: 1 },
    ticks: { stroke: () => colour("grid"), width: 1, size: 4 },
    font: `11px ${FONT}`,
    size: 28,
    gap: 4,
    ...more,
  };
}

/** An axis of whole numbers, such as steps. */
export function wholeAxis(more = {}) {
  const incrs = Array.from({ length: 9 }, (_, power) => [1, 2, 5].map((digit) => digit * 10 ** power)).flat();
  return axis({ incrs, values: (plot, splits) => splits.map(count), ...more });
}

/** An axis of powers of ten. uPlot's own labels would show 0 for most of them. */
export function logAxis(more = {}) {
  return axis({
    size: 46,
    filter: (plot, splits) => splits,
    splits: (plot, _axis, low, high) => (high / low < 100 ? fineWithin(low, high) : powersWithin(low, high)),
    values: (plot, splits) => splits.map((value) => (isPower(value) ? powerOfTen(value) : number(value, 1))),
    ...more,
  });
}

export function numberAxis(more = {}) {
  return axis({ size: 60, values: (plot, splits) => splits.map((value) => number(value)), ...more });
}

/** Powers of ten between two numbers: all of them, or every second or third if there are many. */
export function powersWithin(low, high) {
  const [first, last] = [Math.ceil(Math.log10(low) - 1e-9), Math.floor(Math.log10(high) + 1e-9)];
  const stride = Math.max(1, Math.ceil((last - first) / 7));
  const powers = [];
  for (let exponent = last; exponent >= first; exponent -= stride) powers.unshift(10 ** exponent);
  return powers;
}

/** 1, 2 and 5 times the powers of ten, for two numbers close to each other. */
function fineWithin(low, high) {
  const first = Math.floor(Math.log10(low));
  const steps = Array.from({ length: 4 }, (_, at) => [1, 2, 5].map((digit) => digit * 10 ** (first + at))).flat();
  return steps.filter((value) => value >= low && value <= high);
}

function isPower(value) {
  const exponent = Math.log10(value);
  return Math.abs(exponent - Math.round(exponent)) < 1e-6;
}

/** A uPlot of fixed height, as wide as its box and redrawn with the theme. */
export class Chart {
  constructor(box, height) {
    this.box = box;
    this.height = height;
    this.plot = null;
    styled(box, { "min-height": `${height}px` });
    new ResizeObserver(() => this.#fit()).observe(box);
    onTheme(() => this.plot?.redraw(false, true));
  }

  /** Replaces the drawing. */
  draw(options, values) {
    this.plot?.destroy();
    const size = { width: this.#width, height: this.height };
    this.plot = new window.uPlot({ ...size, legend: { show: false }, ...options }, values, this.box);
  }

  clear() {
    this.plot?.destroy();
    this.plot = null;
  }

  get #width() {
    return Math.max(200, Math.floor(this.box.clientWidth));
  }

  #fit() {
    if (this.plot && this.plot.width !== this.#width) this.plot.setSize({ width: this.#width, height: this.height });
  }
}
