// Builds the page around the selection. The static HTML stays; the rest is drawn into #app.

import { Births } from "./births.js";
import { Data } from "./data.js";
import { make } from "./dom.js";
import { Gradients } from "./gradients.js";
import { HeatMap } from "./heat_map.js";
import { Keys } from "./keys.js";
import { OrderPlot } from "./order_plot.js";
import { Ramp } from "./ramp.js";
import { Scope } from "./scope.js";
import { Selection } from "./selection.js";
import { Table } from "./table.js";
import { Tabs } from "./tabs.js";
import { Tensor } from "./tensor.js";
import { onTheme, startTheme, theme } from "./theme.js";
import { Toolbar } from "./toolbar.js";
import { Tree } from "./tree.js";
import { Trend } from "./trend.js";
import { unmatchedPanel } from "./unmatched.js";

async function start() {
  const app = document.getElementById("app");
  startTheme();
  document.body.classList.add("scripted");
  const waiting = make("p", { class: "waiting", role: "status" }, "Reading the data…");
  app.append(waiting);
  try {
    const data = await Data.open();
    waiting.remove();
    const page = build(app, data);
    requestAnimationFrame(() => setTimeout(() => complete(page)));
  } catch (error) {
    app.append(make("p", { class: "hint", role: "alert" }, `The page could not be drawn: ${error.message}`));
    throw error;
  }
}

function build(app, data) {
  const { head } = data;
  const { step, rank, row } = head.start;
  const selection = new Selection({ step, rank, row, tab: firstTab(head) });
  const scope = new Scope(data, selection);
  const ramp = rampOf(data);
  const births = new Births(data, selection);
  const table = new Table(data, selection, scope);
  const tree = new Tree(data, selection, ramp);
  const plot = new OrderPlot(data, selection, scope);
  const tensor = new Tensor(data, selection);
  const trend = new Trend(data, selection);
  const tabs = new Tabs(panels(data, trend), selection);
  const heat = head.ranks.length > 1 || head.mesh ? new HeatMap(data, selection, ramp) : null;
  const page = { data, selection, births, table, trend, tensor };
  const keys = new Keys(page);
  const toolbar = new Toolbar(data, selection, births, () => keys.help());
  app.append(
    toolbar.node,
    make(
      "div",
      { class: "work" },
      tree.node,
      make("div", { class: "middle" }, plot.node, heat?.node, table.node),
      tensor.node,
    ),
    tabs.node,
  );
  toolbar.draw();
  tree.start();
  tensor.draw();
  plot.draw();
  heat?.start();
  table.start();
  tabs.draw();
  banner(data, births);
  return page;
}

/** Loads the columns that the first drawing does not need. */
async function complete({ data, table, trend, tensor }) {
  performance.mark("tensortap-painted");
  await data.columns.loadAll();
  data.complete = true;
  table.refresh();
  trend.draw();
  tensor.draw();
  performance.mark("tensortap-complete");
  document.body.dataset.ready = "";
}

/** The panels: trend and unmatched records are drawn, the others are moved from the static HTML. */
function panels(data, trend) {
  const { head } = data;
  const all = [{ id: "trend", label: "Trend over steps", node: trend.node, opened: () => trend.draw() }];
  if (head.gradients?.layers.length) {
    const gradients = new Gradients(data);
    all.push({ id: "gradients", label: "Gradient norms", node: gradients.node, opened: () => gradients.draw() });
  }
  if (head.unmatched?.count) {
    const node = unmatchedPanel(head.unmatched);
    all.push({ id: "unmatched", label: `Unmatched (${head.unmatched.count})`, node });
  }
  for (const [id, label] of [
    ["births", data.compares ? "Births" : "Findings"],
    ["coverage", "Coverage"],
    ["environment", "Environment"],
    ["definitions", "Meaning of each number"],
  ]) {
    const node = document.getElementById(id);
    if (node) all.push({ id, label, node });
  }
  return all;
}

/** The panel that is open first. */
function firstTab(head) {
  if (head.verdict === "incomparable" && head.unmatched.count) return "unmatched";
  return head.steps.length > 1 ? "trend" : "births";
}

/** Enables the buttons that need scripts. */
function banner(data, births) {
  const copy = document.getElementById("copy-command");
  if (copy && navigator.clipboard) {
    copy.hidden = false;
    copy.addEventListener("click", async () => {
      try {
        await navigator.clipboard.writeText(copy.dataset.command);
        copy.textContent = "copied";
      } catch {
        getSelection().selectAllChildren(copy.parentElement.querySelector(".command")); // no permission: select it for Ctrl-C
      }
    });
  }
  const next = document.getElementById("next-birth");
  if (next && births.list.length) {
    next.hidden = false;
    next.addEventListener("click", () => births.go(1));
  }
  for (const item of document.querySelectorAll("#births [data-row], #banner [data-row]")) {
    const row = Number(item.dataset.row);
    const at = births.list.findIndex((birth) => birth.row === row);
    if (at < 0) continue;
    const show = make("button", { type: "button", class: "show" }, "show");
    show.addEventListener("click", () => births.show(at));
    item.append(" ", show);
  }
}

/** One ramp for the whole page, so that a colour means the same everywhere. It starts a little below the tolerance. */
function rampOf(data) {
  let [low, high, allowed] = [Infinity, 0, Infinity];
  for (const size of data.column(data.size)) {
    if (!(size > 0) || size === Infinity) continue;
    if (size < low) low = size;
    if (size > high) high = size;
  }
  for (const limit of data.column("tolerance") ?? []) if (limit > 0 && limit < allowed) allowed = limit;
  const start = Number.isFinite(allowed) ? allowed / 10 : low;
  const ramp = high > 0 ? new Ramp(Math.max(Math.min(start, high), high * 1e-8), high) : new Ramp(1e-8, 1);
  const paint = () => (ramp.dark = theme() === "dark");
  paint();
  onTheme(paint);
  return ramp;
}

start();
