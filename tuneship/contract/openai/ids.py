"""The ids of OpenAI's API and those of tuneship, which differ in their prefixes: `ftjob-<x>` is `ft_<x>`.

Both forms are taken everywhere, and answers hold OpenAI's.
"""

import re
from typing import Annotated

from pydantic import BeforeValidator, WithJsonSchema

from tuneship.contract.common import JobId

# OpenAI's prefix by tuneship's.
PREFIXES = {"ds": "file", "ft": "ftjob", "gen": "chatcmpl"}
# A file of a batch is `file_<x>` here; OpenAI's form does not distinguish it from a dataset.
BATCH_FILE = "file_"
RESULT_FILE = "file-res-"
# Parts of the id of a tuned model that name its tenant or its best step, as OpenAI's ids do.
CHECKPOINT = re.compile(r"ckpt-step-[0-9]{1,18}")


def shown_id(identifier: str, prefix: str | None = None) -> str:
    """OpenAI's form of an id, e.g. `ftjob-<x>` of `ft_<x>`; `prefix` replaces the usual one."""
    kind, _, rest = identifier.partition("_")
    return f"{prefix or PREFIXES.get(kind, kind)}-{rest}"


def new_form_id(identifier: str, prefix: str) -> str:
    """The id of a part of OpenAI's responses, e.g. `resp_<x>` of `gen_<x>`: these have an underscore."""
    return f"{prefix}_{identifier.partition('_')[2]}"


def own_id(identifier: str) -> str:
    """The form of an id that tuneship stores, e.g. `ft_<x>` of `ftjob-<x>`; any other text is returned unchanged."""
    if identifier.startswith(RESULT_FILE):
        return identifier
    for own, shown in PREFIXES.items():
        if identifier.startswith(f"{shown}-"):
            return f"{own}_{identifier.removeprefix(f'{shown}-')}"
    return identifier


def batch_file_of(file_id: str) -> str:
    """The id that a file of a batch has, of the id of a file from a request, which looks like a dataset's."""
    return BATCH_FILE + file_id.partition("_")[2]


def job_of_result_file(identifier: str) -> str | None:
    """The id of the job whose result file this is; None for any other id."""
    if not identifier.startswith(RESULT_FILE):
        return None
    return f"ft_{identifier.removeprefix(RESULT_FILE)}"


def result_file_of(job_id: str) -> str:
    """The id of a job's result file."""
    return RESULT_FILE + job_id.removeprefix("ft_")


def own_model_id(identifier: str, client_id: str) -> str:
    """The id of a model as tuneship stores it: `ft:<base>:<name>:<x>`.

    OpenAI's ids have the tenant behind the base, and may end with a checkpoint; both are left out.
    """
    parts = identifier.split(":")
    if parts[0] != "ft":
        return identifier
    if len(parts) > 4 and CHECKPOINT.fullmatch(parts[-1]):
        parts.pop()
    if len(parts) == 5 and parts[2] == client_id:
        del parts[2]
    return ":".join(parts)


def _from_either_form(value: object) -> object:
    return own_id(value) if isinstance(value, str) else value


FineTuningJobId = Annotated[
    JobId,
    BeforeValidator(_from_either_form),
    WithJsonSchema({"type": "string", "pattern": "^(ftjob-|ft_)[0-9a-z]{20,32}$"}),
]
FileId = Annotated[
    str,
    BeforeValidator(_from_either_form),
    WithJsonSchema({"type": "string", "pattern": "^(file-(res-)?|ds_|file_)[0-9a-z]{20,32}$"}),
]
