// The columns of the large table: titles, text and sort order.

import { make } from "./dom.js";
import { count, number, percent } from "./format.js";
import { numberKeys, textKeys } from "./order.js";
import { glyph, gravity } from "./status.js";

const AT_LEAST = 65535; // in place of a bar
const NAMES = [
  { id: "status", label: "status", least: 112, stuck: true, fill: statusCell },
  { id: "module", label: "module", least: 170, grow: 3, stuck: true, fill: moduleCell },
  { id: "tensor", label: "tensor", least: 96, grow: 1, fill: (data, cell, row) => setText(cell, data.tensorName(row)) },
];
const WHERE = [
  { id: "step", label: "step", least: 52, number: true, fill: plain("step") },
  { id: "rank", label: "rank", least: 48, number: true, fill: plain("rank") },
];
const PAIR = [
  measure("rel_l2", "rel. error", 94, (data, row) => estimated(data, row)),
  measure("tolerance", "allowed", 74),
  measure("one_minus_cosine", "1 − cos", 74),
  measure("max_abs", "max abs", 74),
  measure("row_rel_l2", "worst row", 82),
  measure("max_ulp", "max ULP", 74),
  measure("mismatched", "mismatched", 88, (data, row) => percent(data.column("mismatched")[row])),
];
const RECORD = [
  measure("rms", "rms", 74),
  measure("absmax", "abs. max", 74),
  measure("mean", "mean", 78),
  measure("std", "std", 74),
  measure("zeros", "zeros", 66, (data, row) => percent(data.column("zeros")[row])),
  measure("nan", "NaN", 62, (data, row) => count(data.column("nan")[row])),
  measure("inf", "Inf", 62, (data, row) => count(data.column("inf")[row])),
];
const TAIL = [
  { id: "phase", label: "phase", least: 76, fill: (data, cell, row) => setText(cell, data.word("phase", row)) },
  { id: "cls", label: "class", least: 110, fill: (data, cell, row) => setText(cell, data.word("cls", row)) },
  { id: "dtype", label: "dtype", least: 84, fill: (data, cell, row) => setText(cell, both(data, "dtype", row)) },
  { id: "shape", label: "shape", least: 120, fill: (data, cell, row) => setText(cell, both(data, "shape", row)) },
];

/** The columns for this page: step and rank only where there are several. */
export function tableColumns(data) {
  const where = WHERE.filter(({ id }) => data.head[`${id}s`].length > 1);
  const added = data.added.map(({ name, label, form }) =>
    measure(name, label, 74, form === "share" ? (all, row) => percent(all.column(name)[row]) : undefined),
  );
  return [...NAMES, ...(data.compares ? PAIR : [...RECORD, ...added]), ...where, ...TAIL].map((column) => ({
    ...column,
    sortable: true,
    title: data.columns.described.get(column.id)?.text ?? "",
    fill: (cell, row) => column.fill(data, cell, row),
  }));
}

/** Keys to sort all rows by a column. */
export function sortKeys(data, id) {
  const { words, modules } = data.head;
  if (id === "module") return textKeys(data.column("module"), modules.name);
  if (id === "tensor") return tensorKeys(data);
  if (id === "status") return severity(data);
  const source = data.columns.has(id) ? id : `${id}_reference`;
  if (words[id]) return textKeys(data.column(source), words[id]);
  if (id === data.size) return numberKeys(Float32Array.from({ length: data.rows }, (_, row) => data.sizeOf(row)));
  return numberKeys(data.column(source));
}

/** "float32", or "float32 → bfloat16" where the sides differ. */
export function both(data, name, row) {
  if (!data.compares) return data.word(name, row);
  const [reference, candidate] = ["reference", "candidate"].map((side) => data.word(`${name}_${side}`, row, name));
  return reference === candidate ? reference : `${reference} → ${candidate}`;
}

/** The relative error: infinite if one side alone is not finite, with a tilde for an estimate, with ≥ if only norms are
 * known. */
export function estimated(data, row, measured = data.column("rel_l2")[row], digits = digitsOf(data, "rel_l2")) {
  const error = data.status(row) === "nonfinite" ? Infinity : measured;
  if (error === Infinity) return number(error);
  if (isBound(data, row)) return `≥ ${number(error, digits)}`;
  return `${data.column("exact")[row] || !(error > 0) ? "" : "~"}${number(error, digits)}`;
}

/** Whether the error is a lower bound. */
export function isBound(data, row) {
  return data.column("bar_percent")?.[row] === AT_LEAST;
}

/** The digits of a column to show: long tables keep only some bits of each number. */
function digitsOf(data, id) {
  const bits = data.columns.described.get(id)?.bits ?? 23;
  return Math.min(3, Math.floor((bits + 1) * Math.log10(2)));
}

function measure(id, label, least, say = (data, row) => number(data.column(id)[row], digitsOf(data, id))) {
  const fill = (data, cell, row) => setText(cell, data.column(id) === null ? "" : say(data, row));
  return { id, label, least, number: true, fill };
}

function plain(id) {
  return (data, cell, row) => setText(cell, String(data.column(id)[row]));
}

function setText(cell, text) {
  if (cell.textContent !== text) cell.textContent = text;
}

function statusCell(data, cell, row) {
  cell.replaceChildren(...glyph(data.status(row), data.isBirth(row)));
}

// Names are cut at the beginning, because they differ at the end.
function moduleCell(data, cell, row) {
  const name = data.moduleName(row);
  cell.classList.add("cut");
  cell.title = name;
  if (cell.firstChild) setText(cell.firstChild, name);
  else cell.append(make("bdi", { dir: "ltr" }, name));
}

function tensorKeys(data) {
  const [kind, path] = [data.column("kind"), data.column("path")];
  const paths = textKeys(path, data.head.words.path);
  const keys = new Uint32Array(data.rows);
  for (let row = 0; row < keys.length; row++) keys[row] = kind[row] * (1 << 24) + paths[row];
  return keys;
}

/** Sorts births first, then failed pairs, then close ones, when descending. */
function severity(data) {
  const [status, birth] = [data.column("status"), data.column("birth")];
  const places = data.head.words.status.map(gravity);
  const keys = new Uint32Array(data.rows);
  for (let row = 0; row < keys.length; row++) keys[row] = places[status[row]] + birth[row] * 16;
  return keys;
}
