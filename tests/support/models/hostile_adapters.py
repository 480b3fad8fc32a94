"""Archives of adapters that ask much of whoever reads, checks or serves them."""

import json
import tarfile
from typing import Any

import numpy as np
from safetensors.numpy import save

from tests.support.objects.files import tar_of
from tuneship.service.catalogues.base_models import SHIPPED

MODULE = "base_model.model.model.layers.0.self_attn.q_proj"
# The width of that module in the shipped model.
WIDTH = 128
ROUNDS = "{% for a in range(20000) %}{% for b in range(20000) %}{% endfor %}{% endfor %}"
TEMPLATE = (SHIPPED / "tuneship-tiny" / "chat_template.jinja").read_text()


def adapter(rank: int = 4, files: dict[str, bytes] | None = None, **config: Any) -> bytes:
    """An archive of an adapter of one module, whose configuration and files a test chooses."""
    weights = {
        f"{MODULE}.lora_A.weight": np.full((rank, WIDTH), 0.01, np.float32),
        f"{MODULE}.lora_B.weight": np.full((WIDTH, rank), 0.01, np.float32),
    }
    settings = {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "base_model_name_or_path": "tuneship-tiny",
        "r": rank,
        "lora_alpha": rank,
        "target_modules": ["q_proj"],
        **config,
    }
    return tar_of(
        {
            "adapter_config.json": json.dumps(settings).encode(),
            "adapter_model.safetensors": save(weights),
            **(files or {}),
        }
    )


def with_template(source: str) -> bytes:
    return adapter(files={"chat_template.jinja": source.encode()})


def with_probes(count: int) -> bytes:
    """Every probe passes: its spread is that large. It asks for a whole context."""
    probe = {
        "messages": [{"role": "user", "content": "a"}],
        "prompt": [5] * 400,
        "tokens": [5],
        "logits": [0.0],
        "spread": 1e300,
        "greedy": [],
        "leads": [],
    }
    fields = {"dtype": "float32", "probes": [probe] * count}
    return adapter(files={"parity.json": json.dumps(fields).encode()})


def with_long_header(digits: int) -> bytes:
    """Before the adapter a pax header that is a long number (CVE-2024-6232)."""
    content = b"9" * digits
    entry = tarfile.TarInfo("header")
    entry.type, entry.size = tarfile.XHDTYPE, len(content)
    padding = b"\0" * (-len(content) % tarfile.BLOCKSIZE)
    return entry.tobuf() + content + padding + adapter()


ARCHIVES = {
    "loops in a template": with_template(ROUNDS + TEMPLATE),
    "loops at a word": with_template(
        "{% if 'BOOM' in messages[-1].content %}" + ROUNDS + "{% endif %}" + TEMPLATE
    ),
    "a power in a template": with_template("{% if 9**(9**7) % 7 %}{% endif %}" + TEMPLATE),
    "a text in a template": with_template("{% set a = 'a' * 10**9 %}" + TEMPLATE),
    "a large rank": adapter(rank=20_000),
    "many probes": with_probes(150),
    "a slow pattern": adapter(alpha_pattern={r".{8}([\w.]+)+!": 8}),
    "a long header": with_long_header(80_000),
    "a long header's name": with_long_header(4_000_000),
}
