"""The typed client: `client.jobs.create(JobCreate(...))`, sync (`Client`) and async (`AsyncClient`) from one core.

What an operation is stands in `tuneship/contract/`; `resources.py` lists the verbs, `core.py` is the core.
"""

from tuneship.client.base import Options, base_url
from tuneship.client.clients import AsyncClient, Client
from tuneship.contract.errors import (
    ApiError,
    BadResponse,
    DeadlineExceeded,
    ServiceUnreachable,
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
    "TuneshipError",
    "base_url",
]
