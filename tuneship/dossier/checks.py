"""Verifies a dossier: every digest, every decision bit by bit, and that the members agree.

Whoever changes all members at once, and the numbers behind each decision with it, has made another dossier: keep the
SHA-256 of the file elsewhere. What changes without that is named here with its member and place.
"""

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, cast

from pydantic_core import to_jsonable_python

from tuneship.cards.rendering import as_markdown
from tuneship.contract.audit import AuditHead, signed_text
from tuneship.contract.common import count
from tuneship.contract.evaluations import GraderReport, SliceReport
from tuneship.contract.model_card import CardGate, ModelCard
from tuneship.dossier.archive import MAX_BYTES, NoDossier, pack, unpack
from tuneship.dossier.contents import (
    CARD,
    CARD_TEXT,
    HEAD,
    MANIFEST,
    MEMBERS,
    PICTURES,
    RELEASE,
    REPORT,
    RESULT,
    ROLLOUT,
    TRAINING,
    digests_of,
    made_here,
    manifest_of,
    written_manifest,
)
from tuneship.dossier.json_values import (
    bounded,
    difference,
    json_of,
    lines_of,
    mapping_of,
    pick,
)
from tuneship.gates.canary import first_difference
from tuneship.gates.canary import replay as look_again
from tuneship.gates.evaluation.evaluation_report import (
    EVALUATION_GATE,
    decided_report,
    evaluation_gate,
)
from tuneship.gates.evaluation.verdict import replay as judge_again
from tuneship.gates.record import Ended, RolloutRecord, from_lines
from tuneship.gates.reports.rollout_facts import facts_of
from tuneship.gates.training.training_record import training_record

# It rests on answers, which nobody stores.
SMOKE_GATE = "T10 smoke"
# Of a verification: whoever made the file chooses how much is wrong with it.
MAX_PROBLEMS, MAX_CHARACTERS = 100, 400


@dataclass
class Findings:
    """The outcome of a verification: every problem in one line, and the decisions that came out as recorded."""

    problems: list[str] = field(default_factory=list[str])
    decided: list[str] = field(default_factory=list[str])
    # Gates of which nobody has stored what they rest on, and texts by another version of tuneship.
    undecided: list[str] = field(default_factory=list[str])
    release: dict[str, Any] = field(default_factory=dict[str, Any])
    head: AuditHead | None = None

    def note(self, problem: str) -> None:
        """Add a problem, of which a part may come from the file."""
        if len(self.problems) == MAX_PROBLEMS:
            self.problems.append("more than that is wrong")
        elif len(self.problems) < MAX_PROBLEMS:
            self.problems.append(bounded(problem, MAX_CHARACTERS))

    def compare(self, member: str, ours: Any, theirs: Any, source: str) -> None:
        """Note the first place in which a member does not have what follows from `source`."""
        found = difference(ours, theirs)
        if found is not None:
            self.note(f"{member}{found} by {source}")


def verify(content: bytes) -> Findings:
    """Verify a dossier. Raises `NoDossier` for a file that is none."""
    if len(content) > MAX_BYTES:
        raise NoDossier(f"the file is larger than {MAX_BYTES // 2**20} MiB")
    members = unpack(content, MEMBERS)
    missing = [name for name in (MANIFEST, RESULT, RELEASE) if name not in members]
    if missing:
        raise NoDossier(f"it lacks {missing[0]}, which every dossier has")
    found = Findings()
    for member, check in _CHECKS:
        if member in members:
            try:
                check(members, found)
            # Members come from outside: whatever they hold instead of what belongs there is a finding.
            except Exception as error:  # noqa: BLE001
                found.note(f"{member}: {_reason(error)}")
                if check in _READ_BY_ALL:
                    break
    if not found.problems and pack(members) != content:
        found.note("the file has bytes that belong to no member")
    return found


def _reason(error: Exception) -> str:
    """The first line of a message of this program; another's may quote what it read."""
    is_own = type(error) is ValueError or type(error).__module__.startswith("tuneship.")
    return str(error).splitlines()[0] if is_own and str(error) else "cannot be read"


def _digests(members: Mapping[str, bytes], found: Findings) -> None:
    listed: dict[str, Any] = mapping_of(members[MANIFEST])["members"]
    ours = digests_of(members)
    for name in sorted({*ours, *listed}):
        if name not in ours:
            found.note(f"{bounded(name)}: the manifest lists it, and it is missing")
        elif name not in listed:
            found.note(f"{name}: the manifest does not list it")
        elif ours[name] != listed[name]:
            found.note(f"{name}: was changed, its SHA-256 is not that of the manifest")


