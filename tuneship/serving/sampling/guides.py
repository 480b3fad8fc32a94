"""Guides answers along a grammar: compiles it, masks logits, and follows the chosen tokens.

`grammar_turns` compiles in a thread of its own while the engine goes on; `engine` masks each guided row before a token
is chosen.
"""

from collections import OrderedDict
from collections.abc import Sequence
from pathlib import Path
from threading import Lock

import numpy as np
from llguidance import LLMatcher, LLTokenizer
from torch import Tensor

from tuneship.serving.sampling.grammar import LIMITS, spellings

# Compiled grammars that are kept; the next answer of the same schema starts at once.
KEPT_GRAMMARS = 64


class GrammarRefused(Exception):
    """The grammar cannot be compiled or followed with this model.

    The message goes on behind the name of the field that asks for it, and quotes nothing of it.
    """


class Guide:
    """The state of one answer in its grammar; with two spellings, in both until the answer decides for one."""

    def __init__(self, matchers: Sequence[LLMatcher], vocabulary: int) -> None:
        """Take over the matchers, the last one for the spelling that the model has to choose by itself.

        `vocabulary` is the width of the logits.
        """
        self._matchers = [*matchers]
        self._vocabulary = vocabulary
        self._mask = np.zeros((vocabulary + 31) // 32, dtype=np.int32)

    def restrict(self, logits: Tensor) -> None:
        """Set the logits [vocabulary] of all tokens that cannot come next to minus infinity, in place.

        End tokens can come only where the answer is complete. A space behind a comma or a colon can come if the token
        that the model would write without a grammar begins so: a model that was tuned on such answers goes on in the
        form that it knows, and one that has seen little JSON does not write what it need not.
        """
        self._fill_mask(self._matchers[-1])
        if len(self._matchers) > 1:
            word, bit = divmod(int(logits.argmax()), 32)
            if not int(self._mask[word]) >> bit & 1:
                self._fill_mask(self._matchers[0])
        bits = np.unpackbits(
            self._mask.view(np.uint8), count=self._vocabulary, bitorder="little"
        ).view(np.bool_)
        np.copyto(logits.numpy(), -np.inf, where=~bits)

    def _fill_mask(self, matcher: LLMatcher) -> None:
        matcher.unsafe_compute_mask_ptr(self._mask.ctypes.data, self._mask.nbytes)

    def take(self, token: int) -> bool:
        """Follow the chosen token; return whether the answer is complete and nothing can follow it."""
        followed = [one for one in self._matchers if one.try_consume_tokens([token])]
        self._matchers = followed or self._matchers
        return bool(followed) and self._matchers[0].is_stopped() and self.is_complete

    @property
    def is_complete(self) -> bool:
        """Whether the text so far is a complete answer, even if more may follow."""
        return self._matchers[0].is_accepting()

    @property
    def has_failed(self) -> bool:
        """Whether the grammar was too complex for a step."""
        return any(one.is_error() for one in self._matchers)


class GrammarCompiler:
    """Compiles grammars for one model, and keeps the last ones. Not thread-safe, except for `kept`."""

    def __init__(self, base: Path, vocabulary: int) -> None:
        """`base`: the model's directory; its tokenizer is read for the first grammar."""
        self._file = base / "tokenizer.json"
        self._vocabulary = vocabulary
        self._tokenizers: dict[tuple[int, ...], LLTokenizer] = {}
        self._compiled: OrderedDict[tuple[str, tuple[int, ...]], list[LLMatcher]] = OrderedDict()
        self._lock = Lock()

    def kept(self, grammar: str, stop_tokens: tuple[int, ...]) -> Guide | None:
        """A guide at the start of an answer, if the grammar is kept. Any thread may ask."""
        key = (grammar, stop_tokens)
        with self._lock:
            if key not in self._compiled:
                return None
            self._compiled.move_to_end(key)
            matchers = [one.deep_copy() for one in self._compiled[key]]
        return Guide(matchers, self._vocabulary)

    def guide(self, grammar: str, stop_tokens: tuple[int, ...]) -> Guide:
        """A guide at the start of an answer. Raises `GrammarRefused`."""
        if (kept := self.kept(grammar, stop_tokens)) is not None:
            return kept
        matchers = [self._compile(form, stop_tokens) for form in spellings(grammar)]
        with self._lock:
            self._compiled[grammar, stop_tokens] = matchers
            if len(self._compiled) > KEPT_GRAMMARS:
                self._compiled.popitem(last=False)
        return Guide([one.deep_copy() for one in matchers], self._vocabulary)

    def _compile(self, grammar: str, stop_tokens: tuple[int, ...]) -> LLMatcher:
        if stop_tokens not in self._tokenizers:
            try:
                self._tokenizers[stop_tokens] = LLTokenizer(
                    self._file.read_text(encoding="utf-8"),
                    n_vocab=self._vocabulary,
                    eos_token=list(stop_tokens),
                )
            except (OSError, ValueError) as error:
                raise GrammarRefused(
                    "cannot be followed with the tokenizer of this model"
                ) from error
        matcher = LLMatcher(self._tokenizers[stop_tokens], grammar, log_level=0, limits=LIMITS)
        if matcher.is_error():
            raise GrammarRefused("cannot be compiled for this model")
        return matcher
