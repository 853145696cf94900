// Navigation between births.

/** Steps through the births of the head; each selects its step, rank and row. */
export class Births {
  constructor(data, selection) {
    Object.assign(this, { data, selection });
    this.list = data.head.births;
  }

  /** Index of the selected birth, or -1. */
  at() {
    const row = this.selection.get("row");
    return this.list.findIndex((birth) => birth.row === row);
  }

  /** Moves by some births. */
  go(distance) {
    if (!this.list.length) return;
    const at = this.at();
    const next = at < 0 ? (distance > 0 ? 0 : this.list.length - 1) : at + distance;
    this.show((next + this.list.length) % this.list.length);
  }

  show(at) {
    const birth = this.list[at];
    const { selection } = this;
    const hidden = selection.get("module") !== null;
    selection.set({
      row: birth.row,
      step: selection.get("step") === null ? null : birth.step,
      rank: selection.get("rank") === null ? null : birth.rank,
      ...(hidden ? { module: null } : {}),
    });
  }
}
