// One tensor: its statistics on both sides, the difference, and its location.

import { isServed } from "./blocks.js";
import { distributions, sidesKey, ulpBars } from "./bars.js";
import { make } from "./dom.js";
import { ErrorMap } from "./error_map.js";
import { count, number, percent, place, precise } from "./format.js";
import { both, estimated, isBound } from "./measures.js";
import { Slice } from "./slice.js";
import { birthWords, glyph } from "./status.js";
import { onTheme } from "./theme.js";

/** How a statistic of one tensor is written, by its form. */
const FORMS = {
  count,
  share: count,
  number: precise,
  digest: (text) => (text ? String(text).slice(0, 16) : "–"),
};

const SETTLED = 100; // milliseconds
const MAPPED = ["module_candidate", "path_candidate", "layout"];

export class Tensor {
  constructor(data, selection) {
    Object.assign(this, { data, selection });
    this.body = make("div", { class: "tensor-body" });
    this.node = make(
      "aside",
      { class: "panel tensor-panel", id: "tensor", "aria-label": "One tensor", tabIndex: -1 },
      this.body,
    );
    this.map = null;
    this.turn = 0;
    onTheme(() => this.map?.draw());
    selection.listen((changed) => {
      if (changed.has("row")) this.draw();
    });
  }

  /** Shows the selected row from the columns at once, and the rest when it arrives. */
  async draw() {
    const turn = ++this.turn; // answers for an earlier row are ignored
    const row = this.selection.get("row");
    const known = row !== null && row < this.data.rows;
    this.node.hidden = !known;
    document.body.classList.toggle("tensor-open", known);
    if (!known) return;
    this.node.scrollTop = 0;
    const waiting = make("p", { class: "hint" }, "…");
    this.body.replaceChildren(this.#head(row), this.#judgement(row, null), waiting);
    // Requests wait until the selection rests, because a large tensor takes the server some time.
    if (isServed()) await new Promise((done) => setTimeout(done, SETTLED));
    if (turn !== this.turn) return;
    let detail;
    try {
      detail = await this.data.detail(row);
    } catch (error) {
      waiting.replaceWith(make("p", { class: "hint", role: "alert" }, error.message));
      return;
    }
    if (turn !== this.turn) return;
    const parts = detail === null ? this.#withoutDetail(row) : this.#withDetail(row, detail);
    this.body.replaceChildren(this.#head(row), this.#judgement(row, detail), ...parts.filter((part) => part !== null));
  }

  #head(row) {
    const { data } = this;
    const facts = [data.tensorName(row), data.word("phase", row), `step ${data.column("step")[row]}`];
    for (const name of ["micro", "call"]) if (data.column(name)?.[row]) facts.push(`${name} ${data.column(name)[row]}`);
    if (data.head.ranks.length > 1) facts.push(`rank ${data.column("rank")[row]}`);
    const container = data.compares ? data.word("container", row) : "";
    const mapped = data.compares ? MAPPED.map((name) => data.word(name, row)).filter(Boolean).join(" · ") : "";
    return make(
      "header",
      { class: "tensor-head" },
      make(
        "button",
        {
          type: "button",
          class: "dismiss",
          title: "Close (Esc)",
          "aria-label": "Close",
          onclick: () => this.selection.set({ row: null }),
        },
        "×",
      ),
      make("h2", {}, data.moduleName(row)),
      make(
        "p",
        { class: "identity" },
        facts.join(" · "),
        data.word("cls", row) ? make("span", { class: "cls" }, data.word("cls", row)) : null,
      ),
      mapped ? make("p", { class: "identity" }, `in the candidate: ${mapped}`) : null,
      make(
        "p",
        { class: "verdict" },
        make("span", { class: `badge ${data.status(row)}` }, glyph(data.status(row))),
        data.isBirth(row) ? make("span", { class: "badge birth" }, `◀ ${birthWords(data.status(row))}`) : null,
        container && data.isBirth(row) ? make("span", {}, ` attributed to ${container}`) : null,
      ),
    );
  }

  #judgement(row, detail) {
    const { data } = this;
    const measured = (name) =>
      detail?.difference?.[name] !== undefined ? detail.difference[name] : data.column(name)?.[row];
    if (!data.compares) return "";
    const bar = isBound(data, row) || data.sizeOf(row) === Infinity ? 0 : data.column("bar_percent")?.[row];
    const hasRows = data.column("row_rel_l2")?.[row] >= 0; // NaN if only summaries were kept
    const exact = detail?.difference?.rel_l2;
    const error = exact === null || exact === undefined ? estimated(data, row) : estimated(data, row, Number(exact), 3);
    const entries = [
      ["relative error", `${error}${bar ? ` ± ${bar > 999 ? "> 999" : bar} %` : ""}`],
      ["allowed", number(data.column("tolerance")[row])],
      ["1 − cosine", number(measured("one_minus_cosine"))],
      ["max abs difference", number(measured("max_abs"))],
      ["max ULP", number(measured("max_ulp"))],
      ["mismatched", percent(measured("mismatched"))],
      ...(hasRows ? [["worst row", number(measured("row_rel_l2"))]] : []),
      ...(hasRows ? [["allowed per row", number(data.column("row_tolerance")?.[row])]] : []),
    ];
    const index = detail?.difference?.max_abs_index;
    const worst = detail?.difference?.row_index;
    const rule = data.word("rule", row);
    return make(
      "div",
      {},
      make(
        "dl",
        { class: "measures" },
        entries.map(([term, text]) => make("div", {}, make("dt", {}, term), make("dd", {}, text))),
      ),
      index
        ? make(
            "p",
            { class: "hint" },
            `greatest at ${place(index)}: ${precise(detail.difference.reference_value)} → ${precise(detail.difference.candidate_value)}`,
          )
        : null,
      worst?.length ? make("p", { class: "hint" }, `worst row at ${place(worst)}`) : null,
      rule ? make("p", { class: "hint" }, `allowed by: ${rule}`) : null,
    );
  }

