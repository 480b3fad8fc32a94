"""The page of a release: its words, its question, and who is shown what."""

from collections.abc import Callable

import pytest

from tests.support.payloads import SCRIPTS
from tests.support.service.console import Markup, signed_in
from tests.support.service.in_process import Service
from tests.support.service.releases import (
    NOON,
    OWN,
    QUESTION,
    ROLLOUT,
    PlayedPipeline,
    asked,
    begun,
    line_of,
    look,
)
from tuneship.contract.releases import Release, ReleaseEvidence, ReleaseQuestion, ReleaseStatus
from tuneship.gates.gate_types import GateReading
from tuneship.gates.kinds import GATES
from tuneship.gates.record import ApprovalAnswered, Ended, SplitConfirmed, Verdict
from tuneship.gates.reports.words import OUTCOMES, REASONS
from tuneship.service.console import release_words, words
from tuneship.service.console.pages.release import (
    EVENTS_SHOWN,
    MOST,
    ReleaseStory,
    ReleaseView,
)
from tuneship.service.releases.release_state import STAGES


def page_of(service: Service, pipeline: PlayedPipeline, preset: str = "admin") -> Markup:
    answer = signed_in(service, preset).open(f"/console/releases/{pipeline.id}")
    assert answer.status_code == 200, answer.text
    return Markup(answer.text)


def fields(pipeline: PlayedPipeline, token: str, **more: str) -> dict[str, str]:
    then = f"/console/releases/{pipeline.id}"
    sent = {"release_id": pipeline.id, "question": QUESTION, "name": "A. Reviewer", "then": then}
    return {"form_token": token, **sent, **more}


def test_every_stage_state_verdict_and_outcome_has_words() -> None:
    assert {*release_words.STAGES} == {*STAGES}
    assert {*release_words.AT_WORK} == {*STAGES} - {"ended"}
    assert {*release_words.VERDICTS} == {*Verdict}
    assert {*release_words.GATES} >= {*GATES}
    assert {*OUTCOMES} <= {*words.STATES}
    states = GateReading.__annotations__["state"].__args__
    assert {*states} <= {*words.STATES}
    for reason in (*REASONS, "not_proven:error", "threshold:latency_p95"):
        assert "_" not in release_words.reason_in_words(reason).replace("slo_max", "").replace(
            "latency_p95", ""
        ).replace("bake_weight", "").replace("on_inconclusive", "")


def test_a_sentence_says_what_is_happening(service: Service) -> None:
    pipeline = asked(service, "one")
    shown = Release.model_validate(pipeline.shown)
    seen = line_of(look(41, 41, 75))

    def says(**changed: object) -> str:
        return " ".join(release_words.sentence(shown.model_copy(update=changed), seen))

    assert "a person has to decide" in says()
    canary = says(status=ReleaseStatus.RUNNING, stage="canary", question=None)
    assert canary.startswith("Holding at 75 %: “Very slow answers” is not proven")
    assert "3 of 4 gates are proven. “Typical time” needs about 420 more requests." in canary
    training = says(status=ReleaseStatus.RUNNING, stage="training", question=None)
    assert training.strip() == "The new model is being trained."
    over = says(status=ReleaseStatus.ENDED, outcome="rolled_back", reason="latency", question=None)
    assert over == f"{OUTCOMES['rolled_back']} Why: {REASONS['latency']}."
    gates = ReleaseQuestion(
        id="q", asks=["T8 enough data"], until=None, allowed=[], needs_reason=False, answer=None
    )
    assert "because of T8 enough data. No traffic has moved" in says(question=gates)


def test_a_question_is_answered_from_its_page(service: Service) -> None:
    pipeline = asked(service, "one")
    browser = signed_in(service, "approver")
    path = f"/console/releases/{pipeline.id}"
    assert "/console/do/promote_release" in browser.open(path).text
    ask = browser.open(
        f"/console/do/promote_release?release_id={pipeline.id}&question={QUESTION}&then={path}"
    )
    assert "Promote the new model?" in Markup(ask.text).text
    sent = fields(pipeline, browser.form_token(), reason="", ticket="CHG-1")
    refused = browser.post("/console/do/promote_release", {**sent, "ticket": "no ticket"})
    assert refused.status_code == 422
    assert browser.post("/console/do/promote_release", sent).status_code == 303
    answer = pipeline.shown["question"]["answer"]
    assert (answer["decision"], answer["reason"], answer["ticket"]) == ("promote", None, "CHG-1")
    page = Markup(browser.open(path).text)
    assert "A. Reviewer has answered: promote." in page.text
    assert "/console/do/promote_release" not in page.links
    # To stop is still possible, and the field of the button cannot be changed by hand.
    sent = fields(pipeline, browser.form_token(), decision="promote")
    assert browser.post("/console/do/roll_back_release", sent).status_code == 303
    assert pipeline.shown["question"]["answer"]["decision"] == "roll back"
    pipeline.facts(
        ApprovalAnswered("roll back", "A. Reviewer", "too slow"),
        Ended("rolled_back", "human_rejected"),
    )
    pipeline.own("ended", outcome="rolled_back", reason="human_rejected")
    page = page_of(service, pipeline)
    assert OUTCOMES["rolled_back"] in page.text
    assert "A. Reviewer decided: roll back (too slow)" in page.text
    assert not [one for one in page.links if "/do/" in one]


