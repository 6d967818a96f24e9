// The server's state: follows it and tells the views that are concerned by a change.
import { find, say } from "./dom.js";

// In a notebook's frame the browser keeps no cookie: the token of the address goes with each request.
const token = new URLSearchParams(location.search).get("token");
const headers = token ? { "X-Token": token } : {};

// The address of something that is not fetched: of a stream, or of a page that is opened.
export const locate = (path) => (token ? `${path}?token=${encodeURIComponent(token)}` : path);

const watchers = [];
export let state = null;

// Calls `render(part, state)` now and each time that `choose(state)` has another value.
export function watch(choose, render) {
  watchers.push({ choose, render, seen: undefined });
}

function adopt(next) {
  state = next;
  for (const watcher of watchers) {
    const part = watcher.choose(state);
    const seen = JSON.stringify(part);
    if (seen === watcher.seen) continue;
    watcher.seen = seen;
    watcher.render(part, state);
  }
}

// The server's answer to a GET. Raises an Error with the server's words if it refuses.
export async function get(path) {
  return answer(await fetch(path, { headers }));
}

// The server's answer to a POST, as get.
export async function post(path, body = {}) {
  const sent = {
    method: "POST",
    headers: { ...headers, "Content-Type": "application/json" },
    body: JSON.stringify(body),
  };
  return answer(await fetch(path, sent));
}

async function answer(response) {
  const body = await response.json().catch(() => ({}));
  if (response.ok) return body;
  throw Object.assign(new Error(body.error || `The server answered ${response.status}.`), { status: response.status });
}

// Follows /events for ever. The browser itself connects again; a lost connection is said meanwhile.
export function follow() {
  const source = new EventSource(locate("/events"));
  source.addEventListener("state", ({ data }) => adopt(JSON.parse(data)));
  source.addEventListener("open", () => connect(true));
  source.addEventListener("error", () => connect(false));
}

function connect(connected) {
  const { classList } = document.body;
  if (connected && classList.contains("lost")) say("The server answers again.");
  if (!connected && !classList.contains("lost")) {
    say("The server does not answer. If it has ended, start it again and open the address that it prints.", true);
  }
  classList.toggle("lost", !connected);
}

// The line that says what the server does, and the mark that greys figures of an older edit.
watch(
  ({ busy, version, shown_version }) => ({ busy, version, old: shown_version < version }),
  ({ busy, old }) => {
    document.body.classList.toggle("old", old);
    document.body.classList.toggle("busy", busy !== null);
    find("#views").setAttribute("aria-busy", old || busy !== null);
    find("#busy").textContent = { tracing: "tracing the model", estimating: "estimating" }[busy] || "";
  },
);
