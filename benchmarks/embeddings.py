"""Compares a replica's embeddings with plain transformers on the shipped base, in texts per second of processor time.

    python benchmarks/embeddings.py [--texts 512] [--rounds 5]

Texts of 8 to 120 tokens, the mean of the hidden states, one thread on both sides. The reference is what
sentence-transformers does: batches of 32, sorted by length, padded to the longest, mean over the attention mask.
Rounds of both alternate; figures are medians. The replica's time includes its socket and the writing of the vectors.
"""

import argparse
import asyncio
import random
import statistics
import time

import torch
from measuring.replicas import replica
from measuring.running import cpu_seconds
from transformers import AutoModel

from tuneship.service.catalogues.base_models import Catalogue
from tuneship.serving.replica_client import EmbedRequest

BATCH = 32


def draw_texts(count: int) -> tuple[tuple[int, ...], ...]:
    draws = random.Random(0)
    return tuple(
        tuple(draws.randrange(8, 900) for _ in range(draws.randrange(8, 121))) for _ in range(count)
    )


@torch.inference_mode()
def embed_by_transformers(model: torch.nn.Module, texts: tuple[tuple[int, ...], ...]) -> None:
    ordered = sorted(texts, key=len)
    for start in range(0, len(ordered), BATCH):
        batch = ordered[start : start + BATCH]
        longest = max(map(len, batch))
        tokens = torch.tensor([[*text, *[0] * (longest - len(text))] for text in batch])
        mask = torch.tensor([[1] * len(text) + [0] * (longest - len(text)) for text in batch])
        states = model(input_ids=tokens, attention_mask=mask, use_cache=False).last_hidden_state
        total = (states * mask[..., None]).sum(1)
        torch.nn.functional.normalize(total, dim=1).tolist()


async def measure(texts: tuple[tuple[int, ...], ...], rounds: int) -> None:
    base = Catalogue().default.path
    torch.set_num_threads(1)
    model = AutoModel.from_pretrained(base).eval()
    ours: list[float] = []
    theirs: list[float] = []
    async with replica(base) as line:
        for _ in range(rounds + 1):
            before = cpu_seconds(line.facts.pid)
            await line.embed(EmbedRequest(texts))
            ours.append(cpu_seconds(line.facts.pid) - before)
            started = time.process_time()
            embed_by_transformers(model, texts)
            theirs.append(time.process_time() - started)
    ours_s, theirs_s = (statistics.median(one[1:]) for one in (ours, theirs))
    print(f"replica: {len(texts) / ours_s:.0f} texts/s of processor time")
    print(f"transformers, batches of {BATCH}: {len(texts) / theirs_s:.0f} texts/s")
    print(f"ratio: {theirs_s / ours_s:.2f}")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--texts", type=int, default=512)
    parser.add_argument("--rounds", type=int, default=5)
    options = parser.parse_args()
    asyncio.run(measure(draw_texts(options.texts), options.rounds))