def test_only_who_may_decide_has_buttons(service: Service) -> None:
    pipeline = asked(service, "one")
    viewer = page_of(service, pipeline, "viewer")
    assert not [one for one in viewer.links if "/do/" in one]
    assert "needs the scope releases:decide" in viewer.text
    browser = signed_in(service, "viewer")
    sent = fields(pipeline, browser.form_token())
    assert browser.post("/console/do/promote_release", sent).status_code == 403
    overview = Markup(signed_in(service, "approver").open("/console").text)
    assert "Needs you" in overview.text
    assert "Decide" in overview.text


def test_the_announcing_key_does_not_promote_where_four_eyes_have_to(
    start: Callable[..., Service],
) -> None:
    service = start(four_eyes=True)
    service.listen()
    link = service.call("POST", "/v1/sign-in-links").json()["url"].partition("#")[2]
    pipeline = asked(service, "one")
    browser = signed_in(service, "approver")
    assert "/console/do/promote_release" in browser.open(f"/console/releases/{pipeline.id}").text
    browser.cookies.clear()
    browser.post("/console/sign-in", {"code": link})
    page = Markup(browser.open(f"/console/releases/{pipeline.id}").text)
    assert [one for one in page.links if "/do/" in one] == ["/console/do/roll_back_release"]
    assert "Somebody other" in page.text


def test_texts_of_a_pipeline_are_shown_as_they_are(service: Service) -> None:
    for number, text in enumerate(one for one in SCRIPTS if one.isprintable()):
        pipeline = PlayedPipeline(
            service,
            f"{number} {text}"[:128],
            model_name=text[:256],
            endpoint_name=text[:256],
            links={"prefect_run": f"https://prefect.test/{number}?{text}"},
        )
        pipeline.own("held_gates", decision="promote", approver=text[:200], comment=text[:200])
        page = page_of(service, pipeline)
        assert " ".join(text[:200].split()) in " ".join(page.text.split())
        assert not [tag for tag, _ in page.tags if tag in ("img", "iframe", "object", "embed")]


def test_a_record_with_odd_values_is_shown(service: Service) -> None:
    pipeline = PlayedPipeline(service, "one", kind="rollout")
    line = line_of(begun("dep_" + "1" * 24, "dep_" + "2" * 24))
    line["plan"] = {"steps": {"a": 1}, "bake_looks": [1], "approval": None}
    pipeline.tell(ROLLOUT, line)
    pipeline.own("job", id="ft_x")
    assert "The rollout begins" in page_of(service, pipeline).text


def test_a_chart_cuts_evidence_and_draws_harm_only_where_there_is_some(service: Service) -> None:
    pipeline = PlayedPipeline(service, "one", kind="rollout")
    harmed = GateReading(
        "error", "harm", log_e_ok=-1.0, log_e_ok_limit=2.0, log_e_harm=9.0, log_e_harm_limit=4.0
    )
    proven = GateReading(
        "error", "proven", log_e_ok=9.0, log_e_ok_limit=2.0, log_e_harm=-1.0, log_e_harm_limit=4.0
    )
    pipeline.facts(
        begun("dep_" + "1" * 24, "dep_" + "2" * 24),
        *(look(number, 9, 5, gates=(proven,)) for number in (1, 2, 3)),
        look(4, 9, 25, gates=(harmed,), verdict=Verdict.ROLLBACK, reason="error_rate"),
    )
    evidence = service.call("GET", f"{pipeline.path}/evidence").json()
    view = ReleaseView(
        Release.model_validate(pipeline.shown),
        ReleaseStory(),
        ReleaseEvidence.model_validate(evidence),
        *([None] * 5),
    )
    chart = view.chart("error")
    assert chart is not None
    assert chart["columns"] == ([1, 2, 3, 4], [MOST, MOST, MOST, 0.0], [None, None, 0.0, -MOST])
    assert chart["steps"] == [4]
    assert view.chart("slow") is None
    assert (
        "Rolls back at 25 %: the candidate fails more requests" in page_of(service, pipeline).text
    )


