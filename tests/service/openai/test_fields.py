"""Every field of OpenAI's own types is used, neutral or refused by name: a newer package fails here, not a user."""

from typing import Any

import pytest
from openai.types import completion_create_params, embedding_create_params, file_create_params
from openai.types.chat import completion_create_params as chat_params
from openai.types.fine_tuning import job_create_params as job_params
from openai.types.fine_tuning.supervised_hyperparameters_param import SupervisedHyperparametersParam
from openai.types.responses import EasyInputMessageParam, ResponseTextConfigParam
from openai.types.responses import response_create_params as response_params
from openai.types.responses.response_input_file_param import ResponseInputFileParam
from openai.types.responses.response_input_image_param import ResponseInputImageParam
from openai.types.responses.response_input_param import Message
from openai.types.responses.response_input_text_param import ResponseInputTextParam
from openai.types.responses.response_output_message_param import ResponseOutputMessageParam
from openai.types.responses.response_output_refusal_param import ResponseOutputRefusalParam
from openai.types.responses.response_output_text_param import ResponseOutputTextParam

from tuneship.contract.openai.chat import ChatCompletionCreate
from tuneship.contract.openai.completions import TextCompletionCreate
from tuneship.contract.openai.embeddings import EmbeddingsCreate
from tuneship.contract.openai.fields import OpenAIRequest
from tuneship.contract.openai.files import FileUpload
from tuneship.contract.openai.jobs import (
    FineTuningJobCreate,
    SupervisedHyperparameters,
    TuningMethod,
)
from tuneship.contract.openai.responses import (
    InputMessage,
    InputPart,
    ResponseCreate,
    ResponseStreamOptions,
    TextOptions,
)

TYPES: list[tuple[Any, type[OpenAIRequest]]] = [
    (chat_params.CompletionCreateParamsBase, ChatCompletionCreate),
    (completion_create_params.CompletionCreateParamsBase, TextCompletionCreate),
    (response_params.ResponseCreateParamsBase, ResponseCreate),
    (embedding_create_params.EmbeddingCreateParams, EmbeddingsCreate),
]


@pytest.mark.parametrize(("sent", "read"), TYPES, ids=lambda one: one.__name__)
def test_every_field_stands_in_one_list(sent: Any, read: type[OpenAIRequest]) -> None:
    lists = [set(read.model_fields), set(read.neutral), set(read.unsupported)]
    known = set[str]().union(*lists)
    assert set(sent.__annotations__) - known == set()
    assert sum(map(len, lists)) == len(known)
    # The client adds `stream` by itself; `pooling` is this service's own.
    assert known - set(sent.__annotations__) <= {"stream", "pooling"}


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
        (response_params.StreamOptions, ResponseStreamOptions),
        (ResponseTextConfigParam, TextOptions),
        (EasyInputMessageParam, InputMessage),
        (Message, InputMessage),
        (ResponseOutputMessageParam, InputMessage),
        (ResponseInputTextParam, InputPart),
        (ResponseInputImageParam, InputPart),
        (ResponseInputFileParam, InputPart),
        (ResponseOutputTextParam, InputPart),
        (ResponseOutputRefusalParam, InputPart),
    ],
    ids=lambda one: one.__name__,
)
def test_every_field_of_the_parts_is_known(sent: Any, read: type[OpenAIRequest]) -> None:
    known = {*read.model_fields, *read.neutral, *read.unsupported, "file"}
    assert set(sent.__annotations__) - known == set()
