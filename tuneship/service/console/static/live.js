// Keeps the page as it is in the service. A hidden page closes its stream: a browser has few connections to one host.
const body = document.body, main = document.getElementById("main");
const policy = window.trustedTypes
  ? trustedTypes.createPolicy("tuneship", { createHTML: text => text })
  : { createHTML: text => text };
let source = null;

const keep = {
  callbacks: {
    // Charts draw themselves; what somebody has opened stays open.
    beforeNodeMorphed: (old, next) => !(old instanceof Element && old.hasAttribute("data-chart") && next instanceof Element),
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
  body.dataset.state = state;
}

function open() {
  if (!body.dataset.live || source || document.hidden) return;
  source = new EventSource(`/console/live?page=${encodeURIComponent(body.dataset.live)}`);
  source.addEventListener("main", event => { say("live"); put(event.data); });
  source.addEventListener("end", leave);
  source.addEventListener("gone", () => { close(); say("stale"); });
  source.onerror = () => {
    say("stale");
    // A browser gives up for good at any status but 200: the session has ended.
    if (source && source.readyState === EventSource.CLOSED) leave();
  };
}

function close() {
  source?.close();
  source = null;
}

function leave() {
  close();
  location.reload();
}

document.addEventListener("visibilitychange", () => document.hidden ? close() : open());
// The page may come back from the browser's memory, with an old state and perhaps another person in front of it.
addEventListener("pagehide", close);
addEventListener("pageshow", event => event.persisted ? location.reload() : open());
open();
