// One layer, forward and backward: its blocks from left to right, and between them what the devices send each other.
import { choose } from "./arrays.js";
import { rowButton } from "./editor.js";
import { find, h, replace } from "./dom.js";
import { state, watch } from "./state.js";
import { writeBytes, writeSeconds } from "./units.js";

const ARROWS = {
  "all-gather": "⇉",
  "reduce-scatter": "⇇",
  "all-reduce": "⇄",
  "all-to-all": "⤨",
  "collective-permute": "↷",
};
const SMALL = 1 / 200; // of the bytes of the largest transfer over the same mesh axis: smaller ones share a box
const STACK = "layers"; // the module whose own operations stand between the blocks
const MOST_OPS = 5; // of a block that are listed
let chosen = null; // the box whose reasons are shown, as a key; the first one where it is gone
let whole = false; // with what stands before and after the layers

const lastName = (path) => path.split(".").at(-1);
const sum = (numbers) => numbers.reduce((a, b) => a + b, 0);
const isInLayer = ({ name }) => name.split(".").includes("layers");

// The blocks of a phase, and the transfers in the gaps before, between and after them.
function arrange({ blocks, collectives }, phase) {
  const ends = whole || !blocks.some(isInLayer);
  const timed = blocks.some(({ ops }) => ops.length); // of a target without times, all blocks are shown
  const places = blocks.map((block, index) => ({ block, index })).filter(({ block }) => block.phase === phase);
  const shown = places.filter(
    ({ block }) => (ends || isInLayer(block)) && block.name !== STACK && (!timed || block.ops.length),
  );
  const rest = sum(
    places.filter(({ block }) => block.name === STACK).flatMap(({ block }) => block.ops.map(({ seconds }) => seconds)),
  );
  const here = collectives.filter((one) => one.phase === phase);
  const often = Math.max(...here.map((one) => one.times_per_step ?? 1)) > 1;
  const touches = ({ after }) =>
    [after, after + 1].some((index) => blocks[index]?.phase === phase && isInLayer(blocks[index]));
  const kept = here.filter((one) => ends || (touches(one) && (!often || one.times_per_step > 1)));
  const largest = new Map();
  for (const { axis, bytes } of kept) largest.set(axis, Math.max(bytes, largest.get(axis) ?? 0));
  const isSmall = ({ axis, bytes }) => bytes < SMALL * largest.get(axis);
  const gapOf = ({ after }) => shown.filter(({ index }) => index <= after).length;
  const gaps = shown.concat(null).map((_, gap) =>
    gather(
      kept.filter((one) => gapOf(one) === gap),
      `${phase} ${gap}`,
      isSmall,
    ),
  );
  return { blocks: shown.map(({ block }) => block), gaps, rest };
}

// Transfers of one gap, kind, axis and row are one box: those of wq, wk and wv, say. The same box after an edit has the
// same key, so that it stays chosen.
function gather(transfers, gap, isSmall) {
  const name = (one) => [gap, ...(isSmall(one) ? ["small"] : [one.kind, one.axis, one.row])].join(" ");
  const boxes = [...Map.groupBy(transfers, name)].map(([key, members]) => {
    const timed = members.filter(({ seconds }) => seconds !== null);
    return {
      key,
      members,
      timed: timed.length > 0,
      bytes: sum(members.map(({ bytes }) => bytes)),
      small: isSmall(members[0]),
      seconds: sum(timed.map(({ seconds }) => seconds)),
      exposed: sum(timed.map(({ exposed_s }) => exposed_s ?? 0)),
    };
  });
  return boxes.sort((a, b) => a.small - b.small);
}

function drawBlock({ name, ops }) {
  const times = [...Map.groupBy(ops, (op) => lastName(op.name))].map(([op, same]) => [
    op,
    sum(same.map(({ seconds }) => seconds)),
  ]);
  times.sort(([, a], [, b]) => b - a);
  const rest = times.splice(MOST_OPS).map(([, seconds]) => seconds);
  if (rest.length) times.push([`${rest.length} more`, sum(rest)]);
  return h(
    "li",
    { class: "block" },
    h("b", { title: name }, lastName(name)),
    h(
      "ul",
      {},
      times.map(([op, seconds]) => h("li", {}, h("span", {}, op), h("span", { class: "dim" }, writeSeconds(seconds)))),
    ),
  );
}

