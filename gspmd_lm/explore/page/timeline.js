// The timeline of a compiled layout, as on the page of explain, in a frame with its own scripts.
import { find, h, replace } from "./dom.js";
import { locate, watch } from "./state.js";

watch(
  ({ timeline, shown_version, compile }) => [timeline, timeline && shown_version, compile.result?.error],
  ([timeline, , error]) => {
    const frame = { title: "timeline of one layer", sandbox: "allow-scripts", src: locate("/timeline") };
    const report = { href: locate("/report"), target: "_blank" };
    replace(
      find("#timeline"),
      timeline && h("p", {}, h("a", report, "all that explain says of it")),
      timeline ? h("iframe", frame) : h("p", { class: "dim" }, error || "Compile shows the layer's timeline here."),
    );
  },
);
