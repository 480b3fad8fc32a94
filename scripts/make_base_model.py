"""Make the shipped base model: a Llama of about one million parameters and its tokenizer, on one CPU core.

It reads a file of diagnoses, one a line, and nothing else: every task below is made from those lines. It knows no
chapter and no label. What came out, and how it tunes, stands in the card beside the model
(`tuneship/base_models/tuneship-tiny/README.md`).
"""

import argparse
import json
import math
import random
import re
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import GenerationConfig, LlamaConfig, LlamaForCausalLM

ROOT = Path(__file__).resolve().parent.parent
PAD, END, SYSTEM, USER, ASSISTANT = SPECIAL = (
    "<|pad|>",
    "<|end|>",
    "<|system|>",
    "<|user|>",
    "<|assistant|>",
)
# A turn is its role token and its text; the end token closes an assistant's turn only, which is where generation stops.
CHAT_TEMPLATE = (
    "{% for message in messages %}{{ '<|' + message['role'] + '|>' + message['content'] }}"
    "{% if message['role'] == 'assistant' %}{{ eos_token }}{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|assistant|>' }}{% endif %}"
)
VOCABULARY = 2048
CONTEXT_LENGTH = 512
TOKENS_PER_BATCH = 2048
EXAMPLES_PER_POOL = (
    8192  # made, tokenised and sorted by length together, so that a batch has hardly any padding
)
GAIN = 16.0

# --- 1. The corpus ---------------------------------------------------------------------------------------------------


class Corpus:
    """The diagnoses, their words, and for each word or stem the diagnoses that hold it."""

    def __init__(self, diagnoses: Sequence[str]) -> None:
        self.diagnoses = list(diagnoses)
        counts = Counter(word for text in self.diagnoses for word in set(words(text)))
        self.vocabulary = sorted(counts)
        holders: defaultdict[str, list[int]] = defaultdict(list)
        for index, text in enumerate(self.diagnoses):
            for key in keys(text):
                holders[key].append(index)
        self.holders = {key: found for key, found in holders.items() if 2 <= len(found) <= 400}

    def draw(self, rng: random.Random) -> str:
        return rng.choice(self.diagnoses)

    def related(self, text: str, rng: random.Random) -> str | None:
        """Another diagnosis that shares one of the rarer words or stems of this one; None when it shares none."""
        known = [key for key in keys(text) if key in self.holders]
        if not known:
            return None
        weights = [1 / len(self.holders[key]) ** 0.5 for key in known]
        key = rng.choices(known, weights)[0]
        other = self.diagnoses[rng.choice(self.holders[key])]
        return other if other != text else None


def words(text: str) -> list[str]:
    return re.findall(r"[a-z]+", text.lower())


def keys(text: str) -> list[str]:
    """The words of a text and the stems (first six letters) of its longer words, each once, in a fixed order."""
    found = dict.fromkeys(words(text))
    found.update(dict.fromkeys(word[:6] + "-" for word in words(text) if len(word) > 7))
    return list(found)


# --- 2. Tasks --------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Piece:
    """A stretch of an example: text (or token ids as they are), and whether its tokens are learnt."""

    content: str | tuple[int, ...]
    learnt: bool


Example = list[Piece]
Task = Callable[[random.Random, Corpus], "Example | None"]

PHRASES = {
    "repeat": ("Repeat this:", "Copy the text:", "Say it again:", "Echo this text exactly:"),
    "lower": ("Write in lower case:", "Make this lower case:"),
    "upper": ("Write in capital letters:", "Make this upper case:"),
    "fill": ("Fill in the blank:", "Which words are missing here?", "What belongs in the gap?"),
    "complete": ("Complete this diagnosis:", "Continue:", "How does this text go on?"),
    "first": ("What is the first word?", "Which word comes first?"),
    "last": ("What is the last word?", "Which word comes last?"),
    "related": (
        "Which other diagnosis is related to this diagnosis?",
        "Name a diagnosis that belongs to the same group as this one:",
        "What is similar to this diagnosis?",
    ),
    "choose": (
        "Which of these does this diagnosis belong to?",
        "Choose the one that is related to this diagnosis.",
        "Answer with one of the listed texts.",
    ),
    "words": (
        "Which ICD-10-CM words go with this diagnosis?",
        "List words that are often used with this diagnosis:",
    ),
    "look_up": ("Look it up:", "What is the value of", "Find this in the list:"),
    "list": ("List these items in order:", "Read the list back:"),
    "reverse": ("List these in reverse order:", "Say the words backwards:"),
}
SYSTEMS = (
    "You are a helpful assistant.",
    "You answer questions about diagnoses.",
    "Answer with the text only.",
    "You are a careful medical coder. Answer briefly.",
)


