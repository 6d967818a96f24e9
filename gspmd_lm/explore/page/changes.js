// What changed against the pinned layout, row by row.
import { find, h, replace } from "./dom.js";
import { watch } from "./state.js";

watch(
  ({ changes }) => changes,
  (changes) => {
    find("#changes-section").hidden = changes === null;
    if (changes === null) return;
    const rows = changes.map(({ row, lines }) =>
      h(
        "li",
        {},
        h("code", { class: row.startsWith("+") ? "good" : row.startsWith("-") ? "bad" : "" }, row),
        h(
          "ul",
          {},
          lines.map((line) => h("li", {}, line)),
        ),
      ),
    );
    replace(
      find("#changes"),
      rows.length ? h("ul", { class: "rows" }, rows) : h("p", { class: "dim" }, "This is the pinned layout."),
    );
  },
);
