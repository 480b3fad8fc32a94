"""The errors of the main API in the form in which OpenAI's clients expect them. Pure.

Clients decide by the status, by `code`, and some by a sentence (a prompt that is too long). Like those of the main API,
the messages never hold what the caller sent, although OpenAI's own would.
"""

from collections.abc import Mapping
from typing import Any

from tuneship.contract.errors import (
    ApiError,
    AuthenticationError,
    DatasetError,
    DeploymentError,
    InternalError,
    ModelNotFound,
    PermissionDenied,
    QuotaExceeded,
    RateLimitExceeded,
    ResourceNotFound,
    ValidationFailed,
)
from tuneship.service.generation.prompts import PromptTooLong

INVALID = "invalid_request_error"
# OpenAI's code of a refused field by the main API's.
FIELD_CODES = {
    "unknown_field": "unknown_parameter",
    "missing_field": "missing_required_parameter",
    "wrong_type": "invalid_type",
    "unsupported_parameter": "unsupported_parameter",
    "unsupported_value": "unsupported_value",
    "unsupported_operation": "unsupported_operation",
}
# Type and code where the kind of the error decides; a subclass stands before its base.
KINDS: Mapping[type[ApiError], tuple[str, str]] = {
    PromptTooLong: (INVALID, "context_length_exceeded"),
    AuthenticationError: (INVALID, "invalid_api_key"),
    PermissionDenied: (INVALID, "missing_scope"),
    ModelNotFound: (INVALID, "model_not_found"),
    ResourceNotFound: (INVALID, "not_found"),
    RateLimitExceeded: ("requests", "rate_limit_exceeded"),
    QuotaExceeded: ("insufficient_quota", "insufficient_quota"),
    InternalError: ("server_error", "server_error"),
}
# OpenAI's codes for a header that names another organization or project than the key's.
MISMATCHED = {
    "OpenAI-Organization": "mismatched_organization",
    "OpenAI-Project": "mismatched_project",
}


class OpenAIError(ApiError):
    """An error with a type and a code of OpenAI's API."""

    statuses = tuple(range(400, 600))

    def __init__(self, message: str, status: int, codes: tuple[str, str], **fields: Any) -> None:
        """`codes` are the type and the code of the body."""
        super().__init__(message, status=status, **fields)
        self.kind, self.openai_code = codes

    def as_json(self, request_id: str | None) -> dict[str, Any]:  # noqa: ARG002 - the main API's body holds it
        """OpenAI's body; `details` is ours, where there are several places. The id of the request is in its header."""
        error: dict[str, Any] = {
            "message": self.message,
            "type": self.kind,
            "param": self.param,
            "code": self.openai_code,
        }
        if self.details:
            error["details"] = [detail.as_json() for detail in self.details]
        return {"error": error}


def openai_error(error: ApiError, *, is_job_create: bool = False) -> OpenAIError:
    """The error as OpenAI's clients expect it.

    `is_job_create`: some clients take every 400 to a new job for a file that is not ready, and ask again for ever, so
    that waiting does not help is said by 422.
    """
    if isinstance(error, OpenAIError):
        return error
    status, message = error.status, error.message
    if isinstance(error, PromptTooLong):
        message = _too_long(error)
    if isinstance(error, ValidationFailed) or (isinstance(error, DatasetError) and status == 422):
        status = 400
    if is_job_create and status == 400:
        status = 422
    made = OpenAIError(
        message,
        status,
        _codes(error),
        param=error.param,
        details=error.details,
        retry_after=error.retry_after,
    )
    made.retryable, made.headers = error.retryable, error.headers
    return made


def _too_long(error: PromptTooLong) -> str:
    """OpenAI's words for a conversation, or for texts that are read as they are.

    litellm looks for the first words, LangChain for the last ones: since openai 3.57, its errors' text has no code.
    """
    most = f"This model's maximum context length is {error.context_length} tokens"
    if error.is_conversation:
        return (
            f"{most}. However, your messages resulted in {error.tokens} tokens. Please reduce the "
            "length of the messages: the prompt is too long."
        )
    return (
        f"{most}, however you requested {error.tokens} tokens in your prompt. Please reduce your "
        "prompt; or completion length: the prompt is too long."
    )


def _codes(error: ApiError) -> tuple[str, str]:
    if isinstance(error, DeploymentError) and error.status == 503:
        return KINDS[InternalError]
    if error.param in MISMATCHED:
        return (INVALID, MISMATCHED[error.param])
    for kind, codes in KINDS.items():
        if isinstance(error, kind):
            return codes
    if isinstance(error, DatasetError) and error.status == 422 and error.param == "file":
        return (INVALID, "invalid_file_format")
    first = error.details[0].code if error.details else ""
    is_value = bool(first) or isinstance(error, ValidationFailed)
    return (INVALID, FIELD_CODES.get(first, "invalid_value" if is_value else error.code))
