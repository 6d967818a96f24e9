// The tree of arrays, and the chosen one: its bytes, the rows that split it, and its picture on the mesh.
import { rowButton } from "./editor.js";
import { find, h, moveFocus, replace } from "./dom.js";
import { drawPlacement } from "./mesh.js";
import { state, watch } from "./state.js";

const GROUPS = { weights: "weights", optimizer: "optimizer state", activations: "activations" };
let chosen = null;
const closed = new Set(); // groups that are folded

const describe = (axes) => (axes.length ? axes.join("×") : "·");
const splitText = (array) => (array.at_rest || array.in_use || []).map(describe).join(" ");

// What tells an array from others of its path: a weight and its moments share theirs.
const keyOf = (arrays, array) =>
  `${array.group} ${array.path} ${arrays.filter(({ group, path }) => group === array.group && path === array.path).indexOf(array)}`;

// The chosen array; at first the one that is split in the most ways.
function findChosen(arrays) {
  const ways = ({ at_rest, in_use }) => (at_rest || in_use || []).flat().length;
  return (
    arrays.find((array) => keyOf(arrays, array) === chosen) ||
    arrays.reduce((best, array) => (!best || ways(array) > ways(best) ? array : best), null)
  );
}

// Chooses an array by its path, as the other views do.
export function choose(path) {
  const { arrays } = state;
  const array = arrays.find((one) => one.path === path);
  if (array) chooseKey(keyOf(arrays, array));
}

function chooseKey(key) {
  chosen = key;
  closed.delete(key.split(" ")[0]); // its group
  draw(state);
  find(`#tree [aria-selected="true"]`)?.scrollIntoView({ block: "nearest" });
}

function drawTree(arrays, current) {
  const item = (array) =>
    h(
      "li",
      {
        role: "treeitem",
        tabindex: array === current ? 0 : -1,
        "aria-selected": array === current,
        "data-path": array.path,
        "data-key": keyOf(arrays, array),
        onclick: () => chooseKey(keyOf(arrays, array)),
      },
      h("span", { class: "path", title: array.path }, h("bdi", {}, array.path)),
      h("span", { class: "split dim" }, splitText(array)),
      h("span", { class: "num" }, array.bytes_text),
    );
  return Object.entries(GROUPS).map(([group, label]) => {
    const members = arrays.filter((array) => array.group === group);
    if (!members.length) return null;
    const fold = () => {
      if (!closed.delete(group)) closed.add(group);
      draw(state);
    };
    return h(
      "li",
      {
        role: "treeitem",
        "aria-expanded": !closed.has(group),
        tabindex: -1,
        "data-key": `group ${group}`,
        "data-group": group,
        "aria-label": `${label}, ${members.length} arrays`,
      },
      h("span", { class: "fold", onclick: fold }, label, h("span", { class: "dim" }, ` ${members.length}`)),
      !closed.has(group) && h("ul", { role: "group" }, members.map(item)),
    );
  });
}

function onTreeKey(event) {
  const { group, key } = event.target.dataset;
  if (event.key === "Enter" || event.key === " ") {
    event.preventDefault();
    if (!group) chooseKey(key);
    else if (!closed.delete(group)) closed.add(group);
    draw(state);
  } else if ((event.key === "ArrowLeft" || event.key === "ArrowRight") && group) {
    if (event.key === "ArrowLeft") closed.add(group);
    else closed.delete(group);
    draw(state);
  } else moveFocus(event, [...find("#tree").querySelectorAll("[role=treeitem]")]);
}
find("#tree").addEventListener("keydown", onTreeKey);
find("#tree").addEventListener("focusin", ({ target: { dataset } }) => {
  if (dataset.path && dataset.key !== chosen) chooseKey(dataset.key);
});

function drawDetails(array) {
  if (!array) return null;
  const dimensions = array.shape.map((size, i) => {
    const own = new Map(array.rows.filter(({ dim }) => dim === i).map(({ row, line }) => [row, line]));
    const rows = [...own].map(([row, line], n) => rowButton(row, line, `dimension ${i} ${n}`));
    const isSplit = [array.at_rest, array.in_use].some((split) => split?.[i]?.length);
    const ways = (split) => (split ? describe(split[i] || []) : "–");
    return h(
      "tr",
      {},
      h("th", { scope: "row" }, array.axes[i] ?? `${i}`),
      h("td", { class: "num" }, size.toLocaleString("en")),
      h("td", {}, ways(array.at_rest)),
      h("td", {}, ways(array.in_use)),
      h("td", {}, rows.length ? rows : isSplit ? null : h("span", { class: "dim" }, "no row: whole")),
    );
  });
  const head = ["dimension", "size", "at rest", "in use", "because of"].map((name) => h("th", { scope: "col" }, name));
  return [
    h(
      "h3",
      {},
      h("code", {}, array.path),
      h("span", { class: "dim" }, ` ${array.dtype}, ${array.bytes_text} on a device`),
    ),
    h("div", { class: "scroll" }, h("table", {}, h("thead", {}, h("tr", {}, head)), h("tbody", {}, dimensions))),
  ];
}

function draw({ arrays, mesh }) {
  if (!mesh) return; // nothing has been estimated yet
  const current = findChosen(arrays);
  chosen = current ? keyOf(arrays, current) : null;
  replace(find("#tree"), drawTree(arrays, current));
  replace(find("#array"), drawDetails(current));
  drawPlacement(find("#placement"), mesh, current);
}
watch(
  ({ arrays, mesh }) => [arrays, mesh],
  (_, now) => draw(now),
);
