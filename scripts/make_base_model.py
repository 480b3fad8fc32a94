"""Makes the shipped base model: a Llama of 1.2 million parameters and its tokenizer, on one CPU core.

It reads only a file of diagnoses, one per line; `scripts/base_model_tasks.py` makes tasks of them. The model's card
(`tuneship/base_models/tuneship-tiny/README.md`) says what came out and how well it can be tuned.
"""

import argparse
import json
import math
import random
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import cast

import torch
from base_model_tasks import (
    ASSISTANT,
    END,
    PAD,
    PHRASES,
    SPECIAL,
    SYSTEM,
    SYSTEMS,
    USER,
    VOCABULARY,
    Corpus,
    Example,
    examples,
)
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import GenerationConfig, LlamaConfig, LlamaForCausalLM
from transformers.models.llama.modeling_llama import LlamaDecoderLayer

ROOT = Path(__file__).resolve().parent.parent
# A turn is its marker and its text. Only an assistant's turn is closed by the end token: there generation stops.
CHAT_TEMPLATE = (
    "{% for message in messages %}{{ '<|' + message['role'] + '|>' + message['content'] }}"
    "{% if message['role'] == 'assistant' %}{{ eos_token }}{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|assistant|>' }}{% endif %}"
)
CONTEXT_LENGTH = 512
TOKENS_PER_BATCH = 3072
# Examples are made, tokenised and sorted by length in such pools, so that batches have hardly any padding.
EXAMPLES_PER_POOL = 8192
GAIN = 16.0
WARM_UP_STEPS = 50
# The share of the steps before the learning rate falls.
STEADY_SHARE = 0.6

# 1. Tokens


