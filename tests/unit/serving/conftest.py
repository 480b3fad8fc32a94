"""A tiny random base model, adapters made by peft, and real replica processes to talk to."""

import json
import shutil
import socket
import subprocess
import sys
import warnings
from collections.abc import AsyncIterator, Callable, Iterator, Mapping
from contextlib import AbstractAsyncContextManager, asynccontextmanager, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from tests.support.models.tiny_model import build_tiny_model
from tuneship.serving.replica_client import SocketLink

# Tokens for some ten seconds of a free processor, and more than a socket holds for a reader that does not read.
ENDLESS_TOKENS = 16_000
PATIENCE_S = 600.0
QUIET = {"HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1", "TRANSFORMERS_VERBOSITY": "error"}


@pytest.fixture(scope="session")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Build a Llama of width 32 with a context of 256 tokens."""
    return build_tiny_model(tmp_path_factory.mktemp("base") / "tiny")


@pytest.fixture(scope="session")
def long_base(base: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Build the same model for texts so long that a generation still runs however late a test looks at it."""
    directory = tmp_path_factory.mktemp("base") / "long"
    shutil.copytree(base, directory)
    config = json.loads((base / "config.json").read_text())
    longer = config | {"max_position_embeddings": ENDLESS_TOKENS + 256}
    (directory / "config.json").write_text(json.dumps(longer))
    return directory


@pytest.fixture(scope="session")
def adapters(base: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Make two adapters of different rank, scale rule and targets."""
    directory = tmp_path_factory.mktemp("adapters")
    return {
        "wide": make_adapter(base, directory / "wide", r=8, target_modules="all-linear", seed=1),
        "narrow": make_adapter(
            base,
            directory / "narrow",
            r=3,
            target_modules=["q_proj", "v_proj", "down_proj"],
            use_rslora=True,
            seed=2,
        ),
    }


@pytest.fixture(scope="session")
def references(base: Path, adapters: Mapping[str, Path]) -> dict[str | None, Any]:
    """Load the models by transformers and peft themselves."""
    from peft import PeftModel
    from transformers import AutoModelForCausalLM

    models: dict[str | None, Any] = {None: AutoModelForCausalLM.from_pretrained(base)}
    for name, path in adapters.items():
        with quiet_peft():
            models[name] = PeftModel.from_pretrained(
                AutoModelForCausalLM.from_pretrained(base), path
            )
    return models


@contextmanager
def quiet_peft() -> Iterator[None]:
    """Silence the warning of peft 0.21, which asks transformers 5.23 by a deprecated name."""
    with warnings.catch_warnings():
        warnings.filterwarnings(
            "ignore", message="`is_gradient_checkpointing`", category=FutureWarning
        )
        yield


def make_adapter(base: Path, directory: Path, *, seed: int, **options: Any) -> Path:
    """Make a peft adapter whose B is random instead of zero, so that it changes every answer."""
    import torch
    from peft import LoraConfig, get_peft_model
    from transformers import AutoModelForCausalLM

    # peft draws A: without a seed, the tests before this one would decide how large the adapter is.
    with quiet_peft(), torch.random.fork_rng():
        torch.manual_seed(seed)
        plain = AutoModelForCausalLM.from_pretrained(base)
        model = get_peft_model(plain, LoraConfig(lora_alpha=8, **options))
    generator = torch.Generator().manual_seed(seed)
    for name, parameter in model.named_parameters():
        if "lora_B" in name:
            parameter.data.normal_(0, 0.2, generator=generator)
    model.save_pretrained(str(directory))
    return directory


def exploding(adapter: Path, directory: Path) -> Path:
    """Copy an adapter, scaled so that its answers are not finite."""
    from safetensors.torch import load_file, save_file

    shutil.copytree(adapter, directory)
    file = directory / "adapter_model.safetensors"
    save_file({name: tensor * 1e37 for name, tensor in load_file(file).items()}, file)
    return directory


@dataclass
class Process:
    """A running replica and the connection to it."""

    line: SocketLink
    popen: subprocess.Popen[bytes]


def spawn(
    model: Path, *options: str, **pipes: int
) -> tuple[socket.socket, subprocess.Popen[bytes]]:
    """Start a replica process. Return our end of its socket, and the process."""
    ours, theirs = socket.socketpair()
    command = [
        sys.executable,
        "-m",
        "tuneship.serving",
        "--base",
        str(model),
        "--fd",
        str(theirs.fileno()),
    ]
    with theirs:
        return ours, subprocess.Popen(
            [*command, *options], pass_fds=[theirs.fileno()], env=QUIET, **pipes
        )


StartReplica = Callable[..., AbstractAsyncContextManager[Process]]


@pytest.fixture
def start_replica(base: Path) -> StartReplica:
    """Return a function that starts replicas with command-line options. Each ends with its `async with`."""

    @asynccontextmanager
    async def start(*options: str, model: Path = base) -> AsyncIterator[Process]:
        ours, popen = spawn(model, *options)
        try:
            line = await SocketLink.open(ours)
            yield Process(line, popen)
            await line.aclose()
        finally:
            popen.kill()
            popen.wait()

    return start
