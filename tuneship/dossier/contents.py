"""The members of a dossier: read from where a release has left them, and listed with their digests.

The release's record names the other files, which lie beside it. Next: `checks.py`.
"""

import hashlib
import json
from collections.abc import Mapping
from importlib import metadata
from pathlib import Path
from typing import Any

from tuneship.contract.audit import AuditHead
from tuneship.dossier.archive import MAX_BYTES, NoDossier
from tuneship.dossier.components import COMPONENTS
from tuneship.dossier.json_values import json_of, lines_of, mapping_of, pick

MANIFEST, RESULT, RELEASE = "manifest.json", "result.json", "release.jsonl"
ROLLOUT, TRAINING, HEAD = "rollout.jsonl", "training.json", "audit-head.jsonl"
CARD, CARD_TEXT = "model_card.json", "model_card.md"
REPORT = "report.md"
PICTURES = ("evaluation.png", "loss.png", "rollout.png")
# What a dossier may lack, and why it then does.
ABSENT = {
    ROLLOUT: "no rollout began",
    TRAINING: "no training was judged",
    CARD: "no model card",
    REPORT: "no report was written",
    COMPONENTS: "the release was stopped before its end",
    HEAD: "made without an audit head",
}
MEMBERS = frozenset({MANIFEST, RESULT, RELEASE, CARD_TEXT, *ABSENT, *PICTURES})
COMMANDS = {
    "verify everything": "tuneship releases verify DOSSIER",
    "decide every check of the rollout again": f"tuneship rollouts replay {ROLLOUT}",
    "compare the head with the chain, at the service": f"tuneship audit verify --heads {HEAD}",
}


def gather(result_file: Path, head: AuditHead | None) -> dict[str, bytes]:
    """All members but the manifest. Raises ValueError for files that are not those of a release, and OSError."""
    members = {RESULT: result_file.read_bytes()}
    result = mapping_of(members[RESULT])
    run_key, record = result.get("run_key"), result.get("record")
    if not isinstance(run_key, str) or not isinstance(record, str):
        raise NoDossier("it is no result file of a release: it has no run_key, or names no record")
    record_file = Path(record)
    members[RELEASE] = record_file.read_bytes()
    training = record_file.with_suffix(".training.json")
    if training.is_file():
        members[TRAINING] = training.read_bytes()
    if isinstance(rollout := result.get("rollout_id"), str):
        members[ROLLOUT] = _rollout_record(record_file.parents[1], rollout).read_bytes()
    if isinstance(report := result.get("report"), str):
        members |= _report(Path(report))
    if isinstance(card := result.get("model_card"), str):
        members[CARD] = Path(card).read_bytes()
        members[CARD_TEXT] = Path(card).with_name(CARD_TEXT).read_bytes()
    if head is not None:
        members[HEAD] = (json.dumps(head.model_dump()) + "\n").encode()
    if sum(map(len, members.values())) > MAX_BYTES // 2:
        raise NoDossier("the files of this release are larger than a dossier may be")
    return members


def _rollout_record(records: Path, rollout_id: str) -> Path:
    found = sorted(records.glob(f"*/{Path(rollout_id).name}.jsonl"))
    if len(found) != 1:
        many = "several records" if found else "no record"
        raise NoDossier(f"there is {many} of its rollout in {records}")
    return found[0]


def _report(file: Path) -> dict[str, bytes]:
    members = {REPORT: file.read_bytes()}
    # An earlier run in this folder may have left pictures that the report does not show.
    shown = [name for name in PICTURES if f"({name})".encode() in members[REPORT]]
    members |= {name: file.with_name(name).read_bytes() for name in shown}
    components = file.with_name(COMPONENTS)
    return members | ({COMPONENTS: components.read_bytes()} if components.is_file() else {})


def made_here() -> str:
    """The name under which this installation makes dossiers."""
    return f"tuneship {metadata.version('tuneship-client')}"


def digests_of(members: Mapping[str, bytes]) -> dict[str, dict[str, Any]]:
    """Size and SHA-256 of every member but the manifest, by name."""
    return {
        name: {"bytes": len(content), "sha256": hashlib.sha256(content).hexdigest()}
        for name, content in sorted(members.items())
        if name != MANIFEST
    }


def manifest_of(members: Mapping[str, bytes], made_by: str) -> dict[str, Any]:
    """Describe a dossier: its members and its release. Everything but `made_by` follows from the members.

    Raises ValueError for a result or a record that cannot be read.
    """
    return {
        "format": 1,
        "made_by": made_by,
        "release": _identity(members),
        "commands": COMMANDS,
        "absent": {name: why for name, why in ABSENT.items() if name not in members},
        "members": digests_of(members),
    }


def written_manifest(members: Mapping[str, bytes], made_by: str) -> bytes:
    """The manifest as its member has it."""
    return (json.dumps(manifest_of(members, made_by), indent=2) + "\n").encode()


def _identity(members: Mapping[str, bytes]) -> dict[str, Any]:
    """Ids of the release, and the SHA-256 of its data as far as the pipeline knew them."""
    result = mapping_of(members[RESULT])
    names = ("run_key", "outcome", "reason", "model", "champion_model", "job_id", "rollout_id")
    job = pick(json_of(members[TRAINING]), "job") if TRAINING in members else None
    made = [fact for fact in lines_of(members[RELEASE]) if fact.get("kind") == "job"]
    trained = next((one for one in made if one.get("id") == result.get("job_id")), None)
    return {
        **{name: result.get(name) for name in names},
        "base_model": pick(job, "base_model"),
        "data": {
            "training_dataset_id": pick(trained, "dataset_id"),
            "training_sha256": pick(trained, "content"),
            "validation_dataset_id": pick(job, "validation_dataset_id"),
            "validation_sha256": pick(job, "content_sha256"),
            "held_out_sha256": pick(result, "evaluation", "dataset_sha256"),
        },
    }