def test_a_chart_breaks_between_the_rollouts_of_a_release(service: Service) -> None:
    """Each counts its looks from 1."""
    pipeline = PlayedPipeline(service, "one")
    second = "rollout-5d6e7f80-2-0a1b2c3d"
    pipeline.next[second] = 1
    pair = "dep_" + "1" * 24, "dep_" + "2" * 24
    pipeline.facts(begun(*pair), SplitConfirmed(5, NOON), look(1, 9, 5), look(2, 9, 5))
    later = [begun(*pair), SplitConfirmed(25, NOON), look(1, 9, 25), look(2, 9, 50)]
    pipeline.tell(second, *map(line_of, later))
    evidence = service.call("GET", f"{pipeline.path}/evidence").json()
    view = ReleaseView(
        Release.model_validate(pipeline.shown),
        ReleaseStory(),
        ReleaseEvidence.model_validate(evidence),
        *([None] * 5),
    )
    chart = view.chart("error")
    assert chart is not None
    assert (chart["columns"][0], chart["starts"], chart["steps"]) == ([1, 2, 3, 4, 5], [3], [5])
    assert [column[2] for column in chart["columns"][1:]] == [None, None]
    # The steps that the first rollout had reached are none of the second one.
    assert "5 % not yet" in " ".join(page_of(service, pipeline).text.split())


@pytest.mark.parametrize(
    "address", ["http://[", "https://", "https://tuneship.example@elsewhere.test/"]
)
def test_a_link_that_leads_nowhere_or_elsewhere_than_it_seems_is_no_link(
    service: Service, address: str
) -> None:
    pipeline = PlayedPipeline(service, "one", links={"prefect_run": address})
    page = page_of(service, pipeline)
    assert not [tag for _, tag in page.tags if (tag.get("href") or "").startswith("http")]


def test_a_timeline_shows_the_newest_events_and_counts_all(service: Service) -> None:
    pipeline = PlayedPipeline(service, "one")
    for start in range(0, EVENTS_SHOWN + 40, 40):
        lines = [{"kind": "held_gates", "approver": f"E{start + one}"} for one in range(40)]
        pipeline.tell(OWN, *lines)
    page = page_of(service, pipeline)
    assert f"newest {EVENTS_SHOWN} of {EVENTS_SHOWN + 40} events" in " ".join(page.text.split())
    assert f"E{EVENTS_SHOWN + 39} decided" in page.text
    assert "E0 decided" not in page.text


def test_a_name_shows_each_character_that_would_change_how_it_reads(service: Service) -> None:
    name = "\u202eeve\u2066 \x9b2J\u2028x"
    pipeline = PlayedPipeline(service, "one", model_name=name)
    page = page_of(service, pipeline)
    assert "\ufffdeve\ufffd \ufffd2J\ufffdx" in page.text
    pipeline.own("question", question=QUESTION, asks=["T8 x"], until="2126-01-01T00:00:00Z")
    refused = pipeline.answer("promote", name=name)
    assert (refused.status_code, refused.json()["error"]["param"]) == (422, "name")
    pipeline.own("held_gates", approver=name, decision="promote")
    assert "approver" not in pipeline.lines()[-1]


@pytest.mark.parametrize("outcome", OUTCOMES)
def test_every_end_is_shown(service: Service, outcome: str) -> None:
    pipeline = asked(service, "one")
    pipeline.own("ended", outcome=outcome, reason="stopped")
    page = page_of(service, pipeline)
    assert OUTCOMES[outcome] in page.text
    assert words.STATES[outcome].word in page.text


def test_a_release_whose_run_failed_is_not_called_stopped(service: Service) -> None:
    pipeline = asked(service, "one")
    pipeline.own("ended", outcome="aborted", reason="failed")
    page = signed_in(service, "admin").open(f"/console/releases/{pipeline.id}").text
    shown = page.partition("</h1>")[2].partition("</div>")[0]
    assert "failed" in shown
    assert words.STATES["aborted"].word not in shown


@pytest.mark.parametrize("outcome", OUTCOMES)
def test_checks_of_a_bake_are_planned_only_until_the_release_has_ended(
    service: Service, outcome: str
) -> None:
    pipeline = PlayedPipeline(service, "one", kind="rollout")
    line = line_of(begun("dep_" + "1" * 24, "dep_" + "2" * 24))
    line["plan"] |= {"bake_looks": 3}
    pipeline.tell(ROLLOUT, line)
    pipeline.facts(SplitConfirmed(5, NOON), look(1, 9, 5))
    assert "Bake3 checks planned" in page_of(service, pipeline).text
    pipeline.own("ended", outcome=outcome, reason="stopped")
    page = page_of(service, pipeline).text
    assert "planned" not in page
    assert "% not yet" not in " ".join(page.split())
    assert ("Bake3 checks" in page) == (outcome == "promoted")
