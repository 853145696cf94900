// The toolbar: step, rank, module and birth of the selection, and the buttons of the page.

import { make } from "./dom.js";
import { count } from "./format.js";
import { onTheme, theme, toggleTheme } from "./theme.js";

export class Toolbar {
  constructor(data, selection, births, help) {
    Object.assign(this, { data, selection, births });
    this.step = this.#picker("step", data.head.steps, "all steps");
    this.rank = this.#picker("rank", data.head.ranks, "all ranks");
    this.module = make("button", {
      type: "button",
      class: "scope-module",
      title: "Show all modules",
      onclick: () => selection.set({ module: null }),
    });
    this.counter = make("span", { class: "said", "aria-live": "polite" });
    const go = (label, title, distance) =>
      make("button", { type: "button", title, onclick: () => births.go(distance) }, label);
    this.theme = make("button", { type: "button", class: "quiet", onclick: toggleTheme });
    const sayTheme = () => (this.theme.textContent = theme() === "dark" ? "☀ light" : "☾ dark");
    sayTheme();
    onTheme(sayTheme);
    this.node = make(
      "div",
      { class: "toolbar", role: "group", "aria-label": "Selection" },
      this.step.node,
      data.head.ranks.length > 1 ? this.rank.node : null,
      this.module,
      births.list.length
        ? make(
            "span",
            { class: "group" },
            go("‹", "Previous birth (p)", -1),
            this.counter,
            go("›", "Next birth (n)", 1),
          )
        : null,
      make("span", { class: "spring" }),
      this.theme,
      make("button", { type: "button", class: "quiet", title: "Keys and help (?)", onclick: help }, "? help"),
    );
    selection.listen(() => this.draw());
  }

  draw() {
    const { selection, births } = this;
    this.step.select.value = selection.get("step") ?? "";
    this.rank.select.value = selection.get("rank") ?? "";
    const module = selection.get("module");
    this.module.hidden = module === null;
    const { name, shown } = this.data.head.modules;
    this.module.replaceChildren(make("bdi", {}, shown[name.indexOf(module)] ?? ""), " ×");
    const at = births.at();
    const word = this.data.compares ? "birth" : "finding";
    this.counter.textContent =
      at < 0
        ? `${count(births.list.length)} ${word}${births.list.length > 1 ? "s" : ""}`
        : `${word} ${at + 1} of ${count(births.list.length)}`;
  }

  #picker(name, values, all) {
    const pick = (value) => this.selection.set({ [name]: value === "" ? null : Number(value) });
    const select = make(
      "select",
      { "aria-label": name, onchange: () => pick(select.value) },
      make("option", { value: "" }, all),
      values.map((value) => make("option", { value: String(value) }, `${name} ${value}`)),
    );
    const move = (distance) => {
      const at = values.indexOf(this.selection.get(name));
      const next = values[Math.max(0, Math.min(values.length - 1, at + distance))];
      if (next !== undefined) pick(String(next));
    };
    const arrow = (label, title, distance) =>
      make("button", { type: "button", title, onclick: () => move(distance) }, label);
    const node = make(
      "span",
      { class: "group" },
      arrow("‹", `Previous ${name}`, -1),
      select,
      arrow("›", `Next ${name}`, 1),
    );
    node.hidden = values.length < 2;
    return { node, select };
  }
}
