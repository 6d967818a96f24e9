// The timeline of a compiled layout, as on the page of explain.
import { find, h, replace } from "./dom.js";
import { watch } from "./state.js";

watch(({ timeline }) => timeline, (timeline) => {
  const frame = timeline && h("iframe", { title: "timeline of one layer", sandbox: "allow-scripts", srcdoc: timeline });
  replace(find("#timeline"), frame || h("p", { class: "dim" }, "Compile shows the layer's timeline here."));
});
