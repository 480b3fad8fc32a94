"""A headless Chromium (Debian's) that tests drive by the labels, buttons and tabs that a person reads.

A form of Prefect's UI passes typed text to the enclosing form after 10 ms, which passes it on in the same way. A
`Submit` that is pressed before the text has reached the outermost form is refused, although the field shows the text.
So every method that changes a form ends with `settle` and then checks the field.
"""

import base64
import re
import shutil
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from selenium import webdriver
from selenium.common.exceptions import (
    ElementClickInterceptedException,
    ElementNotInteractableException,
    JavascriptException,
    NoSuchElementException,
    StaleElementReferenceException,
    TimeoutException,
)
from selenium.webdriver.chrome.options import Options
from selenium.webdriver.chrome.service import Service
from selenium.webdriver.common.by import By
from selenium.webdriver.common.keys import Keys
from selenium.webdriver.remote.webelement import WebElement
from selenium.webdriver.support.ui import Select

from tests.support.waiting import pause_after

PROGRAMS = ("chromium", "chromedriver")
# Limit for each wait: two busy cores may need a minute for the largest form.
PATIENCE_S = 600.0
# Limit for one call of the driver, after which it is repeated; Selenium itself gives up after 120 s.
CALL_S = 100.0
REFUSALS = (
    "is a required property",
    "is not of type",
    "is not valid under any of",
    "Something went wrong",  # the server answered 503 because its SQLite was locked; this page does not retry
    "Failed to",
)
AGAIN_AFTER_S = 20.0
SETTLE = """
const done = arguments[0];
let left = 15;  // deeper than any form, and each timer later than those that the page has set before
(function next() { left-- ? setTimeout(next, 20) : done(true); })();
"""
FLAGS = (
    "--headless=new",
    "--no-sandbox",
    "--disable-gpu",
    "--disable-software-rasterizer",  # drawing the graph of an open run would take most of a core
    "--disable-dev-shm-usage",
    "--no-first-run",
    "--no-proxy-server",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
    "--window-size=1400,1800",
)
NOT_YET = (
    NoSuchElementException,
    StaleElementReferenceException,
    ElementClickInterceptedException,  # e.g. because a notice covers it, which the page soon removes
    ElementNotInteractableException,
    TimeoutException,  # the page is too busy to answer
    AssertionError,
)


