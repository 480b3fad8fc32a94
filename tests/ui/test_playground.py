"""The playground in a real browser: streams, texts that are scripts, keys alone, and that nothing of it is kept."""

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from selenium.webdriver.common.keys import Keys

from tests.support.objects.files import contents_below
from tests.support.payloads import SCRIPTS
from tests.support.service.console import link_of
from tests.support.service.in_process import Service
from tests.ui.browser import Browser
from tests.ui.conftest import opened_window
from tests.ui.test_console import WATCH
from tuneship.contract.generation import Generate

pytestmark = [pytest.mark.slow, pytest.mark.essential]
SECRET = "Q7-planted-patient-text"
WORDS = {"old": "The finding is stable since March.", "new": "The finding is new since March."}


class Playground:
    """The page in a window, asked by keys."""

    def __init__(self, service: Service, window: Browser, pair: tuple[str, str]) -> None:
        self.service, self.window, self.pair = service, window, pair

    def open(self, *deployments: str) -> None:
        names = zip("ab", deployments or self.pair, strict=False)
        query = "&".join(f"{letter}={one}" for letter, one in names)
        self.window.open(f"{self.service.url}/console/playground?{query}", "Nothing is stored")
        self.window.wait(
            lambda: self.window.evaluate("!document.getElementById('send').disabled") or None
        )

    def put(self, name: str, text: str) -> None:
        """Write a text into a field, as a person who pastes it."""
        found = f"document.querySelector('#ask [name={name}]')"
        self.window.evaluate(f"{found}.focus()")
        self.window.evaluate(f"{found}.value = {json.dumps(text)}")
        self.window.evaluate(f"{found}.dispatchEvent(new Event('input', {{bubbles: true}}))")

    def ask(self, text: str) -> None:
        self.put("prompt", text)
        self.window.keys(Keys.CONTROL, Keys.ENTER)

    def answers(self, wait_for: str = "complete") -> list[str]:
        """The texts of the answers, once each has ended so."""
        asked = self.window.evaluate(
            "[...document.querySelectorAll('.pick select')].map(s => s.value)"
        )
        ends = "[...document.querySelectorAll('[data-figure=end]')].map(one => one.textContent)"
        wanted = [wait_for if one else "" for one in asked]
        self.window.wait(lambda: self.window.evaluate(ends) == wanted or None)
        return self.window.evaluate(
            "[...document.querySelectorAll('.text')].map(t => t.textContent)"
        )


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Service, tuple[str, str]]]:
    """A service whose tuned model answers otherwise than its base model."""
    with Service(tmp_path_factory.mktemp("playground")) as service:
        service.listen()
        old = service.deployment("old")
        new = service.deployment("new", model_name=service.model())
        yield service, (old, new)


@pytest.fixture(scope="module")
def window(
    served: tuple[Service, tuple[str, str]], tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Browser]:
    with opened_window(tmp_path_factory.mktemp("window")) as browser:
        browser.watch_dialogs()
        browser.before_every_page(WATCH)
        sign_in(served[0], browser)
        yield browser


@pytest.fixture
def playground(served: tuple[Service, tuple[str, str]], window: Browser) -> Iterator[Playground]:
    service, pair = served
    answers = {name: encoded(service)(text) for name, text in WORDS.items()}
    service.engines.answer_to = lambda frame: answers["new" if frame.get("adapter") else "old"]
    service.engines.may_go_on.clear()
    service.engines.tokens_before_pause = 0
    page = Playground(service, window, pair)
    page.open()
    yield page
    service.engines.may_go_on.set()
    assert window.dialogs == 0
    assert window.evaluate("window.refused") == []
    assert window.complaints() == []


def sign_in(service: Service, browser: Browser) -> None:
    browser.open(f"{service.url}/console/sign-in#{link_of(service).partition('#')[2]}", "Overview")


def encoded(service: Service) -> Callable[[str], list[int]]:
    tokenizer: Any = service.parts.catalogue.default.tokenizer
    return lambda text: tokenizer.encode(text, add_special_tokens=False).ids


