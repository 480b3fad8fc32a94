// Warns before the session ends, says in the service that somebody is here, and empties the page when it is over.
const dialog = document.getElementById("log-off"), given = dialog.dataset;
const idle = Number(given.idle);
// Half of a short time is without a warning, and the service notes uses no more often than they are told.
const warning = Math.min(60, idle / 2), grain = Math.min(60, idle / 4);
let idleEnd, wholeEnd, told = 0, asking = false, knows = false;

function arm(left) {
  // Differences only: the clock of this machine may be wrong.
  idleEnd = Date.now() + 1000 * left.idle;
  wholeEnd = Date.now() + 1000 * left.whole;
}

// True while the session lasts. A GET is no use of it, a POST is.
async function ask(method) {
  asking = true;
  try {
    const body = method === "POST" ? new URLSearchParams({ form_token: given.token }) : undefined;
    const answer = await fetch("/console/session", { method, body, redirect: "error", signal: AbortSignal.timeout(5_000) });
    if (answer.ok) arm(await answer.json());
    return answer.ok;
  } catch {
    return false;
  } finally {
    asking = false;
  }
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
  await ask("GET");
  if (left() > warning) return;
  for (const one of dialog.querySelectorAll("[data-if]")) one.hidden = one.dataset.if !== (wholeEnd <= idleEnd ? "whole" : "idle");
  dialog.showModal();
}

function empty() {
  document.body.replaceChildren();
  document.title = "tuneship";
}

function leave() {
  clearInterval(clock);
  empty();
  location.replace(`/console/sign-in?next=${encodeURIComponent(given.next)}`);
}

async function stay() {
  if (wholeEnd > idleEnd && !(await ask("POST"))) return;
  dialog.close();
  look();
}

function used(event) {
  // With the question open only its answer counts.
  const now = Date.now(), last = Math.max(told, idleEnd - 1000 * idle);
  if (!event.isTrusted || dialog.open || now - last < 1000 * grain) return;
  told = now;
  ask("POST");
}

arm({ idle: Number(given.idleLeft), whole: Number(given.wholeLeft) });
const clock = setInterval(look, 1000);
for (const kind of ["keydown", "pointerdown", "wheel"]) addEventListener(kind, used, { capture: true, passive: true });
dialog.addEventListener("cancel", event => { event.preventDefault(); stay(); });
for (const button of dialog.querySelectorAll("button")) button.addEventListener("click", stay);
document.addEventListener("visibilitychange", look);
// A browser may keep the page and bring it back, perhaps for another person.
addEventListener("pagehide", event => { if (event.persisted) empty(); });
addEventListener("pageshow", event => { if (event.persisted) location.reload(); });
