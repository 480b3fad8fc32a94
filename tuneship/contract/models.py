"""Models on the wire (§2.3, §4.3): base models of the catalogue and fine-tuned models in one list.

A model id may hold `/` and `:`, so the routes of one model take the rest of the path, plain or percent-encoded.
"""

from typing import Annotated, Any, Literal

from pydantic import Field

from tuneship.contract.common import (
    CreateRequest,
    Deleted,
    Limit,
    ModelId,
    ModelName,
    Offset,
    Pagination,
    Reply,
    Tags,
    Timestamp,
    absent,
)
from tuneship.contract.declaring.examples import BASE, JOB, LATER, MODEL, PAGE, TAGS
from tuneship.contract.declaring.operation import Example, TarFile, operation
from tuneship.contract.declaring.verbs import AdapterVerb, C_co, DownloadVerb, Pages, Resource, Verb
from tuneship.contract.errors import (
    InvalidRequestError,
    ModelNotFound,
    PermissionDenied,
    QuotaExceeded,
)


def job_of_model(model: str) -> str | None:
    """The id of the job that made a tuned model, `ft:<base>:<name>:<suffix>`; None for a base model."""
    return f"ft_{model.rpartition(':')[2]}" if model.startswith("ft:") else None


class Model(Reply):
    """A base model or a fine-tuned one; the fields of the other kind are null."""

    id: str
    name: str
    version: str = ""
    description: str = ""
    parameters: int | None = None
    context_length: int | None = None
    supported_fine_tuning: bool | None = None
    base_model: str | None = None
    fine_tuning_job_id: str | None = None
    created_at: Timestamp | None = None
    fine_tuning_method: str | None = None
    ends_learnt: Annotated[
        float | None,
        Field(
            description="Share of the validation examples behind whose answers the end of the turn was the likeliest "
            "token; null: not measured."
        ),
    ] = None
    appended_end: Annotated[
        str | None,
        Field(
            description="End token that training and serving put behind each answer, since the chat template writes "
            "nothing there; null: the template writes one."
        ),
    ] = None
    source: Annotated[
        str | None,
        Field(exclude_if=absent, description="Additive. The hub's id of a base model."),
    ] = None
    licence: Annotated[
        str | None,
        Field(
            exclude_if=absent,
            description="Additive. Of a base model, as its source names it.",
        ),
    ] = None
    tags: dict[str, str] = Field(default_factory=dict)


ExportFormat = Literal["peft", "merged", "gguf"]
GgufType = Literal["f16", "q8_0"]


class ModelImport(CreateRequest):
    """The form of import, beside its `file`. `tags` is JSON text."""

    name: ModelName = "imported"
    base_model: Annotated[
        ModelId | None,
        Field(description="The base model; default: the one that the adapter names."),
    ] = None
    tags: Tags = Field(default_factory=dict)


class ModelPage(Reply):
    """One page of models: base models by id, then fine-tuned ones, newest first."""

    models: list[Model]
    pagination: Pagination | None = None


class HyperparameterLimits(Reply):
    """Limits of one hyperparameter. A null bound means no bound; `auto` says that the word `auto` is a value, too."""

    type: str
    min: float | int | None
    max: float | int | None
    exclusive_min: bool = False
    exclusive_max: bool = False
    # The value when the field, and those that it depends on, are not sent.
    default: Any
    auto: bool = False
    description: str = ""


class ModelLimits(Reply):
    """Limits of a model. A fine-tuned model is not tuned again, so it has no methods and no hyperparameters."""

    id: str
    fine_tuning_methods: list[str]
    hyperparameters: dict[str, HyperparameterLimits]
    # Names that `target_modules` may hold beside `all-linear`.
    target_modules: list[str]
    context_length: int
    max_output_tokens: Annotated[
        int, Field(description="The largest value a deployment may allow.")
    ]


# Examples of the OpenAPI document.
EXAMPLE_BASE: dict[str, Any] = {
    "id": BASE,
    "name": "tuneship tiny",
    "version": "1",
    "description": "A small model that trains on a laptop.",
    "parameters": 1_016_000,
    "context_length": 512,
    "supported_fine_tuning": True,
    "base_model": None,
    "fine_tuning_job_id": None,
    "created_at": None,
    "fine_tuning_method": None,
    "ends_learnt": None,
    "appended_end": None,
    "tags": {},
}

