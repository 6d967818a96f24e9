// The editor of the rules file: its text is the truth, and all that writes into it is undone with one key.
import * as cm from "./vendor/codemirror.js";
import { complete } from "./completion.js";
import { find, h, latest, replace, say } from "./dom.js";
import { post, watch } from "./state.js";

const SENT_AFTER_MS = 40; // of the last key
const FIX = "fix: ";
const QUIET = cm.Annotation.define(); // marks a text that the server has already

const theme = cm.EditorView.theme({
  "&": { height: "100%", fontSize: "13px" },
  ".cm-scroller": { fontFamily: "var(--mono)", lineHeight: "1.5" },
  ".cm-gutters": { background: "transparent", color: "var(--dim)", border: "0" },
  ".cm-activeLine, .cm-activeLineGutter": { background: "var(--active)" },
  ".cm-cursor": { borderLeftColor: "var(--ink)" },
  "&.cm-focused .cm-selectionBackground, .cm-selectionBackground": { background: "var(--selected) !important" },
  ".cm-tooltip": {
    background: "var(--panel)",
    color: "var(--ink)",
    border: "1px solid var(--line)",
    borderRadius: "6px",
  },
  ".cm-tooltip-autocomplete ul li[aria-selected]": { background: "var(--accent)", color: "var(--on-accent)" },
  ".cm-completionDetail": { fontStyle: "normal", color: "inherit", opacity: ".75", fontFamily: "var(--sans)" },
  ".cm-matchingBracket": { background: "var(--selected)" },
  ".cm-diagnostic": { borderLeft: "3px solid var(--bad)", whiteSpace: "pre-wrap", maxWidth: "34rem" },
  ".cm-diagnosticAction": {
    background: "var(--accent)",
    color: "var(--on-accent)",
    font: "inherit",
    margin: ".3rem 0 0",
  },
});
const colours = cm.HighlightStyle.define([
  { tag: [cm.tags.propertyName, cm.tags.definition(cm.tags.propertyName)], color: "var(--key)" },
  { tag: cm.tags.comment, color: "var(--dim)", fontStyle: "italic" },
  { tag: [cm.tags.number, cm.tags.bool, cm.tags.null, cm.tags.keyword], color: "var(--number)" },
  { tag: [cm.tags.content, cm.tags.string], color: "var(--ink)" },
  { tag: [cm.tags.punctuation, cm.tags.separator, cm.tags.squareBracket, cm.tags.brace], color: "var(--dim)" },
]);

// The line that a picture on the right points at.
const pointAt = cm.StateEffect.define();
const pointed = cm.StateField.define({
  create: () => cm.Decoration.none,
  update(marks, { effects, changes, state }) {
    let now = marks.map(changes);
    for (const effect of effects) {
      if (!effect.is(pointAt)) continue;
      const line = effect.value && effect.value <= state.doc.lines ? state.doc.line(effect.value) : null;
      now = line ? cm.Decoration.set([cm.Decoration.line({ class: "pointed" }).range(line.from)]) : cm.Decoration.none;
    }
    return now;
  },
  provide: (field) => cm.EditorView.decorations.from(field),
});

let agreed = null; // the text that the server is known to have
let editVersion = 0; // the version of the last edit that the server acknowledged
let timer = null;
async function sendNow(text) {
  const { version } = await post("/edit", { text });
  [agreed, editVersion] = [text, version];
}
const send = latest(sendNow);

const view = new cm.EditorView({
  parent: find("#editor"),
  extensions: [
    cm.lineNumbers(),
    cm.lintGutter(),
    cm.history(),
    cm.drawSelection(),
    cm.indentOnInput(),
    cm.bracketMatching(),
    cm.closeBrackets(),
    cm.highlightActiveLine(),
    cm.highlightActiveLineGutter(),
    cm.yaml(),
    pointed,
    theme,
    cm.syntaxHighlighting(colours),
    cm.autocompletion({ override: [complete], icons: false }),
    // Tab leaves the editor, as everywhere on the page; Escape closes the list of completions.
    cm.keymap.of([
      ...cm.closeBracketsKeymap,
      ...cm.defaultKeymap,
      ...cm.historyKeymap,
      ...cm.completionKeymap,
      ...cm.lintKeymap,
    ]),
    cm.EditorView.contentAttributes.of({ "aria-label": "rules file" }),
    cm.EditorView.updateListener.of((update) => {
      if (!update.docChanged || update.transactions.some((transaction) => transaction.annotation(QUIET))) return;
      clearTimeout(timer);
      document.body.classList.add("old");
      timer = setTimeout(() => send(text()), SENT_AFTER_MS);
    }),
  ],
});

