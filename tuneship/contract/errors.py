"""Every error that a call of the API can raise, under one root; the service's errors have one class per code of §7.

The service raises an error and renders it; the client reads it from the answer and raises it again.

    TuneshipError                     any call that failed; `retryable` says whether the same call may succeed later
     |- ApiError                      the service's error: a code, a status and a request id
     |   |- InvalidRequestError       invalid_request_error      400 (405 408 409 412 413 414 415 431)
     |   |- AuthenticationError       authentication_error       401
     |   |- PermissionDenied          permission_denied          403
     |   |- ResourceNotFound          resource_not_found         404
     |   |- ModelNotFound             model_not_found            404
     |   |- ValidationFailed         validation_error           422
     |   |- DatasetError              dataset_error              422 (409)
     |   |- DeploymentError           deployment_error           409 (503)
     |   |- InstanceTypeUnavailable   instance_type_unavailable  409
     |   |- RateLimitExceeded         rate_limit_exceeded        429
     |   |- QuotaExceeded             quota_exceeded             429
     |   |- FineTuningError           fine_tuning_error          only inside the record of a failed job
     |   `- InternalError             internal_error             500 (503)
     |- SourceError                   the caller's rows cannot be sent as JSON Lines (client only)
     |- BadResponse                   the answer is not of this contract (client only)
     `- ServiceUnreachable            no answer came (client only)
         `- DeadlineExceeded          none came before the caller's deadline (client only)

Messages name fields, limits and counts, never what the caller sent: it may be a patient's text.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, cast


@dataclass(frozen=True)
class ErrorDetail:
    """One refused place: a field of the request, or a line of a dataset file."""

    field: str | None
    code: str
    message: str
    line: int | None = None

    def as_json(self) -> dict[str, Any]:
        """The wire form; `line` only where there is one."""
        body: dict[str, Any] = {"field": self.field, "code": self.code, "message": self.message}
        return body if self.line is None else {"line": self.line, **body}


class TuneshipError(Exception):
    """A call of the API failed. Catch it where it does not matter why."""

    # Whether the same call may succeed later.
    retryable: bool


class ApiError(TuneshipError):
    """An error of the service. `status` is the HTTP status, `retryable` whether the same request may succeed later."""

    code: ClassVar[str] = "unknown_error"
    statuses: ClassVar[tuple[int, ...]] = (500,)

    def __init__(
        self,
        message: str,
        *,
        param: str | None = None,
        details: Sequence[ErrorDetail] = (),
        status: int | None = None,
        retry_after: int | None = None,
    ) -> None:
        """Take the class's first status unless another of its statuses is given."""
        super().__init__(message)
        self.message = message
        self.param = param
        self.details = tuple(details)
        self.status = self.statuses[0] if status is None else status
        # A plain `ApiError` is read from the answer of a server that may use any status.
        if type(self) is not ApiError and self.status not in self.statuses:
            raise ValueError(f"{self.code} cannot have the status {self.status}")
        self.retry_after = retry_after
        # `fine_tuning_error` has this status, too, and such a job does not succeed later.
        self.retryable = self.status in (408, 503) or (
            self.status == 500 and self.code == "internal_error"
        )
        self.request_id: str | None = None
        self.unknown_code: str | None = None
        self.headers: dict[str, str] = {}

    @property
    def sent_code(self) -> str:
        """The code that the server sent, even if no class here has it."""
        return self.unknown_code or self.code

    def as_json(self, request_id: str | None) -> dict[str, Any]:
        """The error body, which has the same shape for every error."""
        return {
            "error": {
                "code": self.code,
                "message": self.message,
                "type": self.code,
                "param": self.param,
                "request_id": request_id,
                "details": [detail.as_json() for detail in self.details],
            }
        }


class InvalidRequestError(ApiError):
    """The request is malformed, lacks a required parameter, or meets a resource in the wrong state."""

    code = "invalid_request_error"
    statuses = (400, 405, 408, 409, 412, 413, 414, 415, 431)


class AuthenticationError(ApiError):
    """The API key or the client id is missing or wrong, or they do not belong together.

    A key that ends while it is used ends with this code, within two seconds, what it has begun: a stream by an `error`
    event, a download by breaking off, a generation, and an upload when it has arrived. What it ends is counted neither
    as cancelled nor as an error. A short request that was accepted before is completed. Jobs, deployments and webhooks
    belong to the client id and stay.
    """

    code = "authentication_error"
    statuses = (401,)


class PermissionDenied(ApiError):
    """The key is valid but lacks the scope of this operation.

    It is answered before the body is read.
    """

    code = "permission_denied"
    statuses = (403,)


class ResourceNotFound(ApiError):
    """The job, dataset, deployment, endpoint or route does not exist for this client.

    What belongs to another client id is answered in the same way.
    """

    code = "resource_not_found"
    statuses = (404,)


