// Elements from code. Text from data becomes text nodes only, so no name can become markup.

const SVG = "http://www.w3.org/2000/svg";

/** An element with properties, attributes (those with a dash, and role) and children: nodes, strings or null. */
export function make(tag, properties = {}, ...children) {
  return filled(document.createElement(tag), properties, children);
}

/** The same in SVG, where everything is an attribute. */
export function draw(tag, attributes = {}, ...children) {
  const node = document.createElementNS(SVG, tag);
  for (const [name, value] of Object.entries(attributes)) node.setAttribute(name, value);
  node.append(...children.filter((child) => child !== null));
  return node;
}

function filled(node, properties, children) {
  for (const [name, value] of Object.entries(properties)) {
    if (value === null || value === undefined) continue;
    if (name.startsWith("on")) node.addEventListener(name.slice(2), value);
    else if (name === "class") node.className = value;
    else if (name === "for") node.htmlFor = value;
    else if (name.includes("-") || name === "role") node.setAttribute(name, value);
    else node[name] = value;
  }
  node.append(...children.flat().filter((child) => child !== null && child !== undefined));
  return node;
}

/** Sets one custom property or style through the CSSOM, which a content security policy allows. */
export function styled(node, styles) {
  for (const [name, value] of Object.entries(styles)) node.style.setProperty(name, value);
  return node;
}

/** A canvas of a size in CSS pixels, sharp on any screen, and its context. */
export function canvas(width, height, properties = {}) {
  const scale = window.devicePixelRatio || 1;
  const node = make("canvas", properties);
  node.width = Math.round(width * scale);
  node.height = Math.round(height * scale);
  styled(node, { width: `${width}px`, height: `${height}px` });
  const context = node.getContext("2d");
  context.scale(scale, scale);
  return { node, context };
}
