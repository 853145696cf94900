// The icicle: a row for each level of names, each module as wide as its total time. Its own time is the part of its width
// with nothing below. A stronger colour means a larger share of own time.

import { make, styled } from "./dom.js";
import { duration, percent } from "./format.js";

const NARROWEST = 3; // pixels; narrower cells are merged with their neighbours
const LABELLED = 44;
const STRONGEST = 46; // per cent of the accent colour

/** `chosen(node)` is called when a node is reached by keyboard or mouse. */
export class Icicle {
  constructor(tree, chosen) {
    Object.assign(this, { tree, chosen });
    this.zoom = 0;
    this.current = 0;
    this.cells = new Map();
    this.frame = make("div", { class: "icicle", role: "tree", "aria-label": "Modules by time" });
    this.tip = make("div", { class: "tip", hidden: true });
    this.node = make("div", { class: "icicle-frame" }, this.frame, this.tip);
    this.frame.addEventListener("keydown", (event) => this.#key(event));
    this.frame.addEventListener("mouseleave", () => (this.tip.hidden = true));
    new ResizeObserver(() => this.draw()).observe(this.node);
  }

  draw() {
    const wide = this.node.clientWidth;
    if (!wide || wide + this.#state() === this.drawn) return;
    this.drawn = wide + this.#state();
    const focused = this.frame.contains(document.activeElement);
    this.cells.clear();
    const above = this.tree.path(this.zoom);
    const found = above.map((at) => this.#cell(at, 0, 1, wide));
    const levels = this.#below(this.zoom, 0, 1, wide, found);
    this.frame.replaceChildren(...found);
    styled(this.frame, { "--levels": String(levels) });
    if (!this.cells.has(this.current)) this.current = this.zoom;
    this.#point(this.current, focused);
  }

  /** Shows a node over the full width. */
  zoomTo(at) {
    this.zoom = at;
    this.current = at;
    this.draw();
    this.chosen(at);
  }

  refresh() {
    this.drawn = null;
    this.draw();
  }

  #state() {
    const { side, phase } = this.tree;
    return ` ${this.zoom} ${side} ${phase}`;
  }

  /** Makes the cells below a node; returns the number of levels. */
  #below(at, left, width, wide, found) {
    const { tree } = this;
    const scale = tree.total[at] ? width / tree.total[at] : 0;
    let [deepest, place, small] = [tree.depth[at] + 1, left, null];
    const flush = () => {
      if (small) found.push(this.#small(small, wide));
      small = null;
    };
    for (const child of tree.children[at]) {
      const own = tree.total[child] * scale;
      if (!own) continue;
      if (own * wide < NARROWEST) {
        small ??= { left: place, width: 0, nodes: [], level: tree.depth[child] };
        small.nodes.push(child);
        small.width += own;
      } else {
        flush();
        found.push(this.#cell(child, place, own, wide));
        deepest = Math.max(deepest, this.#below(child, place, own, wide, found));
      }
      place += own;
      deepest = Math.max(deepest, tree.depth[child] + 1);
    }
    flush();
    return deepest;
  }

  #cell(at, left, width, wide) {
    const { tree } = this;
    const { label } = tree.nodes[at];
    const cell = make("div", {
      class: at === this.zoom ? "cell zoomed" : "cell",
      role: "treeitem",
      tabIndex: -1,
      "aria-level": String(tree.depth[at] + 1),
      "aria-label": this.#said(at),
      onclick: () => this.zoomTo(at === this.zoom && at ? tree.nodes[at].parent : at),
      onfocus: () => this.#reached(at),
      onmousemove: (event) => this.#hover(event, this.#said(at), at),
    });
    const strength = tree.mostOwn ? Math.round(STRONGEST * Math.min(1, tree.own[at] / tree.mostOwn)) : 0;
    this.#place(cell, tree.depth[at], left, width);
    styled(cell, { "--heat": `${strength}%` });
    if (width * wide > LABELLED) cell.append(make("span", { class: "label" }, label));
    if (width * wide > 4 * LABELLED) {
      cell.append(make("span", { class: "share" }, `${duration(tree.total[at])} · ${percent(tree.share(tree.total[at]))}`));
    }
    cell.append(this.#strip(at));
    this.cells.set(at, cell);
    return cell;
  }

  /** One cell for neighbours that are too narrow. */
  #small({ left, width, nodes, level }, wide) {
    const time = nodes.reduce((sum, at) => sum + this.tree.total[at], 0);
    const said = `${nodes.length} more, together ${duration(time)}; zoom in to see them`;
    const cell = make("div", {
      class: "cell small",
      "aria-hidden": "true",
      onmousemove: (event) => this.#hover(event, said),
    });
    return this.#place(cell, level, left, Math.max(width, 1 / wide));
  }

  #place(cell, level, left, width) {
    return styled(cell, { "--level": String(level), left: `${100 * left}%`, width: `${100 * width}%` });
  }

  /** The share of each phase, as a line at the bottom of the cell. */
  #strip(at) {
    const { tree } = this;
    const phases = tree.phase === "all" ? tree.phases : [tree.phase];
    const parts = phases.map((phase) => styled(make("i", { class: phase }), { flex: String(tree.totalOf(at, tree.side, phase)) }));
    return make("span", { class: "strip", "aria-hidden": "true" }, parts);
  }

  #said(at) {
    const { tree } = this;
    const { class: cls } = tree.nodes[at];
    const [total, own] = [tree.total[at], tree.own[at]];
    const name = cls ? `${tree.name(at)} (${cls})` : tree.name(at);
    return `${name}: ${duration(total)}, ${percent(tree.share(total))} of the profile; own ${duration(own)}`;
  }