  #withDetail(row, detail) {
    this.map = detail.map ? new ErrorMap(row, detail.map) : null;
    return [
      this.#needed(detail),
      sidesTable(detail.sides, this.data.head.statistics),
      detail.histogram
        ? part(
            "Values",
            distributions(detail.histogram),
            detail.histogram.scale === "symlog"
              ? "symmetric logarithmic bins; heights are roots of counts"
              : "heights are roots of counts",
            this.data.compares ? sidesKey() : null,
          )
        : null,
      this.map ? part("Where they differ", this.map.node) : null,
      ...this.#slices(row, detail),
      detail.ulps ? part("Distance in ULP", ulpBars(detail.ulps), "counts on a logarithmic scale") : null,
      detail.worst?.length ? part("Worst elements", worstTable(detail.worst)) : null,
      detail.why ? make("p", { class: "hint" }, `Single elements are not shown: ${detail.why}`) : null,
    ];
  }

  /** Elements without a map: of one run, or of sides without counterparts. */
  #slices(row, detail) {
    if (!isServed() || this.map) return [];
    if (!this.data.compares) return detail.source === "tensors" ? [part("Elements", new Slice(row).node)] : [];
    if (detail.sides.reference.shape === detail.sides.candidate?.shape) return [];
    return ["reference", "candidate"].map((side) => part(`Elements of the ${side}`, new Slice(row, side).node));
  }

  #withoutDetail(row) {
    const { data } = this;
    const names = [
      ...(data.compares
        ? ["mean", "std", "l2", "nan", "inf"]
        : ["rms", "absmax", "min", "max", "mean", "std", "l2", "zeros", "nan", "inf"]),
      ...data.added.map(({ name }) => name),
    ];
    const sides = data.compares ? ["_reference", "_candidate"] : [""];
    const value = (name, side) => {
      const found = data.column(name + side)?.[row];
      return ["nan", "inf"].includes(name) ? count(found) : number(found, 4);
    };
    const lines = names.map((name) => [name, ...sides.map((side) => value(name, side))]);
    return [
      table(data.compares ? ["", "reference", "candidate"] : ["", ""], [
        ["dtype", ...split(data, "dtype", row)],
        ["shape", ...split(data, "shape", row)],
        ...lines,
      ]),
      isServed()
        ? null
        : make(
            "p",
            { class: "hint" },
            "Details are in the page for births, the worst and a sample. tensortap view shows them for every tensor.",
          ),
    ];
  }

  #needed(detail) {
    const { needed } = detail;
    if (!needed) return null;
    const entries = [
      ["relative error", needed.rel_l2],
      ["atol (rtol = 0)", needed.atol],
      ["rtol (atol = 0)", needed.rtol],
      ["atol with default rtol", needed.atol_with_rtol],
    ].filter(([, value]) => value !== null && value !== undefined);
    if (!entries.length) return null;
    return part(
      "Tolerance needed to pass",
      make(
        "dl",
        { class: "measures" },
        entries.map(([term, value]) => make("div", {}, make("dt", {}, term), make("dd", {}, number(Number(value), 4)))),
      ),
      make("p", { class: "hint" }, "The whole tensor and its worst row would pass with this relative error."),
    );
  }
}

