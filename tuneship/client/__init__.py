"""The typed client: `client.jobs.create(JobCreate(...))`, sync (`Client`) and async (`AsyncClient`) from one core.

Operations and their verbs are declared in `tuneship/contract/`; `core.py` decides about retries, errors and replies.
"""

from tuneship.client.base import Options, base_url
from tuneship.client.clients import AsyncClient, Client
from tuneship.client.records import parse_columns, records
from tuneship.contract.errors import (
    ApiError,
    BadResponse,
    DeadlineExceeded,
    ServiceUnreachable,
    SourceError,
    TuneshipError,
)

__all__ = [
    "ApiError",
    "AsyncClient",
    "BadResponse",
    "Client",
    "DeadlineExceeded",
    "Options",
    "ServiceUnreachable",
    "SourceError",
    "TuneshipError",
    "base_url",
    "parse_columns",
    "records",
]
