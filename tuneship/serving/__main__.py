"""`python -m tuneship.serving --base DIR --fd N`: one replica process. Loads torch; `line` talks to it."""

import argparse
import os
import signal
import socket
import sys
from pathlib import Path

import torch

from tuneship.serving.engine import Engine, EngineLimits
from tuneship.serving.model import SMALL_MODEL, ModelFacts, ModelRefused
from tuneship.serving.replica import Frames, ReplicaServer, load_model


def main() -> int:
    """Serve until the socket closes or SIGTERM; 1 when the base model cannot be served."""
    options = _options()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(0))
    torch.set_num_threads(options.threads or 1)
    frames = Frames(socket.socket(fileno=options.fd))
    try:
        model = load_model(options.base, options.dtype)
    except ModelRefused as refusal:
        frames.send({"refused": str(refusal)})
        return 1
    torch.set_num_threads(options.threads or _threads(model.facts.parameters))
    prompt_tokens = options.prompt_tokens or _prompt_tokens(model.facts.parameters)
    limits = EngineLimits(options.rows, prompt_tokens, options.cache_bytes or None)
    engine = Engine(model, limits)
    frames.send({"ready": _introduction(model.facts)})
    ReplicaServer(engine, frames).run()
    return 0


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m tuneship.serving", description=__doc__)
    parser.add_argument("--base", type=Path, required=True, help="directory of the base model")
    parser.add_argument(
        "--fd", type=int, required=True, help="inherited end of a stream socket pair"
    )
    parser.add_argument("--threads", type=int, default=0, help="torch threads; 0 chooses by size")
    parser.add_argument("--dtype", choices=["auto", "float32", "bfloat16"], default="auto")
    parser.add_argument(
        "--rows", type=int, default=EngineLimits().rows, help="requests running at once"
    )
    parser.add_argument(
        "--prompt-tokens", type=int, default=0, help="new prompt tokens per step; 0 chooses by size"
    )
    parser.add_argument(
        "--cache-bytes", type=int, default=0, help="memory for keys and values; 0 sets no limit"
    )
    return parser.parse_args()


def _threads(parameters: int) -> int:
    """Small products lose more by waking threads than they gain."""
    return 1 if parameters < SMALL_MODEL else max(1, (os.cpu_count() or 2) - 1)


def _prompt_tokens(parameters: int) -> int:
    """Joiners hold up the running requests by about 4 GFLOP a step, some 40 ms of one core; few tokens waste more."""
    return max(32, 2_000_000_000 // parameters)


def _introduction(facts: ModelFacts) -> dict[str, object]:
    return {
        "pid": os.getpid(),
        "parameters": facts.parameters,
        "context_length": facts.context_length,
        "vocabulary": facts.vocabulary,
        "dtype": str(facts.cache.dtype).removeprefix("torch."),
    }


if __name__ == "__main__":
    sys.exit(main())
