import { check } from "./log-off.js";

// Asks one or two deployments. What is typed and answered is on this page alone: in no address, and in nothing that a
// browser keeps. Texts of people and of models reach the page as text nodes only.
const form = document.getElementById("ask");
const LETTERS = ["a", "b"];
const NUMBERS = ["temperature", "top_p", "max_tokens", "seed"];
// What the box for JSON may hold: the page shows no log probabilities, and one answer of each deployment.
const MORE = ["response_format", "tools", "tool_choice", "allowed_tools", "parallel_tool_calls"];
const ENDS = { stop: "complete", length: "cut off", tool_calls: "calls functions" };
// A hidden page does not learn that its session has ended, which is after 15 minutes at the latest.
const HIDDEN_MS = 15 * 60_000;
// Longer answers are underlined as a whole between their equal ends: the comparison takes time with their product.
const MOST_WORDS = 1500;

// A field that this page itself refuses. The message never quotes it.
class Refused extends Error {
  constructor(field, message) {
    super(message);
    this.details = [{ field, message }];
  }
}

function start() {
  const field = name => form.elements[name];
  // Within the form, which a page that leaves has taken out of the document.
  const own = id => form.querySelector(`#${id}`);
  const part = (letter, selector) => form.querySelector(`#answer-${letter} ${selector}`);
  const send = own("send"), stop = own("break-off");
  const turns = own("turns"), choice = own("choice");
  let asking = null, hiding = 0;
  // The answers that are whole.
  let answers = {};

  const chosen = () => LETTERS.filter(letter => field(letter).value);
  const isConversation = () => field("kind").value === "messages";

  function moreOf(text) {
    let more = {};
    try {
      more = text.trim() ? JSON.parse(text) : {};
    } catch {
      more = null;
    }
    if (more === null || typeof more !== "object" || Array.isArray(more)) throw new Refused("more", "must be one JSON object");
    if (Object.keys(more).some(name => !MORE.includes(name))) throw new Refused("more", `may have ${MORE.join(", ")} only`);
    return more;
  }

  // The request as the operation takes it. Throws `Refused`.
  function request() {
    const body = isConversation()
      ? { messages: [...turns.children].map(turn => ({ role: turn.querySelector("select").value, content: turn.querySelector("textarea").value })) }
      : { prompt: field("prompt").value };
    for (const name of NUMBERS) if (field(name).value) body[name] = Number(field(name).value);
    const stops = field("stop").value.split("\n").filter(one => one);
    if (stops.length) body.stop = stops;
    return { ...body, ...moreOf(field("more").value) };
  }

  const asked = () => field(chosen()[0] ?? "a").value;
  const asJson = body => JSON.stringify(body, null, 2);
  // As JSON between single quotes, of a shell as well as of Python.
  const inQuotes = body => asJson(body).replaceAll("'", "\\u0027");
  const asCurl = body => [
    `curl ${location.origin}/v1/deployments/${asked()}/generate`,
    '-H "Authorization: Bearer $TUNESHIP_API_KEY"',
    `-H 'X-Client-ID: ${form.dataset.client}'`,
    "-H 'Content-Type: application/json'",
    `--data-raw '${inQuotes(body)}'`,
  ].join(" \\\n  ");
  const asPython = body => [
    "from tuneship.client import Client",
    "from tuneship.contract.generation import Generate",
    "",
    `request = Generate.model_validate_json(r'''${inQuotes(body)}''')`,
    "with Client() as client:",
    `    print(client.deployments.generate("${asked()}", request).completion)`,
  ].join("\n");
  const shown = [["as-json", asJson], ["as-curl", asCurl], ["as-python", asPython]].map(([id, made]) => [own(id), made]);

  // The request in each way that somebody has opened, and in no other.
  function show() {
    for (const [details, made] of shown) {
      let text = "";
      try {
        if (details.open) text = made(request());
      } catch (error) {
        if (!(error instanceof Refused)) throw error;
      }
      details.querySelector("pre").textContent = text;
    }
  }

  // Puts the errors of a request beside their fields, or into the answer where they are of none.
  function refuse(letter, error) {
    const details = error.details?.length ? error.details : [{ field: error.param, message: error.message }];
    for (const one of details) {
      const root = one.field?.split(/[.[]/)[0];
      const place = (root && form.querySelector(`[data-problem~="${root}"]`)) ?? part(letter, ".problem");
      const text = one.field && !one.message.startsWith(one.field) ? `${one.field} ${one.message}` : one.message;
      // Both deployments refuse most requests in the same words.
      if (!place.hidden && place.textContent.includes(text)) continue;
      place.textContent += `${place.hidden ? "" : "; "}${text}`;
      place.hidden = false;
    }
    figure(letter, "end", "refused");
  }

  const figure = (letter, name, text) => { part(letter, `[data-figure="${name}"]`).textContent = text; };

  function wipe() {
    answers = {};
    for (const one of form.querySelectorAll("[role=alert]")) Object.assign(one, { textContent: "", hidden: true });
    for (const letter of LETTERS) {
      part(letter, ".text").replaceChildren();
      part(letter, ".figures").hidden = true;
      for (const one of form.querySelectorAll(`#answer-${letter} [data-figure]`)) one.textContent = "";
    }
    own("chosen").textContent = "";
    choice.hidden = true;
  }

  // Everything that was typed or answered is gone from the page.
  function clear() {
    asking?.abort();
    form.reset();
    turns.replaceChildren();
    wipe();
    form.classList.remove("blind");
    show();
    arrange();
  }

  async function answer(letter, body, signal) {
    const text = part(letter, ".text"), began = performance.now();
    const written = text.appendChild(document.createTextNode(""));
    let first = null, whole = null;
    part(letter, ".figures").hidden = false;
    figure(letter, "end", "writing");
    text.setAttribute("aria-busy", "true");
    try {
      const reply = await fetch(`/console/generate/${field(letter).value}`, {
        method: "POST",
        headers: { "Content-Type": "application/json", Accept: "application/x-ndjson", "X-Form-Token": form.dataset.token },
        body: JSON.stringify({ ...body, stream: true }),
        cache: "no-store",
        signal,
      });
      // Perhaps the session has ended, or another one has begun in this browser.
      if (reply.status === 401 || reply.status === 403) await check();
      if (!reply.ok) return refuse(letter, (await reply.json()).error);
      for await (const one of linesOf(reply.body)) {
        if (one.error) return refuse(letter, one.error);
        if (one.usage) whole = one;
        else {
          if (first === null) figure(letter, "first", `${Math.round((first = performance.now()) - began)} ms`);
          written.appendData(one.text);
        }
      }
      if (!whole) throw new TypeError("the stream ended early");
      finish(letter, whole, (performance.now() - first) / 1000);
    } catch (error) {
      if (error.name === "AbortError") figure(letter, "end", "stopped");
      else if (error instanceof TypeError) refuse(letter, { message: "the connection to the service was lost" });
      else throw error;
    } finally {
      text.removeAttribute("aria-busy");
    }
  }

  function finish(letter, whole, seconds) {
    const { prompt_tokens: read, completion_tokens: wrote } = whole.usage;
    answers[letter] = whole.completion;
    figure(letter, "speed", wrote > 1 && seconds > 0.001 ? ((wrote - 1) / seconds).toFixed(1) : "no data");
    figure(letter, "tokens", `${read}, ${wrote}`);
    figure(letter, "end", ENDS[whole.finish_reason] ?? whole.finish_reason);
    for (const call of whole.tool_calls ?? []) {
      const made = part(letter, ".text").appendChild(document.createElement("code"));
      made.textContent = `${call.function.name}(${call.function.arguments})`;
    }
  }

  async function ask() {
    if (asking) return;
    wipe();
    let body = null;
    try {
      body = request();
    } catch (error) {
      if (error instanceof Refused) return refuse("a", error);
      throw error;
    }
    const letters = chosen();
    const isBlind = field("blind").checked && letters.length === 2;
    if (isBlind && crypto.getRandomValues(new Uint8Array(1))[0] & 1) [field("a").value, field("b").value] = [field("b").value, field("a").value];
    form.classList.toggle("blind", isBlind);
    asking = new AbortController();
    arrange();
    try {
      await Promise.all(letters.map(letter => answer(letter, body, asking.signal)));
    } finally {
      asking = null;
      arrange();
    }
    underline();
    choice.hidden = !form.classList.contains("blind");
  }

  function choose(letter) {
    const named = one => field(one).selectedOptions[0].textContent;
    form.classList.remove("blind");
    choice.hidden = true;
    own("chosen").textContent =
      `${letter ? `You chose ${letter.toUpperCase()}` : "You chose neither"}. A is ${named("a")}, B is ${named("b")}.`;
    place();
  }

  function underline() {
    const both = LETTERS.map(letter => answers[letter]);
    const isWanted = field("differences").checked && both.every(text => text !== undefined);
    const pieces = isWanted ? differences(...both) : both.map(text => [[text, false]]);
    LETTERS.forEach((letter, number) => {
      if (answers[letter] === undefined) return;
      const text = part(letter, ".text"), calls = text.querySelectorAll("code");
      text.replaceChildren(...pieces[number].map(([words, isOwn]) =>
        isOwn ? Object.assign(document.createElement("mark"), { textContent: words }) : words), ...calls);
    });
  }

  function arrange() {
    send.setAttribute("aria-disabled", String(Boolean(asking)));
    stop.setAttribute("aria-disabled", String(!asking));
    send.firstElementChild.textContent = chosen().length === 2 ? "Send to both" : "Send";
    own("as-prompt").hidden = isConversation();
    own("as-messages").hidden = !isConversation();
    if (isConversation() && !turns.children.length) addTurn();
  }

  // The address holds the ids of the deployments alone, so that the page can be opened again, or by somebody else.
  function place() {
    const query = new URLSearchParams(chosen().map(letter => [letter, field(letter).value]));
    history.replaceState(null, "", `${location.pathname}?${query}`);
  }

  function addTurn() {
    const turn = own("turn").content.firstElementChild.cloneNode(true);
    turn.querySelector("button").addEventListener("click", () => {
      (turn.previousElementSibling?.querySelector("textarea") ?? own("add-turn")).focus();
      turn.remove();
      show();
    });
    turns.append(turn);
    return turn;
  }

  own("add-turn").addEventListener("click", () => addTurn().querySelector("textarea").focus());
  stop.addEventListener("click", () => asking?.abort());
  choice.addEventListener("click", event => event.target.matches("button") && choose(event.target.value));
  for (const [details] of shown) details.addEventListener("toggle", show);
  for (const letter of LETTERS) field(letter).addEventListener("change", place);
  form.addEventListener("input", () => { arrange(); show(); });
  field("differences").addEventListener("change", underline);
  form.addEventListener("submit", event => { event.preventDefault(); ask(); });
  form.addEventListener("keydown", event => {
    if (event.key !== "Enter" || !(event.ctrlKey || event.metaKey)) return;
    event.preventDefault();
    form.requestSubmit();
  });
  addEventListener("pagehide", clear);
  document.addEventListener("visibilitychange", () => {
    clearTimeout(hiding);
    if (document.hidden) hiding = setTimeout(clear, HIDDEN_MS);
  });
  send.disabled = false;
  arrange();
}

// The objects of a stream of JSON lines. Safari cannot iterate over a stream itself.
async function* linesOf(body) {
  const reader = body.pipeThrough(new TextDecoderStream()).getReader();
  let rest = "";
  for (;;) {
    const { done, value } = await reader.read();
    if (done) return;
    const lines = (rest + value).split("\n");
    rest = lines.pop();
    for (const line of lines) if (line.trim()) yield JSON.parse(line);
  }
}

// Both texts in pieces, with true for the words that the other one lacks at that place: the longest common sequence.
export function differences(one, other) {
  const [a, b] = [one, other].map(text => text.match(/^\s+|\S+\s*/g) ?? []);
  const same = (i, j) => a[i].trim() === b[j].trim();
  let start = 0, end = 0;
  while (start < Math.min(a.length, b.length) && same(start, start)) start += 1;
  while (end < Math.min(a.length, b.length) - start && same(a.length - 1 - end, b.length - 1 - end)) end += 1;
  const [n, m] = [a.length - start - end, b.length - start - end];
  const own = [a.map((_, i) => i >= start && i < start + n), b.map((_, j) => j >= start && j < start + m)];
  if (n <= MOST_WORDS && m <= MOST_WORDS) {
    const width = m + 1, longest = new Uint16Array((n + 1) * width);
    for (let i = n - 1; i >= 0; i--)
      for (let j = m - 1; j >= 0; j--)
        longest[i * width + j] = same(start + i, start + j)
          ? longest[(i + 1) * width + j + 1] + 1
          : Math.max(longest[(i + 1) * width + j], longest[i * width + j + 1]);
    for (let i = 0, j = 0; i < n && j < m;) {
      if (same(start + i, start + j)) own[0][start + i++] = own[1][start + j++] = false;
      else if (longest[(i + 1) * width + j] >= longest[i * width + j + 1]) i += 1;
      else j += 1;
    }
  }
  return [a, b].map((words, side) => words.reduce((pieces, word, i) => {
    const last = pieces.at(-1);
    if (last?.[1] === own[side][i]) last[0] += word;
    else pieces.push([word, own[side][i]]);
    return pieces;
  }, []));
}

if (form) start();
