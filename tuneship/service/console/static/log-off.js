// Warns before the session ends, says in the service that somebody is here, and empties the page when it is over: also
// when another session has begun in this browser, whose data this page must not show.
const dialog = document.getElementById("log-off"), given = dialog.dataset;
const idle = Number(given.idle);
// Half of a short time is without a warning, and the service notes uses no more often than they are told.
const warning = Math.min(60, idle / 2), grain = Math.min(60, idle / 4);
// How long the answer to a form may take before the page leaves by itself.
const FORM_MS = 5_000;
let idleEnd, wholeEnd, told = 0, asking = false, knows = false, sent = -Infinity, isLeaving = false;

function arm(left) {
  // Differences only: the clock of this machine may be wrong.
  idleEnd = Date.now() + 1000 * left.idle;
  wholeEnd = Date.now() + 1000 * left.whole;
}

// True while the session of this page lasts, false once it has ended, undefined without an answer. A GET is no use of
// it, a POST is.
async function ask(method) {
  asking = true;
  try {
    const body = method === "POST" ? new URLSearchParams({ form_token: given.token }) : undefined;
    const answer = await fetch("/console/session", { method, body, redirect: "manual", signal: AbortSignal.timeout(5_000) });
    // Without a session the service leads to the sign-in, and it refuses the token of another one.
    if (answer.type === "opaqueredirect" || answer.status === 403) return false;
    if (!answer.ok) return undefined;
    const found = await answer.json();
    if (found.session !== given.session) return false;
    arm(found);
    return true;
  } catch {
    return undefined;
  } finally {
    asking = false;
  }
}

// Leaves if the session of this page has ended; answers what `ask` does.
export async function check(method = "GET") {
  const lasts = await ask(method);
  if (lasts === false) leave();
  return lasts;
}

const left = () => Math.ceil((Math.min(idleEnd, wholeEnd) - Date.now()) / 1000);

async function look() {
  if (asking) return;
  // Another window may have been used meanwhile, of which only the service knows.
  if (left() <= 0 && !(await ask("GET") && left() > 0)) return leave();
  if (left() > warning) {
    knows = false;
    return dialog.close();
  }
  document.getElementById("log-off-left").textContent = left();
  if (knows) return;
  knows = true;
  if (await check() === false || left() > warning) return;
  for (const one of dialog.querySelectorAll("[data-if]")) one.hidden = one.dataset.if !== (wholeEnd <= idleEnd ? "whole" : "idle");
  dialog.showModal();
}

function empty() {
  document.body.replaceChildren();
  document.title = "tuneship";
}

// Goes to the sign-in page, which leads back to this one. Every script of the page leaves this way.
export function leave() {
  const wait = sent + FORM_MS - performance.now();
  // A form that is on its way leads on by itself: signing out may lead to the provider of OpenID Connect.
  if (wait > 0) return void setTimeout(leave, wait);
  if (isLeaving) return;
  isLeaving = true;
  clearInterval(clock);
  empty();
  location.replace(`/console/sign-in?next=${encodeURIComponent(given.next)}`);
}

async function stay() {
  if (wholeEnd > idleEnd && !(await check("POST"))) return;
  dialog.close();
  look();
}

function used(event) {
  // With the question open only its answer counts.
  const now = Date.now(), last = Math.max(told, idleEnd - 1000 * idle);
  if (!event.isTrusted || dialog.open || now - last < 1000 * grain) return;
  told = now;
  check("POST");
}

// The answer to a form that was refused has no address that can be opened: that of its page stands for it.
if (location.pathname.startsWith("/console/do/") && !location.search) history.replaceState(null, "", given.next);
arm({ idle: Number(given.idleLeft), whole: Number(given.wholeLeft) });
const clock = setInterval(look, 1000);
for (const kind of ["keydown", "pointerdown", "wheel"]) addEventListener(kind, used, { capture: true, passive: true });
dialog.addEventListener("cancel", event => { event.preventDefault(); stay(); });
for (const button of dialog.querySelectorAll("button")) button.addEventListener("click", stay);
document.addEventListener("submit", event => { if (!event.defaultPrevented) sent = performance.now(); });
document.addEventListener("visibilitychange", look);
// Another window of this browser may have signed out, or somebody else in.
addEventListener("focus", () => check());
// A browser may keep the page and bring it back, perhaps for another person: until that is known, nothing is shown.
addEventListener("pagehide", event => { if (event.persisted) document.body.hidden = true; });
addEventListener("pageshow", async event => {
  if (!event.persisted) return;
  sent = -Infinity;
  const lasts = await ask("GET");
  if (lasts === false) leave();
  else if (lasts) document.body.hidden = false;
  else location.reload();
});
