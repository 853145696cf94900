// The rows of the selected step, rank and module, in execution order.

export class Scope {
  constructor(data, selection) {
    this.data = data;
    this.selection = selection;
    this.cached = "";
  }

  /** Row numbers, ascending. */
  rows() {
    this.#refresh();
    return this.#rows;
  }

  /** The first row of each step of each rank: [{at, rank, step}]. */
  parts() {
    this.#refresh();
    return this.#parts;
  }

  #rows = new Uint32Array();
  #parts = [];

  #refresh() {
    const { data, selection } = this;
    const key = JSON.stringify(["step", "rank", "module"].map((name) => selection.get(name)));
    if (key === this.cached) return;
    this.cached = key;
    const inside = this.#modules();
    const module = data.column("module");
    const chosen = ranges(data, selection.get("step"), selection.get("rank"));
    const rows = new Uint32Array(chosen.reduce((sum, range) => sum + range.end - range.begin, 0));
    let length = 0;
    this.#parts = [];
    for (const range of chosen) {
      this.#parts.push({ at: length, rank: range.rank, step: range.step });
      for (let row = range.begin; row < range.end; row++) {
        if (inside === null || inside[module[row]]) rows[length++] = row;
      }
    }
    this.#rows = rows.subarray(0, length);
  }

  /** The codes of the selected module and those below it; null for all. */
  #modules() {
    const { modules } = this.data.head;
    const code = modules.name.indexOf(this.selection.get("module"));
    return code < 0 ? null : subtree(modules, code);
  }
}

/** The ranges of rows of a step and a rank; null means any. */
export function ranges(data, step, rank) {
  return data.head.scopes.filter(
    (scope) => (step === null || scope.step === step) && (rank === null || scope.rank === rank),
  );
}

/** 1 for the module of that code and all below it. */
export function subtree(modules, code) {
  const inside = new Uint8Array(modules.name.length);
  inside[code] = 1;
  // Parents come before their children.
  for (let at = code + 1; at < inside.length; at++) {
    if (modules.parent[at] >= 0 && inside[modules.parent[at]]) inside[at] = 1;
  }
  return inside;
}
