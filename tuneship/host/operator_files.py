"""Reads the files that settings name. Every fault names the setting or the file, and never what is in it."""

import ssl
from pathlib import Path
from typing import Any, TypeVar

import yaml
from pydantic import BaseModel, ValidationError

from tuneship.host.startup import StartupError

M = TypeVar("M", bound=BaseModel)


def secret_in(file: Path, variable: str) -> str:
    """The secret that a file holds. Raises `StartupError`."""
    try:
        secret = file.read_text().strip()
    except (OSError, UnicodeDecodeError) as error:
        raise StartupError(f"{variable} cannot be read: {type(error).__name__}") from error
    if not secret or not secret.isascii() or not secret.isprintable():
        raise StartupError(f"{variable} does not hold a secret")
    return secret


def trust_in(file: Path | None, variable: str) -> ssl.SSLContext:
    """The authorities of a file; None: those of the system. Raises `StartupError`."""
    try:
        return ssl.create_default_context(cafile=file)
    except OSError as error:  # also one of TLS
        raise StartupError(f"{variable} cannot be used: {type(error).__name__}") from error


def read_yaml(file: Path, model: type[M], what: str, fault: type[StartupError]) -> M:
    """Read and check a file of YAML, which messages call `what`. Raises `fault`."""
    try:
        return model.model_validate(yaml.safe_load(file.read_text()))
    except (OSError, UnicodeDecodeError, yaml.YAMLError) as error:
        # Of YAML's own text only the place: the rest repeats what the file holds.
        mark: Any = getattr(error, "problem_mark", None)
        place = "" if mark is None else f" in line {mark.line + 1}"
        text = f"it cannot be read: {type(error).__name__}{place}"
        raise fault(f"the {what} {file}: {text}") from None
    except ValidationError as error:
        first = error.errors(include_input=False)[0]
        parts = (f"[{one}]" if isinstance(one, int) else f".{one}" for one in first["loc"])
        path = "".join(parts).removeprefix(".") or "the file"
        message = first["msg"].removeprefix("Value error, ")
        raise fault(f"the {what} {file}: {path}: {message}") from None