def chat(
    kind: str, question: str, answer: str, rng: random.Random, *, learn_question: bool = True
) -> Example:
    """One user turn and its answer. Question texts are learnt too unless they are noise: more signal for a pass."""
    opening = rng.choice(PHRASES[kind])
    system = [Piece(SYSTEM + rng.choice(SYSTEMS), learnt=False)] if rng.random() < 0.1 else []
    return [
        *system,
        Piece(USER + opening, learnt=False),
        Piece(rng.choice((" ", " ", "\n\n")) + question, learnt=learn_question),
        Piece(ASSISTANT, learnt=False),
        Piece(answer + END, learnt=True),
    ]


def document(rng: random.Random, corpus: Corpus) -> Example:
    return [Piece(rng.choice((" ", "")) + corpus.draw(rng) + END, learnt=True)]


def neighbours(rng: random.Random, corpus: Corpus) -> Example:
    """A run of diagnoses, each related to the first."""
    first = corpus.draw(rng)
    texts = [first, *(corpus.related(first, rng) for _ in range(3))]
    return [Piece(" " + "; ".join(dict.fromkeys(t for t in texts if t)) + END, learnt=True)]


def repeat(rng: random.Random, corpus: Corpus) -> Example:
    text = corpus.draw(rng)
    return chat("repeat", text, text, rng)


def repeat_words(rng: random.Random, corpus: Corpus) -> Example:
    """Words in no order: nothing but copying tells the next one."""
    count = rng.choice((3, 5, 8, 12, 24, 60))
    text = " ".join(random_case(word, rng) for word in rng.choices(corpus.vocabulary, k=count))
    return chat("repeat", text, text, rng, learn_question=False)


def repeat_tokens(rng: random.Random, _corpus: Corpus) -> Example:
    """Any tokens at all, so that no embedding stays as it was drawn: LoRA cannot move the tied embeddings later."""
    ids = tuple(
        rng.randrange(len(SPECIAL), VOCABULARY) for _ in range(rng.choice((2, 4, 8, 16, 40)))
    )
    return [
        Piece(USER + rng.choice(PHRASES["repeat"]) + " ", learnt=False),
        Piece(ids, learnt=False),
        Piece(ASSISTANT, learnt=False),
        Piece(ids, learnt=True),
        Piece(END, learnt=True),
    ]


def lower_case(rng: random.Random, corpus: Corpus) -> Example:
    text = corpus.draw(rng)
    return chat("lower", text, text.lower(), rng)


def upper_case(rng: random.Random, corpus: Corpus) -> Example:
    text = " ".join(rng.choices(corpus.vocabulary, k=rng.randint(1, 3)))
    return chat("upper", text, text.upper(), rng, learn_question=False)


def fill(rng: random.Random, corpus: Corpus) -> Example:
    """One to three words left out: what stands after the gap must be used as well as what stands before it."""
    parts = corpus.draw(rng).split(" ")
    size = rng.randint(1, min(3, len(parts)))
    start = rng.randint(0, len(parts) - size)
    question = " ".join([*parts[:start], "___", *parts[start + size :]])
    return chat("fill", question, " ".join(parts[start : start + size]), rng)


def complete(rng: random.Random, corpus: Corpus) -> Example | None:
    parts = corpus.draw(rng).split(" ")
    if len(parts) < 2:
        return None
    cut = rng.randint(1, len(parts) - 1)
    return chat("complete", " ".join(parts[:cut]), " ".join(parts[cut:]), rng)


def first_word(rng: random.Random, corpus: Corpus) -> Example:
    text = corpus.draw(rng)
    return chat("first", text, text.split(" ")[0], rng)


def last_word(rng: random.Random, corpus: Corpus) -> Example:
    text = corpus.draw(rng)
    return chat("last", text, text.split(" ")[-1], rng)


def related(rng: random.Random, corpus: Corpus) -> Example | None:
    text = corpus.draw(rng)
    other = corpus.related(text, rng)
    return chat("related", text, other, rng) if other else None


