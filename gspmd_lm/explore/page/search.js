// The search: layouts by step time and memory as they are estimated, the frontier, and a click that loads one.
import { write } from "./editor.js";
import { all, find, h, moveFocus, replace, say } from "./dom.js";
import { post, watch } from "./state.js";
import { writeBytes, writeSeconds } from "./units.js";

const [WIDTH, HEIGHT, LEFT, BOTTOM, EDGE] = [560, 260, 62, 34, 12];
const LISTED = 12;

async function load({ rank, name }) {
  try {
    write((await post("/load", { rank })).text);
    say(`Loaded: ${name}. Undo takes it back.`);
  } catch (error) {
    say(error.message, true);
  }
}

// Round marks between two numbers.
function findTicks(low, high) {
  const raw = (high - low) / 4 || high || 1;
  const unit = 10 ** Math.floor(Math.log10(raw));
  const step = [1, 2, 5, 10].map((factor) => factor * unit).find((size) => size >= raw);
  const ticks = [];
  for (let tick = Math.ceil(low / step) * step; tick <= high; tick += step) ticks.push(tick);
  return ticks;
}

function drawPlot(points, limit) {
  // Where no times are known, as of a CPU, the bytes that a device sends stand in place of them.
  const timed = points.every(({ step_time_s }) => step_time_s !== null);
  const costOf = (point) => (timed ? point.step_time_s : point.sent_bytes);
  const writeCost = timed ? writeSeconds : writeBytes;
  const times = points.map(costOf);
  const sizes = points.map(({ peak_bytes }) => peak_bytes);
  const margin = 0.05 * (Math.max(...times) - Math.min(...times)) || 0.05 * times[0] || 1;
  const [left, right] = [Math.max(0, Math.min(...times) - margin), Math.max(...times) + margin];
  const top = 1.05 * Math.max(...sizes, limit && limit < 3 * Math.max(...sizes) ? limit : 0);
  const x = (cost) => LEFT + ((WIDTH - LEFT - EDGE) * (cost - left)) / (right - left);
  const y = (bytes) => HEIGHT - BOTTOM - (HEIGHT - BOTTOM - EDGE) * (bytes / top);
  const front = points.filter((point) => point.front).sort((a, b) => costOf(a) - costOf(b));
  const dots = points.map((point) =>
    h(
      "circle",
      {
        class: `point${point.fits ? "" : " large"}${point.front ? " front" : ""}${point.compiled ? " compiled" : ""}`,
        cx: x(costOf(point)),
        cy: y(point.peak_bytes),
        r: point.front ? 6 : 4.5,
        tabindex: -1,
        role: "button",
        "data-key": `point ${point.rank}`,
        "data-rank": point.rank,
        "aria-label": point.text,
        onclick: () => load(point),
        onkeydown: (event) => {
          if (event.key === "Enter" || event.key === " ") {
            event.preventDefault();
            load(point);
          }
        },
      },
      h("title", {}, point.text),
    ),
  );
  return h(
    "svg",
    {
      class: "plot",
      viewBox: `0 0 ${WIDTH} ${HEIGHT}`,
      role: "group",
      "aria-label": `${points.length} layouts by step time and memory`,
    },
    findTicks(left, right).map((tick) => [
      h("line", { class: "grid", x1: x(tick), x2: x(tick), y1: EDGE, y2: HEIGHT - BOTTOM }),
      h("text", { class: "x", x: x(tick), y: HEIGHT - BOTTOM + 15 }, writeCost(tick)),
    ]),
    findTicks(0, top).map((tick) => [
      h("line", { class: "grid", x1: LEFT, x2: WIDTH - EDGE, y1: y(tick), y2: y(tick) }),
      h("text", { class: "y", x: LEFT - 6, y: y(tick) + 4 }, writeBytes(tick)),
    ]),
    limit &&
      limit <= top && [
        h("line", { class: "limit", x1: LEFT, x2: WIDTH - EDGE, y1: y(limit), y2: y(limit) }),
        h("text", { class: "limit-name", x: WIDTH - EDGE, y: y(limit) - 5 }, "memory of a device"),
      ],
    h("text", { class: "x", x: (LEFT + WIDTH) / 2, y: HEIGHT - 3 }, timed ? "step time" : "sent by a device"),
    front.length > 1 &&
      h("polyline", {
        class: "frontier",
        points: front.map((point) => `${x(costOf(point))},${y(point.peak_bytes)}`).join(" "),
      }),
    dots,
  );
}

function drawList(points) {
  const best = points.slice(0, LISTED); // those that fit come first, and of them the fastest
  return h(
    "ol",
    { class: "found", "aria-label": "the fastest layouts that were found" },
    best.map((point) =>
      h(
        "li",
        {},
        h(
          "button",
          { type: "button", "data-key": `load ${point.rank}`, title: point.name, onclick: () => load(point) },
          point.name,
        ),
        h(
          "span",
          { class: point.fits ? "dim" : "bad" },
          ` ${point.text.replace(`${point.name}: `, "")}${point.fits ? "" : ", does not fit"}`,
        ),
      ),
    ),
  );
}

watch(
  ({ search, headline }) => [search, headline?.memory?.limit_bytes],
  ([search, limit]) => {
    const { running, progress, points, error } = search;
    replace(
      find("#search"),
      running &&
        h(
          "p",
          { class: "progress" },
          h("progress", progress?.done ? { max: progress.total, value: progress.done } : {}),
          " ",
          progress?.text || "begins",
        ),
      error && h("p", { class: "bad" }, error),
      points.length > 0 && h("div", { class: "two" }, drawPlot(points, limit), drawList(points)),
      !running &&
        !points.length &&
        !error &&
        h("p", { class: "dim" }, "Search tries many layouts for this model and target. Each becomes a point here."),
    );
    const dots = all("#search circle");
    if (dots.length) dots[0].setAttribute("tabindex", 0);
  },
);
find("#search").addEventListener("keydown", (event) => {
  if (event.target.matches("circle")) moveFocus(event, all("#search circle"));
});
