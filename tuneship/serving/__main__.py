"""`python -m tuneship.serving --base DIR --fd N`: one replica process. Loads torch; `replica_client` talks to it."""

import argparse
import os
import signal
import socket
import sys
from pathlib import Path

import torch

from tuneship.serving.engine import Engine, EngineLimits
from tuneship.serving.kernels.integer_kernels import Kernels
from tuneship.serving.malloc import release_free_memory
from tuneship.serving.models.model import SMALL_MODEL_PARAMETERS, ModelRefused
from tuneship.serving.replica import Frames, ReplicaServer, load_model
from tuneship.serving.sampling.guides import GrammarCompiler
from tuneship.serving.weights import AUTO, WEIGHTS
from tuneship.serving.weights_choice import fastest, measured_weights

# Prefills may delay the decoding sequences by about 4 GFLOP a step, some 40 ms of one core: 2 FLOP
# per parameter and token. Fewer tokens than the minimum waste more than they gain.
PROMPT_TOKENS_TIMES_PARAMETERS = 2_000_000_000
MIN_PROMPT_TOKENS = 32


def main() -> int:
    """Serve until the socket closes or SIGTERM; return 1 if the base model cannot be served."""
    options = _options()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(0))
    torch.set_num_threads(options.threads or 1)
    frames = Frames(socket.socket(fileno=options.fd))
    try:
        weights = options.weights
        if weights == AUTO:
            weights = fastest(measured_weights(options.base)).weights
        model = load_model(options.base, weights)
    except ModelRefused as error:
        frames.send({"refused": str(error)})
        return 1
    release_free_memory()  # of weights that were read in another format
    facts = model.facts
    # Small products lose more by waking threads than they gain.
    is_small = facts.parameters < SMALL_MODEL_PARAMETERS
    threads = 1 if is_small else max(1, (os.cpu_count() or 2) - 1)
    torch.set_num_threads(options.threads or threads)
    # One core is left to the service while many requests run; few requests leave cores idle.
    cores = 1 if is_small else len(os.sched_getaffinity(0))
    Kernels.few_token_threads = options.threads or cores
    prompt_tokens = max(MIN_PROMPT_TOKENS, PROMPT_TOKENS_TIMES_PARAMETERS // facts.parameters)
    limits = EngineLimits(
        options.rows, options.prompt_tokens or prompt_tokens, options.cache_bytes or None
    )
    engine = Engine(model, limits)
    introduction = {
        "pid": os.getpid(),
        "parameters": facts.parameters,
        "context_length": facts.context_length,
        "vocabulary": facts.vocabulary,
        "dtype": facts.weights,
    }
    frames.send({"ready": introduction})
    compiler = GrammarCompiler(options.base, facts.vocabulary)
    ReplicaServer(engine, frames, compiler=compiler).run()
    return 0


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m tuneship.serving", description=__doc__)
    parser.add_argument("--base", type=Path, required=True, help="directory of the base model")
    parser.add_argument(
        "--fd", type=int, required=True, help="inherited end of a stream socket pair"
    )
    parser.add_argument("--threads", type=int, default=0, help="torch threads; 0 chooses by size")
    parser.add_argument(
        "--weights",
        choices=WEIGHTS,
        help="number format of the weights; float32 or bfloat16 without it, by size and machine",
    )
    parser.add_argument(
        "--rows", type=int, default=EngineLimits().slots, help="requests running at once"
    )
    parser.add_argument(
        "--prompt-tokens", type=int, default=0, help="prompt tokens per step; 0 chooses by size"
    )
    parser.add_argument(
        "--cache-bytes", type=int, default=0, help="size limit of the KV cache; 0 sets no limit"
    )
    return parser.parse_args()


if __name__ == "__main__":
    sys.exit(main())
