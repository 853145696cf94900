// Panels that share one place; the open one is part of the selection.

import { make } from "./dom.js";

export class Tabs {
  /** `panels` is [{id, label, node, opened()}]. */
  constructor(panels, selection) {
    Object.assign(this, { panels, selection });
    this.buttons = panels.map(({ id, label }) =>
      make(
        "button",
        {
          type: "button",
          role: "tab",
          id: `tab-${id}`,
          "aria-controls": `panel-${id}`,
          onclick: () => selection.set({ tab: id }),
        },
        label,
      ),
    );
    const bodies = panels.map(({ id, node }) =>
      make("div", { role: "tabpanel", id: `panel-${id}`, "aria-labelledby": `tab-${id}`, tabIndex: 0 }, node),
    );
    this.bodies = bodies;
    this.list = make("div", { role: "tablist", "aria-label": "More about the runs" }, this.buttons);
    this.list.addEventListener("keydown", (event) => this.#key(event));
    this.node = make("section", { class: "panel tabs" }, this.list, bodies);
    selection.listen((changed) => changed.has("tab") && this.draw());
  }

  draw() {
    const open = this.#open();
    this.panels.forEach(({ opened }, at) => {
      this.buttons[at].setAttribute("aria-selected", String(at === open));
      this.buttons[at].tabIndex = at === open ? 0 : -1;
      this.bodies[at].hidden = at !== open;
      if (at === open) opened?.();
    });
  }

  #open() {
    return Math.max(
      0,
      this.panels.findIndex(({ id }) => id === this.selection.get("tab")),
    );
  }

  #key(event) {
    const step = { ArrowRight: 1, ArrowLeft: -1 }[event.key];
    if (!step) return;
    event.preventDefault();
    const next = (this.#open() + step + this.panels.length) % this.panels.length;
    this.selection.set({ tab: this.panels[next].id });
    this.buttons[next].focus();
  }
}
