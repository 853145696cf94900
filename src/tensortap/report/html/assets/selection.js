// The selection that all views share. It is kept in the hash of the URL, so that a link shows the same view.

const NUMBERS = ["step", "rank", "row"];
const TEXTS = ["module", "text", "sort", "trend", "tab"];
const SWITCHES = ["failing"];
const NONE = "all"; // no step, no rank: all of them

export class Selection {
  /** `defaults` is what an empty hash means. */
  constructor(defaults) {
    this.defaults = { module: null, text: "", sort: "", trend: "", tab: "", failing: false, ...defaults };
    this.listeners = [];
    this.state = this.#read();
    window.addEventListener("hashchange", () => this.#become(this.#read()));
  }

  get(name) {
    return this.state[name];
  }

  /** Changes parts of it, updates the hash and notifies all views. */
  set(changes) {
    this.#become({ ...this.state, ...changes });
    const hash = this.#written();
    if (hash !== location.hash.slice(1)) history.replaceState(null, "", `#${hash}`);
  }

  /** Registers a callback that gets the changed names. */
  listen(listener) {
    this.listeners.push(listener);
  }

  #become(state) {
    const changed = Object.keys(state).filter((name) => state[name] !== this.state[name]);
    if (!changed.length) return;
    this.state = state;
    for (const listener of this.listeners) listener(new Set(changed));
  }

  #read() {
    const state = { ...this.defaults };
    for (const [name, text] of new URLSearchParams(location.hash.slice(1))) {
      if (NUMBERS.includes(name)) state[name] = text === NONE || !/^\d+$/.test(text) ? null : Number(text);
      else if (TEXTS.includes(name)) state[name] = text;
      else if (SWITCHES.includes(name)) state[name] = text === "1";
    }
    return state;
  }

  #written() {
    const parameters = new URLSearchParams();
    for (const name of [...NUMBERS, ...TEXTS, ...SWITCHES]) {
      const value = this.state[name];
      if (value === this.defaults[name]) continue;
      parameters.set(name, value === null ? NONE : value === true ? "1" : value === false ? "0" : String(value));
    }
    return parameters.toString();
  }
}
