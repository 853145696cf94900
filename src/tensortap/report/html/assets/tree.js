// The model as a tree. Each module shows the size of its error, as a colour and a number, and whether a wrong value was born
// in it. Size alone misleads: the largest error is rarely the first.

import { make, styled } from "./dom.js";
import { number } from "./format.js";
import { Lines } from "./lines.js";
import { css, ink } from "./ramp.js";
import { ranges } from "./scope.js";
import { glyph, gravity } from "./status.js";
import { onTheme } from "./theme.js";

const OPENED = 60; // greatest number of modules that are shown first
const HIGH = 25; // pixels of a line

export class Tree {
  constructor(data, selection, ramp) {
    Object.assign(this, { data, selection, ramp });
    this.modules = data.head.modules;
    this.#family();
    this.open = new Set();
    this.order = []; // the modules outside closed ones, one per line
    this.line = new Int32Array(this.modules.name.length); // the line of each module, or -1
    this.focused = -1;
    this.list = make("ul", { role: "tree", "aria-label": "Modules", class: "tree" });
    styled(this.list, { "--row": `${HIGH}px` });
    const scroller = make("div", { class: "tree-scroll", tabIndex: -1 }, this.list);
    this.where = make("span", { class: "said" });
    this.node = make(
      "nav",
      { class: "panel tree-panel", "aria-label": "Modules" },
      make("div", { class: "panel-head" }, make("h2", {}, "Modules"), this.where),
      scroller,
      this.#legend(),
    );
    this.lines = new Lines({
      scroller,
      body: this.list,
      high: HIGH,
      make: () => make("li", { role: "treeitem" }),
      fill: (item, at) => this.#fill(item, this.order[at]),
    });
    this.list.addEventListener("click", (event) => this.#click(event));
    this.list.addEventListener("keydown", (event) => this.#key(event));
    this.list.addEventListener("focusin", (event) => this.#entered(event.target));
    onTheme(() => this.draw());
    selection.listen((changed) => {
      if (changed.has("step") || changed.has("rank")) this.#measure();
      if (changed.has("row")) this.#reveal();
      else if (["step", "rank", "module"].some((name) => changed.has(name))) this.draw();
    });
  }

  start() {
    this.#measure();
    this.#unfold();
    this.#reveal();
  }

  /** Sets the children, the position among siblings and the depth of each module. */
  #family() {
    this.children = new Map();
    this.nth = [];
    this.level = [];
    this.modules.parent.forEach((parent, code) => {
      if (!this.children.has(parent)) this.children.set(parent, []);
      this.nth.push(this.children.get(parent).push(code));
      this.level.push(parent < 0 ? 1 : this.level[parent] + 1);
    });
  }

  /** The greatest size and the births of every module within the scope; containers include their descendants. */
  #measure() {
    const { data, modules, selection } = this;
    const many = modules.name.length;
    this.size = new Float64Array(many).fill(NaN);
    this.worst = new Uint32Array(many);
    this.born = new Uint32Array(many);
    this.trouble = new Array(many).fill(null);
    this.below = new Uint32Array(many);
    const [module, birth] = [data.column("module"), data.column("birth")];
    for (const { begin, end } of ranges(data, selection.get("step"), selection.get("rank"))) {
      for (let row = begin; row < end; row++) {
        const code = module[row];
        const size = data.sizeOf(row);
        if (!Number.isNaN(size) && !(this.size[code] >= size)) [this.size[code], this.worst[code]] = [size, row];
        this.born[code] += birth[row];
        if (!data.compares && data.isFailing(row)) this.#note(code, data.status(row));
      }
    }
    for (let code = many - 1; code >= 0; code--) {
      const parent = modules.parent[code];
      if (parent < 0) continue;
      if (!Number.isNaN(this.size[code]) && !(this.size[parent] >= this.size[code])) {
        [this.size[parent], this.worst[parent]] = [this.size[code], this.worst[code]];
      }
      this.below[parent] += this.born[code] + this.below[code];
    }
    const step = selection.get("step");
    const rank = selection.get("rank");
    const parts = [step === null ? "all steps" : `step ${step}`];
    if (data.head.ranks.length > 1) parts.push(rank === null ? "all ranks" : `rank ${rank}`);
    this.where.textContent = parts.join(", ");
  }

  /** The most severe status of a module, on the page of a run. */
  #note(code, status) {
    if (gravity(status) > gravity(this.trouble[code])) this.trouble[code] = status;
  }

