"""An error of the service for people: its code and every refused place. The service never echoes the input."""

from tuneship.contract.errors import ApiError

SHOWN_DETAILS = 20


def error_text(error: ApiError) -> str:
    """The message, a line for each detail (fields, lines of a file, codes), and the id of the request."""
    lines = [f"the service refused ({error.status} {error.sent_code}): {error}"]
    for detail in error.details[:SHOWN_DETAILS]:
        line = f"line {detail.line}, " if detail.line is not None else ""
        lines.append(f"  {line}{detail.field or 'request'}: {detail.code}: {detail.message}")
    if error.request_id:
        lines.append(f"  request {error.request_id}")
    return "\n".join(lines)