export const text = () => view.state.doc.toString();

// Returns when the server has the text that stands in the editor.
export async function settle() {
  clearTimeout(timer);
  while (text() !== agreed) await sendNow(text());
}

// Writes a text into the editor as one edit that can be undone. Only what differs is replaced, so that the cursor stays.
export function write(next, annotations = []) {
  const now = text();
  if (next === now) return;
  const most = Math.min(now.length, next.length);
  let from = 0;
  while (from < most && now[from] === next[from]) from++;
  let end = 0;
  while (end < most - from && now.at(-1 - end) === next.at(-1 - end)) end++;
  view.dispatch({
    changes: { from, to: now.length - end, insert: next.slice(from, next.length - end) },
    annotations,
    userEvent: "input",
  });
}

// Has the cursor at the beginning of a line, counted from 1, and the focus.
export function goTo(line) {
  if (!line || line > view.state.doc.lines) return;
  view.dispatch({ selection: cm.EditorSelection.cursor(view.state.doc.line(line).from), scrollIntoView: true });
  view.focus();
}

// Marks a line, or none for null, while something on the right points at it.
export const point = (line) => view.dispatch({ effects: pointAt.of(line) });

// A button with a row of the rules file: it leads to the row's line.
export function rowButton(row, line, key) {
  if (!line) return h("code", {}, row);
  return h(
    "button",
    {
      type: "button",
      class: "row",
      "data-key": key,
      title: `line ${line} of the rules file`,
      onclick: () => goTo(line),
      onpointerenter: () => point(line),
      onpointerleave: () => point(null),
      onfocus: () => point(line),
      onblur: () => point(null),
    },
    row,
  );
}

async function fix(index) {
  try {
    await settle();
    write((await post("/fix", { problem: index })).text);
    say("The fix is applied. Undo takes it back.");
    view.focus();
  } catch (error) {
    say(error.message, true);
  }
}

// The server's text is adopted where this page has nothing of its own to say: at first, and when another page edits.
watch(
  ({ inputs, version }) => [inputs.text, version],
  ([theirs, version]) => {
    const isTyping = agreed !== null && text() !== agreed; // the server does not have all of it yet
    if (isTyping || version < editVersion || theirs === agreed || theirs === null) return;
    const first = agreed === null;
    agreed = theirs;
    write(theirs, [QUIET.of(true), cm.Transaction.addToHistory.of(!first)]);
  },
);

watch(
  ({ inputs }) => inputs.editable,
  (editable) => {
    document.body.classList.toggle("fixed", !editable);
  },
);

// Problems: a mark at the row with the fix as a button, and the list below the editor.
watch(
  ({ problems, shown_version, version }) => [problems, shown_version === version],
  ([problems]) => {
    const doc = view.state.doc;
    const inText = problems.map((problem, i) => [problem, i]).filter(([{ line }]) => line);
    const marks = inText.map(([{ line, message, fix: words, fix_text, warning }, i]) => {
      const at = doc.line(Math.min(line, doc.lines));
      const actions = fix_text ? [{ name: "Apply the fix", apply: () => fix(i) }] : [];
      return {
        from: at.from + at.text.search(/\S|$/),
        to: at.to,
        severity: warning ? "warning" : "error",
        message: words ? `${message}\n${FIX}${words}` : message,
        actions,
      };
    });
    view.dispatch(cm.setDiagnostics(view.state, marks));
    replace(
      find("#problems"),
      problems.map(({ line, message, fix: words, fix_text, warning }, i) =>
        h(
          "li",
          { class: warning ? "warning" : null },
          line && rowButton(`line ${line}`, line, `problem ${i}`),
          h("span", { class: "message" }, message),
          words && h("span", { class: "dim" }, `${FIX}${words}`),
          fix_text &&
            h(
              "button",
              { type: "button", class: "fix", "data-key": `fix ${i}`, onclick: () => fix(i) },
              "Apply the fix",
            ),
        ),
      ),
    );
  },
);
