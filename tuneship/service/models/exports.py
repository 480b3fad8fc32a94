"""Makes an export of a tuned model in a folder of unfinished work: its files in one of three formats, and a card.

Used by the API (`content.py`) and by `tuneship models export`. The work is that of a process of its own
(`tuneship/conversion/exporting.py`), which also reads the result back and compares it.
"""

import hashlib
import shutil
from dataclasses import dataclass
from datetime import UTC, datetime
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Literal, cast

import sqlalchemy as sa

from tuneship.cards.canonical import canonical
from tuneship.cards.facts import privacy_facts, training_facts
from tuneship.cards.making import new_card, with_release
from tuneship.cards.rendering import as_markdown
from tuneship.contract.jobs import Job
from tuneship.contract.model_card import CardDataset, CardModel, ModelCard
from tuneship.conversion.order import ExportOrder, ExportReport
from tuneship.conversion.running import ConversionFailed, ConversionLimits, Convert
from tuneship.host.durable import flush
from tuneship.host.file_digest import sha256_of
from tuneship.host.startup import StartupError
from tuneship.host.weight_files import weight_files
from tuneship.security.sealed_files import open_plain, read_plain
from tuneship.service.access.data_keys import Keyring
from tuneship.service.access.hipaa import is_hipaa
from tuneship.service.catalogues.base_models import Catalogue, CataloguedModel
from tuneship.store.database import rows, tables
from tuneship.store.database.tables import DatasetRow, JobRow, ModelRow
from tuneship.store.files.blobs import Blobs
from tuneship.store.files.stored_files import dataset_file, model_ref

# Folders of unfinished exports, in the service's `scratch` or beside the folder that a command fills.
EXPORTING = ".exporting-"
# Library and relation to the base model in Hugging Face's metadata, by format.
HUB_TERMS = {
    "peft": ("peft", "adapter"),
    "merged": ("transformers", "finetune"),
    "gguf": ("gguf", "quantized"),
}
LICENCES = ("LICENSE", "LICENSE.txt", "LICENSE.md", "NOTICE", "NOTICE.txt")


DatasetRole = Literal["training", "validation"]


class ExportRefused(StartupError):
    """A model is not exported; the message says why, and nothing was made."""


@dataclass(frozen=True)
class Exportable:
    """A tuned model with everything that its export needs from the rows."""

    row: ModelRow
    key: str
    job: JobRow | None
    # Role, id, row and data key of each dataset of the job; no row: it was deleted.
    datasets: tuple[tuple[DatasetRole, str, DatasetRow | None, str | None], ...]


def exportable(connection: sa.Connection, keyring: Keyring, row: ModelRow) -> Exportable:
    """Read what the export of a model needs. Raises `ObjectDamaged`."""
    client_id = row["client_id"]
    job: Any = row["job_id"] and rows.fetch(
        connection, tables.jobs, row["job_id"], client_id=client_id
    )
    named: dict[DatasetRole, Any] = {
        "training": job and job["dataset_id"],
        "validation": job and job["validation_dataset_id"],
    }
    datasets: list[tuple[DatasetRole, str, DatasetRow | None, str | None]] = []
    for role, identifier in named.items():
        if identifier:
            found = rows.fetch(connection, tables.datasets, identifier, client_id=client_id)
            key = keyring.find(connection, client_id, f"datasets/{identifier}") if found else None
            datasets.append((role, identifier, found, key))
    return Exportable(row, keyring.find(connection, client_id, row["blob"]), job, tuple(datasets))


def refuse_hipaa(model: Exportable, *, is_allowed: bool) -> None:
    """Raise `ExportRefused` for a model of a job in hipaa mode, unless the operator allows it."""
    if model.job is not None and is_hipaa(model.job) and not is_allowed:
        raise ExportRefused(
            "the model was trained in hipaa mode, and such models are not exported here "
            "(TUNESHIP_EXPORT_HIPAA_MODELS)"
        )


