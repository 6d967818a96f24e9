// One layer, forward and backward: its blocks from left to right, and between them what the devices send each other.
import { choose } from "./arrays.js";
import { rowButton } from "./editor.js";
import { find, h, replace } from "./dom.js";
import { state, watch } from "./state.js";

const ARROWS = { "all-gather": "⇉", "reduce-scatter": "⇇", "all-reduce": "⇄", "all-to-all": "⤨", "collective-permute": "↷" };
let chosen = null; // the collective whose reasons are shown, as a key

// The same collective after an edit has the same key, so that it stays chosen.
const keyOf = ({ phase, after, kind, axis, array }) => [phase, after, kind, axis, array].join(" ");

const drawBlock = ({ name, ops }) => h("li", { class: "block" }, h("b", {}, name),
  h("ul", {}, ops.map((op) => h("li", {}, op.name, " ", h("span", { class: "dim" }, op.text)))));

function drawCollective(collective, axes) {
  const { kind, axis, bytes_text, text, seconds, exposed_s } = collective;
  const key = keyOf(collective);
  const waits = exposed_s > 0;
  const share = seconds > 0 ? Math.min(1, exposed_s / seconds) : 0;
  return h("li", {}, h("button", {
    type: "button", class: `collective axis-${axes.indexOf(axis.split(/\W+/)[0]) % 6} ${waits ? "waits" : "hidden-time"}`, "data-key": key,
    "aria-expanded": chosen === key, "aria-controls": "reason", style: `--exposed:${share}`,
    title: waits ? "some of its time is exposed: the devices wait" : "hidden behind computation",
    onclick: () => { chosen = chosen === key ? null : key; draw(state); },
  }, h("span", { class: "what" }, h("span", { "aria-hidden": "true" }, `${ARROWS[kind] || "→"} `), kind),
  h("span", {}, `${axis} · ${bytes_text}`), h("span", {}, text), h("span", { class: "wait" }, waits ? "exposed" : "hidden")));
}

// Blocks and collectives of a phase, in their order: after block -1 stands what comes before the first.
function drawPhase({ blocks, collectives }, phase, axes) {
  const here = collectives.filter((collective) => collective.phase === phase);
  const steps = [];
  const after = (index) => here.filter((collective) => collective.after === index).map((collective) => drawCollective(collective, axes));
  const own = blocks.map((block, index) => ({ block, index })).filter(({ block }) => block.phase === phase);
  steps.push(...after((own[0]?.index ?? 0) - 1));
  for (const { block, index } of own) steps.push(drawBlock(block), ...after(index));
  return h("div", { class: "phase" }, h("h3", {}, phase),
    h("ol", { class: "flow", "aria-label": `${phase} pass of one layer` }, steps));
}

function drawReason(collective) {
  if (!collective) return h("p", { class: "dim" }, "Choose a transfer to see why it is there.");
  const { kind, because, row, line, array, source } = collective;
  return h("p", {}, h("b", {}, kind), ": ", because, " ", row && rowButton(row, line, "reason row"),
    array && [" ", h("button", { type: "button", class: "row", "data-key": "reason array", onclick: () => choose(array) }, array)],
    source && [" ", h("span", { class: "dim" }, "in ", h("code", {}, source))]);
}

function draw({ layer, mesh }) {
  if (!mesh) return; // nothing has been estimated yet
  if (!layer) {
    replace(find("#layer"), h("p", { class: "dim" }, "Nothing is known of the layers of this program."));
    return;
  }
  const axes = mesh.axes.map(({ name }) => name);
  replace(find("#layer"),
    drawPhase(layer, "forward", axes), drawPhase(layer, "backward", axes),
    h("div", { id: "reason", "aria-live": "polite" }, drawReason(layer.collectives.find((collective) => keyOf(collective) === chosen))));
}
watch(({ layer, mesh }) => [layer, mesh?.axes], (_, now) => draw(now));
