"""The engines that can serve a base model, with the facts that the service needs before it starts one."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from tuneship.host.gpus import VARIABLE, listed_gpus

# The values that vLLM takes for its option; an adapter of any rank up to the chosen one is served.
VLLM_RANK_OPTION = "--max-lora-rank"
VLLM_RANKS = (1, 8, 16, 32, 64, 128, 256, 320, 512)
USUAL_VLLM_RANK = 64
# The options of vLLM by whose product it takes GPUs.
GPU_OPTIONS = (
    ("--tensor-parallel-size", "-tp"),
    ("--pipeline-parallel-size", "-pp"),
    ("--data-parallel-size", "-dp"),
)
# Keys of an adapter's configuration that vLLM passes over (0.10.2 does), so that its answers would be wrong.
PATTERNS = ("rank_pattern", "alpha_pattern")


@dataclass(frozen=True)
class EngineKind:
    """An engine, as named by `runtime` in the model catalogue."""

    name: str
    # Whether it is this project's engine, which keeps every security setting and refuses some architectures.
    is_own: bool
    uses_gpus: bool
    # Whether `runtime_options` of a catalogue entry reach it.
    takes_options: bool
    # Whether it reserves memory for adapters up to a rank, and loads none above it.
    has_rank_limit: bool = False

    def largest_rank(self, options: Sequence[str]) -> int | None:
        """The largest rank of an adapter that it loads with these `runtime_options`; None: any. Raises `ValueError`."""
        if not self.has_rank_limit:
            return None
        value = option_of(options, VLLM_RANK_OPTION)
        rank = USUAL_VLLM_RANK if value is None else int(value)
        if rank not in VLLM_RANKS:
            raise ValueError(rank)
        return rank

    def fault_of_adapter(self, config: Mapping[str, Any], options: Sequence[str]) -> str | None:
        """Why the engine cannot serve an adapter with this `adapter_config.json`; None if no reason is known.

        The text continues a sentence that begins with the adapter.
        """
        largest = self.largest_rank(options)
        if largest is None:
            return None
        if found := [name for name in PATTERNS if config.get(name)]:
            return f"has the option {found[0]}, which {self.name} does not obey"
        rank = config.get("r")
        if isinstance(rank, int) and rank > largest:
            return f"has rank {rank}, and {self.name} {self.rank_rule(largest)}"
        return None

    def rank_rule(self, largest: int) -> str:
        """The limit of ranks and how to change it; the text continues a sentence whose subject is the engine."""
        higher = [str(rank) for rank in VLLM_RANKS if rank > largest]
        more = f" (runtime_options of the base model may say {', '.join(higher)})" if higher else ""
        return f"serves this base model with {VLLM_RANK_OPTION} {largest}{more}"


@dataclass(frozen=True)
class VllmServer:
    """The command that starts vLLM's server for one base model."""

    # Program, e.g. `vllm serve`; the base model's directory and the options follow.
    command: tuple[str, ...]
    # More options for this base model, e.g. `--tensor-parallel-size 2`.
    options: tuple[str, ...] = ()
    # Time limit until the server is healthy.
    patience_s: float = 600.0

    @property
    def gpus(self) -> int:
        """The number of GPUs that it uses, by its options."""
        given = (option_of(self.options, *names) or "" for names in GPU_OPTIONS)
        return math.prod(int(value) for value in given if value.isdecimal() and int(value))

    @property
    def named_gpus(self) -> tuple[str, ...]:
        """The GPUs that its command names (`env CUDA_VISIBLE_DEVICES=1 vllm serve`), which override the service's
        choice.
        """
        prefix = f"{VARIABLE}="
        named = [one.removeprefix(prefix) for one in self.command if one.startswith(prefix)]
        return listed_gpus(named[-1], 0) if named else ()


OWN_ENGINE = EngineKind("replica", is_own=True, uses_gpus=False, takes_options=False)
VLLM_ENGINE = EngineKind(
    "vllm", is_own=False, uses_gpus=True, takes_options=True, has_rank_limit=True
)
ENGINES = {kind.name: kind for kind in (OWN_ENGINE, VLLM_ENGINE)}


def option_of(options: Sequence[str], *names: str) -> str | None:
    """The value of an option as a command line gives it (`--name value` or `--name=value`), the last one if repeated.

    None where it is not given, and empty where its value is missing.
    """
    found = None
    for number, option in enumerate(options):
        name, has_value, value = option.partition("=")
        # vLLM takes `--max_lora_rank` for `--max-lora-rank`.
        if name.replace("_", "-") in names:
            found = value if has_value else next(iter(options[number + 1 : number + 2]), "")
    return found
