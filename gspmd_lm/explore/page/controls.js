// The fields above the editor (model, target, batch), and the controls below it, which write into its text.
import { settle, write } from "./editor.js";
import { find, h, latest, replace, say } from "./dom.js";
import { post, state, watch } from "./state.js";

// Fields: each is an input of the layout that is no part of the rules file.
for (const field of document.querySelectorAll("#inputs input")) {
  field.addEventListener("change", async () => {
    const { name } = field;
    const words = field.value.split(/\s+/).filter(Boolean);
    const size = field.value === "" ? null : Number(field.value); // null: that of the config
    const value = field.type === "number" ? size : name === "set" ? words : field.value.trim();
    try {
      await post("/edit", { [name]: value });
      field.removeAttribute("aria-invalid");
    } catch (error) {
      field.setAttribute("aria-invalid", "true");
      say(error.message, true);
    }
  });
}
watch(
  ({ inputs }) => inputs,
  (inputs) => {
    for (const field of document.querySelectorAll("#inputs input")) {
      if (field === document.activeElement) continue;
      const value = inputs[field.name];
      field.closest("label").hidden =
        inputs.program !== null && (value === null || value === "" || field.name === "set");
      field.value = Array.isArray(value) ? value.join(" ") : (value ?? "");
    }
    find("#path").textContent = inputs.path || "";
    find("#program").textContent = inputs.program || "";
    document.title = `${inputs.config || inputs.program || "explore"}: ${inputs.path || "layout"}`;
  },
);

// Controls. While one is dragged, none is made anew: the pointer would lose it.
let dragged = null;
const shown = new Map(); // from a control's name to the function that shows its value

const setters = new Map();
const pending = new Map(); // from a control's name to the value that the server's state does not have yet
function set(name, value) {
  const setNow = async (next) => {
    try {
      await settle();
      write((await post("/control", { name, value: next })).text);
      await settle();
    } finally {
      if (pending.get(name) === next) pending.delete(name);
    }
  };
  if (!setters.has(name)) setters.set(name, latest(setNow));
  pending.set(name, value);
  shown.get(name)(value);
  setters.get(name)(value);
}

// -1 is the size that is left over by the other axes of the mesh.
function writeSize(name, value) {
  const axis = value === -1 && state.mesh?.axes.find((one) => `mesh.${one.name}` === name);
  return axis ? `-1: ${axis.size}` : (value ?? "–");
}

function drawSlider(control, id) {
  const { name, label } = control;
  const choices = control.choices.includes(control.value) ? control.choices : [control.value, ...control.choices];
  const output = h("output", { for: id });
  const release = () => {
    dragged = null;
    drawControls(state.controls);
  };
  const slider = h("input", {
    type: "range",
    id,
    min: 0,
    max: choices.length - 1,
    step: 1,
    "data-key": id,
    "aria-label": label,
    oninput: () => set(name, choices[slider.value]),
    onpointerdown: () => {
      dragged = name;
    },
    onpointerup: release,
    onpointercancel: release,
  });
  const show = (value) => {
    if (choices.includes(value)) slider.value = choices.indexOf(value);
    output.textContent = slider.ariaValueText = writeSize(name, value);
  };
  const step = (by, sign) =>
    h(
      "button",
      {
        type: "button",
        class: "step",
        "aria-label": `${label} ${by > 0 ? "larger" : "smaller"}`,
        "data-key": `${id} ${by}`,
        onclick: () => {
          const next = choices[Number(slider.value) + by];
          if (next !== undefined) set(name, next);
        },
      },
      sign,
    );
  return [show, h("span", { class: "slider" }, step(-1, "−"), slider, step(1, "+"), output)];
}

function drawNumber({ name, label }, id) {
  const field = h("input", {
    type: "number",
    id,
    min: 1,
    step: 1,
    "data-key": id,
    "aria-label": label,
    oninput: () => {
      if (field.value) set(name, Number(field.value));
    },
  });
  return [
    (value) => {
      if (field !== document.activeElement) field.value = value ?? "";
    },
    field,
  ];
}

function drawChoice({ name, label, choices }, id) {
  const written = (value) => (value === null ? "none" : `${value}`);
  const field = h(
    "select",
    {
      id,
      "data-key": id,
      "aria-label": label,
      onchange: () => set(name, choices[field.selectedIndex]),
    },
    choices.map((choice) => h("option", {}, written(choice))),
  );
  return [
    (value) => {
      field.selectedIndex = choices.findIndex((choice) => written(choice) === written(value));
    },
    field,
  ];
}

function drawControls(controls) {
  if (dragged !== null) return;
  shown.clear();
  replace(
    find("#controls"),
    controls.map((control) => {
      const id = `control-${control.name}`;
      const draw = control.kind === "choice" ? drawChoice : control.choices ? drawSlider : drawNumber;
      const [show, node] = draw(control, id);
      show(pending.get(control.name) ?? control.value);
      shown.set(control.name, show);
      return h("div", { class: "control", title: control.meaning }, h("label", { for: id }, control.label), node);
    }),
  );
}
watch(
  ({ controls }) => controls.map(({ value, ...rest }) => rest),
  (_, { controls }) => drawControls(controls),
);
watch(
  ({ controls, version, mesh }) => [version, mesh?.axes, controls.map(({ value }) => value)],
  (_, { controls }) => {
    for (const { name, value } of controls) if (name !== dragged) shown.get(name)?.(pending.get(name) ?? value);
  },
);
