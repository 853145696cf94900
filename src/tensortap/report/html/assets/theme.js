// Light and dark theme: the preference of the system or the user. Canvases read the colours of the style sheet here.

const KEY = "tensortap-theme";
const prefersDark = window.matchMedia("(prefers-color-scheme: dark)");
const listeners = [];
const known = new Map();

/** "light" or "dark". */
export function theme() {
  return document.documentElement.dataset.theme || (prefersDark.matches ? "dark" : "light");
}

export function toggleTheme() {
  document.documentElement.dataset.theme = theme() === "dark" ? "light" : "dark";
  remembered(document.documentElement.dataset.theme);
  changed();
}

/** Calls back after each change. */
export function onTheme(listener) {
  listeners.push(listener);
}

/** A custom colour of the style sheet, resolved for the theme. */
export function colour(name) {
  if (!known.has(name)) {
    const probe = document.createElement("span");
    probe.style.color = `var(--${name})`;
    document.body.append(probe);
    known.set(name, getComputedStyle(probe).color);
    probe.remove();
  }
  return known.get(name);
}

/** Restores an earlier choice. */
export function startTheme() {
  const chosen = remembered();
  if (chosen === "light" || chosen === "dark") document.documentElement.dataset.theme = chosen;
  prefersDark.addEventListener("change", changed);
}

function changed() {
  known.clear();
  for (const listener of listeners) listener();
}

// A page from disk may have no storage.
function remembered(value) {
  try {
    if (value) localStorage.setItem(KEY, value);
    return localStorage.getItem(KEY);
  } catch {
    return null;
  }
}
