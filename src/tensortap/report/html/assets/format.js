// Numbers and names as people read them. The data holds numbers; this is the only place that rounds.

/** A measured number to three or four digits: 0, 0.0123, 42.5, 1.53e-5; "–" where nothing was measured. */
export function number(value, digits = 3) {
  if (typeof value === "string") return value === "NaN" ? value : number(Number(value), digits);
  if (value === null || value === undefined || Number.isNaN(value)) return "–";
  if (value === 0) return "0";
  if (!Number.isFinite(value)) return value > 0 ? "∞" : "-∞";
  const size = Math.abs(value);
  if (size >= 1e-2 && size < 1e5) {
    return Number.isInteger(value)
      ? value.toLocaleString("en")
      : String(Number(value.toPrecision(digits + (digits > 2 ? 1 : 0))));
  }
  return value.toExponential(digits - 1).replace("e+", "e");
}

/** A number with all digits of a float32, for values that are compared side by side. */
export function precise(value) {
  if (value === null || value === undefined) return "–";
  if (typeof value === "string") return number(value); // "NaN", "Infinity": JSON lacks them
  if (!Number.isFinite(value)) return number(value);
  const short = String(Number(value.toPrecision(9)));
  return short.length <= 14 ? short : value.toExponential(8);
}

/** A count with thousands separators. */
export function count(value) {
  return value === null || value === undefined ? "–" : value.toLocaleString("en");
}

/** A share between 0 and 1 as per cent. */
export function percent(value) {
  const share = value === null || value === undefined ? NaN : Number(value);
  if (Number.isNaN(share)) return "–";
  return share === 0 ? "0 %" : `${number(share * 100, 2)} %`;
}

/** Microseconds to three digits: 0.40 µs, 12.3 ms; "–" for none. */
export function duration(value) {
  if (!value) return "–";
  const units = [
    ["µs", 1],
    ["ms", 1e3],
    ["s", 1e6],
  ];
  const [unit, size] = units.find(([, length]) => Math.abs(value) / length < 999.5) ?? units[2];
  const shown = value / size;
  const length = Math.abs(shown);
  return `${shown.toFixed(length < 9.995 ? 2 : length < 99.95 ? 1 : 0)} ${unit}`;
}

/** A power of ten for an axis: 10⁻⁵. */
export function powerOfTen(value) {
  const exponent = Math.round(Math.log10(value));
  if (exponent >= -2 && exponent <= 3) return String(Number(value.toPrecision(1)));
  const raised = String(exponent).replace(/./g, (sign) => (sign === "-" ? "⁻" : "⁰¹²³⁴⁵⁶⁷⁸⁹"[Number(sign)]));
  return `10${raised}`;
}

/** A module's name; the root has none. */
export function shown(module) {
  return module === "" ? "(root)" : module;
}

/** A shape: 4 × 16 × 64; a scalar has none. */
export function shape(sizes) {
  if (sizes === null || sizes === undefined) return "–";
  return sizes.length ? sizes.join(" × ") : "scalar";
}

/** An index into a tensor: [0, 12, 3]. */
export function place(index) {
  return index === null || index === undefined ? "–" : `[${index.join(", ")}]`;
}