  #hover(event, said, at = null) {
    const box = this.node.getBoundingClientRect();
    this.tip.hidden = false;
    this.tip.textContent = said;
    const left = Math.min(event.clientX - box.left + 12, Math.max(0, box.width - this.tip.offsetWidth));
    styled(this.tip, { left: `${left}px`, top: `${event.clientY - box.top + 18}px` });
    if (at !== null && !this.frame.contains(document.activeElement)) this.chosen(at);
  }

  #reached(at) {
    this.current = at;
    this.#point(at, false);
    this.chosen(at);
  }

  /** Tab reaches one cell; arrow keys move from there. */
  #point(at, focus) {
    for (const [each, cell] of this.cells) {
      cell.tabIndex = each === at ? 0 : -1;
      cell.setAttribute("aria-selected", String(each === at));
    }
    if (focus) this.cells.get(at)?.focus();
  }

  #key(event) {
    const { tree, current } = this;
    const parent = tree.nodes[current].parent;
    const acts = {
      ArrowDown: () => this.#go(tree.children[current].find((at) => tree.total[at])),
      ArrowUp: () => this.#go(parent >= 0 ? parent : undefined),
      ArrowRight: () => this.#go(this.#sibling(1)),
      ArrowLeft: () => this.#go(this.#sibling(-1)),
      Home: () => this.#zoomed(0),
      Enter: () => this.#zoomed(current),
      " ": () => this.#zoomed(current),
      Escape: () => this.#zoomed(Math.max(0, tree.nodes[this.zoom].parent)),
    };
    if (!(event.key in acts) || event.ctrlKey || event.metaKey || event.altKey) return;
    event.preventDefault();
    acts[event.key]();
  }

  /** The next or previous node of the same level with any time. */
  #sibling(step) {
    const { tree, current } = this;
    const row = tree.nodes.map((_, at) => at).filter((at) => tree.depth[at] === tree.depth[current] && tree.total[at]);
    return row[row.indexOf(current) + step];
  }

  #zoomed(at) {
    this.zoomTo(at);
    this.cells.get(at)?.focus();
  }

  /** Moves to a node; if it is too narrow or outside the view, zooms to the node around it. */
  #go(at) {
    if (at === undefined) return;
    if (!this.cells.has(at)) {
      this.zoom = Math.max(0, this.tree.nodes[at].parent);
      this.current = this.zoom;
      this.draw();
      if (!this.cells.has(at)) this.zoomTo(at);
    }
    this.cells.get(at)?.focus();
  }
}
