// Sends a form once: a double click, or Enter twice, is one request.
const AGAIN_MS = 5_000;
let sent = new WeakMap();

document.addEventListener("submit", event => {
  const form = event.target;
  // Some forms are sent by a script of their page, and a filter may be changed at any time.
  if (event.defaultPrevented || form.getAttribute("method") !== "post") return;
  if (performance.now() - sent.get(form) < AGAIN_MS) event.preventDefault();
  else sent.set(form, performance.now());
});
// Somebody who comes back to the page means another request.
addEventListener("pageshow", () => { sent = new WeakMap(); });
