// The keyboard, and the page that explains it.

import { make } from "./dom.js";

const KEYS = [
  ["n  p", "next and previous birth"],
  ["j  k", "next and previous row of the table"],
  ["/", "filter by words"],
  ["Esc", "close this, leave the filter, close the tensor"],
  ["?", "this help"],
  ["← → ↑ ↓", "in the tree, the table and the maps"],
  ["Enter", "narrow to a module or a cell, zoom in"],
];

export class Keys {
  constructor(page) {
    this.page = page;
    this.dialog = this.#help();
    document.body.append(this.dialog);
    document.addEventListener("keydown", (event) => this.#key(event));
  }

  help() {
    this.dialog.showModal();
  }

  #help() {
    const close = () => this.dialog.close();
    return make(
      "dialog",
      { class: "help", "aria-label": "Keys" },
      make("h2", {}, "Keys"),
      make(
        "dl",
        {},
        KEYS.map(([key, text]) =>
          make(
            "div",
            {},
            make(
              "dt",
              {},
              key.split("  ").map((each) => make("kbd", {}, each)),
            ),
            make("dd", {}, text),
          ),
        ),
      ),
      make(
        "p",
        {},
        "Drag across the plot to zoom in, double-click to zoom out. The address contains the selection: copy it to share the view.",
      ),
      make("p", { class: "buttons" }, make("button", { type: "button", onclick: close }, "Close")),
    );
  }

  #key(event) {
    if (event.ctrlKey || event.metaKey || event.altKey || event.defaultPrevented || this.dialog.open) return;
    const { table, births, selection } = this.page;
    const writing = event.target.matches("input:not([type=checkbox]), select, textarea");
    if (event.key === "Escape") {
      if (writing) event.target.blur();
      else selection.set({ row: null });
      return;
    }
    if (writing) return;
    const acts = {
      n: () => births.go(1),
      p: () => births.go(-1),
      j: () => table.move(1),
      k: () => table.move(-1),
      "/": () => table.input.select(),
      "?": () => this.help(),
    };
    if (!(event.key in acts)) return;
    event.preventDefault();
    acts[event.key]();
  }
}
