// A virtual list: only visible lines exist in the document. Beyond the greatest height that browsers allow, the scroll
// position is a share of the lines instead of pixels.

import { styled } from "./dom.js";

const TALLEST = 8_000_000;
const AROUND = 4; // extra lines above and below the visible ones

/**
 * Lines in `body`, inside `scroller`, with absolute positions. Each is `high` pixels, as is the head that covers the upper
 * edge of the scroller if it is `headed`. `make()` returns a node, `fill(node, at)` makes it show a line, and `drawn()` is
 * called when the set of existing lines changes.
 */
export class Lines {
  constructor({ scroller, body, high, headed = false, make, fill, drawn = () => {} }) {
    Object.assign(this, { scroller, body, high, headed, make, fill, drawn });
    this.many = 0;
    this.kept = -1;
    this.nodes = new Map();
    this.spare = [];
    scroller.addEventListener("scroll", () => this.#draw(), { passive: true });
    new ResizeObserver(() => this.#draw()).observe(scroller);
  }

  /** Sets the number of lines; `seen` is one to scroll to, if any. */
  show(many, seen = -1) {
    this.many = many;
    styled(this.body, { height: `${Math.min(many * this.high, TALLEST)}px` });
    this.refresh(seen);
  }

  /** The line with the focus exists even out of view. -1 for none. */
  keep(at) {
    this.kept = at;
  }

  /** Refills all lines. */
  refresh(seen = -1) {
    if (seen >= 0) this.#scroll(seen);
    this.#draw(true);
  }

  /** Scrolls to a line, which then has a node. */
  reveal(at) {
    this.#scroll(at);
    this.#draw(); // even if nothing scrolled here: scroll events of the user arrive one frame late
  }

  /** A line's node, or null while it has none. */
  node(at) {
    return this.nodes.get(at) ?? null;
  }

  /** The number of lines of a page. */
  get page() {
    return Math.floor(this.#height / this.high) - 1;
  }

  /** Scrolls to a line, unless it is in view already. */
  #scroll(at) {
    const top = at * this.high;
    const from = this.scroller.scrollTop * this.#scale;
    if (top >= from && top + this.high <= from + this.#height) return;
    this.scroller.scrollTop = Math.max(0, top - this.#height / 3) / this.#scale;
  }

  get #height() {
    return Math.max(this.high, this.scroller.clientHeight - (this.headed ? this.high : 0));
  }

  /** Pixels of lines per pixel of scrolling. */
  get #scale() {
    const room = this.many * this.high - this.#height;
    const scrolled = Math.min(this.many * this.high, TALLEST) - this.#height;
    return scrolled > 0 && room > scrolled ? room / scrolled : 1;
  }

  #draw(again = false) {
    const top = this.scroller.scrollTop;
    const shifted = top * this.#scale;
    const first = Math.max(0, Math.floor(shifted / this.high) - AROUND);
    const end = Math.min(this.many, first + Math.ceil(this.#height / this.high) + 2 * AROUND + 1);
    const wanted = Array.from({ length: Math.max(0, end - first) }, (_, at) => first + at);
    const apart = this.kept >= 0 && !wanted.includes(this.kept);
    if (apart) wanted.splice(this.kept < first ? 0 : wanted.length, 0, this.kept);
    this.#free(new Set(wanted));
    // From last to first: nodes keep the order of their lines, and no remaining node is moved, because it would lose the
    // focus.
    let next = null;
    for (const at of wanted.reverse()) {
      const known = this.nodes.get(at);
      const node = known ?? this.#placed(at, next);
      if (again || !known) this.fill(node, at);
      const place = apart && at === this.kept ? -this.high : at * this.high - shifted + top; // out of view, above everything
      styled(node, { transform: `translateY(${place}px)` });
      next = node;
    }
    this.drawn();
  }

  #free(wanted) {
    for (const [at, node] of this.nodes) {
      if (wanted.has(at)) continue;
      node.remove();
      this.nodes.delete(at);
      this.spare.push(node);
    }
  }

  #placed(at, next) {
    const node = this.spare.pop() ?? this.make();
    this.body.insertBefore(node, next);
    this.nodes.set(at, node);
    return node;
  }
}