def _manifest(members: Mapping[str, bytes], found: Findings) -> None:
    listed = mapping_of(members[MANIFEST])
    expected = manifest_of(members, str(listed["made_by"]))
    found.release = expected["release"]
    if not found.problems:
        found.compare(MANIFEST, listed, expected, "the other members")
        if not found.problems and members[MANIFEST] != written_manifest(members, listed["made_by"]):
            found.note(f"{MANIFEST}: is not written as tuneship writes it")


def _result_can_be_read(members: Mapping[str, bytes], _: Findings) -> None:
    mapping_of(members[RESULT])


def _record_can_be_read(members: Mapping[str, bytes], _: Findings) -> None:
    lines_of(members[RELEASE])


def _rollout(members: Mapping[str, bytes], found: Findings) -> None:
    record = from_lines(members[ROLLOUT].decode().splitlines())
    looks = 0
    for recorded, decided in look_again(record):
        if place := first_difference(recorded, decided):
            raise ValueError(f"look {recorded.number}{place}")
        looks += 1
    found.decided.append(f"{count(looks, 'check')} of the rollout")
    result = mapping_of(members[RESULT])
    said = result.get("outcome"), result.get("reason")
    # A paused rollout may have gone on after the result was written.
    ends = [
        place
        for place, fact in enumerate(record.facts, 1)
        if isinstance(fact, Ended) and (fact.outcome, fact.reason) == said
    ]
    if not ends:
        raise ValueError(f"it did not end as {RESULT} says, in its outcome and reason")
    facts = to_jsonable_python(facts_of(RolloutRecord(record.facts[: ends[-1]])))
    ours = {name: result.get(name) for name in facts}
    found.compare(RESULT, _without_sentences(ours), _without_sentences(facts), ROLLOUT)


def _without_sentences(facts: dict[str, Any]) -> dict[str, Any]:
    """The facts of a rollout without their sentences, which another version of tuneship may word differently."""
    forecast = facts["forecast"]
    if isinstance(forecast, dict):
        forecast = cast("dict[str, Any]", forecast) | {"in_words": None}
    return facts | {"in_words": None, "forecast": forecast}