class ModelNotFound(ApiError):
    """The named model does not exist."""

    code = "model_not_found"
    statuses = (404,)


class ValidationFailed(ApiError):
    """A field is present and its value is refused."""

    code = "validation_error"
    statuses = (422,)


class DatasetError(ApiError):
    """The content of a dataset is refused, or the dataset is in use or not processed.

    422 is for the content, 409 for the state.
    """

    code = "dataset_error"
    statuses = (422, 409)


class DeploymentError(ApiError):
    """A deployment is in the wrong state, its name is taken, or something still refers to it.

    503: it does not serve yet, and waiting helps.
    """

    code = "deployment_error"
    statuses = (409, 503)


class InstanceTypeUnavailable(ApiError):
    """An instance or compute type that this installation does not have, or not in this region."""

    code = "instance_type_unavailable"
    statuses = (409,)


class RateLimitExceeded(ApiError):
    """Too many requests in the current window; `retry_after` seconds bring the next one.

    After 20 refused keys a minute from one address, further wrong ones get this, too; a valid key is still accepted.
    """

    code = "rate_limit_exceeded"
    statuses = (429,)

    def __init__(self, message: str, **fields: Any) -> None:
        """Mark the call as one that a later try may repeat."""
        super().__init__(message, **fields)
        self.retryable = True


class QuotaExceeded(ApiError):
    """A quota of the client id is used up; waiting does not help.

    Unless the operator has set others: 10 active jobs, 50 deployments, 500 endpoints, 20 webhooks, 1,000 datasets, and
    50 GiB of datasets and files of batches.
    """

    code = "quota_exceeded"
    statuses = (429,)


class FineTuningError(ApiError):
    """The reason why a job failed. It is in the job's record, and is never an HTTP answer."""

    code = "fine_tuning_error"
    statuses = (500,)


class InternalError(ApiError):
    """The service failed, or cannot take the request now (503): it is busy, or shuts down."""

    code = "internal_error"
    statuses = (500, 503)


class SourceError(TuneshipError):
    """Rows to upload cannot be read, or not be written as JSON Lines (client only). The message names the place."""

    retryable = False


class BadResponse(TuneshipError):
    """The server's answer is not of this contract (client only). The message names the operation and the problem."""

    def __init__(self, message: str, *, retryable: bool = False) -> None:
        """Set `retryable` when the answer was cut short or came from a proxy, so that a retry may bring a whole one."""
        super().__init__(message)
        self.retryable = retryable


class ServiceUnreachable(TuneshipError):
    """No answer came: refused, timed out, or the connection broke (client only)."""

    def __init__(self, message: str, *, retryable: bool = True) -> None:
        """Clear `retryable` when a retry must fail, too: the address is wrong, or there is no TLS connection."""
        super().__init__(message)
        self.retryable = retryable


class DeadlineExceeded(ServiceUnreachable):
    """The caller's own deadline has passed (client only). Whether the service carried out the call is not known."""


BY_CODE: dict[str, type[ApiError]] = {
    kind.code: kind
    for kind in (
        InvalidRequestError,
        AuthenticationError,
        PermissionDenied,
        ResourceNotFound,
        ModelNotFound,
        ValidationFailed,
        DatasetError,
        DeploymentError,
        InstanceTypeUnavailable,
        RateLimitExceeded,
        QuotaExceeded,
        FineTuningError,
        InternalError,
    )
}


def error_from_answer(status: int | None, body: object) -> ApiError:
    """The error that an HTTP answer stands for; an unknown code becomes a plain `ApiError`.

    `body` is the decoded JSON or anything else. Of a body of another shape, only the status is used. Without a status
    it is the last event of a stream, whose own status was sent long before: then the error has its class's first one.
    """
    fields = cast("dict[str, object]", body).get("error") if isinstance(body, dict) else None
    if not isinstance(fields, dict):
        # A proxy's answer: its text is not shown, since it may quote the request.
        error = ApiError(f"the server answered {status} without an error body", status=status)
        error.retryable = status in (408, 429, 500, 502, 503, 504)
        return error
    fields = cast("dict[str, Any]", fields)
    code = str(fields.get("code"))
    known = BY_CODE.get(code)
    message, param = str(fields.get("message", "")), fields.get("param")
    details = [
        ErrorDetail(
            field=detail.get("field"),
            code=str(detail.get("code")),
            message=str(detail.get("message")),
            line=detail.get("line"),
        )
        for detail in fields.get("details") or ()
    ]
    # A later version of the service may use another status, which the class would refuse.
    if known and (status is None or status in known.statuses):
        error = known(message, param=param, details=details, status=status)
    else:
        error = ApiError(message, param=param, details=details, status=status)
        error.unknown_code = code
    error.request_id = fields.get("request_id")
    return error
