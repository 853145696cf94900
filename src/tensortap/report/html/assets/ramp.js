// The size of an error as a colour: a ramp over its logarithm that is safe for colour-blind readers. Small errors are close
// to the background colour and large ones far from it, so the dark theme reverses the ramp.

const STOPS = [
  [0, 34, 78],
  [15, 52, 108],
  [38, 79, 140],
  [69, 108, 160],
  [110, 137, 163],
  [156, 163, 148],
  [195, 184, 122],
  [222, 203, 110],
  [242, 222, 138],
  [253, 240, 180],
];

/** A ramp between two positive errors. */
export class Ramp {
  constructor(low, high) {
    this.low = low;
    this.high = Math.max(high, low * 10);
    this.dark = false;
  }

  /** The position of an error, 0 to 1; zero is below the ramp, at -1. */
  place(error) {
    if (!(error > 0)) return error === 0 ? -1 : NaN;
    const span = Math.log10(this.high) - Math.log10(this.low);
    return Math.min(1, Math.max(0, (Math.log10(error) - Math.log10(this.low)) / span));
  }

  /** [red, green, blue] at a place between 0 and 1. */
  at(place) {
    const along = (this.dark ? place : 1 - place) * (STOPS.length - 1);
    const start = Math.min(STOPS.length - 2, Math.floor(along));
    return STOPS[start].map((channel, at) => Math.round(channel + (STOPS[start + 1][at] - channel) * (along - start)));
  }

  /** The colour of an error, or null if it is zero or was not measured. */
  colour(error) {
    const place = this.place(error);
    return place >= 0 ? this.at(place) : null;
  }
}

/** The text colour to put on a background. */
export function ink(colour) {
  const [red, green, blue] = colour.map((channel) => {
    const share = channel / 255;
    return share <= 0.04045 ? share / 12.92 : ((share + 0.055) / 1.055) ** 2.4;
  });
  return 0.2126 * red + 0.7152 * green + 0.0722 * blue > 0.179 ? "#10161d" : "#ffffff";
}

export function css(colour) {
  return `rgb(${colour.join(" ")})`;
}
