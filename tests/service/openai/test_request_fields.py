"""Every field of OpenAI's own types is used, neutral or refused by name: a newer package fails here, not a user."""

from typing import Any

import pytest
from openai.types import (
    batch_create_params,
    completion_create_params,
    embedding_create_params,
    eval_create_params,
    eval_update_params,
    file_create_params,
)
from openai.types.chat import (
    ChatCompletionAllowedToolChoiceParam,
    ChatCompletionAllowedToolsParam,
    ChatCompletionAssistantMessageParam,
    ChatCompletionContentPartRefusalParam,
    ChatCompletionContentPartTextParam,
    ChatCompletionFunctionToolParam,
    ChatCompletionMessageFunctionToolCallParam,
    ChatCompletionNamedToolChoiceCustomParam,
    ChatCompletionNamedToolChoiceParam,
    ChatCompletionToolMessageParam,
    ChatCompletionUserMessageParam,
)
from openai.types.chat import completion_create_params as chat_params
from openai.types.chat.chat_completion_message_function_tool_call_param import (
    Function as CalledFunctionParam,
)
from openai.types.evals import create_eval_completions_run_data_source_param as completions_run
from openai.types.evals import run_create_params as run_params
from openai.types.fine_tuning import job_create_params as job_params
from openai.types.fine_tuning.supervised_hyperparameters_param import SupervisedHyperparametersParam
from openai.types.graders import StringCheckGraderParam
from openai.types.responses import (
    EasyInputMessageParam,
    FunctionToolParam,
    ResponseFunctionToolCallParam,
    ResponseTextConfigParam,
    ToolChoiceAllowedParam,
    ToolChoiceFunctionParam,
)
from openai.types.responses import response_create_params as response_params
from openai.types.responses.response_format_text_json_schema_config_param import (
    ResponseFormatTextJSONSchemaConfigParam,
)
from openai.types.responses.response_input_file_param import ResponseInputFileParam
from openai.types.responses.response_input_image_param import ResponseInputImageParam
from openai.types.responses.response_input_param import FunctionCallOutput, Message
from openai.types.responses.response_input_text_param import ResponseInputTextParam
from openai.types.responses.response_output_message_param import ResponseOutputMessageParam
from openai.types.responses.response_output_refusal_param import ResponseOutputRefusalParam
from openai.types.responses.response_output_text_param import ResponseOutputTextParam
from openai.types.responses.response_reasoning_item_param import ResponseReasoningItemParam
from openai.types.shared_params import FunctionDefinition as FunctionDefinitionParam
from openai.types.shared_params.response_format_json_schema import (
    JSONSchema,
    ResponseFormatJSONSchema,
)
from openai.types.webhooks import (
    webhook_create_params,
    webhook_rotate_secret_params,
    webhook_test_params,
    webhook_update_params,
)

