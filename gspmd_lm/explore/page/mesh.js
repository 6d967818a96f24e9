// The pictures of the mesh and of one array on it. Pointing at a device or at a part shows what belongs to it everywhere.
import { all, h, moveFocus, product, range, replace } from "./dom.js";
import { Placement } from "./pieces.js";

const [WIDTH, HEIGHT] = [230, 160]; // of the picture of an array
const DIGIT = 6.2; // the width of a character in it
const LABELLED = 64; // parts; more have no room for their devices' numbers
const MOST_PARTS = 4096; // rectangles of one picture

// "0, 4, 8 +13": the first devices that hold a part, as many as there is room for.
function listDevices(devices, room) {
  const shown = [];
  for (const { id } of [...devices].sort((a, b) => a.id - b.id)) {
    const words = [...shown, id].join(",");
    if (words.length > room - 4 && shown.length && shown.length < devices.length)
      return `${shown.join(",")} +${devices.length - shown.length}`;
    shown.push(id);
  }
  return shown.join(",");
}

// The array as a rectangle, cut as it lies on the mesh.
function drawArray(placement, name, whole) {
  const { array, counts, drawn } = placement;
  const [down, across] = drawn;
  const rows = down === undefined ? 1 : counts[down];
  const columns = across === undefined ? 1 : counts[across];
  const holders = placement.holders();
  const [width, height] = [WIDTH / columns, HEIGHT / rows];
  const parts = rows * columns <= MOST_PARTS ? range(rows).flatMap((r) => range(columns).map((c) => [r, c])) : [];
  const pictures = parts.map(([r, c]) => {
    const key = `${r},${c}`;
    const devices = holders.get(key) || [];
    const label = rows * columns <= LABELLED && height >= 10 ? listDevices(devices, Math.floor(width / DIGIT)) : "";
    return h(
      "g",
      { "data-use": name, "data-part": key },
      h("rect", { x: c * width, y: r * height, width, height, style: `fill:${placement.colour(key)}` }),
      label &&
        label.length * DIGIT <= width &&
        h(
          "text",
          { x: (c + 0.5) * width, y: (r + 0.5) * height + 3.4, style: `font-size:${Math.min(10, height - 1)}px` },
          label,
        ),
    );
  });
  const copies = whole / product(placement.counts);
  const cut = array.shape.map((size, i) => {
    const words = `${array.axes[i] ?? i} ${size.toLocaleString("en")}`;
    if (counts[i] === 1) return words;
    const unseen = drawn.includes(i) ? "" : ", which is not drawn";
    return `${words} ÷ ${counts[i]} (${placement.split[i].join(", ")}${unseen})`;
  });
  const about = copies > 1 ? `${copies} copies of each part` : "one copy";
  return h(
    "figure",
    { class: "array" },
    h("figcaption", {}, h("b", {}, name), ` ${about}`),
    h(
      "svg",
      {
        viewBox: `0 0 ${WIDTH} ${HEIGHT}`,
        role: "img",
        "aria-label": `${array.path} ${name}: ${cut.join("; ")}; ${about}`,
      },
      pictures,
    ),
    h(
      "p",
      { class: "dim" },
      cut.map((words) => h("span", {}, words)),
    ),
  );
}

// The mesh: the devices in their hosts, and the hosts in their slices.
function drawMesh(mesh, colourOf) {
  const inOrder = [...mesh.devices].sort((a, b) => a.slice - b.slice || a.host - b.host || a.id - b.id);
  const slices = Map.groupBy(inOrder, ({ slice }) => slice);
  const drawn = [...slices].map(([slice, inSlice]) =>
    h(
      "div",
      { class: "slice" },
      slices.size > 1 && h("h4", {}, `slice ${slice}`),
      h(
        "div",
        { class: "hosts" },
        [...Map.groupBy(inSlice, ({ host }) => host)].map(([host, devices]) =>
          h(
            "div",
            { class: "host", title: `host ${host}`, style: `--across:${Math.ceil(Math.sqrt(devices.length))}` },
            devices.map((device) => {
              const where = mesh.axes.map(({ name }, i) => `${name} ${device.coords[i]}`).join(", ");
              return h(
                "button",
                {
                  type: "button",
                  class: "device",
                  tabindex: -1,
                  "data-device": device.id,
                  "data-key": `device ${device.id}`,
                  style: `background:${colourOf(device)}`,
                  "aria-label": `device ${device.id}: ${where}, host ${host}`,
                },
                `${device.id}`,
              );
            }),
          ),
        ),
      ),
    ),
  );
  return h(
    "div",
    { class: "mesh" },
    drawn,
    mesh.devices_left_out > 0 &&
      h("p", { class: "dim" }, `${mesh.devices_left_out.toLocaleString("en")} more devices follow on in the same way.`),
  );
}