def test_two_answers_are_written_side_by_side_and_compared(playground: Playground) -> None:
    service, window = playground.service, playground.window
    service.engines.tokens_before_pause = 2
    playground.ask("How is it?")
    begun = "[...document.querySelectorAll('.text')].every(one => one.textContent.length > 2)"
    window.wait(lambda: window.evaluate(begun) or None)
    assert window.text.count("writing") == 2
    assert "Send to both" in window.text
    # Two answers and the stream of the page leave connections for others.
    window.evaluate("fetch('/console/jobs').then(answer => { window.free = answer.status; })")
    window.wait(lambda: window.evaluate("window.free") == 200 or None)
    service.engines.may_go_on.set()
    assert playground.answers() == [*WORDS.values()]
    marks = "[...document.querySelectorAll('.text mark')].map(one => one.textContent.trim())"
    assert window.evaluate(marks) == ["stable", "new"]
    tokens = [len(encoded(service)(text)) for text in WORDS.values()]
    shown = window.evaluate(
        "[...document.querySelectorAll('[data-figure=tokens]')].map(one => one.textContent)"
    )
    assert [int(one.split(", ")[1]) for one in shown] == tokens
    assert window.evaluate("document.querySelector('[data-figure=first]').textContent").endswith(
        " ms"
    )
    assert "How" not in window.address


def test_keys_alone_ask_and_stop(playground: Playground) -> None:
    service, window = playground.service, playground.window
    service.engines.tokens_before_pause = 2
    window.tab_to("[name=prompt]")
    window.keys("How is it?")
    window.tab_to("#send")
    window.keys(Keys.ENTER)
    window.wait(lambda: any(one.running for one in service.engines.replicas) or None)
    window.wait_for_text("writing")
    assert window.evaluate("document.activeElement.id") == "send", "the focus is lost"
    window.tab_to("#break-off")
    window.keys(Keys.ENTER)
    playground.answers("stopped")
    window.wait(lambda: not any(one.running for one in service.engines.replicas) or None)
    service.engines.may_go_on.set()
    service.engines.tokens_before_pause = 0
    window.keys(Keys.CONTROL, Keys.ENTER)
    assert playground.answers() == [*WORDS.values()]


def test_a_text_that_is_a_script_stays_a_text(playground: Playground) -> None:
    service, window = playground.service, playground.window
    for first in range(0, len(SCRIPTS), 8):
        text = "\n".join(SCRIPTS[first : first + 8]).replace("\t", " ")
        tokens = encoded(service)(text)
        service.engines.answer_to = lambda frame, tokens=tokens: tokens
        playground.open()
        playground.ask(text)
        assert playground.answers() == [text, text]
        window.evaluate("document.querySelectorAll('details').forEach(one => { one.open = true; })")
        window.wait(
            lambda: window.evaluate("document.querySelector('#as-python pre').textContent") or None
        )
        assert window.evaluate("document.querySelectorAll('.text *, pre *').length") == 0
        assert window.dialogs == 0


def test_the_request_is_shown_as_it_is_sent(playground: Playground) -> None:
    service, window = playground.service, playground.window
    text = "It's 'quoted', \\ and \"so\"\nüber 👩‍⚕️"
    window.evaluate("document.querySelectorAll('details').forEach(one => { one.open = true; })")
    more = '{"response_format": {"type": "json_object"}}'
    written = {"prompt": text, "seed": "7", "stop": "END\n", "top_p": "0.5", "more": more}
    for name, one in written.items():
        playground.put(name, one)
    wanted = Generate.model_validate(
        {
            "prompt": text,
            "temperature": 0,
            "top_p": 0.5,
            "seed": 7,
            "stop": ["END"],
            "response_format": {"type": "json_object"},
        }
    )
    read = "document.querySelector('#as-{} pre').textContent"
    assert Generate.model_validate_json(window.evaluate(read.format("json"))) == wanted
    curl = window.evaluate(read.format("curl"))
    assert f"{service.url}/v1/deployments/{playground.pair[0]}/generate" in curl
    sent = curl.partition("--data-raw '")[2].removesuffix("'")
    assert "'" not in sent
    assert Generate.model_validate_json(sent) == wanted
    names: dict[str, Any] = {}
    exec(window.evaluate(read.format("python")).partition("with Client")[0], names)  # noqa: S102 - it is our own
    assert names["request"] == wanted
    for shown in ("json", "curl", "python"):
        assert "tsk_" not in window.evaluate(read.format(shown))


def test_a_conversation_is_asked_in_turns(playground: Playground) -> None:
    window = playground.window
    playground.service.engines.may_go_on.set()
    window.evaluate("document.querySelector('[value=messages]').click()")
    window.evaluate("document.querySelector('#turns textarea').focus()")
    window.keys("first")
    window.press("Add a turn")
    window.keys("second")
    window.evaluate("document.getElementById('as-json').open = true")
    shown = "document.querySelector('#as-json pre').textContent"
    window.wait(lambda: "second" in window.evaluate(shown) or None)
    asked = Generate.model_validate_json(window.evaluate(shown))
    assert asked.messages is not None
    assert [(one.role, one.content) for one in asked.messages] == [
        ("user", "first"),
        ("user", "second"),
    ]
    window.keys(Keys.CONTROL, Keys.ENTER)
    assert playground.answers() == [*WORDS.values()]