  /** Opens level by level up to the limit. */
  #unfold() {
    let level = this.children.get(-1) ?? [];
    let showing = level.length;
    while (level.length) {
      const next = level.flatMap((code) => this.children.get(code) ?? []);
      if (showing + next.length > OPENED) break;
      for (const code of level) if (this.children.has(code)) this.open.add(code);
      showing += next.length;
      level = next;
    }
  }

  /** Opens all ancestors of the selected row's module, and scrolls to it. */
  #reveal() {
    const { parent } = this.modules;
    const current = this.#current();
    for (let code = parent[current] ?? -1; code >= 0; code = parent[code]) this.open.add(code);
    this.draw(current);
  }

  /** The module of the selected row, or -1. */
  #current() {
    const row = this.selection.get("row");
    return row === null || row >= this.data.rows ? -1 : this.data.column("module")[row];
  }

  /** Redraws the lines, and scrolls to one module if given. */
  draw(seen = -1) {
    this.current = this.#current();
    this.chosen = this.modules.name.indexOf(this.selection.get("module"));
    this.#arrange();
    const inside = this.list.contains(document.activeElement);
    this.focused = this.#nearest(this.focused >= 0 ? this.focused : this.chosen);
    this.lines.keep(this.line[this.focused]);
    this.lines.show(this.order.length, this.line[seen]);
    if (!inside) return;
    this.lines.node(this.line[this.focused])?.focus({ preventScroll: true }); // its line may have changed
    if (seen >= 0) this.lines.reveal(this.line[seen]);
  }

  /** Modules come right before their descendants, so their order is that of the lines. */
  #arrange() {
    const { parent } = this.modules;
    this.order = [];
    this.line.fill(-1);
    for (let code = 0; code < parent.length; code++) {
      const above = parent[code];
      const shown = above < 0 || (this.line[above] >= 0 && this.open.has(above));
      if (shown) this.line[code] = this.order.push(code) - 1;
    }
  }

  /** The module itself, or its nearest visible ancestor; else the first. */
  #nearest(code) {
    while (code >= 0 && this.line[code] < 0) code = this.modules.parent[code];
    return code >= 0 ? code : (this.order[0] ?? -1);
  }

  #fill(item, code) {
    const { modules } = this;
    const inner = this.children.has(code);
    const open = this.open.has(code);
    Object.assign(item, {
      code,
      className: code === this.current ? "current" : "",
      tabIndex: code === this.focused ? 0 : -1,
      title: `${modules.shown[code]}${modules.cls[code] ? ` (${modules.cls[code]})` : ""}`,
      ariaLevel: String(this.level[code]),
      ariaPosInSet: String(this.nth[code]),
      ariaSetSize: String(this.children.get(modules.parent[code]).length),
      ariaSelected: String(code === this.chosen),
      ariaExpanded: inner ? String(open) : null,
      ariaCurrent: code === this.current ? "true" : null,
    });
    styled(item, { "--level": String(this.level[code] - 1) });
    item.replaceChildren(
      make("span", { class: "twist", "aria-hidden": "true" }, inner ? (open ? "▾" : "▸") : ""),
      make("span", { class: "label" }, modules.label[code]),
      this.#mark(code, open) ?? "",
      this.#chip(code),
    );
  }

  #mark(code, open) {
    const trouble = this.trouble[code];
    if (this.born[code]) return make("span", { class: "born" }, trouble ? glyph(trouble, true) : "◀ born");
    if (trouble) return make("span", { class: "trouble" }, glyph(trouble));
    if (this.below[code] && !open)
      return make("span", { class: "born inside", title: "born inside" }, `◀ ${this.below[code]}`);
    return null;
  }

  #chip(code) {
    const size = this.size[code];
    if (Number.isNaN(size)) return make("span", { class: "chip none" }, "–");
    if (size === Infinity) {
      const shape = this.data.status(this.worst[code]) === "shape";
      return make("span", { class: "chip lost" }, shape ? "✖ shape" : "✖ NaN");
    }
    const colour = this.ramp.colour(size);
    if (colour === null) return make("span", { class: "chip equal" }, this.data.compares ? "=" : "0");
    return styled(make("span", { class: "chip" }, number(size, 2)), { background: css(colour), color: ink(colour) });
  }

  #legend() {
    const bar = make("span", { class: "ramp", "aria-hidden": "true" });
    const paint = () => {
      const stops = Array.from({ length: 9 }, (_, at) => css(this.ramp.at(at / 8)));
      styled(bar, { background: `linear-gradient(90deg, ${stops.join(", ")})` });
    };
    paint();
    onTheme(paint);
    return make(
      "p",
      { class: "ramp-legend" },
      make("span", {}, this.data.compares ? "worst rel. error" : "greatest rms"),
      make("span", {}, number(this.ramp.low, 1)),
      bar,
      make("span", {}, number(this.ramp.high, 1)),
    );
  }

  /** The line that Tab reaches; it stays when it is scrolled out of view. */
  #entered(item) {
    const before = this.lines.node(this.line[this.focused]);
    if (before) before.tabIndex = -1;
    item.tabIndex = 0;
    this.focused = item.code;
    this.lines.keep(this.line[item.code]);
    if (item.matches(":focus-visible")) this.lines.reveal(this.line[item.code]); // a click must not scroll its target away
  }

  #click(event) {
    const item = event.target.closest("[role=treeitem]");
    if (!item) return;
    if (event.target.classList.contains("twist") && this.children.has(item.code)) this.#toggle(item.code);
    else this.#choose(item.code);
  }

  #toggle(code) {
    if (!this.open.delete(code)) this.open.add(code);
    this.draw();
  }

  #choose(code) {
    const name = this.modules.name[code];
    this.selection.set({ module: this.selection.get("module") === name ? null : name });
  }

  #go(code) {
    if (code === undefined || code < 0) return;
    this.lines.reveal(this.line[code]);
    this.lines.node(this.line[code]).focus();
  }

  #key(event) {
    const { code } = event.target;
    const { order, lines } = this;
    const at = this.line[code];
    const last = order.length - 1;
    const inner = this.children.has(code);
    const open = this.open.has(code);
    const acts = {
      ArrowDown: () => this.#go(order[at + 1]),
      ArrowUp: () => this.#go(order[at - 1]),
      PageDown: () => this.#go(order[Math.min(last, at + lines.page)]),
      PageUp: () => this.#go(order[Math.max(0, at - lines.page)]),
      Home: () => this.#go(order[0]),
      End: () => this.#go(order[last]),
      ArrowRight: () => (inner && !open ? this.#toggle(code) : inner ? this.#go(order[at + 1]) : null),
      ArrowLeft: () => (inner && open ? this.#toggle(code) : this.#go(this.modules.parent[code])),
      Enter: () => this.#choose(code),
      " ": () => this.#choose(code),
    };
    if (!(event.key in acts) || event.ctrlKey || event.metaKey || event.altKey) return;
    event.preventDefault();
    event.stopPropagation();
    acts[event.key]();
  }
}
