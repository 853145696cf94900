// The page about time by module: the icicle, its controls, and the figures of one module.

import { jsonBlock } from "./blocks.js";
import { make } from "./dom.js";
import { count, duration, percent } from "./format.js";
import { Icicle } from "./icicle.js";
import { onTheme, startTheme, theme, toggleTheme } from "./theme.js";
import { TimesTree } from "./times_tree.js";

const KEYS = "Arrow keys move between modules, Enter zooms in, Escape out, Home shows everything.";
const SIDES = { cpu: "CPU time", device: "device time" };

async function start() {
  const app = document.getElementById("app");
  startTheme();
  document.body.classList.add("scripted");
  try {
    build(app, await jsonBlock("head"));
    document.body.dataset.ready = "";
  } catch (error) {
    app.append(make("p", { class: "hint", role: "alert" }, `The page could not be drawn: ${error.message}`));
    throw error;
  }
}

function build(app, head) {
  const tree = new TimesTree(head);
  if (head.device) tree.choose({ side: "device", phase: "all" });
  const figures = make("section", { class: "panel figures", "aria-live": "polite", "aria-label": "The module" });
  const showFigures = (at) => figures.replaceChildren(...figuresOf(tree, head, at));
  const icicle = new Icicle(tree, showFigures);
  app.append(
    toolbar(tree, head, icicle, () => showFigures(icicle.current)),
    make("section", { class: "panel" }, icicle.node, legend(head)),
    make("p", { class: "hint" }, KEYS),
    figures,
  );
  icicle.draw();
  showFigures(0);
}

function toolbar(tree, head, icicle, showFigures) {
  const side = select("Time", head.device ? Object.keys(SIDES) : ["cpu"], (each) => SIDES[each], tree.side);
  const phase = select("Phase", ["all", ...head.phases], (each) => (each === "all" ? "all phases" : each), "all");
  const change = () => {
    tree.choose({ side: side.value, phase: phase.value });
    icicle.refresh();
    showFigures();
  };
  side.addEventListener("change", change);
  phase.addEventListener("change", change);
  const whole = make("button", { type: "button", onclick: () => icicle.zoomTo(0) }, "Whole profile");
  const look = make("button", { type: "button", class: "quiet", onclick: toggleTheme });
  const sayTheme = () => (look.textContent = theme() === "dark" ? "☀ light" : "☾ dark");
  onTheme(sayTheme);
  sayTheme();
  const parts = [side, phase, whole, make("span", { class: "spring" }), look];
  return make("div", { class: "toolbar", role: "group", "aria-label": "What is shown" }, parts);
}

function select(label, values, worded, chosen) {
  const options = values.map((each) => make("option", { value: each, selected: each === chosen }, worded(each)));
  return make("select", { "aria-label": label }, options);
}

function legend(head) {
  const phases = head.phases.map((phase) => make("span", {}, make("i", { class: phase }), phase));
  const said = "width: time · colour: own time · line at the bottom: phases";
  return make("p", { class: "legend phases" }, phases, make("span", {}, said));
}

/** The figures of one module: a row for each phase. */
function figuresOf(tree, head, at) {
  const { class: cls, calls } = tree.nodes[at];
  const sides = head.device ? ["cpu", "device"] : ["cpu"];
  const whole = Object.fromEntries(sides.map((side) => [side, tree.totalOf(0, side, "all")]));
  const titles = sides.flatMap((side) => {
    const name = side === "cpu" ? "CPU" : side;
    return [`${name} own`, "%", `${name} total`, "%"];
  });
  const cells = (phase) =>
    sides.flatMap((side) =>
      [tree.ownOf(at, side, phase), tree.totalOf(at, side, phase)].flatMap((time) => [
        duration(time),
        time ? percent(time / whole[side]) : "–",
      ]),
    );
  const row = (phase, title) =>
    make(
      "tr",
      {},
      make("th", { scope: "row" }, title),
      make("td", { class: "number" }, phase === "all" || !calls[phase] ? "–" : count(calls[phase])),
      cells(phase).map((text) => make("td", { class: "number" }, text)),
    );
  const used = head.phases.filter((phase) => tree.totalOf(at, "cpu", phase) || tree.totalOf(at, "device", phase));
  const heads = ["phase", "calls", ...titles].map((title) => make("th", { scope: "col" }, title));
  return [
    make("h2", {}, make("code", {}, tree.name(at)), cls ? make("span", { class: "said" }, ` ${cls}`) : null),
    make(
      "table",
      {},
      make("thead", {}, make("tr", {}, heads)),
      make("tbody", {}, used.map((phase) => row(phase, phase)), used.length > 1 ? row("all", "together") : null),
    ),
  ];
}

start();
