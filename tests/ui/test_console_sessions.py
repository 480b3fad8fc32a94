"""Sessions of the console in a real browser: a page belongs to its session, and nothing that a person does is lost."""

from collections.abc import Iterator

import pytest

from tests.support.service.console import link_of
from tests.support.service.in_process import Service
from tests.ui.browser import Browser
from tests.ui.conftest import opened_window
from tests.ui.test_console import sign_in

pytestmark = [pytest.mark.slow, pytest.mark.essential]
# As the browser does when it keeps the page in memory, and when somebody goes back to it.
HIDES, SHOWS = (
    f"dispatchEvent(new PageTransitionEvent('{kind}', {{persisted: true}}))"
    for kind in ("pagehide", "pageshow")
)
COMES_BACK = "dispatchEvent(new Event('focus'))"


@pytest.fixture(scope="module")
def service(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Service]:
    with Service(tmp_path_factory.mktemp("sessions")) as started:
        started.listen()
        yield started


@pytest.fixture(scope="module")
def window(service: Service, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Browser]:
    with opened_window(tmp_path_factory.mktemp("window")) as browser:
        yield browser


def sign_in_as_bob_beside(window: Browser, service: Service) -> None:
    """Sign in as another person in another window of the same browser."""
    before = window.open_window()
    code = link_of(service, "bob").partition("#")[2]
    window.open(f"{service.url}/console/sign-in#{code}", "You are signed in to the tenant alice")
    window.press("Sign in with the link")
    window.wait_for_text("tenant bob")
    window.go_to(before)


@pytest.mark.parametrize("how", ["signs out", "signs in as another"])
def test_a_live_page_leaves_when_another_window_ends_its_session(
    service: Service, window: Browser, how: str
) -> None:
    job = service.job(model_name="of-alice")
    service.job(model_name="of-bob", client="bob")
    sign_in(window, service, "Overview")
    window.open(f"{service.url}/console/jobs", "of-alice")
    window.wait(lambda: window.evaluate("document.body.dataset.state") == "live" or None)
    asked = len(service.log.texts)
    if how == "signs out":
        before = window.open_window()
        window.open(f"{service.url}/console", "Overview")
        window.press("Sign out")
        window.wait_for_text("Code of the link")
        assert window.address == f"{service.url}/console/sign-in"
        window.go_to(before)
    else:
        sign_in_as_bob_beside(window, service)
    window.attempt(COMES_BACK)
    window.wait_for_text("Code of the link")
    assert window.address == f"{service.url}/console/sign-in?next=%2Fconsole%2Fjobs"
    assert "of-bob" not in window.text
    asks = [one for one in service.log.texts[asked:] if "GET /console/sign-in " in one]
    assert len(asks) == 2, "once in each window"
    assert service.job_status(job) not in ("cancelling", "cancelled")


def test_a_page_that_is_not_live_leaves_when_a_person_comes_back_to_it(
    service: Service, window: Browser
) -> None:
    service.dataset(name="of-alice")
    sign_in(window, service, "Overview")
    window.open(f"{service.url}/console/jobs/new", "of-alice")
    window.attempt(COMES_BACK)
    window.settle()
    assert "of-alice" in window.text, "its session lasts"
    sign_in_as_bob_beside(window, service)
    window.attempt(COMES_BACK)
    window.wait_for_text("You are signed in to the tenant bob")
    assert window.address == f"{service.url}/console/sign-in?next=%2Fconsole%2Fjobs%2Fnew"


def test_a_form_of_another_session_is_not_sent_in_the_name_of_the_new_one(
    service: Service, window: Browser
) -> None:
    job = service.job(client="bob")
    sign_in(window, service, "Overview")
    page = f"/console/do/cancel_job?job_id={job}&then=/console/jobs"
    own = service.job()
    window.open(f"{service.url}{page.replace(job, own)}", "Cancel this job?")
    window.evaluate(f"document.querySelector('[name=job_id]').value = '{job}'")
    sign_in_as_bob_beside(window, service)
    window.attempt("document.querySelector('form.asking').requestSubmit()")
    window.wait_for_text("What you sent was not carried out")
    assert "You are signed in to the tenant bob" in window.text
    assert service.job_status(job, "bob") not in ("cancelling", "cancelled")


@pytest.mark.parametrize("how", ["lasts", "ended"])
def test_a_page_from_the_memory_of_the_browser_is_shown_once_its_session_is_known(
    service: Service, window: Browser, how: str
) -> None:
    sign_in(window, service, "Overview")
    service.dataset()
    window.open(f"{service.url}/console/jobs/new", "Start training")
    window.evaluate("document.querySelector('[name=model_name]').value = 'typed'")
    window.attempt(HIDES)
    assert window.evaluate("getComputedStyle(document.body).display") == "none"
    if how == "ended":
        window.forget()
    window.attempt(SHOWS)
    if how == "ended":
        window.wait_for_text("Code of the link")
        assert window.address.endswith("?next=%2Fconsole%2Fjobs%2Fnew")
    else:
        window.wait(lambda: window.evaluate("!document.body.hidden") or None)
        assert window.evaluate("document.querySelector('[name=model_name]').value") == "typed"


