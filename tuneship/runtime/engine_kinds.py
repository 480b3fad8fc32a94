"""The engines that can serve a base model, one entry each: what the service must know before it starts one."""

from dataclasses import dataclass


@dataclass(frozen=True)
class EngineKind:
    """An engine, as `runtime` of an entry in the model catalogue names it."""

    name: str
    is_own: bool
    """Whether it is this project's engine, which keeps every security setting and refuses some architectures."""
    uses_gpus: bool
    takes_options: bool
    """Whether `runtime_options` of a catalogue entry reach it."""


@dataclass(frozen=True)
class VllmServer:
    """The command that starts vLLM's server for one base model."""

    command: tuple[str, ...]
    """Program, e.g. `vllm serve`; the base model's directory and the options follow."""
    options: tuple[str, ...] = ()
    """More options for this base model, e.g. `--tensor-parallel-size 2`."""
    patience_s: float = 600.0
    """Time limit until the server is healthy."""


OWN_ENGINE = EngineKind("replica", is_own=True, uses_gpus=False, takes_options=False)
VLLM_ENGINE = EngineKind("vllm", is_own=False, uses_gpus=True, takes_options=True)
ENGINES = {kind.name: kind for kind in (OWN_ENGINE, VLLM_ENGINE)}
