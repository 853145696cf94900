// The modules of a profile as a tree of names, with own and total times.

/** The amounts to show: `side` is "cpu" or "device", `phase` one of the profile's phases or "all". */
export class TimesTree {
  constructor(head) {
    this.nodes = head.nodes;
    this.phases = head.phases;
    this.children = this.nodes.map(() => []);
    this.depth = this.nodes.map(() => 0);
    this.nodes.forEach(({ parent }, at) => {
      if (parent < 0) return;
      this.children[parent].push(at);
      this.depth[at] = this.depth[parent] + 1;
    });
    this.choose({ side: "cpu", phase: "all" });
  }

  choose({ side, phase }) {
    Object.assign(this, { side, phase });
    this.own = this.nodes.map((_, at) => this.ownOf(at, side, phase));
    this.total = [...this.own];
    for (let at = this.nodes.length - 1; at > 0; at--) this.total[this.nodes[at].parent] += this.total[at];
    this.mostOwn = this.own.reduce((most, own, at) => (this.#isModule(at) ? Math.max(most, own) : most), 0);
  }

  /** Time outside of modules may exceed that of any module, and must not make all of them look the same. */
  #isModule(at) {
    const { module } = this.nodes[at];
    return module === "(root)" || !module.startsWith("(");
  }

  /** Microseconds of one node without its children. */
  ownOf(at, side, phase) {
    const { own } = this.nodes[at];
    const place = side === "device" ? 1 : 0;
    const phases = phase === "all" ? this.phases : [phase];
    return phases.reduce((sum, each) => sum + (own[each]?.[place] ?? 0), 0);
  }

  /** Microseconds of one node with its children. */
  totalOf(at, side, phase) {
    return this.children[at].reduce((sum, child) => sum + this.totalOf(child, side, phase), this.ownOf(at, side, phase));
  }

  /** The share of the whole profile. */
  share(amount) {
    return this.total[0] ? amount / this.total[0] : 0;
  }

  /** From the whole profile down to a node. */
  path(at) {
    const found = [];
    for (let each = at; each >= 0; each = this.nodes[each].parent) found.unshift(each);
    return found;
  }

  name(at) {
    return at ? this.nodes[at].module : this.nodes[0].label;
  }
}
