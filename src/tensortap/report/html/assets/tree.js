// The model as a tree. Two things are shown of each module: how large the error is in it, as a colour and a number, and
// whether a wrong value was born in it. The one alone misleads: the largest error is rarely the first.

import { make, styled } from "./dom.js";
import { number } from "./format.js";
import { css, ink } from "./ramp.js";
import { ranges } from "./scope.js";
import { glyph, gravity } from "./status.js";
import { onTheme } from "./theme.js";

const OPENED = 60; // modules that are shown at the start, at most

export class Tree {
  constructor(data, selection, ramp) {
    Object.assign(this, { data, selection, ramp });
    this.modules = data.head.modules;
    this.children = this.#children();
    this.open = new Set();
    this.items = new Map();
    this.focused = null;
    this.list = make("ul", { role: "tree", "aria-label": "Modules", class: "tree" });
    this.where = make("span", { class: "said" });
    this.node = make(
      "nav",
      { class: "panel tree-panel", "aria-label": "Modules" },
      make("div", { class: "panel-head" }, make("h2", {}, "Modules"), this.where),
      this.list,
      this.#legend(),
    );
    this.list.addEventListener("click", (event) => this.#click(event));
    this.list.addEventListener("keydown", (event) => this.#key(event));
    onTheme(() => this.draw());
    selection.listen((changed) => {
      if (changed.has("step") || changed.has("rank")) this.#measure();
      if (changed.has("row")) this.#reveal();
      if (["step", "rank", "row", "module"].some((name) => changed.has(name))) this.draw();
    });
  }

  start() {
    this.#measure();
    this.#unfold();
    this.#reveal();
    this.draw();
  }

  #children() {
    const children = new Map();
    this.modules.parent.forEach((parent, code) => {
      if (!children.has(parent)) children.set(parent, []);
      children.get(parent).push(code);
    });
    return children;
  }

  /** The greatest size and the births of every module within the scope; containers have their descendants' too. */
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

  /** Of a run: the gravest trouble of a module. */
  #note(code, status) {
    if (gravity(status) > gravity(this.trouble[code])) this.trouble[code] = status;
  }

  /** Opens level by level while there is room. */
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

  #reveal() {
    const row = this.selection.get("row");
    if (row === null || row >= this.data.rows) return;
    let code = this.modules.parent[this.data.column("module")[row]];
    for (; code >= 0; code = this.modules.parent[code]) this.open.add(code);
  }

  draw() {
    const visible = [];
    const walk = (code, level) => {
      visible.push([code, level]);
      if (this.open.has(code)) for (const child of this.children.get(code) ?? []) walk(child, level + 1);
    };
    for (const code of this.children.get(-1) ?? []) walk(code, 1);
    const row = this.selection.get("row");
    const current = row === null || row >= this.data.rows ? -1 : this.data.column("module")[row];
    const chosen = this.modules.name.indexOf(this.selection.get("module"));
    this.order = visible.map(([code]) => code);
    if (!this.order.includes(this.focused)) this.focused = chosen >= 0 ? chosen : (this.order[0] ?? null);
    const focusInside = this.list.contains(document.activeElement);
    this.items.clear();
    this.list.replaceChildren(...visible.map(([code, level]) => this.#item(code, level, current, chosen)));
    if (focusInside) this.items.get(this.focused)?.focus();
    const shownItem = this.items.get(current);
    if (shownItem && !focusInside) inView(this.list, shownItem);
  }

  #item(code, level, current, chosen) {
    const { modules } = this;
    const inner = this.children.has(code);
    const open = this.open.has(code);
    const item = make(
      "li",
      {
        role: "treeitem",
        class: code === current ? "current" : "",
        tabIndex: code === this.focused ? 0 : -1,
        title: `${modules.shown[code]}${modules.cls[code] ? ` (${modules.cls[code]})` : ""}`,
        "aria-level": String(level),
        "aria-selected": String(code === chosen),
        "aria-expanded": inner ? String(open) : null,
        "aria-current": code === current ? "true" : null,
      },
      make("span", { class: "twist", "aria-hidden": "true" }, inner ? (open ? "▾" : "▸") : ""),
      make("span", { class: "label" }, modules.label[code]),
      this.#mark(code, open),
      this.#chip(code),
    );
    styled(item, { "--level": String(level - 1) });
    item.code = code;
    this.items.set(code, item);
    return item;
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

  #click(event) {
    const item = event.target.closest("[role=treeitem]");
    if (!item) return;
    this.focused = item.code;
    if (event.target.classList.contains("twist") && this.children.has(item.code)) this.#toggle(item.code);
    else this.#choose(item.code);
    this.items.get(item.code)?.focus();
  }

  #toggle(code) {
    if (!this.open.delete(code)) this.open.add(code);
    this.draw();
  }

  #choose(code) {
    const name = this.modules.name[code];
    this.selection.set({ module: this.selection.get("module") === name ? null : name });
  }

  #key(event) {
    const code = this.focused;
    const at = this.order.indexOf(code);
    const inner = this.children.has(code);
    const open = this.open.has(code);
    const go = (other) => {
      if (other === undefined || other < 0) return;
      this.focused = other;
      this.draw();
      this.items.get(other)?.focus();
    };
    const acts = {
      ArrowDown: () => go(this.order[at + 1]),
      ArrowUp: () => go(this.order[at - 1]),
      Home: () => go(this.order[0]),
      End: () => go(this.order[this.order.length - 1]),
      ArrowRight: () => (inner && !open ? this.#toggle(code) : inner ? go(this.order[at + 1]) : null),
      ArrowLeft: () => (inner && open ? this.#toggle(code) : go(this.modules.parent[code])),
      Enter: () => this.#choose(code),
      " ": () => this.#choose(code),
    };
    if (!(event.key in acts) || event.ctrlKey || event.metaKey || event.altKey) return;
    event.preventDefault();
    event.stopPropagation();
    acts[event.key]();
  }
}

/** Scrolls the list, never the page. */
function inView(list, item) {
  const top = item.offsetTop - list.offsetTop;
  if (top < list.scrollTop || top + item.offsetHeight > list.scrollTop + list.clientHeight) {
    list.scrollTop = top - list.clientHeight / 3;
  }
}