from tuneship.contract.openai.answer_parts import NamedSchema
from tuneship.contract.openai.batches import BatchCreate
from tuneship.contract.openai.chat import (
    AllowedTools,
    ChatCall,
    ChatCalledFunction,
    ChatCompletionCreate,
    ChatMessage,
    ChatPart,
    ChatResponseFormat,
    ChatToolChoice,
)
from tuneship.contract.openai.completions import TextCompletionCreate
from tuneship.contract.openai.embeddings import EmbeddingsCreate
from tuneship.contract.openai.eval_runs import (
    EvalRunCreate,
    InputMessages,
    RunDataSource,
    RunSource,
    SamplingParams,
    SentRow,
    TemplateMessage,
)
from tuneship.contract.openai.evals import EvalCreate, EvalCriterion, EvalDataSource, EvalUpdate
from tuneship.contract.openai.files import FileUpload
from tuneship.contract.openai.jobs import (
    FineTuningJobCreate,
    SupervisedHyperparameters,
    TuningMethod,
)
from tuneship.contract.openai.request_fields import OpenAIRequest
from tuneship.contract.openai.responses import (
    InputCall,
    InputMessage,
    InputPart,
    InputReasoning,
    InputResult,
    ResponseCreate,
    ResponseStreamOptions,
    ResponseTool,
    ResponseToolChoice,
    TextFormat,
    TextOptions,
)
from tuneship.contract.openai.webhooks import (
    WebhookEndpointCreate,
    WebhookEndpointTest,
    WebhookEndpointUpdate,
    WebhookSecretRotation,
)
from tuneship.contract.schemas.tools import FunctionDefinition, FunctionTool

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
        (batch_create_params.BatchCreateParams, BatchCreate),
        (eval_create_params.EvalCreateParams, EvalCreate),
        (eval_create_params.DataSourceConfigCustom, EvalDataSource),
        (StringCheckGraderParam, EvalCriterion),
        (eval_create_params.TestingCriterionTextSimilarity, EvalCriterion),
        (eval_update_params.EvalUpdateParams, EvalUpdate),
        (run_params.RunCreateParams, EvalRunCreate),
        (completions_run.CreateEvalCompletionsRunDataSourceParam, RunDataSource),
        (run_params.DataSourceCreateEvalResponsesRunDataSource, RunDataSource),
        (completions_run.SourceFileContent, RunSource),
        (completions_run.SourceFileContentContent, SentRow),
        (completions_run.SourceFileID, RunSource),
        (completions_run.InputMessagesTemplate, InputMessages),
        (completions_run.InputMessagesItemReference, InputMessages),
        (completions_run.InputMessagesTemplateTemplateEvalItem, TemplateMessage),
        (EasyInputMessageParam, TemplateMessage),
        (completions_run.SamplingParams, SamplingParams),
        (run_params.DataSourceCreateEvalResponsesRunDataSourceSamplingParams, SamplingParams),
        (webhook_create_params.WebhookCreateParams, WebhookEndpointCreate),
        (webhook_update_params.WebhookUpdateParams, WebhookEndpointUpdate),
        (webhook_rotate_secret_params.WebhookRotateSecretParams, WebhookSecretRotation),
        (webhook_test_params.WebhookTestParams, WebhookEndpointTest),
        (response_params.StreamOptions, ResponseStreamOptions),
        (ResponseTextConfigParam, TextOptions),
        (ResponseFormatTextJSONSchemaConfigParam, TextFormat),
        (ResponseFormatJSONSchema, ChatResponseFormat),
        (JSONSchema, NamedSchema),
        (ChatCompletionUserMessageParam, ChatMessage),
        (ChatCompletionAssistantMessageParam, ChatMessage),
        (ChatCompletionToolMessageParam, ChatMessage),
        (ChatCompletionNamedToolChoiceParam, ChatToolChoice),
        (ChatCompletionNamedToolChoiceCustomParam, ChatToolChoice),
        (ChatCompletionAllowedToolChoiceParam, ChatToolChoice),
        (ChatCompletionAllowedToolsParam, AllowedTools),
        (FunctionToolParam, ResponseTool),
        (ToolChoiceFunctionParam, ResponseToolChoice),
        (ToolChoiceAllowedParam, ResponseToolChoice),
        (ResponseFunctionToolCallParam, InputCall),
        (FunctionCallOutput, InputResult),
        (EasyInputMessageParam, InputMessage),
        (Message, InputMessage),
        (ResponseOutputMessageParam, InputMessage),
        (ResponseInputTextParam, InputPart),
        (ResponseInputImageParam, InputPart),
        (ResponseInputFileParam, InputPart),
        (ResponseOutputTextParam, InputPart),
        (ResponseOutputRefusalParam, InputPart),
        (ResponseReasoningItemParam, InputReasoning),
        (ChatCompletionMessageFunctionToolCallParam, ChatCall),
        (CalledFunctionParam, ChatCalledFunction),
        (ChatCompletionContentPartTextParam, ChatPart),
        (ChatCompletionContentPartRefusalParam, ChatPart),
    ],
    ids=lambda one: one.__name__,
)
def test_every_field_of_the_parts_is_known(sent: Any, read: type[OpenAIRequest]) -> None:
    fields = {field.alias or name for name, field in read.model_fields.items()}
    known = {*fields, *read.neutral, *read.unsupported, "file"}
    assert set(sent.__annotations__) - known == set()


@pytest.mark.parametrize(
    ("sent", "read"),
    [
        (ChatCompletionFunctionToolParam, FunctionTool),
        (FunctionDefinitionParam, FunctionDefinition),
    ],
    ids=lambda one: one.__name__,
)
def test_functions_of_chats_are_those_of_the_main_api(sent: Any, read: Any) -> None:
    assert set(sent.__annotations__) == set(read.model_fields)
