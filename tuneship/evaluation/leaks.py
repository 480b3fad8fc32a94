"""Evaluation rows that stand in the training data as well, found by one pass over these."""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from hashlib import blake2b

from tuneship.contract.lines.dataset_lines import Message, text_of
from tuneship.evaluation.items import EvaluationItem
from tuneship.evaluation.texts import squeezed

# Of five million training rows and a thousand others, two have the same by chance once in 10^9 files.
HASH_BYTES = 8


def hash_of(item: EvaluationItem) -> int:
    """The hash of an example's prompt and answer, without case, white space, punctuation and system turns."""
    answer: Message = {"role": "assistant", "content": item.reference}
    if item.calls:
        answer["tool_calls"] = [dict(call) for call in item.calls]
    return list(_hashes([*item.prompt, answer]))[-1]


def leaked_lines(
    examples: Mapping[int, EvaluationItem], training: Iterable[Sequence[Message]]
) -> set[int]:
    """The keys of the examples that stand in training rows, as whole rows or up to one of their answers."""
    wanted: dict[int, list[int]] = {}
    for key, item in examples.items():
        wanted.setdefault(hash_of(item), []).append(key)
    found: set[int] = set()
    for turns in training:
        for value in _hashes(turns):
            if value in wanted:
                found.update(wanted.pop(value))
    return found


def _hashes(turns: Sequence[Message]) -> Iterator[int]:
    """Yield the hash of the conversation up to each answer that is learnt."""
    running = blake2b(digest_size=HASH_BYTES)
    for turn in turns:
        if turn["role"] == "system":
            # Another instruction around the same question and answer is no other example.
            continue
        text = squeezed(text_of(turn)).encode("utf-8", "surrogatepass")
        # The length, so that no text can look like the end of one and the beginning of the next.
        running.update(f"{turn['role']} {len(text)} ".encode() + text)
        if turn["role"] == "assistant" and turn.get("weight", 1):
            yield int.from_bytes(running.digest())
