"""The guard's parameters and result: the form of its deployment and the result of its script."""

from typing import Literal

from pydantic import BaseModel, Field

from flows.rollout.abandoned import AbandonedRollout
from flows.upkeep.watch import Alarm


class GuardRules(BaseModel):
    """The guard's time limits."""

    silence_seconds: int = Field(
        default=60,
        ge=0,
        le=86_400,
        description="A rollout without a driver and without a check for this long, and for three checks, is abandoned.",
    )
    release_silence_hours: int = Field(
        default=24,
        ge=0,
        le=720,
        description="A release that nobody went on with for this long gives its job and its deployment away.",
    )
    watch: bool = Field(
        default=True,
        description="Weigh what serves each endpoint against its own first day and report what has become worse.",
    )


class GuardResult(BaseModel):
    """The result of one run of the guard."""

    outcome: Literal["nothing_to_do", "returned", "rollback_incomplete"]
    reason: str = "none"
    rollouts: list[AbandonedRollout] = Field(default_factory=list[AbandonedRollout])
    releases: list[str] = Field(
        default_factory=list[str], description="Run keys of the releases that were closed."
    )
    alarms: list[Alarm] = Field(
        default_factory=list[Alarm],
        description="What has become worse since its first day and was not reported before; no traffic was moved.",
    )
    notes: list[str] = Field(default_factory=list[str], description="What a person must look at.")
