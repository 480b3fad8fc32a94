import { leave } from "./log-off.js";

// Keeps the page as it is in the service. A hidden page closes its stream: a browser has few connections to one host.
const body = document.body, main = document.getElementById("main");
const policy = window.trustedTypes
  ? trustedTypes.createPolicy("tuneship", { createHTML: text => text })
  : { createHTML: text => text };
const KEPT = "[data-chart], form:has(select, textarea, input:not([type=hidden]))";
const FIRST_AGAIN_MS = 2_000;
// A stream of another session is refused.
const { session } = document.getElementById("log-off").dataset;
let source = null, again = FIRST_AGAIN_MS;

const keep = {
  callbacks: {
    // Charts draw themselves, and what somebody writes or chooses is not replaced; what somebody has opened stays open.
    beforeNodeMorphed: (old, next) => !(old instanceof Element && old.matches(KEPT) && next instanceof Element),
    beforeAttributeUpdated: (name, node) => !(name === "open" && node.tagName === "DETAILS"),
  },
  ignoreActiveValue: true,
  morphStyle: "innerHTML",
};

function put(text) {
  const template = document.createElement("template");
  template.innerHTML = policy.createHTML(text);
  Idiomorph.morph(main, template.content, keep);
  document.dispatchEvent(new Event("points"));
}

function say(state) {
  if (state === "stale" && body.dataset.state !== "stale") {
    const mark = document.getElementById("not-live");
    if (mark) mark.textContent = `not live since ${new Date().toISOString().slice(11, 16)} UTC`;
  }
  if (state === "live") again = FIRST_AGAIN_MS;
  body.dataset.state = state;
}

function open() {
  if (!body.dataset.live || source || document.hidden) return;
  source = new EventSource(`/console/live?${new URLSearchParams({ page: body.dataset.live, session })}`);
  source.addEventListener("main", event => { say("live"); put(event.data); });
  source.addEventListener("end", () => { close(); leave(); });
  // What the page was about: its place is taken by where to go.
  source.addEventListener("gone", event => { close(); body.dataset.live = ""; put(event.data); });
  source.onerror = () => {
    say("stale");
    // At any status but 200 a browser gives up for good: the service is busy, or ends.
    if (source?.readyState !== EventSource.CLOSED) return;
    close();
    setTimeout(open, again);
    again = Math.min(2 * again, 60_000);
  };
}

function close() {
  source?.close();
  source = null;
}

document.addEventListener("visibilitychange", () => document.hidden ? close() : open());
addEventListener("pagehide", close);
// Also when the page comes back from the browser's memory.
addEventListener("pageshow", open);
open();
