"""Every field of OpenAI's own types is used, neutral or refused by name: a newer package fails here, not a user."""

from typing import Any

import pytest
from openai.types import completion_create_params, file_create_params
from openai.types.chat import completion_create_params as chat_params
from openai.types.fine_tuning import job_create_params as job_params
from openai.types.fine_tuning.supervised_hyperparameters_param import SupervisedHyperparametersParam

from tuneship.contract.openai.chat import ChatCompletionCreate
from tuneship.contract.openai.completions import TextCompletionCreate
from tuneship.contract.openai.fields import OpenAIRequest
from tuneship.contract.openai.files import FileUpload
from tuneship.contract.openai.jobs import (
    FineTuningJobCreate,
    SupervisedHyperparameters,
    TuningMethod,
)

TYPES: list[tuple[Any, type[OpenAIRequest]]] = [
    (chat_params.CompletionCreateParamsBase, ChatCompletionCreate),
    (completion_create_params.CompletionCreateParamsBase, TextCompletionCreate),
]


@pytest.mark.parametrize(("sent", "read"), TYPES, ids=lambda one: one.__name__)
def test_every_field_stands_in_one_list(sent: Any, read: type[OpenAIRequest]) -> None:
    lists = [set(read.model_fields), set(read.neutral), set(read.unsupported)]
    known = set[str]().union(*lists)
    assert set(sent.__annotations__) - known == set()
    assert sum(map(len, lists)) == len(known)
    # The client adds `stream` by itself.
    assert known - set(sent.__annotations__) <= {"stream"}


def test_a_neutral_value_is_no_other_value_of_the_same_truth() -> None:
    fields = {"model": "m", "prompt": "p", "best_of": True}
    with pytest.raises(ValueError, match="supported only as"):
        TextCompletionCreate.model_validate(fields)


@pytest.mark.parametrize(
    ("sent", "read"),
    [
        (job_params.JobCreateParams, FineTuningJobCreate),
        (job_params.Method, TuningMethod),
        (job_params.Hyperparameters, SupervisedHyperparameters),
        (SupervisedHyperparametersParam, SupervisedHyperparameters),
        (file_create_params.FileCreateParams, FileUpload),
    ],
    ids=lambda one: one.__name__,
)
def test_every_field_of_files_and_jobs_is_known(sent: Any, read: type[OpenAIRequest]) -> None:
    known = {*read.model_fields, *read.neutral, *read.unsupported, "file"}
    assert set(sent.__annotations__) - known == set()