def test_a_refusal_stands_beside_its_field(playground: Playground) -> None:
    window = playground.window
    shown = "document.querySelector('[data-problem~={}]').textContent"
    playground.put("max_tokens", "100000")
    playground.ask(SECRET)
    playground.answers("refused")
    assert "max_tokens must" in window.evaluate(shown.format("max_tokens"))
    playground.put("max_tokens", "")
    playground.put("more", f'{{"n": "{SECRET}')
    window.keys(Keys.CONTROL, Keys.ENTER)
    window.wait(lambda: "one JSON object" in window.evaluate(shown.format("more")) or None)
    assert window.evaluate(shown.format("max_tokens")) == ""
    refusals = (
        "[...document.querySelectorAll('.problem, .text')].map(one => one.textContent).join()"
    )
    assert SECRET not in window.evaluate(refusals)
    window.complaints()  # the browser notes a refused request


def test_a_blind_choice_names_the_deployments_after_it(playground: Playground) -> None:
    window = playground.window
    playground.service.engines.may_go_on.set()
    window.evaluate("document.querySelector('[name=blind]').click()")
    playground.ask("How is it?")
    answers = playground.answers()
    assert sorted(answers) == sorted(WORDS.values())
    window.wait_for_text("Which answer is better?")
    assert "hidden until you choose" in window.text
    window.press("A")
    chosen = next(name for name, text in WORDS.items() if text == answers[0])
    window.wait_for_text(f"You chose A. A is {chosen}, B is ")
    assert "hidden until you choose" not in window.text


def test_one_deployment_is_asked_alone(playground: Playground) -> None:
    playground.service.engines.may_go_on.set()
    playground.open(playground.pair[1])
    assert "Send to both" not in playground.window.text
    playground.ask("How is it?")
    assert playground.answers() == [WORDS["new"], ""]


def test_nothing_is_kept_when_the_page_is_left_or_the_session_ends(
    served: tuple[Service, tuple[str, str]], tmp_path: Path
) -> None:
    service, pair = served
    service.engines.tokens_before_pause = 0
    service.engines.answer_to = lambda frame: encoded(service)(f"answer {SECRET}")
    held = (
        "[...document.querySelectorAll('textarea, input')].map(one => one.value).join() "
        "+ document.body.textContent + JSON.stringify([{...localStorage}, {...sessionStorage}]) + location"
    )
    with opened_window(tmp_path) as window:
        sign_in(service, window)
        page = Playground(service, window, pair)

        def ask() -> None:
            page.open()
            page.ask(SECRET)
            page.answers()
            window.evaluate("document.getElementById('as-json').open = true")
            window.wait(lambda: window.evaluate(held).count(SECRET) >= 4 or None)

        ask()
        window.open(f"{service.url}/console/jobs", "Jobs")
        window.back()
        window.wait_for_text("Nothing is stored")
        assert SECRET not in window.evaluate(held)
        ask()
        fields = "new URLSearchParams({form_token: document.getElementById('ask').dataset.token})"
        window.evaluate(f"fetch('/console/sign-out', {{method: 'POST', body: {fields}}})")
        window.wait_for_text("Code of the link")
        assert not [one for one in window.complaints() if "TypeError" in one]
        assert SECRET not in window.evaluate(held)
        window.back()
        window.wait_for_text("Sign in")
        assert SECRET not in window.evaluate(held)
        # Another session has begun in the same browser.
        sign_in(service, window)
        page.open()
        window.forget()
        code = link_of(service, "bob").partition("#")[2]
        before = window.open_window()
        window.open(f"{service.url}/console/sign-in#{code}", "tenant bob")
        window.go_to(before)
        page.ask(SECRET)
        window.wait_for_text("You are signed in to the tenant bob")
        assert SECRET not in window.evaluate(held)
    # The driver's log beside it has what the test typed.
    kept = contents_below(tmp_path / "profile")
    assert len(kept) > 10
    assert [str(path) for path, content in kept.items() if SECRET.encode() in content] == []
    stored = contents_below(service.settings.data_dir)
    assert [str(path) for path, content in stored.items() if SECRET.encode() in content] == []
    assert not [line for line in service.log.texts if SECRET in line]