function split(data, name, row) {
  if (!data.compares) return [both(data, name, row)];
  return ["reference", "candidate"].map((side) => data.word(`${name}_${side}`, row, name));
}

function part(title, content, hint = "", key = null) {
  return make(
    "section",
    { class: "part" },
    make("h3", {}, title, key),
    content,
    hint ? make("p", { class: "hint" }, hint) : null,
  );
}

function sidesTable(sides, statistics) {
  const present = ["reference", "candidate"].filter((side) => sides[side]);
  const facts = [
    ["dtype", "dtype", String],
    ["shape", "shape", String],
    ...statistics.map(({ name, label, form }) => [name, label, FORMS[form]]),
  ];
  const lines = facts.map(([key, name, say]) => [name, ...present.map((side) => say(sides[side][key] ?? null))]);
  const shownSides = lines.filter(
    ([name, ...texts]) => !(["NaN", "+Inf", "−Inf"].includes(name) && texts.every((text) => text === "0")),
  );
  return part(
    present.length > 1 ? "Both sides" : "Summary",
    table(present.length > 1 ? ["", ...present] : ["", ""], shownSides),
  );
}

/** A small table; lines whose two sides differ are marked. */
function table(heads, lines) {
  return make(
    "table",
    { class: "sides" },
    heads.some(Boolean)
      ? make(
          "thead",
          {},
          make(
            "tr",
            {},
            heads.map((head) => make("th", { scope: "col", class: head ? `key-${head}` : "" }, head)),
          ),
        )
      : null,
    make(
      "tbody",
      {},
      lines.map(([name, ...texts]) => {
        const differs = texts.length === 2 && texts[0] !== texts[1];
        return make(
          "tr",
          { class: differs ? "differs" : "" },
          make(
            "th",
            { scope: "row" },
            name,
            differs ? make("span", { class: "unequal", title: "the sides differ" }, " ≠") : null,
          ),
          texts.map((text) => make("td", {}, text)),
        );
      }),
    ),
  );
}

function worstTable(worst) {
  return make(
    "div",
    { class: "scrolls" },
    make(
      "table",
      { class: "worst" },
      make(
        "thead",
        {},
        make(
          "tr",
          {},
          ["index", "reference", "candidate", "difference", "ULP"].map((head) => make("th", { scope: "col" }, head)),
        ),
      ),
      make(
        "tbody",
        {},
        worst.map((element) =>
          make(
            "tr",
            {},
            make("td", {}, place(element.index)),
            make("td", {}, precise(element.reference)),
            make("td", {}, precise(element.candidate)),
            make("td", {}, number(element.difference)),
            make("td", {}, number(element.ulp)),
          ),
        ),
      ),
    ),
  );
}