def train_tokenizer(corpus: Corpus) -> Tokenizer:
    """Train byte-level BPE on the diagnoses, at the start of a text and after a space, and on the task phrases."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Digits(individual_digits=True),
            pre_tokenizers.ByteLevel(add_prefix_space=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    phrases = [*SYSTEMS, *(phrase for group in PHRASES.values() for phrase in group)]
    trainer = trainers.BpeTrainer(
        vocab_size=VOCABULARY,
        special_tokens=list(SPECIAL),
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    texts = [" " + text for text in corpus.diagnoses] + corpus.diagnoses + phrases * 100
    tokenizer.train_from_iterator(texts, trainer)
    return tokenizer


@dataclass(frozen=True)
class Batch:
    """`input_ids` (rows, length), and `labels` (rows, length): the next token where it is learnt, else -100."""

    input_ids: torch.Tensor
    labels: torch.Tensor


def batches(corpus: Corpus, tokenizer: Tokenizer, rng: random.Random) -> Iterator[Batch]:
    """Endless batches of about TOKENS_PER_BATCH tokens, each of rows of similar length."""
    while True:
        rows = sorted(
            tokenised(tokenizer, examples(corpus, rng, EXAMPLES_PER_POOL)),
            key=lambda row: len(row[0]),
        )
        cut: list[list[Row]] = [[]]
        for row in rows:
            if (len(cut[-1]) + 1) * len(row[0]) > TOKENS_PER_BATCH:
                cut.append([])
            cut[-1].append(row)
        rng.shuffle(cut)
        yield from map(padded, cut)


Row = tuple[list[int], list[bool]]


def tokenised(tokenizer: Tokenizer, made: Sequence[Example]) -> Iterator[Row]:
    texts = [
        piece.content for example in made for piece in example if isinstance(piece.content, str)
    ]
    encoded = iter(tokenizer.encode_batch(texts))
    for example in made:
        ids: list[int] = []
        learnt: list[bool] = []
        for piece in example:
            new = next(encoded).ids if isinstance(piece.content, str) else piece.content
            ids.extend(new)
            learnt.extend([piece.learnt] * len(new))
        yield ids[:CONTEXT_LENGTH], learnt[:CONTEXT_LENGTH]


def padded(rows: Sequence[Row]) -> Batch:
    """A padded batch; padding is at the end and never learnt, so a causal model needs no mask for it."""
    length = max(len(ids) for ids, _ in rows)
    input_ids = torch.zeros(len(rows), length, dtype=torch.long)
    labels = torch.full((len(rows), length), -100)
    for index, (ids, learnt) in enumerate(rows):
        tokens = torch.tensor(ids)
        input_ids[index, : len(ids)] = tokens
        labels[index, : len(ids) - 1] = torch.where(torch.tensor(learnt[1:]), tokens[1:], -100)
    return Batch(input_ids, labels)


# 2. The model


def new_model() -> LlamaForCausalLM:
    return LlamaForCausalLM(
        LlamaConfig(
            vocab_size=VOCABULARY,
            hidden_size=128,
            num_hidden_layers=4,
            num_attention_heads=4,
            num_key_value_heads=2,
            intermediate_size=384,
            max_position_embeddings=CONTEXT_LENGTH,
            tie_word_embeddings=True,
            pad_token_id=SPECIAL.index(PAD),
            bos_token_id=None,
            eos_token_id=SPECIAL.index(END),
        )
    )


def loss_of(model: LlamaForCausalLM, batch: Batch) -> torch.Tensor:
    """Mean cross-entropy in nats; logits are computed for learnt tokens alone."""
    hidden = model.model(input_ids=batch.input_ids, use_cache=False).last_hidden_state
    learnt = batch.labels != -100
    return torch.nn.functional.cross_entropy(model.lm_head(hidden[learnt]), batch.labels[learnt])


def optimizers(model: LlamaForCausalLM, rate: float) -> list[torch.optim.Optimizer]:
    """Muon for the matrices of the layers, AdamW for embeddings and norms."""
    matrices = [p for p in model.model.layers.parameters() if p.ndim == 2]
    taken = set(map(id, matrices))
    rest = [p for p in model.parameters() if id(p) not in taken]
    return [
        torch.optim.Muon(matrices, lr=rate, weight_decay=0.1, adjust_lr_fn="match_rms_adamw"),
        torch.optim.AdamW(rest, lr=rate, betas=(0.9, 0.98), weight_decay=0.01),
    ]


@dataclass(frozen=True)
class Effort:
    """The length of the training in steps, or as many steps as a time allows.

    The rate is constant for the first part and then falls to zero, so the number of steps need not be known before
    that part is over. A run by time prints the number of steps that makes the same model again with the same seed.
    """

    steps: int | None
    seconds: float

    def total(self, step: int, elapsed: float) -> int | None:
        """The number of steps, as soon as it is known."""
        if self.steps is not None:
            return self.steps
        return (
            max(step + 1, round(step / STEADY_SHARE))
            if elapsed >= STEADY_SHARE * self.seconds
            else None
        )


def rate_at(step: int, total: int | None) -> float:
    """The share of the top learning rate at a step from 0: warm-up, constant, then a linear fall."""
    share = min(1.0, (step + 1) / WARM_UP_STEPS)
    if total is None or step < STEADY_SHARE * total:
        return share
    return share * (total - step) / (total - STEADY_SHARE * total)


def train(model: LlamaForCausalLM, stream: Iterator[Batch], effort: Effort, rate: float) -> int:
    """Train the model in place; returns the number of steps."""
    updates = optimizers(model, rate)
    total, start, step, recent = effort.total(0, 0.0), time.monotonic(), 0, math.nan
    while total is None or step < total:
        total = total or effort.total(step, time.monotonic() - start)
        loss = loss_of(model, next(stream))
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        for update in updates:
            for group in update.param_groups:
                group["lr"] = rate * rate_at(step, total)
            update.step()
            update.zero_grad()
        step += 1
        recent = loss.item() if step == 1 else 0.98 * recent + 0.02 * loss.item()
        if step % 100 == 0:
            elapsed = time.monotonic() - start
            print(f"step {step} of {total} loss {recent:.3f} seconds {elapsed:.0f}", flush=True)
    return step


@torch.no_grad()
def fold_gains(model: LlamaForCausalLM, gain: float) -> None:
    """Multiply the gains of the norms and divide the weights after them: the same logits, stronger LoRA updates.

    A tiny model's weights are large compared with what LoRA adds at ordinary learning rates. The weights of queries,
    keys and the gate are divided; values and `up` pass the scale on, so `o` and `down` are divided. A gain that is a
    power of two changes no logit.
    """
    for layer in cast("list[LlamaDecoderLayer]", model.model.layers):
        attention, mlp = layer.self_attn, layer.mlp
        for norm in (layer.input_layernorm, layer.post_attention_layernorm):
            norm.weight.mul_(gain)
        for linear in (attention.q_proj, attention.k_proj, attention.o_proj):
            linear.weight.div_(gain)
        for linear in (mlp.gate_proj, mlp.down_proj):
            linear.weight.div_(gain)


# 3. The directory


def save(model: LlamaForCausalLM, tokenizer: Tokenizer, output: Path) -> None:
    """Write the standard Hugging Face layout; the card (README.md) is written by hand and left alone."""
    output.mkdir(parents=True, exist_ok=True)
    model.generation_config = GenerationConfig(
        eos_token_id=SPECIAL.index(END), pad_token_id=SPECIAL.index(PAD)
    )
    model.save_pretrained(output)
    tokenizer.save(str(output / "tokenizer.json"))
    settings = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "eos_token": END,
        "pad_token": PAD,
        "additional_special_tokens": [SYSTEM, USER, ASSISTANT],
        "model_max_length": CONTEXT_LENGTH,
        "padding_side": "left",
        "clean_up_tokenization_spaces": False,
    }
    (output / "tokenizer_config.json").write_text(json.dumps(settings, indent=2) + "\n")
    (output / "chat_template.jinja").write_text(CHAT_TEMPLATE)


def make(diagnoses: Path, output: Path, effort: Effort, *, seed: int, rate: float) -> None:
    torch.set_num_threads(1)
    torch.manual_seed(seed)
    corpus = Corpus(diagnoses.read_text(encoding="utf-8").splitlines())
    tokenizer = train_tokenizer(corpus)
    model = new_model()
    size = sum(parameter.numel() for parameter in model.parameters())
    print(f"{size} parameters, {len(corpus.diagnoses)} diagnoses", flush=True)
    rng = random.Random(seed)  # noqa: S311 (no secret)
    steps = train(model, batches(corpus, tokenizer, rng), effort, rate)
    fold_gains(model, GAIN)
    save(model, tokenizer, output)
    print(f"{output}, again by --steps {steps} --seed {seed}")


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    length = parser.add_mutually_exclusive_group(required=True)
    length.add_argument("--steps", type=int, help="with the same seed, the same model")
    length.add_argument("--seconds", type=float, help="as many steps as this time allows")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--rate", type=float, default=3e-3, help="top learning rate")
    parser.add_argument("--diagnoses", type=Path, default=ROOT / "examples/icd10cm/diagnoses.txt")
    parser.add_argument("--output", type=Path, default=ROOT / "tuneship/base_models/tuneship-tiny")
    given = parser.parse_args()
    effort = Effort(given.steps, given.seconds or 0.0)
    make(given.diagnoses, given.output, effort, seed=given.seed, rate=given.rate)


if __name__ == "__main__":
    main()
