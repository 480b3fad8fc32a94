"""`tuneship doctor`: what this machine can do, and what a model of a given size would need of it.

Nothing is started or changed. Exit code 0; 4 where a service cannot run here, or the model would not fit.
"""

import math
import os
import platform
import re
import shutil
import socket
from collections.abc import Iterator
from importlib import metadata
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from tuneship.cli.common import fail, service_settings
from tuneship.cli.output import show_json, show_rows

if TYPE_CHECKING:
    from tuneship.settings import ServiceSettings

UNFIT = 4
SIZE = re.compile(r"(\d+(?:\.\d+)?)\s*([MB])", re.IGNORECASE)
UNITS = {"M": 1e6, "B": 1e9}
GIB = 1 << 30
# The tables of README.md and docs/first-release.md are computed with these, and say what was measured: GiB for the
# process, bytes for each parameter, and GiB for what a step keeps, by the square root of a billion parameters. A
# training has the weights in bfloat16 and, for an adapter of 1 % of them, 16 bytes a parameter.
NEEDS = {
    "to add it": (0.7, 6.5, 0.0),
    "to train it": (0.6, 2.16, 3.5),
    "a replica": (0.2, 5.5, 0.0),
}
# Of such a step; with less memory, a training computes it row by row.
ROWS, TOKENS = 16, 60

app = typer.Typer(no_args_is_help=True)


@app.command()
def doctor(
    parameters: Annotated[
        str | None,
        typer.Option(metavar="SIZE", help="Size of a base model, such as 135M or 1.5B parameters."),
    ] = None,
    as_json: Annotated[
        bool,
        typer.Option(
            "--json", help="Print JSON: one document, or one per line where entries are streamed."
        ),
    ] = False,
) -> None:
    """Say what this machine can do, and what a model of a given size would need."""
    size = None if parameters is None else _size(parameters)
    rows = [*_machine(service_settings()), *([] if size is None else _needs(size))]
    if as_json:
        show_json([{"what": what, "found": found, "fits": fits} for what, found, fits in rows])
    else:
        show_rows(
            [{"what": what, "found": found, "": "" if fits else "!"} for what, found, fits in rows],
            ("", "what", "found"),
        )
    if not all(fits for _, _, fits in rows):
        raise typer.Exit(UNFIT)


def _size(text: str) -> float:
    found = SIZE.fullmatch(text.strip())
    if found is None:
        fail("--parameters: must be a number with M or B, such as 135M or 1.5B", 2)
    return float(found[1]) * UNITS[found[2].upper()]


def _machine(settings: "ServiceSettings") -> Iterator[tuple[str, str, bool]]:
    try:
        from tuneship.host.machine import this_machine  # noqa: PLC0415 - the light install
        from tuneship.host.memory import free_memory  # noqa: PLC0415
        from tuneship.isolation.landlock import NoLandlock, version  # noqa: PLC0415
    except ModuleNotFoundError:
        fail("this needs `pip install tuneship`: tuneship-client knows no machine")

    machine = this_machine()
    yield "Python", platform.python_version(), True
    try:
        yield "service", _torch(machine.gpus), True
    except metadata.PackageNotFoundError:
        yield "service", "needs `pip install 'tuneship[service]'`", False
    yield "cores", str(machine.cpus), True
    yield "memory", f"{_gib(machine.memory_bytes)}, {_gib(free_memory())} free", True
    has = set(re.findall(r"\b(?:avx2|fma|avx512_vnni)\b", _read("/proc/cpuinfo")))
    fast = "int8 and int4 weights run fast" if {"avx2", "fma"} <= has else "no fast int8 and int4"
    yield "processor", f"{platform.machine()}, {', '.join(sorted(has)) or 'no AVX2'}: {fast}", True
    yield "GPUs", str(machine.gpus), True
    try:
        yield "Landlock", f"version {version()}: workers are isolated", True
    except NoLandlock as error:
        yield "Landlock", f"{error}: workers cannot be isolated", False
    yield _disk(settings)
    yield _port(settings)


def _torch(gpus: int) -> str:
    found = f"with torch {metadata.version('torch')}"
    has_libraries = any(one.startswith("nvidia") for one in metadata.requires("torch") or ())
    if has_libraries and not gpus:
        found += ", whose GPU libraries are of no use here: its CPU build saves several GB"
    return found


def _disk(settings: "ServiceSettings") -> tuple[str, str, bool]:
    folder = next(path for path in (settings.data_dir, *settings.data_dir.parents) if path.exists())
    usage = shutil.disk_usage(folder)
    least = max(settings.minimum_free_disk_bytes, settings.minimum_free_disk_share * usage.total)
    text = f"{_gib(usage.free)} free for {settings.data_dir}"
    fits = usage.free > least
    return "disk", text if fits else f"{text}: uploads are refused below {_gib(least)}", fits


def _port(settings: "ServiceSettings") -> tuple[str, str, bool]:
    place = f"{settings.host}:{settings.port}"
    try:
        with socket.create_server((settings.host, settings.port)):
            return "port", f"{place} is free", True
    except OSError as error:
        # In most cases this is the service itself.
        return "port", f"{place}: {os.strerror(error.errno or 0)}", True


def _needs(size: float) -> Iterator[tuple[str, str, bool]]:
    from tuneship.host.machine import this_machine  # noqa: PLC0415 - the light install

    has = this_machine().memory_bytes
    for what, (fixed, each, kept) in NEEDS.items():
        needed = fixed * GIB + each * size
        step = kept * GIB * math.sqrt(size / 1e9)
        text = f"about {_gib(needed + step)} of memory"
        if step:
            needed += step / ROWS
            text += f" for steps of {ROWS} rows of {TOKENS} tokens, at least {_gib(needed)}"
        yield what, text, needed <= has


def _gib(amount: float) -> str:
    return f"{amount / GIB:.1f} GiB"


def _read(path: str) -> str:
    try:
        return Path(path).read_text()
    except OSError:
        return ""
