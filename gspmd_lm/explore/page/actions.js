// The buttons of the page's head: pin, compile, search, save, copy, share, and light or dark.
import { settle } from "./editor.js";
import { find, say } from "./dom.js";
import { locate, post, state, watch } from "./state.js";

// A button that says why it could not do what it was asked for.
function onPress(id, act) {
  find(id).addEventListener("click", async () => {
    try {
      await settle();
      await act();
    } catch (error) {
      say(error.message, true);
    }
  });
}

const isPinned = ({ pinned }) => Boolean(pinned);
onPress("#pin", async () => {
  const clear = isPinned(state);
  await post("/pin", clear ? { clear: true } : {});
  say(clear ? "Nothing is pinned." : "This layout is pinned. The figures show their change against it.");
});
watch(isPinned, (pinned) => {
  find("#pin").textContent = pinned ? "Unpin" : "Pin";
  find("#pin").setAttribute("aria-pressed", pinned);
});

// Compile and Search run in the background: the same button stops them.
for (const [id, name] of [
  ["#compile", "compile"],
  ["#find", "search"],
]) {
  const label = find(id).textContent;
  onPress(id, () => post(`/${name}`, state[name].running ? { stop: true } : {}));
  watch(
    (now) => now[name].running,
    (running) => {
      find(id).textContent = running ? "Stop" : label;
    },
  );
}
watch(
  ({ compile }) => compile,
  ({ running, progress, seconds }) => {
    document.body.classList.toggle("compiling", running);
    find("#compiling").textContent = running ? `compiling, ${Math.round(seconds)} s` : "";
    find("#compiling").title = progress;
  },
);
watch(
  ({ compile }) => compile.error,
  (error) => {
    if (error) say(error, true);
  },
);
watch(
  ({ compile }) => compile.running && compile.progress,
  (progress) => {
    if (progress) say(progress);
  },
);

onPress("#copy", async () => {
  const { command } = state;
  await navigator.clipboard.writeText(command);
  say(`Copied: ${command}`);
});

find("#share").href = locate("/share");

// Save asks where, and once more before it writes over a file that is not the one that was opened.
const dialog = find("#save-dialog");
const path = find("#save-path");
const refusal = find("#save-refusal");
function offerOverwriting(offered, reason = "") {
  refusal.textContent = reason;
  find("#save-go").textContent = offered ? "Overwrite" : "Save";
  dialog.dataset.overwrite = offered;
}
onPress("#save", () => {
  path.value = state.inputs.path || "";
  offerOverwriting(false);
  dialog.showModal();
  path.select();
});
path.addEventListener("input", () => offerOverwriting(false));
find("#save-cancel").addEventListener("click", () => dialog.close());
find("#save-form").addEventListener("submit", async (event) => {
  event.preventDefault();
  try {
    const saved = await post("/save", { path: path.value, overwrite: dialog.dataset.overwrite === "true" });
    dialog.close();
    say(`Saved: ${saved.path}`);
  } catch (error) {
    offerOverwriting(error.status === 409, error.message);
  }
});
addEventListener(
  "keydown",
  (event) => {
    if (!(event.ctrlKey || event.metaKey) || event.altKey) return;
    const button = { s: "#save", Enter: "#compile" }[event.key];
    if (!button || dialog.open) return;
    event.preventDefault();
    find(button).click();
  },
  true,
);

// Light or dark: as the system says, until the button is pressed.
const dark = matchMedia("(prefers-color-scheme: dark)");
const root = document.documentElement;
const isDark = () => (root.style.colorScheme || (dark.matches ? "dark" : "light")) === "dark";
const nameTheme = () => {
  find("#theme").textContent = isDark() ? "Light" : "Dark";
};
find("#theme").addEventListener("click", () => {
  root.style.colorScheme = isDark() ? "light" : "dark";
  nameTheme();
});
dark.addEventListener("change", nameTheme);
nameTheme();
