"""Compares answers of both deployments: the smoke test before any traffic, and exact matches on validation rows.

Only counts leave this module. Next: `tuneship/gates/smoke_test.py` judges the smoke test.
"""

from pathlib import Path

from prefect import get_run_logger

from flows.forms.release_form import ReleaseParameters
from flows.release.local_files import questions
from flows.release.result import Accuracy
from flows.rollout.traffic_driver import read_prompts
from tasks.sample_answers import answer_prompts
from tuneship.contract.common import count
from tuneship.gates.gate_result import GateResult
from tuneship.gates.smoke_test import judge_smoke

SMOKE_PROMPTS = 20
# Of the exact matches: nothing is timed there, so many prompts may run at once.
IN_FLIGHT = 16
# For a release that brings no rows and no prompts of its own.
PLAIN_PROMPTS = (
    "What is a fracture of the femur?",
    "Name a disease of the respiratory system.",
    "Which organ does hepatitis affect?",
    "What does an open wound of the hand need?",
    "Describe a burn of the second degree.",
    "What is type 2 diabetes mellitus?",
    "Name a disorder of the eye.",
    "What causes influenza?",
    "Which chapter holds diseases of the skin?",
    "What is anaemia?",
    "Name a disease of the ear.",
    "What is a sprain?",
    "Which organ does pneumonia affect?",
    "Describe a fracture of the wrist.",
    "Name an infectious disease of the intestines.",
    "What does a burn of the third degree need?",
    "Which joint does a torn meniscus affect?",
    "What causes malaria?",
    "Name a disorder of the thyroid gland.",
    "What is asthma?",
)


def smoke_test(baseline_id: str, candidate_id: str, release: ReleaseParameters) -> GateResult:
    """Send twenty fixed prompts to both deployments while the candidate has no traffic (gate T10)."""
    prompts = smoke_prompts(release)
    tokens = release.evaluation.max_tokens
    # One at a time: the times are compared, and a queue would be measured instead of the models.
    baseline, candidate = answer_prompts(
        [baseline_id, candidate_id], prompts, tokens, purpose="smoke-test", in_flight=1
    )
    verdict = judge_smoke(baseline, candidate)
    get_run_logger().info("gate %s: %s", verdict.name, verdict.state)
    return verdict


def smoke_prompts(release: ReleaseParameters) -> list[str]:
    """The same prompts in every run of a release: its validation rows, else its traffic's prompts, else plain ones."""
    prompts: list[str] = []
    if release.data is not None and release.validation_file is not None:
        rows = questions(release.validation_file, release.data.format, SMOKE_PROMPTS)
        prompts = [row.prompt for row in rows]
    if not prompts and release.canary.traffic is not None:
        prompts = read_prompts(Path(release.canary.traffic.prompts))[:SMOKE_PROMPTS]
    return prompts or list(PLAIN_PROMPTS)


def measure_accuracy(
    baseline_id: str, candidate_id: str, release: ReleaseParameters
) -> Accuracy | None:
    """Count exact matches of both deployments on the same rows; None without rows. No gate reads it."""
    wanted = release.evaluation
    most = wanted.exact_match_rows
    if not most or release.data is None or release.validation_file is None:
        return None
    rows = questions(release.validation_file, release.data.format, most)
    if not rows:
        return None
    prompts = [row.prompt for row in rows]
    answered = answer_prompts(
        [baseline_id, candidate_id],
        prompts,
        wanted.max_tokens,
        purpose="exact-match",
        in_flight=IN_FLIGHT,
    )
    right = [
        sum(one.completion.strip() == row.answer for one, row in zip(answers, rows, strict=True))
        for answers in answered
    ]
    accuracy = Accuracy(rows=len(rows), before=right[0], after=right[1])
    get_run_logger().info(
        "exact match on %s: %.1f %% before, %.1f %% after",
        count(accuracy.rows, "validation row"),
        100 * accuracy.before / accuracy.rows,
        100 * accuracy.after / accuracy.rows,
    )
    return accuracy
