// Cells of a map: a colour for the size and, if it fits, the number, so that nothing depends on colour alone.

import { FONT } from "./axes.js";
import { number } from "./format.js";
import { css, ink } from "./ramp.js";
import { colour } from "./theme.js";

/** The least width of a cell with a number. */
export const WIDE_ENOUGH = 44;
const HIGH_ENOUGH = 15;

/** Draws one cell into [x, y, width, height]; its number is moved right by `shift`. */
export function cell(pen, ramp, size, [x, y, width, height], shift = 0) {
  const [background, text, said] = looks(ramp, size);
  pen.fillStyle = background;
  pen.fillRect(x, y, width, height);
  if (width < WIDE_ENOUGH + 2 * shift || height < HIGH_ENOUGH) return;
  pen.fillStyle = text;
  pen.font = `11px ${FONT}`;
  pen.textBaseline = "middle";
  pen.textAlign = "center";
  pen.fillText(said, x + width / 2 + shift, y + height / 2 + 0.5);
  pen.textAlign = "start";
}

/** Background, text colour and text of a cell. */
function looks(ramp, size) {
  if (size === null || Number.isNaN(size)) return [colour("none-fill"), colour("muted"), "–"];
  if (!Number.isFinite(size)) return [colour("lost-fill"), "#ffffff", "✖"];
  const found = ramp.colour(size);
  if (found === null) return [colour("equal-fill"), colour("ok-ink"), "0"];
  return [css(found), ink(found), number(size, 2)];
}
