// The pictures of the mesh and of one array on it. Pointing at a device or at a part shows what belongs to it everywhere.
import { all, h, moveFocus, range } from "./dom.js";
import { Placement } from "./pieces.js";

const [WIDTH, HEIGHT] = [230, 150]; // of the picture of an array
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
      label && label.length * DIGIT <= width && h("text", { x: (c + 0.5) * width, y: (r + 0.5) * height + 4 }, label),
    );
  });
  const copies = whole / placement.counts.reduce((a, b) => a * b, 1);
  const cut = array.shape.map(
    (size, i) =>
      `${array.axes[i] ?? i} ${size.toLocaleString("en")}${counts[i] > 1 ? ` ÷ ${counts[i]} (${placement.split[i].join(", ")})` : ""}`,
  );
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

// Fills `box` with the mesh and the chosen array at rest and in use.
export function drawPlacement(box, mesh, array) {
  const whole = mesh.axes.reduce((count, { size }) => count * size, 1);
  const placements = new Map();
  if (array?.at_rest) placements.set("at rest", new Placement(mesh, array, array.at_rest));
  if (array?.in_use) placements.set("in use", new Placement(mesh, array, array.in_use));
  const coloured = [...placements.values()][0];
  const colourOf = (device) => (coloured ? coloured.colour(coloured.key(coloured.piece(device))) : "transparent");
  const about = h("p", { class: "about", "aria-live": "polite" });
  const axes = mesh.axes.map(({ name, size }) => `${name} ${size}`).join(" × ");
  box.replaceChildren(
    h(
      "div",
      { class: "placed" },
      h(
        "div",
        { class: "arrays-drawn" },
        [...placements].map(([name, placement]) => drawArray(placement, name, whole)),
      ),
      h(
        "figure",
        { class: "of-mesh" },
        h(
          "figcaption",
          {},
          h("b", {}, "mesh"),
          ` ${axes || "one device"}`,
          h("span", { class: "dim" }, coloured ? `, coloured by the part ${[...placements.keys()][0]}` : ""),
        ),
        drawMesh(mesh, colourOf),
      ),
    ),
    about,
  );

  const devices = new Map(mesh.devices.map((device) => [device.id, device]));
  const cells = all("[data-device]", box);
  const mark = (chosen) => {
    // chosen: devices; the parts that they hold are marked, too
    const keys = new Map(
      [...placements].map(([name, placement]) => [
        name,
        new Set(chosen.map((device) => placement.key(placement.piece(device)))),
      ]),
    );
    const ids = new Set(chosen.map(({ id }) => id));
    for (const part of all("[data-part]", box))
      part.classList.toggle("chosen", chosen.length > 0 && keys.get(part.dataset.use).has(part.dataset.part));
    for (const part of all(".chosen[data-part]", box)) part.parentElement.append(part); // above its neighbours
    for (const cell of cells) cell.classList.toggle("chosen", ids.has(Number(cell.dataset.device)));
  };
  const tellDevice = (device) => {
    mark([device]);
    const where = mesh.axes.map(({ name }, i) => `${name} ${device.coords[i]}`).join(", ");
    const held = [...placements].map(([name, placement]) => `${name} [${placement.slices(device)}]`).join(", ");
    about.textContent = `Device ${device.id} (${where}; host ${device.host}${device.slice ? `, slice ${device.slice}` : ""})${array ? ` holds of ${array.path}: ${held}.` : "."}`;
  };
  const tellPart = ({ dataset }) => {
    const holders = placements.get(dataset.use).holders().get(dataset.part) || [];
    mark(holders);
    about.textContent = `This part of ${array.path} is ${dataset.use} on ${holders.length === 1 ? "device" : "devices"} ${listDevices(holders, 60)}.`;
  };
  const look = (event) => {
    const cell = event.target.closest("[data-device]");
    const part = event.target.closest("[data-part]");
    if (cell) tellDevice(devices.get(Number(cell.dataset.device)));
    else if (part) tellPart(part);
  };
  const rest = () => {
    mark([]);
    about.textContent = "Point at a device or at a part: its pieces are marked everywhere.";
  };
  box.onpointerover = box.onfocusin = look;
  box.onpointerleave = rest;
  box.onkeydown = (event) => {
    if (event.target.dataset.device) moveFocus(event, cells);
  };
  if (cells.length) cells[0].tabIndex = 0;
  rest();
}