class Browser:
    """One browser window, whose methods wait until the thing that they look for appears."""

    def __init__(self, folder: Path, *flags: str) -> None:
        """Start Chromium; its profile, the driver's log and screenshots are written to `folder`."""
        chromium, driver = (shutil.which(name) for name in PROGRAMS)
        options = Options()
        options.binary_location = str(chromium)
        for flag in (*FLAGS, *flags, f"--user-data-dir={folder / 'profile'}"):
            options.add_argument(flag)
        options.set_capability("goog:loggingPrefs", {"browser": "WARNING"})
        service = Service(executable_path=str(driver), log_output=str(folder / "driver.log"))
        self._driver = webdriver.Chrome(options=options, service=service)
        self._driver.set_page_load_timeout(CALL_S)
        self._driver.set_script_timeout(CALL_S)
        self._folder = folder

    def close(self) -> None:
        """End Chromium and its driver."""
        self._driver.quit()

    def open(self, url: str, shows: str) -> None:
        """Open a page and wait until it shows this text."""
        self.wait(lambda: self._load(url))
        self.wait_for_text(shows)

    def _load(self, url: str) -> bool:
        self._driver.get(url)
        return True

    def sign_in(self, ui: str, auth_string: str) -> None:
        """Give the UI the string for which it asks, and wait for its answer: the first page, or a refusal."""
        self.open(f"{ui}/login", shows="Login")

        def type_in() -> bool:
            field = self._one("//input[@type='password']")
            field.clear()
            field.send_keys(auth_string)
            self.settle()
            assert field.get_property("value") == auth_string
            return True

        self.wait(type_in)
        self.press("Login")
        answers = ("Dashboard", "Authentication failed")
        self.wait(lambda: any(one in self.text for one in answers) or None)

    def open_form(self, url: str) -> None:
        """Open a form and wait until all its fields are there: some appear only after others."""
        self.open(url, shows="Validate parameters")

        def is_still() -> bool:
            before = self.titles()
            self.settle()
            assert self.titles() == before, "the form still grows"
            return True

        self.wait(is_still)

    def settle(self) -> None:
        """Wait until the timers that the page has set have run, measured by the page's own timers."""
        self._driver.execute_async_script(SETTLE)

    @property
    def text(self) -> str:
        """The visible text of the page, with single spaces between words."""
        # Selenium's own `text` walks over the page by a script, which takes a second where a form is large.
        return self._shown("read(document.body)")

    @property
    def source(self) -> str:
        """The HTML of the page as it is now, including attributes and hidden parts."""
        return self._driver.page_source

    def watch_dialogs(self) -> None:
        """From the next page on, count calls that would open a dialog instead of opening it."""
        count = "window.dialogs = 0; window.alert = () => { top.dialogs += 1; };"
        self._driver.execute_cdp_cmd("Page.addScriptToEvaluateOnNewDocument", {"source": count})

    @property
    def dialogs(self) -> int:
        """The number of dialogs that this page would have opened."""
        return self._driver.execute_script("return top.dialogs")

    @property
    def address(self) -> str:
        """The address of the page."""
        return self._driver.current_url

    def before_every_page(self, script: str) -> None:
        """Run a script at the beginning of every page from the next one on."""
        self._driver.execute_cdp_cmd("Page.addScriptToEvaluateOnNewDocument", {"source": script})

    def evaluate(self, expression: str) -> Any:
        """The value of an expression on this page."""
        return self._driver.execute_script(f"return {expression}")

    def attempt(self, script: str) -> None:
        """Run a script that the page may refuse."""
        with suppress(JavascriptException):
            self._driver.execute_script(script)

    def resize(self, width: int, height: int) -> None:
        """Give the page a size in pixels."""
        size = {"width": width, "height": height, "deviceScaleFactor": 1, "mobile": width < 600}
        self._driver.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", size)

    def pages_on_paper(self) -> int:
        """The number of A4 pages that printing this page takes; the PDF is kept for people to look at."""
        paper = {"paperWidth": 8.27, "paperHeight": 11.69, "printBackground": True}
        printed = self._driver.execute_cdp_cmd("Page.printToPDF", paper)
        document = base64.b64decode(printed["data"])
        (self._folder / "printed.pdf").write_bytes(document)
        return len(re.findall(rb"/Type\s*/Page\b", document))

    def prefer(self, scheme: str) -> None:
        """Prefer `light` or `dark` pages."""
        features = [{"name": "prefers-color-scheme", "value": scheme}]
        self._driver.execute_cdp_cmd("Emulation.setEmulatedMedia", {"features": features})

    def check_accessibility(self, axe: str, rules: Sequence[str]) -> list[str]:
        """The faults that axe finds on this page, with their places. The driver puts it in, past the page's policy."""
        self._driver.execute_script(f"{axe}; window.axe = axe;")
        done = "const done = arguments[arguments.length - 1];"
        run = f"axe.run({{runOnly: {[*rules]}}}).then(found => done(found.violations.map("
        shown = "one => one.id + ': ' + one.nodes.map(node => node.target.join(' ')).join(', '))))"
        return self._driver.execute_async_script(f"{done} {run}{shown}")

    def complaints(self) -> list[str]:
        """The browser's warnings and errors since the last call."""
        return [one["message"] for one in self._driver.get_log("browser")]

    def keys_to(self, name: str) -> None:
        """Move the focus to a button by the Tab key, and press it."""
        for _ in range(200):
            focused = self._driver.switch_to.active_element
            if focused.text == name:
                focused.send_keys(Keys.ENTER)
                return
            focused.send_keys(Keys.TAB)
        raise AssertionError(f"no key leads to {name}")

    def key(self, key: str) -> None:
        """Press a key where the focus is."""
        self._driver.switch_to.active_element.send_keys(key)

    def forget(self) -> None:
        """Lose all cookies."""
        self._driver.delete_all_cookies()

    def open_window(self) -> str:
        """Go on in another window of the same browser; returns the one that was in front, for `go_to`."""
        before = self._driver.current_window_handle
        self._driver.switch_to.new_window("window")
        return before

    def go_to(self, window: str) -> None:
        """Close this window, and go on in another one."""
        self._driver.close()
        self._driver.switch_to.window(window)

    def tab_to(self, selector: str) -> None:
        """Move the focus by the Tab key to the element that matches a selector of CSS."""
        for _ in range(200):
            self.keys(Keys.TAB)
            if self.evaluate(f"document.activeElement.matches({selector!r})"):
                return
        raise AssertionError(f"no key leads to {selector}")

    def keys(self, *keys: str) -> None:
        """Press keys where the focus is."""
        self._driver.switch_to.active_element.send_keys(*keys)

    def back(self) -> None:
        """Go back to the page before."""
        self._driver.back()

    def wait_for_text(self, text: str) -> None:
        """Wait until the page shows this text."""
        self.wait(lambda: text in self.text or None)

    def wait(self, look: Callable[[], Any]) -> Any:
        """Call `look` until it returns something; if it never does, fail with the last error and a screenshot."""
        end = time.monotonic() + PATIENCE_S
        while True:
            began = time.monotonic()
            found, complaint = None, "nothing was found"
            try:
                found = look()
            except NOT_YET as error:
                complaint = f"{type(error).__name__}: {error}"
            if found is not None:
                return found
            if time.monotonic() > end:
                file = self.picture("never")
                raise AssertionError(f"{complaint}\n{file}\nThe page says: {self.text[:2000]}")
            time.sleep(max(0.2, pause_after(time.monotonic() - began)))

    def press(self, name: str) -> None:
        """Press the button of this name; if there are several, the last one, which lies in a dialog over the page."""
        self.wait(lambda: self._click(name))

    def _click(self, name: str) -> bool:
        path = f"//button[normalize-space()='{name}']"
        shown = [one for one in self._all(path) if one.is_displayed() and one.is_enabled()]
        assert shown, f"no button {name!r}"
        # A notice of a failed call stays while the pointer rests on it, and may cover the button. Its own ring of time
        # covers its cross, so the cross is not pressed with the pointer.
        for cross in self._driver.find_elements(By.CSS_SELECTOR, ".p-toast__close-btn"):
            self._driver.execute_script("arguments[0].click()", cross)
        shown[-1].click()
        return True

    def submit(self, get_result: Callable[[], Any]) -> Any:
        """Press `Submit` and wait for its result; press again if the page shows that it failed, or nothing comes."""
        pressed_at, is_refused = 0.0, False

        def press_or_look() -> Any:
            nonlocal pressed_at, is_refused
            if pressed_at and (found := get_result()):
                return found
            # Remembered, since notices fade; on a busy machine one may do so before anybody looks.
            is_refused = is_refused or self._refuses()
            patience_s = AGAIN_AFTER_S if is_refused else 3 * AGAIN_AFTER_S
            if not pressed_at or _since(pressed_at) > patience_s:
                self.settle()
                # Without waiting: a late success may already have closed the form.
                self._click("Submit")
                pressed_at, is_refused = time.monotonic(), False
            return get_result() or None

        return self.wait(press_or_look)

    def _refuses(self) -> bool:
        shown = self.text
        return any(words in shown for words in REFUSALS)

    def tab(self, name: str) -> None:
        """Select the tab of this name."""

        def click() -> bool:
            self._one(f"//*[@role='tablist']/*[normalize-space()='{name}']").click()
            return True

        self.wait(click)

    def titles(self) -> list[str]:
        """The titles of all fields of a form."""
        return self._shown("[...document.querySelectorAll('label')].map(read)")

    def write(self, title: str, text: str, under: str = "") -> None:
        """Replace the text of the field with this title (with `under`, the first such field below that title)."""

        def type_in() -> bool:
            field = self._field(title, under)
            field.clear()
            field.send_keys(text)
            self.settle()
            held = self._field(title, under).get_property("value")
            assert held == text, f"{title!r} holds {held!r}"
            return True

        self.wait(type_in)

    def choose(self, title: str, option: str) -> None:
        """Choose one of the options that the field with this title offers."""

        def pick() -> bool:
            Select(self._field(title)).select_by_visible_text(option)
            self.settle()
            held = Select(self._field(title)).first_selected_option.text
            assert held == option, f"{title!r} holds {held!r}"
            return True

        self.wait(pick)

    def value(self, title: str) -> str:
        """The current value of the field with this title."""
        return str(self.wait(lambda: self._field(title).get_property("value")))

    def give_a_value(self, title: str, kind: str) -> None:
        """Press the button `kind` below an optional field, which shows its input only then (a list: `Add item`)."""
        path = f"{_label(title)}/following::button[normalize-space()='{kind}'][1]"

        def click() -> bool:
            self._one(path).click()
            self.settle()
            return True

        self.wait(click)

    def rows(self) -> list[list[str]]:
        """The cells of all table rows, as text."""
        return self._shown("[...document.querySelectorAll('tr')].map(r => [...r.cells].map(read))")

    def picture_widths(self) -> dict[str, int]:
        """Widths in pixels of all pictures as Chromium has decoded them, by alternative text; 0 for a broken one."""
        shown = "return [...document.images].map(i => [i.alt, i.complete ? i.naturalWidth : 0])"
        return dict(self._driver.execute_script(shown))

    def picture(self, name: str) -> Path:
        """Save a screenshot for people to look at."""
        file = self._folder / f"{name}.png"
        self._driver.save_screenshot(str(file))
        return file

    def show_end(self) -> None:
        """Scroll to the last table."""
        last = "[...document.querySelectorAll('tr')].pop()"
        self._driver.execute_script(f"{last}.scrollIntoView({{block: 'end'}})")

    def _field(self, title: str, under: str = "") -> WebElement:
        kinds = "self::input or self::textarea or self::select"
        label = f"{_label(under)}/following::{_label(title)[2:]}[1]" if under else _label(title)
        return self._one(f"{label}/following::*[{kinds}][1]")

    def _shown(self, what: str) -> Any:
        """Evaluate a script in one call: a call for each element would take a busy machine minutes."""
        read = "const read = e => e.innerText.trim().replace(/\\s+/g, ' ');"
        return self._driver.execute_script(f"{read} return {what}")

    def _one(self, path: str) -> WebElement:
        return self._driver.find_element(By.XPATH, path)

    def _all(self, path: str) -> list[WebElement]:
        return self._driver.find_elements(By.XPATH, path)


def _since(moment: float) -> float:
    return time.monotonic() - moment


def _label(title: str) -> str:
    return f"//label[normalize-space()='{title}']"