@dataclass(frozen=True)
class Exporter:
    """The parts of an installation that exports need."""

    blobs: Blobs
    catalogue: Catalogue
    convert: Convert

    def make(
        self,
        model: Exportable,
        stage: Path,
        wanted: tuple[str, str],
        limits: ConversionLimits,
        release: ModelCard | None = None,
    ) -> Path:
        """Make an export within `stage` and return its folder. Raises `ExportRefused` and `OSError`.

        `wanted`: the format and the number format of a GGUF file; `release`: the card of the model's release.
        """
        base = self._base(model.row["base_model"])
        if wanted[0] == "gguf" and find_spec("gguf") is None:
            raise ExportRefused("a GGUF file needs `pip install 'tuneship[gguf]'` at the service")
        adapter, target = stage / "adapter", stage / "export"
        for folder in (adapter, target):
            folder.mkdir(mode=0o700)
        with self.blobs.fetched(model_ref(model.row)) as files:
            for name in model.row["sha256"]:
                (adapter / name).write_bytes(read_plain(files / name, model.key))
        card = self._card(model, base)
        order = ExportOrder(
            str(base.path.absolute()), str(adapter.absolute()), str(target.absolute()), *wanted,
            base_name=base.hub_id or base.id, name=model.row["name"], licence=base.licence,
        )  # fmt: skip
        try:
            report = self.convert(order, ExportReport, stage, (base.path.absolute(),), limits)
        except ConversionFailed as failure:
            raise ExportRefused(f"the model cannot be exported: {failure}") from None
        _refuse_faulty(report)
        for name in LICENCES:
            if (base.path / name).is_file():
                shutil.copyfile(base.path / name, target / name)
        if release is not None:
            card = with_release(card, release)
        library, relation = HUB_TERMS[order.format]
        metadata = {"library_name": library, "base_model_relation": relation}
        text = as_markdown(card, metadata, _this_export(order, report))
        (target / "README.md").write_text(text, encoding="utf-8")
        (target / "model_card.json").write_bytes(canonical(card))
        for path in (*target.iterdir(), target):
            flush(path)
        return target

    def _base(self, identifier: str) -> CataloguedModel:
        base = self.catalogue.get(identifier)
        if base is None or base.fault is not None:
            raise ExportRefused(
                f"its base model {identifier} is not on this machine, so that no export can be made or compared"
            )
        return base

    def _card(self, model: Exportable, base: CataloguedModel) -> ModelCard:
        row = model.row
        job = None if model.job is None else Job.model_validate(model.job)
        return new_card(
            datetime.now(UTC),
            CardModel(
                id=row["id"],
                name=row["name"],
                created_at=row["created_at"],
                is_imported=row["job_id"] is None,
                base_model=base.id,
                base_source=base.hub_id,
                base_licence=base.licence,
                base_sha256={file.name: sha256_of(file) for file in weight_files(base.path).files},
            ),
            data=[self._dataset(*one) for one in model.datasets],
            training=None if job is None else training_facts(job),
            privacy=privacy_facts(job),
        )

    def _dataset(
        self, role: DatasetRole, identifier: str, row: DatasetRow | None, key: str | None
    ) -> CardDataset:
        if row is None:
            return CardDataset(role=role, id=identifier)
        with dataset_file(self.blobs, row) as path, open_plain(path, key, path.name) as file:
            digest = hashlib.file_digest(cast("Any", file), "sha256").hexdigest()
        return CardDataset(
            role=role,
            id=identifier,
            sha256=digest,
            examples=row["num_examples"],
            tokens=row["prompt_tokens"] + row["response_tokens"],
            parents=row["source_datasets"] or [],
        )


def _this_export(order: ExportOrder, report: ExportReport) -> list[str]:
    """The section of the card about the export itself."""
    versions = ", ".join(f"{name} {version}" for name, version in report.versions.items())
    checked = (
        f"Format {order.format}, weights in {report.number_format}. It was read back and compared with the service's "
        f"engine: over fixed texts the logits differ by {report.difference:.2g} of their standard deviation "
        f"({report.allowed:g} is allowed). Written and read with {versions}."
    )
    return ["## This export", "", checked, ""]


def _refuse_faulty(report: ExportReport) -> None:
    if report.fault is not None:
        raise ExportRefused(f"the model cannot be exported: {report.fault}")
    if not report.difference <= report.allowed:  # also refuses NaN
        raise ExportRefused(
            f"the export answers otherwise than the model: logits differ by {report.difference:.2g} of their spread, "
            f"{report.allowed:g} is allowed"
        )