function drawTransfers(box, axes, current) {
  const { key, members, bytes, small, timed, seconds, exposed } = box;
  const [{ kind, axis }] = members;
  const share = seconds > 0 ? Math.min(1, exposed / seconds) : 0;
  const wait = share > 0.995 ? "exposed" : share > 0.005 ? `${Math.round(100 * share)}% exposed` : "hidden";
  const what = small ? "small ones" : [h("span", { "aria-hidden": "true" }, `${ARROWS[kind] || "→"} `), kind];
  return h(
    "button",
    {
      type: "button",
      "data-key": key,
      "aria-pressed": current,
      style: `--exposed:${share}`,
      class: `collective ${small ? "small" : `axis-${axes.indexOf(axis.split(/\W+/)[0]) % 6}`} ${share > 0 ? "waits" : "overlapped"}`,
      title: share > 0 ? "The devices wait for the exposed part of its time." : "It is hidden behind computation.",
      onclick: () => {
        chosen = key;
        draw(state);
      },
    },
    h("span", { class: "what" }, what, members.length > 1 && ` × ${members.length}`),
    h("span", {}, small ? "" : `${axis} · `, writeBytes(bytes)),
    timed && !small && h("span", {}, writeSeconds(seconds), " ", h("span", { class: "wait" }, wait)),
  );
}

function drawPhase({ blocks, gaps, rest }, phase, axes, current) {
  const drawGap = (boxes) =>
    boxes.length > 0 &&
    h(
      "li",
      { class: "gap" },
      boxes.map((box) => drawTransfers(box, axes, box === current)),
    );
  return h(
    "div",
    { class: "phase" },
    h("h3", {}, phase, rest > 0 && h("span", { class: "dim" }, `, and ${writeSeconds(rest)} between the blocks`)),
    h(
      "ol",
      { class: "flow", "aria-label": `${phase} pass of one layer` },
      drawGap(gaps[0]),
      blocks.map((block, i) => [drawBlock(block), drawGap(gaps[i + 1])]),
    ),
  );
}

// A sentence whose rows stand between backticks; the row whose line is known leads to it.
const drawBecause = ({ because, row, line }, key) =>
  because.split("`").map((words, i) => {
    if (i % 2 === 0) return words;
    return words === row ? rowButton(row, line, key) : h("code", {}, words);
  });

function drawReason(box) {
  if (!box) return h("p", { class: "dim" }, "The devices send each other nothing here.");
  const drawMember = (member, i) => {
    const { kind, array, source } = member;
    const press = { type: "button", class: "row", "data-key": `reason array ${i}`, onclick: () => choose(array) };
    return h(
      "li",
      {},
      [h("b", {}, kind), " "],
      array && [h("button", press, "show the array"), " "],
      drawBecause(member, `reason row ${i}`),
      source && h("span", { class: "dim" }, " in ", h("code", {}, source)),
    );
  };
  return h("ul", {}, box.members.map(drawMember));
}

function draw({ layer, mesh }) {
  if (!mesh) return; // nothing has been estimated yet
  if (!layer) {
    replace(find("#layer"), h("p", { class: "dim" }, "Nothing is known of the layers of this program."));
    return;
  }
  const axes = mesh.axes.map(({ name }) => name);
  const phases = ["forward", "backward"].map((phase) => [phase, arrange(layer, phase)]);
  const boxes = phases.flatMap(([, { gaps }]) => gaps.flat());
  const box = boxes.find(({ key }) => key === chosen) ?? boxes[0];
  replace(
    find("#layer"),
    phases.map(([phase, arranged]) => drawPhase(arranged, phase, axes, box)),
    h("div", { id: "reason", "aria-live": "polite" }, drawReason(box)),
  );
}
find("#whole").addEventListener("change", ({ target }) => {
  whole = target.checked;
  draw(state);
});
watch(
  ({ layer, mesh }) => [layer, mesh?.axes],
  (_, now) => draw(now),
);
// The layer follows the figures a little later: it alone is grey until then.
watch(
  ({ layer, version }) => layer !== null && layer.version < version,
  (late) => find("#layer").classList.toggle("late", late),
);
