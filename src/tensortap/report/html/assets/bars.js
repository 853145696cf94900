// Histograms as small drawings; their classes follow the theme.

import { draw, make } from "./dom.js";
import { count, number } from "./format.js";

const WIDTH = 360;
const HEIGHT = 96;
const FOOT = 16;

/** Two distributions over the same bins: the reference as a solid outline, the candidate dashed. */
export function distributions(histogram) {
  const sides = ["reference", "candidate"].filter((side) => histogram[side]);
  const most = Math.max(1, ...sides.flatMap((side) => histogram[side]));
  // The square root of a count keeps the tails visible without hiding the middle.
  const height = (value) => Math.sqrt(value / most) * (HEIGHT - FOOT - 4);
  const bins = histogram.edges.length - 1;
  const shapes = sides.flatMap((side) => {
    const path = outline(histogram[side], bins, height);
    return [
      draw("path", { class: `area ${side}`, d: `${path}V${HEIGHT - FOOT}H0Z` }),
      draw("path", { class: `edge ${side}`, d: path }),
    ];
  });
  const marks = zeroMark(histogram.edges);
  const svg = framed(`histogram of ${sides.join(" and ")}`, [...shapes, ...marks, ...ends(histogram.edges)]);
  svg.append(...hover(bins, (bin) => hint(histogram, sides, bin)));
  return svg;
}

/** Elements by distance in units in the last place; counts are on a logarithmic scale. */
export function ulpBars(ulps) {
  const most = Math.log10(1 + Math.max(1, ...ulps.counts));
  const bins = ulps.counts.length;
  const step = WIDTH / bins;
  const bars = ulps.counts.map((value, bin) => {
    const tall = (Math.log10(1 + value) / most) * (HEIGHT - FOOT - 4);
    return draw("rect", {
      class: bin === 0 ? "bar same" : "bar",
      x: bin * step + 1,
      y: HEIGHT - FOOT - tall,
      width: Math.max(1, step - 2),
      height: tall,
    });
  });
  const every = Math.ceil(bins / 8);
  const labels = ulps.counts
    .map((_, bin) => bin)
    .filter((bin) => bin % every === 0)
    .map((bin) => label(bin * step + step / 2, number(Number(ulps.edges[bin]), 1), "middle"));
  const svg = framed("elements by distance in units in the last place", [...bars, ...labels]);
  svg.append(...hover(bins, (bin) => `${ulpRange(ulps.edges, bin)} ULP: ${count(ulps.counts[bin])} elements`));
  return svg;
}

/** The legend of the two sides. */
export function sidesKey() {
  return make(
    "span",
    { class: "sides-key" },
    make("span", { class: "key-reference" }, "━ reference"),
    make("span", { class: "key-candidate" }, "╍ candidate"),
  );
}

function ulpRange(edges, bin) {
  const [low, high] = [Number(edges[bin]), Number(edges[bin + 1])];
  if (high === Infinity) return `${number(low)} or more`;
  return high - low <= 1 ? number(low) : `${number(low)} to ${number(high - 1)}`;
}

function hint(histogram, sides, bin) {
  const range = `${number(Number(histogram.edges[bin]))} to ${number(Number(histogram.edges[bin + 1]))}`;
  return `${range}: ${sides.map((side) => `${side} ${count(histogram[side][bin])}`).join(", ")}`;
}

function outline(counts, bins, height) {
  const step = WIDTH / bins;
  const floor = HEIGHT - FOOT;
  const steps = counts.map((value, bin) => `V${(floor - height(value)).toFixed(1)}H${((bin + 1) * step).toFixed(1)}`);
  return `M0 ${floor}${steps.join("")}`;
}

function zeroMark(edges) {
  const at = edges.findIndex((edge, place) => place > 0 && Number(edges[place - 1]) < 0 && Number(edge) >= 0);
  if (at < 1) return [];
  const x = (at * WIDTH) / (edges.length - 1);
  const line = draw("line", { class: "zero", x1: x, x2: x, y1: 0, y2: HEIGHT - FOOT });
  return x > 60 && x < WIDTH - 60 ? [line, label(x, "0", "middle")] : [line];
}

function ends(edges) {
  return [label(0, number(Number(edges[0])), "start"), label(WIDTH, number(Number(edges[edges.length - 1])), "end")];
}

function label(x, text, anchor) {
  return draw("text", { x, y: HEIGHT - 3, "text-anchor": anchor }, text);
}

function framed(title, children) {
  return draw(
    "svg",
    { class: "bars", viewBox: `0 0 ${WIDTH} ${HEIGHT}`, role: "img", "aria-label": title },
    draw("line", { class: "floor", x1: 0, x2: WIDTH, y1: HEIGHT - FOOT, y2: HEIGHT - FOOT }),
    ...children,
  );
}

/** Invisible columns that carry the exact numbers as tooltips. */
function hover(bins, text) {
  const step = WIDTH / bins;
  return Array.from({ length: bins }, (_, bin) =>
    draw(
      "rect",
      { class: "hover", x: bin * step, y: 0, width: step, height: HEIGHT - FOOT },
      draw("title", {}, text(bin)),
    ),
  );
}
