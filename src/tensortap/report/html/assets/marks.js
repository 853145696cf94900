// Marks over plots and maps; `scale` is the number of device pixels per CSS pixel.

import { colour } from "./theme.js";

/** A birth. */
export function diamond(pen, x, y, reach, scale = 1) {
  pen.beginPath();
  pen.moveTo(x, y - reach);
  pen.lineTo(x + reach, y);
  pen.lineTo(x, y + reach);
  pen.lineTo(x - reach, y);
  pen.closePath();
  pen.fillStyle = colour("birth-mark");
  pen.fill();
  stroked(pen, colour("panel"), scale);
}

/** A value without a finite size. */
export function cross(pen, x, y, reach, scale = 1) {
  pen.beginPath();
  pen.moveTo(x - reach, y - reach);
  pen.lineTo(x + reach, y + reach);
  pen.moveTo(x - reach, y + reach);
  pen.lineTo(x + reach, y - reach);
  stroked(pen, colour("nonfinite-mark"), scale);
}

function stroked(pen, style, scale) {
  pen.lineWidth = 1.5 * scale;
  pen.strokeStyle = style;
  pen.stroke();
}