def choose(rng: random.Random, corpus: Corpus) -> Example | None:
    """Find the related one among others and copy it: comparison of meanings, and answers from a list."""
    text = corpus.draw(rng)
    other = corpus.related(text, rng)
    if other is None:
        return None
    options = [other, *(corpus.draw(rng) for _ in range(rng.randint(1, 4)))]
    rng.shuffle(options)
    return chat("choose", f"{text}\n" + "\n".join(options), other, rng, learn_question=False)


def word_neighbours(rng: random.Random, corpus: Corpus) -> Example | None:
    """Words of related diagnoses that this one does not hold."""
    text = corpus.draw(rng)
    found = [corpus.related(text, rng) for _ in range(3)]
    own = set(words(text))
    others = [w for t in found if t for w in words(t) if len(w) > 4 and w not in own]
    others = list(dict.fromkeys(others))
    if not others:
        return None
    return chat("words", text, ", ".join(rng.sample(others, min(4, len(others)))), rng)


def look_up(rng: random.Random, corpus: Corpus) -> Example:
    names = rng.sample(corpus.vocabulary, rng.choice((2, 4, 8, 16)))
    table = {name: rng.choice(corpus.vocabulary) for name in names}
    name = rng.choice(names)
    question = f"{name}\n" + "\n".join(f"{key}: {value}" for key, value in table.items())
    return chat("look_up", question, table[name], rng, learn_question=False)


def read_list(rng: random.Random, corpus: Corpus) -> Example:
    items = [corpus.draw(rng) for _ in range(rng.choice((2, 3, 5, 12)))]
    return chat("list", "\n".join(items), ", ".join(items), rng, learn_question=False)


def reverse_list(rng: random.Random, corpus: Corpus) -> Example:
    items = rng.choices(corpus.vocabulary, k=rng.randint(2, 6))
    return chat("reverse", " ".join(items), " ".join(reversed(items)), rng, learn_question=False)


def random_case(word: str, rng: random.Random) -> str:
    return rng.choice((word, word, word.capitalize(), word.upper()))


MIX: dict[Task, float] = {
    document: 30,
    neighbours: 8,
    repeat: 3,
    repeat_words: 4,
    repeat_tokens: 7,
    lower_case: 4,
    upper_case: 1,
    fill: 18,
    complete: 3,
    first_word: 1,
    last_word: 1,
    related: 8,
    choose: 6,
    word_neighbours: 6,
    look_up: 2,
    read_list: 1,
    reverse_list: 1,
}


def examples(corpus: Corpus, rng: random.Random, count: int) -> list[Example]:
    tasks, weights = list(MIX), list(MIX.values())
    made: list[Example] = []
    while len(made) < count:
        for task in rng.choices(tasks, weights, k=count - len(made)):
            example = task(rng, corpus)
            if example is not None:
                made.append(example)
    return made


# --- 3. Tokens -------------------------------------------------------------------------------------------------------


def train_tokenizer(corpus: Corpus) -> Tokenizer:
    """Byte-level BPE over the diagnoses, as they open a text and as they follow a space, and the task phrases."""
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
    """Endless batches of about TOKENS_PER_BATCH tokens, rows of like length together."""
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
    """Padding stands at the end and is never learnt, so a causal model needs no mask for it."""
    length = max(len(ids) for ids, _ in rows)
    input_ids = torch.zeros(len(rows), length, dtype=torch.long)
    labels = torch.full((len(rows), length), -100)
    for index, (ids, learnt) in enumerate(rows):
        tokens = torch.tensor(ids)
        input_ids[index, : len(ids)] = tokens
        labels[index, : len(ids) - 1] = torch.where(torch.tensor(learnt[1:]), tokens[1:], -100)
    return Batch(input_ids, labels)


# --- 4. The model ----------------------------------------------------------------------------------------------------


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
    """Mean cross-entropy in nats; the output layer runs only where a token is learnt."""
    hidden = model.model(input_ids=batch.input_ids, use_cache=False).last_hidden_state
    learnt = batch.labels != -100
    return torch.nn.functional.cross_entropy(model.lm_head(hidden[learnt]), batch.labels[learnt])


