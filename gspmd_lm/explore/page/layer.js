// One layer, forward and backward: its blocks from left to right, and between them what the devices send each other.
import { choose } from "./arrays.js";
import { rowButton } from "./editor.js";
import { find, h, replace } from "./dom.js";
import { state, watch } from "./state.js";
import { writeBytes, writeSeconds } from "./units.js";

const ARROWS = { "all-gather": "⇉", "reduce-scatter": "⇇", "all-reduce": "⇄", "all-to-all": "⤨", "collective-permute": "↷" };
let chosen = null; // the transfers whose reasons are shown, as a key

const lastName = (path) => path.split(".").at(-1);
const sum = (numbers) => numbers.reduce((a, b) => a + b, 0);

// Transfers of the same kind, at the same place and because of the same row are one box: those of wq, wk and wv, say.
// The same box after an edit has the same key, so that it stays chosen.
function gather(collectives) {
  const key = ({ phase, after, kind, axis, row }) => [phase, after, kind, axis, row].join(" ");
  return [...Map.groupBy(collectives, key)].map(([name, members]) => {
    const known = members.filter(({ seconds }) => seconds !== null);
    const [seconds, exposed] = [sum(known.map((one) => one.seconds)), sum(known.map(({ exposed_s }) => exposed_s ?? 0))];
    return { ...members[0], key: name, members, bytes: sum(members.map(({ bytes }) => bytes)), timed: known.length > 0, seconds, exposed };
  });
}

const drawBlock = ({ name, ops }) => h("li", { class: "block" }, h("b", { title: name }, lastName(name)),
  h("ul", {}, ops.map((op) => h("li", {}, h("span", {}, lastName(op.name)), " ", h("span", { class: "dim" }, op.text)))));

function drawTransfers(box, axes) {
  const { key, kind, axis, members, bytes, timed, seconds, exposed } = box;
  const share = seconds > 0 ? Math.min(1, exposed / seconds) : 0;
  const wait = share > 0.995 ? "exposed" : share > 0.005 ? `${Math.round(100 * share)}% exposed` : "hidden";
  return h("li", {}, h("button", {
    type: "button", class: `collective axis-${axes.indexOf(axis.split(/\W+/)[0]) % 6} ${share > 0 ? "waits" : "overlapped"}`, "data-key": key,
    "aria-expanded": chosen === key, "aria-controls": "reason", style: `--exposed:${share}`,
    title: share > 0 ? "The devices wait for the exposed part of its time." : "It is hidden behind computation.",
    onclick: () => { chosen = chosen === key ? null : key; draw(state); },
  }, h("span", { class: "what" }, h("span", { "aria-hidden": "true" }, `${ARROWS[kind] || "→"} `), kind, members.length > 1 && ` × ${members.length}`),
  h("span", {}, `${axis} · ${writeBytes(bytes)}`),
  timed && h("span", {}, writeSeconds(seconds), " ", h("span", { class: "wait" }, wait))));
}

// Blocks and transfers of a phase, in their order: after block -1 stands what comes before the first.
function drawPhase({ blocks }, boxes, phase, axes) {
  const own = blocks.map((block, index) => ({ block, index })).filter(({ block }) => block.phase === phase);
  const after = (index) => boxes.filter((box) => box.phase === phase && box.after === index).map((box) => drawTransfers(box, axes));
  const steps = [after((own[0]?.index ?? 0) - 1), own.map(({ block, index }) => [drawBlock(block), after(index)])];
  return h("div", { class: "phase" }, h("h3", {}, phase), h("ol", { class: "flow", "aria-label": `${phase} pass of one layer` }, steps));
}

function drawReason(box) {
  if (!box) return h("p", { class: "dim" }, "Choose a transfer to see why it is there.");
  return h("ul", {}, box.members.map(({ because, row, line, array, source }, i) => h("li", {},
    h("b", {}, box.kind), ": ", because, " ", row && rowButton(row, line, `reason row ${i}`), " ",
    array && h("button", { type: "button", class: "row", "data-key": `reason array ${i}`, onclick: () => choose(array) }, array), " ",
    source && h("span", { class: "dim" }, "in ", h("code", {}, source)))));
}

function draw({ layer, mesh }) {
  if (!mesh) return; // nothing has been estimated yet
  if (!layer) {
    replace(find("#layer"), h("p", { class: "dim" }, "Nothing is known of the layers of this program."));
    return;
  }
  const axes = mesh.axes.map(({ name }) => name);
  const boxes = gather(layer.collectives);
  replace(find("#layer"),
    ["forward", "backward"].map((phase) => drawPhase(layer, boxes, phase, axes)),
    h("div", { id: "reason", "aria-live": "polite" }, drawReason(boxes.find(({ key }) => key === chosen))));
}
watch(({ layer, mesh }) => [layer, mesh?.axes], (_, now) => draw(now));