// A mesh and an array on it, at rest and in use, and what is marked where someone points.
class Picture {
  constructor(mesh, array) {
    this.mesh = mesh;
    this.array = array;
    this.placements = new Map();
    if (array?.at_rest) this.placements.set("at rest", new Placement(mesh, array, array.at_rest));
    if (array?.in_use) this.placements.set("in use", new Placement(mesh, array, array.in_use));
    this.about = h("p", { class: "about", "aria-live": "polite" });
    this.node = this.draw();
    this.cells = all("[data-device]", this.node);
    this.cells[0].tabIndex = 0;
    this.rest();
  }

  draw() {
    const { mesh, placements } = this;
    const [coloured] = placements; // the name and the placement that give the devices their colours
    const colourOf = (device) => (coloured ? coloured[1].colourOf(device) : "transparent");
    const whole = product(mesh.axes.map(({ size }) => size));
    const axes = mesh.axes.map(({ name, size }) => `${name} ${size}`).join(" × ") || "one device";
    const arrays = [...placements].map(([name, placement]) => drawArray(placement, name, whole));
    const caption = coloured && h("span", { class: "dim" }, `, coloured by the part ${coloured[0]}`);
    const title = h("figcaption", {}, h("b", {}, "mesh"), ` ${axes}`, caption);
    return h(
      "div",
      {
        onpointerover: (event) => this.look(event.target),
        onfocusin: (event) => this.look(event.target),
        onpointerleave: () => this.rest(),
        onkeydown: (event) => moveFocus(event, this.cells),
      },
      h(
        "div",
        { class: "placed" },
        h("div", { class: "arrays-drawn" }, arrays),
        h("figure", { class: "of-mesh" }, title, drawMesh(mesh, colourOf)),
      ),
      this.about,
    );
  }

  look(target) {
    const cell = target.closest("[data-device]");
    const part = target.closest("[data-part]");
    if (cell) this.tellDevice(this.mesh.devices.find(({ id }) => id === Number(cell.dataset.device)));
    else if (part) this.tellPart(part.dataset);
  }

  rest() {
    this.mark([]);
    this.about.textContent = "Point at a device or at a part: its pieces are marked everywhere.";
  }

  tellDevice(device) {
    const { mesh, array, placements } = this;
    this.mark([device]);
    const places = mesh.axes.map(({ name }, i) => `${name} ${device.coords[i]}`);
    const where = `${places.join(", ")}; host ${device.host}, slice ${device.slice}`;
    const held = [...placements].map(([name, placement]) => `${name} [${placement.slices(device)}]`).join(", ");
    this.about.textContent = `Device ${device.id} (${where})${array ? ` holds of ${array.path}: ${held}.` : "."}`;
  }

  tellPart({ use, part }) {
    const holders = this.placements.get(use).holders().get(part) || [];
    this.mark(holders);
    const devices = `${holders.length === 1 ? "device" : "devices"} ${listDevices(holders, 60)}`;
    this.about.textContent = `This part of ${this.array.path} is ${use} on ${devices}.`;
  }

  // Marks devices, and the parts that they hold.
  mark(chosen) {
    const ids = new Set(chosen.map(({ id }) => id));
    for (const cell of this.cells) cell.classList.toggle("chosen", ids.has(Number(cell.dataset.device)));
    for (const [use, placement] of this.placements) {
      const held = new Set(chosen.map((device) => placement.key(placement.piece(device))));
      for (const part of all(`[data-use="${use}"]`, this.node)) {
        part.classList.toggle("chosen", held.has(part.dataset.part));
        if (held.has(part.dataset.part)) part.parentElement.append(part); // above its neighbours
      }
    }
  }
}

// Fills `box` with the mesh and the chosen array at rest and in use.
export function drawPlacement(box, mesh, array) {
  replace(box, new Picture(mesh, array).node);
}