def optimizers(model: LlamaForCausalLM, rate: float) -> list[torch.optim.Optimizer]:
    """Muon for the matrices of the layers (about a third fewer steps than AdamW here), AdamW for the rest."""
    matrices = [p for p in model.model.layers.parameters() if p.ndim == 2]
    taken = set(map(id, matrices))
    rest = [p for p in model.parameters() if id(p) not in taken]
    return [
        torch.optim.Muon(matrices, lr=rate, weight_decay=0.1, adjust_lr_fn="match_rms_adamw"),
        torch.optim.AdamW(rest, lr=rate, betas=(0.9, 0.98), weight_decay=0.01),
    ]


def rate_at(progress: float) -> float:
    """The share of the top learning rate: a short warm-up, then half a cosine down to nothing."""
    return (
        progress / 0.02
        if progress < 0.02
        else 0.5 * (1 + math.cos(math.pi * (progress - 0.02) / 0.98))
    )


@dataclass(frozen=True)
class Effort:
    """How long to train: a number of steps (the same seed gives the same model) or of seconds."""

    steps: int | None
    seconds: float | None

    def progress(self, step: int, elapsed: float) -> float:
        return step / self.steps if self.steps else elapsed / (self.seconds or 1.0)


def train(model: LlamaForCausalLM, stream: Iterator[Batch], effort: Effort, rate: float) -> int:
    """Train in place; returns the number of steps done."""
    updates = optimizers(model, rate)
    start, step, seen, recent = time.monotonic(), 0, 0, 0.0
    while (progress := effort.progress(step, time.monotonic() - start)) < 1:
        batch = next(stream)
        loss = loss_of(model, batch)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        for update in updates:
            for group in update.param_groups:
                group["lr"] = rate * rate_at(progress)
            update.step()
            update.zero_grad()
        step, seen = step + 1, seen + batch.input_ids.numel()
        recent = loss.item() if step == 1 else 0.98 * recent + 0.02 * loss.item()
        if step % 100 == 0:
            elapsed = time.monotonic() - start
            print(f"step {step} loss {recent:.3f} tokens {seen} seconds {elapsed:.0f}", flush=True)
    return step


@torch.no_grad()
def fold_gains(model: LlamaForCausalLM, gain: float) -> None:
    """Multiply the norms' gains and divide the weights after them: the same logits, but LoRA deltas act `gain` times.

    A tiny model has small activations, so ordinary LoRA rates would hardly move it. Queries, keys and the gate take
    the division at once; values and `up` pass the larger scale on to `o` and `down`. With a power of two no bit changes.
    """
    for layer in model.model.layers:
        attention, mlp = layer.self_attn, layer.mlp
        for norm in (layer.input_layernorm, layer.post_attention_layernorm):
            norm.weight.mul_(gain)
        for linear in (
            attention.q_proj,
            attention.k_proj,
            attention.o_proj,
            mlp.gate_proj,
            mlp.down_proj,
        ):
            linear.weight.div_(gain)


# --- 5. The directory ------------------------------------------------------------------------------------------------


def save(model: LlamaForCausalLM, tokenizer: Tokenizer, output: Path) -> None:
    """The standard Hugging Face layout; the card (README.md) is written by people and left alone."""
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


def make(diagnoses: Path, output: Path, effort: Effort, seed: int, rate: float) -> None:
    torch.set_num_threads(1)
    torch.manual_seed(seed)
    corpus = Corpus(diagnoses.read_text(encoding="utf-8").splitlines())
    tokenizer = train_tokenizer(corpus)
    model = new_model()
    print(
        f"{sum(p.numel() for p in model.parameters())} parameters, {len(corpus.diagnoses)} diagnoses",
        flush=True,
    )
    steps = train(model, batches(corpus, tokenizer, random.Random(seed)), effort, rate)
    fold_gains(model, GAIN)
    save(model, tokenizer, output)
    print(f"{steps} steps; model in {output}")


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    length = parser.add_mutually_exclusive_group(required=True)
    length.add_argument(
        "--steps", type=int, help="training steps; with the same seed, the same model"
    )
    length.add_argument("--seconds", type=float, help="training time instead")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--rate", type=float, default=4e-3, help="top learning rate")
    parser.add_argument("--diagnoses", type=Path, default=ROOT / "examples/icd10cm/diagnoses.txt")
    parser.add_argument("--output", type=Path, default=ROOT / "tuneship/base_models/tuneship-tiny")
    given = parser.parse_args()
    make(given.diagnoses, given.output, Effort(given.steps, given.seconds), given.seed, given.rate)


if __name__ == "__main__":
    main()
