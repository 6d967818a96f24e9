// Completion in the rules file: which names may stand at the cursor, each with its one-line meaning.
import { get } from "./state.js";

const AXIS_TABLES = new Set(["mesh", "dcn"]); // their keys are axes of the mesh; all other tables split arrays
let words = null;

const options = (meanings, type, after = "") =>
  Object.entries(meanings || {}).map(([label, meaning]) => ({ label, detail: meaning, type, apply: label + after }));

// What stands around the cursor: the table, the key if the cursor is behind its colon, and the word before the cursor.
export function findPlace(lines, before) {
  const indented = /^\s/.test(before);
  const flow = before.match(/^(\w+):\s*\{([^}]*)$/);
  const above = [...lines].reverse().find((line) => /^\w/.test(line));
  const table = flow ? flow[1] : indented ? (above || "").match(/^\w+/)?.[0] : null;
  const inner = flow ? flow[2].split(",").at(-1).trimStart() : before.trimStart();
  const [, key] = inner.match(/^([\w.*]+):/) || [];
  return { table: table || null, key: key || null, word: before.match(/[\w.]*$/)[0] };
}

function optionsAt({ table, key, word }) {
  const { keys, axes, arrays, mesh_axes, values } = words;
  if (key) {
    const known = values[table ? `${table}.${key}` : key] || values[key];
    if (known) return known.map((label) => ({ label: `${label}`, type: "enum" }));
    return table && !AXIS_TABLES.has(table) ? options(mesh_axes, "variable") : [];
  }
  if (!table) return options(keys, "keyword", ": ");
  if (AXIS_TABLES.has(table)) return options(mesh_axes, "variable", ": ");
  const inside = Object.entries(keys).filter(([name]) => name.startsWith(`${table}.`));
  if (inside.length)
    return options(
      Object.fromEntries(inside.map(([name, about]) => [name.slice(table.length + 1), about])),
      "keyword",
      ": ",
    );
  const [array, axis] = word.split(".");
  if (axis !== undefined) {
    // an axis of one array, such as residual.seq
    return Object.entries(axes).map(([name, meaning]) => ({
      label: `${array}.${name}`,
      detail: meaning,
      type: "property",
      apply: `${array}.${name}: `,
    }));
  }
  return [...options(axes, "property", ": "), ...options(arrays, "class", ".")];
}

// CodeMirror's source of completions.
export async function complete(context) {
  words ??= await get("/complete");
  const line = context.state.doc.lineAt(context.pos);
  const before = line.text.slice(0, context.pos - line.from);
  if (before.includes("#")) return null;
  const place = findPlace(context.state.doc.toString().slice(0, line.from).split("\n"), before);
  if (!place.word && !context.explicit) return null;
  return { from: context.pos - place.word.length, options: optionsAt(place), validFor: /^[\w.]*$/ };
}
