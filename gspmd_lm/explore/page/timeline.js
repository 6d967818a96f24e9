// The timeline of a compiled layout, as on the page of explain.
import { find, h, replace } from "./dom.js";
import { locate, watch } from "./state.js";

watch(
  ({ timeline, compile }) => [timeline, compile.result?.error],
  ([timeline, error]) => {
    const frame =
      timeline && h("iframe", { title: "timeline of one layer", sandbox: "allow-scripts", srcdoc: timeline });
    const report =
      timeline && h("p", {}, h("a", { href: locate("/report"), target: "_blank" }, "all that explain says of it"));
    replace(
      find("#timeline"),
      report,
      frame || h("p", { class: "dim" }, error || "Compile shows the layer's timeline here."),
    );
  },
);
