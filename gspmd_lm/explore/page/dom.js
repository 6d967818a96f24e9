// Makes and replaces elements. The views build their pictures with these few functions.

const SVG = "http://www.w3.org/2000/svg";
const SVG_TAGS = new Set(["svg", "g", "rect", "line", "text", "circle", "path", "polyline", "title"]);

// An element with its attributes and children. An attribute `onclick: f` listens. null leaves an attribute out, and so
// does false, except in aria-*, where it is written.
export function h(tag, attributes = {}, ...children) {
  const node = SVG_TAGS.has(tag) ? document.createElementNS(SVG, tag) : document.createElement(tag);
  for (const [name, value] of Object.entries(attributes)) {
    const flag = typeof value === "boolean" && !name.startsWith("aria-");
    if (value === null || value === undefined || (flag && !value)) continue;
    if (name.startsWith("on")) node.addEventListener(name.slice(2), value);
    else node.setAttribute(name, flag ? "" : value);
  }
  node.append(...children.flat(Infinity).filter((child) => child !== null && child !== undefined && child !== false));
  return node;
}

// Puts children in place of those of `root`. The element with the same `data-key` has the focus afterwards.
export function replace(root, ...children) {
  const focused = root.contains(document.activeElement) ? document.activeElement.dataset.key : null;
  root.replaceChildren(...children.flat(Infinity).filter(Boolean));
  if (focused) root.querySelector(`[data-key="${CSS.escape(focused)}"]`)?.focus({ preventScroll: true });
}

export const find = (selector) => document.querySelector(selector);
export const all = (selector, within = document) => [...within.querySelectorAll(selector)];
export const range = (n) => Array.from({ length: n }, (_, i) => i);
export const product = (sizes) => sizes.reduce((a, b) => a * b, 1);

const SHOWN_MS = 8000; // of a sentence that reports no mistake
let fading = null;

// Says a sentence in the corner of the page, which screen readers read aloud. It goes away by itself unless it is bad.
export function say(message, bad = false) {
  clearTimeout(fading);
  if (!bad) fading = setTimeout(() => say("", true), SHOWN_MS);
  const status = find("#status");
  status.textContent = message;
  status.classList.toggle("bad", bad);
}

// A function that calls `act` with one value at a time. Of the values that arrive meanwhile, the last one alone is next.
export function latest(act) {
  let running = false;
  let waiting = [];
  return async (value) => {
    waiting = [value];
    if (running) return;
    running = true;
    try {
      while (waiting.length) await act(waiting.pop());
    } catch (error) {
      say(error.message, true);
    } finally {
      running = false;
    }
  };
}

// Moves the focus among `nodes` with the arrow keys, as one does in a list.
export function moveFocus(event, nodes) {
  const by = { ArrowDown: 1, ArrowRight: 1, ArrowUp: -1, ArrowLeft: -1 }[event.key];
  const at = nodes.indexOf(event.target);
  const next = { Home: 0, End: nodes.length - 1 }[event.key] ?? (by === undefined ? -1 : at + by);
  if (at < 0 || next < 0 || next >= nodes.length) return;
  event.preventDefault();
  nodes[next].focus();
}
