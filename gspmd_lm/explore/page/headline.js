// The headline: what the layout costs, each figure with how it is known, and its change against the pinned layout.
import { find, h, replace } from "./dom.js";
import { watch } from "./state.js";

const KINDS = {
  counted: "counted exactly",
  estimated: "estimated from the traced program",
  compiled: "read from the compiled program",
};

function drawChange({ pinned, better }) {
  if (!pinned) return null;
  const { change, change_text, text } = pinned;
  const good = better === "lower" ? change < 0 : change > 0;
  const judged = !change || !better ? "same" : good ? "good" : "bad";
  return h(
    "span",
    { class: `change ${judged}`, title: `pinned: ${text}` },
    change_text,
    h(
      "span",
      { class: "unseen" },
      ` against the pinned ${text}${judged === "same" ? "" : good ? ", better" : ", worse"}`,
    ),
  );
}

function drawFigure(figure) {
  const { label, text, kind, error, compiled } = figure;
  return h(
    "div",
    { class: "figure", "data-name": figure.name },
    h("dt", {}, label),
    h("dd", {}, h("b", {}, text), " ", drawChange(figure)),
    h(
      "dd",
      {},
      h(
        "abbr",
        { class: "kind", title: figure.error_about || KINDS[kind] || kind },
        error ? `${kind} ±${error}` : kind,
      ),
    ),
    compiled && h("dd", { class: "compiled" }, "compiled ", h("b", {}, compiled.text)),
  );
}

// Peak memory as a bar against the limit. A peak beyond the limit makes the bar longer, and the limit a mark within it.
function drawMemory({ peak_bytes, limit_bytes, text, parts, fits, compiled, pinned }) {
  const scale = Math.max(peak_bytes, limit_bytes || 0) || 1;
  const percent = (bytes) => `${(100 * bytes) / scale}%`;
  return h(
    "div",
    { class: "memory" },
    h(
      "div",
      {
        class: "meter",
        role: "img",
        "aria-label": `memory: ${parts.map(({ name, text }) => `${name} ${text}`).join(", ")}`,
      },
      parts.map(({ name, bytes, text }, i) =>
        h("span", { class: `part-${i % 6}`, style: `width:${percent(bytes)}`, title: `${name} ${text}` }),
      ),
      limit_bytes && h("i", { style: `left:${percent(limit_bytes)}`, title: "the limit of a device" }),
    ),
    h(
      "p",
      { class: "legend" },
      h(
        "span",
        {},
        `memory ${text} `,
        pinned && [drawChange({ pinned, better: "lower" }), " "],
        limit_bytes && h("b", { class: fits ? "good" : "bad" }, fits ? "fits" : "does not fit"),
      ),
      parts.map(({ name, text }, i) => h("span", {}, h("i", { class: `swatch part-${i % 6}` }), `${name} ${text}`)),
    ),
    compiled &&
      h(
        "p",
        { class: "legend compiled" },
        "compiled ",
        h("b", {}, compiled.text),
        " ",
        compiled.limit_bytes &&
          h("b", { class: compiled.fits ? "good" : "bad" }, compiled.fits ? "fits" : "does not fit"),
      ),
  );
}

function drawExposed(exposed) {
  const most = Math.max(...exposed.map(({ seconds }) => seconds), 1e-12);
  if (!exposed.length) return null;
  return h(
    "div",
    { class: "exposed" },
    h("h3", {}, "time that waits for the network, by axis"),
    h(
      "dl",
      { class: "bars" },
      exposed.map(({ axis, seconds, text }) => [
        h("dt", {}, axis),
        h("dd", {}, h("span", { class: "bar", style: `width:${Math.max(1, (60 * seconds) / most)}%` }), " ", text),
      ]),
    ),
  );
}

watch(
  ({ headline, not_known }) => [headline, not_known],
  ([headline, not_known]) => {
    replace(
      find("#headline"),
      headline && h("dl", { class: "figures" }, headline.figures.map(drawFigure)),
      headline &&
        h("div", { class: "two" }, headline.memory && drawMemory(headline.memory), drawExposed(headline.exposed || [])),
      not_known.length > 0 &&
        h(
          "ul",
          { class: "not-known" },
          not_known.map((what) => h("li", {}, what)),
        ),
    );
  },
);