def test_a_second_submit_of_a_form_is_not_sent(service: Service, window: Browser) -> None:
    sign_in(window, service, "Overview")
    window.open(f"{service.url}/console/do/cancel_job?job_id={service.job()}", "Cancel this job?")
    twice = """(() => {
      const form = document.querySelector("form.asking"), stopped = [];
      addEventListener("submit", event => { stopped.push(event.defaultPrevented); event.preventDefault(); });
      form.requestSubmit();
      form.requestSubmit();
      dispatchEvent(new PageTransitionEvent("pageshow"));
      form.requestSubmit();
      return stopped;
    })()"""
    assert window.evaluate(twice) == [False, True, False]


def test_a_form_that_is_sent_after_the_end_leads_back_to_its_page(
    service: Service, window: Browser
) -> None:
    job = service.job()
    sign_in(window, service, "Overview")
    page = f"/console/do/cancel_job?job_id={job}&then=/console/jobs"
    window.open(f"{service.url}{page}", "Cancel this job?")
    window.forget()
    window.press("Cancel job")
    window.wait_for_text("What you sent was not carried out")
    assert service.job_status(job) not in ("cancelling", "cancelled")
    window.picture("unsent")
    window.evaluate(f"document.querySelector('[name=code]').value = '{link_of(service)}'")
    window.press("Sign in with the link")
    window.wait_for_text("Cancel this job?")
    assert window.address == f"{service.url}{page}"


def test_a_refused_form_that_is_sent_after_the_end_leads_back_to_its_page(
    service: Service, window: Browser
) -> None:
    service.dataset()
    sign_in(window, service, "Overview")
    page = f"{service.url}/console/jobs/new"
    window.open(page, "Start training")
    window.press("Start training")
    window.wait_for_text("model_name is required")
    assert window.address == page
    window.forget()
    window.press("Start training")
    window.wait_for_text("What you sent was not carried out")
    assert window.address.endswith("?ended=unsent&next=%2Fconsole%2Fjobs%2Fnew")


def test_a_link_that_changes_only_the_fragment_signs_in(service: Service, window: Browser) -> None:
    window.forget()
    window.open(f"{service.url}/console/sign-in", "Code of the link")
    code = link_of(service).partition("#")[2]
    window.open(f"{service.url}/console/sign-in#{code}", "Overview")
    assert "#" not in window.address


def test_filters_and_open_parts_stay_while_the_page_updates(
    service: Service, window: Browser
) -> None:
    sign_in(window, service, "Overview")
    window.open(f"{service.url}/console/jobs", "Jobs")
    window.wait(lambda: window.evaluate("document.body.dataset.state") == "live" or None)
    kept = {"status": "failed", "base_model": "tuneship"}
    for name, value in kept.items():
        window.evaluate(f"document.querySelector('[name={name}]').value = '{value}'")
    job = service.job(model_name="new-meanwhile")
    window.wait_for_text("new-meanwhile")
    for name, value in kept.items():
        assert window.evaluate(f"document.querySelector('[name={name}]').value") == value
    trainer = service.trainer_of(job)
    trainer.start_of(4)
    trainer.step(1, evaluated=True)
    window.open(f"{service.url}/console/jobs/{job}", "As numbers")
    window.wait(lambda: window.evaluate("document.body.dataset.state") == "live" or None)
    window.evaluate("document.querySelector('details').open = true")
    trainer.step(2, evaluated=True)
    window.wait(
        lambda: window.evaluate("document.querySelector('details tbody').rows.length") == 2 or None
    )
    assert window.evaluate("document.querySelector('details').open") is True


def test_an_open_page_says_that_its_subject_is_gone_and_where_to_go(
    service: Service, window: Browser
) -> None:
    data = service.dataset(name="soon-gone")
    sign_in(window, service, "Overview")
    window.open(f"{service.url}/console/datasets/{data}", "soon-gone")
    window.wait(lambda: window.evaluate("document.body.dataset.state") == "live" or None)
    service.call("DELETE", f"/v1/datasets/{data}")
    window.wait_for_text("It is gone, or was never here")
    window.picture("gone")
    assert "soon-gone" not in window.text
    window.attempt("document.querySelector('main .primary').click()")
    window.wait_for_text("newest first")
    assert window.address == f"{service.url}/console/datasets"