EXAMPLE_TUNED = {
    **EXAMPLE_BASE,
    "id": MODEL,
    "name": "icd-chapters",
    "description": "",
    "supported_fine_tuning": False,
    "base_model": BASE,
    "fine_tuning_job_id": JOB,
    "created_at": LATER,
    "fine_tuning_method": "lora",
    "ends_learnt": 0.99,
    "tags": TAGS,
}


@operation(
    "GET",
    "/v1/models",
    scope="models:read",
    headers=("X-API-Profile",),
    example=Example(
        reply={"models": [EXAMPLE_BASE, EXAMPLE_TUNED], "pagination": {**PAGE, "total": 2}}
    ),
)
def list_models(
    limit: Limit = 20,
    offset: Offset = 0,
    base_model: ModelId | None = None,
    fine_tuned_only: bool = False,
    tags: Tags | None = None,
) -> ModelPage:
    """List models (§4.3); `base_model` keeps only models tuned from that base.

    Base models come first, then fine-tuned ones, newest first; `fine_tuned_only` leaves the base models out. A base
    model whose files are damaged is not listed.
    """
    raise NotImplementedError


@operation(
    "GET",
    "/v1/models/{model_id:path}",
    scope="models:read",
    errors=(ModelNotFound,),
    headers=("X-API-Profile",),
    example=Example(reply=EXAMPLE_TUNED),
)
def get_model(model_id: ModelId) -> Model:
    """Fetch one model, a base model or a fine-tuned one.

    `:` and `/` of the id may be sent plain or percent-encoded. A base model whose files are damaged is 404, with the
    reason.
    """
    raise NotImplementedError


@operation(
    "GET",
    "/v1/models/{model_id:path}/limits",
    scope="models:read",
    errors=(ModelNotFound,),
    example=Example(
        reply={
            "id": BASE,
            "fine_tuning_methods": ["lora"],
            "hyperparameters": {
                "learning_rate": {
                    "type": "number",
                    "min": 0.0,
                    "max": 1.0,
                    "exclusive_min": True,
                    "exclusive_max": False,
                    "default": 0.0002,
                    "auto": True,
                    "description": "",
                }
            },
            "target_modules": ["q_proj", "v_proj"],
            "context_length": 512,
            "max_output_tokens": 512,
        }
    ),
)
def get_model_limits(model_id: ModelId) -> ModelLimits:
    """Read the limits and defaults of training and generation with a model.

    A form for a job can be built from them.
    """
    raise NotImplementedError


@operation(
    "GET",
    "/v1/models/{model_id:path}/content",
    scope="models:content",
    errors=(ModelNotFound, (InvalidRequestError, 409), PermissionDenied),
)
def get_model_content(
    model_id: ModelId,
    format: ExportFormat = "peft",  # noqa: A002 - what people call it
    gguf_type: GgufType = "f16",
) -> bytes:
    """Download a tuned model as a tar archive: its adapter, a merged checkpoint or a GGUF file, with a model card.

    It is made, read back and compared with the service's engine while the caller waits: seconds for a small model,
    minutes for a large one.
    """
    raise NotImplementedError


@operation(
    "POST",
    "/v1/models",
    scope="models:write",
    status=201,
    errors=(ModelNotFound, QuotaExceeded),
    example=Example(
        {"adapter": {"name": "icd-chapters", "base_model": BASE, "file": "a tar archive"}},
        {**EXAMPLE_TUNED, "fine_tuning_job_id": None},
    ),
)
def import_model(form: ModelImport, file: TarFile) -> Model:
    """Make a tuned model of a LoRA adapter that was trained elsewhere: a tar archive of a peft directory.

    It is loaded as it will be served before it is accepted, so that one for another base model, of wrong shapes or with
    values that are not finite is refused. Weights are taken as safetensors only, and it is asked in the chat template
    of its base model: one that comes with another is refused.
    """
    raise NotImplementedError


@operation(
    "DELETE",
    "/v1/models/{model_id:path}",
    scope="models:write",
    errors=(ModelNotFound, (InvalidRequestError, 409)),
    example=Example(reply={"id": MODEL, "deleted": True}),
)
def delete_model(model_id: ModelId) -> Deleted:
    """Delete a fine-tuned model and its files; one that a deployment names is kept.

    The refusal (409) names these deployments.
    """
    raise NotImplementedError


class Models(Resource[C_co]):
    """Base models and fine-tuned ones."""

    list = Verb(list_models)
    iterate = Pages(list_models, lambda page: page.models)
    get = Verb(get_model)
    limits = Verb(get_model_limits)
    download = DownloadVerb(get_model_content)
    import_ = AdapterVerb[ModelImport, Model](import_model)
    delete = Verb(delete_model)