def _without_words(gates: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """The gates without what decides nothing: their notes, and whether there is one of a gate that passes.

    Another version of tuneship may word a note differently, or note a rise of an ended job's losses (T2) earlier.
    """
    return [
        gate | {"note": None, "state": "pass" if gate["state"] == "note" else gate["state"]}
        for gate in gates
    ]


def _result(members: Mapping[str, bytes], found: Findings) -> None:
    """The result against the release's record, and its outcome against its gates."""
    result, facts = mapping_of(members[RESULT]), lines_of(members[RELEASE])
    begun = [fact for fact in facts if fact.get("kind") == "begun"]
    found.compare(f"{RESULT}.run_key", result.get("run_key"), pick(begun[-1], "run_key"), RELEASE)
    outcome, gates = result.get("outcome"), result["training_gates"]
    ends = [fact for fact in facts if fact.get("kind") == "ended"]
    same = [fact for fact in ends if fact.get("outcome") == outcome]
    # A stopped release may have been ended by its clean-up, under another reason.
    if outcome != "aborted" and result.get("reason") not in [one.get("reason") for one in same]:
        found.note(f"{RESULT}.outcome: {RELEASE} has no such end, or with another reason")
    if plans := [fact for fact in facts if fact.get("kind") == "rollout"]:
        found.compare(f"{RESULT}.training_gates", gates, plans[-1].get("gates"), RELEASE)
    for gate in gates:
        if gate["state"] == "reject" and outcome != "rejected":
            found.note(f"{RESULT}.outcome: gate {gate['name']} rejects")
    for member, wanted in (
        (ROLLOUT, result.get("rollout_id") is not None),
        (REPORT, result.get("report") is not None),
        (CARD, result.get("model_card") is not None),
        (CARD_TEXT, result.get("model_card") is not None),
        (TRAINING, any(_is_of_training(gate) for gate in gates)),
    ):
        if wanted != (member in members):
            text = "it is missing" if wanted else "it does not belong to this release"
            found.note(f"{member}: by {RESULT} {text}")
    report = members.get(REPORT, b"")
    for name in PICTURES:
        is_there = name in members
        if (f"({name})".encode() in report) != is_there:
            text = "does not show it" if is_there else "shows it, and it is missing"
            found.note(f"{name}: {REPORT} {text}")


def _is_of_training(gate: Mapping[str, Any]) -> bool:
    return gate["name"] not in (SMOKE_GATE, EVALUATION_GATE)


def _training(members: Mapping[str, bytes], found: Findings) -> None:
    result = mapping_of(members[RESULT])
    record = training_record(members[TRAINING].decode())
    verdict = record.decide()
    decided = [dataclasses.asdict(gate) for gate in verdict.gates]
    gates = [gate for gate in result["training_gates"] if _is_of_training(gate)]
    found.compare(
        f"{RESULT}.training_gates", _without_words(gates), _without_words(decided), TRAINING
    )
    found.compare(f"{RESULT}.model", result.get("model"), record.job.fine_tuned_model, TRAINING)
    found.decided.append(f"{len(decided)} training gates")


def _evaluation(members: Mapping[str, bytes], found: Findings) -> None:
    result = mapping_of(members[RESULT])
    evaluation: dict[str, Any] = result.get("evaluation") or {}
    record = pick(evaluation, "record")
    names = [gate["name"] for gate in result["training_gates"]]
    found.undecided += [SMOKE_GATE] * names.count(SMOKE_GATE)
    if record is None:
        found.undecided += [EVALUATION_GATE] * names.count(EVALUATION_GATE)
        return
    again = judge_again(record)
    report = decided_report(again)
    graders = [GraderReport.model_validate(one) for one in report["graders"]]
    words = report["sentence"] or ""
    expected = {
        "sentence": words,
        # Behind these stand graders of shares, which decide nothing.
        "graders": _dumped(graders),
        "slices": _dumped([SliceReport.model_validate(one) for one in report["slices"]]),
    }
    ours = {
        "sentence": evaluation["sentence"],
        "graders": evaluation["graders"][: len(graders)],
        "slices": evaluation["slices"],
    }
    found.compare(f"{RESULT}.evaluation", ours, expected, "evaluation.record")
    gate = evaluation_gate(again.verdict, graders, again.rules.margin, words)
    recorded = [one for one in result["training_gates"] if one["name"] == EVALUATION_GATE]
    found.compare(
        f"{RESULT}.training_gates", recorded, [dataclasses.asdict(gate)], "evaluation.record"
    )
    found.decided.append("the evaluation")


def _dumped(reports: Sequence[GraderReport | SliceReport]) -> list[dict[str, Any]]:
    return [one.model_dump(mode="json") for one in reports]


def _card(members: Mapping[str, bytes], found: Findings) -> None:
    kept = [one for one in lines_of(members[RELEASE]) if one.get("kind") == "model_card"]
    digest = digests_of(members)[CARD]["sha256"]
    if [pick(one, "sha256") for one in kept[-1:]] != [digest]:
        found.note(f"{CARD}: its SHA-256 is not the one in {RELEASE}")
    card = ModelCard.model_validate_json(members[CARD])
    _decided_as_result(card, mapping_of(members[RESULT]), found)
    # Another version of tuneship may word the same card otherwise.
    if mapping_of(members[MANIFEST])["made_by"] != made_here():
        found.undecided.append(CARD_TEXT)
    elif members.get(CARD_TEXT) != as_markdown(card).encode():
        found.note(f"{CARD_TEXT}: it does not say what {CARD} has")


def _decided_as_result(card: ModelCard, result: dict[str, Any], found: Findings) -> None:
    names = ["run_key"]
    # The card of a stopped release was written before the clean-up, and its result after that, from the records.
    is_stopped = card.decisions is not None and card.decisions.outcome == "aborted"
    is_known = result.get("model") or result["training_gates"]
    if result.get("report") or (is_known and not is_stopped):
        names += ["outcome", "reason", "gate", "gates"]
        found.compare(f"{CARD}.model.id", card.model.id, result.get("model"), RESULT)
    # With the numbers as a card has them: what is not finite is null.
    gates = [CardGate(**gate).model_dump(mode="json") for gate in result["training_gates"]]
    theirs, ours = result | {"gates": gates}, card.model_dump(mode="json")
    found.compare(
        f"{CARD}.decisions",
        {name: pick(ours, "decisions", name) for name in names},
        {name: theirs.get(name) for name in names},
        RESULT,
    )


def _head(members: Mapping[str, bytes], found: Findings) -> None:
    # An extra of the service, and with Prefect in every installation.
    from cryptography.exceptions import InvalidSignature  # noqa: PLC0415 - starts slowly
    from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PublicKey  # noqa: PLC0415

    head = AuditHead.model_validate(json_of(members[HEAD]))
    key = Ed25519PublicKey.from_public_bytes(bytes.fromhex(head.public_key))
    try:
        key.verify(bytes.fromhex(head.signature), signed_text(head.seq, head.mac, head.at))
    except InvalidSignature:
        found.note(f"{HEAD}: its signature is not valid")
    else:
        found.head = head


_CHECKS: Sequence[tuple[str, Callable[[Mapping[str, bytes], Findings], None]]] = (
    (MANIFEST, _digests),
    (RESULT, _result_can_be_read),
    (RELEASE, _record_can_be_read),
    (MANIFEST, _manifest),
    (RESULT, _result),
    (ROLLOUT, _rollout),
    (TRAINING, _training),
    (RESULT, _evaluation),
    (CARD, _card),
    (HEAD, _head),
)
# Without these two, every other check would only say that they cannot be read.
_READ_BY_ALL = (_result_can_be_read, _record_can_be_read)
