"""Chooses the sequences of the next step, and the number of tokens to prefill from each prompt.

Waiting sequences take turns by owner, and those of an owner by queue: a hundred requests of one tenant do not hold up
the request of another, whether they are for one deployment or for fifty. When one owner has all slots, an owner that
has none gets a guest slot: otherwise it would wait until a generation ends, which may take minutes. Decoding sequences
come before those whose prompts are still being prefilled. Sequences in the background join only while no other one
waits, and never take all slots. Knows nothing of tensors and of the KV cache; `engine` acts on its decisions.
"""

from collections import Counter, OrderedDict, deque
from collections.abc import Iterable
from dataclasses import dataclass

from tuneship.serving.sequence import Sequence

# Prompt tokens per decoding sequence that a step may prefill beyond its fixed budget: the step
# then takes about three times as long as without any, however many sequences decode.
PROMPT_TOKENS_PER_DECODE = 2

# Slots beyond the limit, as a share of it, each for an owner that has nothing running. The KV
# cache has rows for them.
GUEST_SHARE = 0.25

# Share of the slots that one owner may have while there are others, because every token takes as
# long as a step of all: on the shipped base a token beside 8 other sequences takes 1.7 times as
# long as alone, beside 16 it takes 2.4 times.
OWNER_SHARE = 0.25

# Share of the slots that sequences in the background may have while nothing else runs, so that what comes next finds a
# slot at once. While others are there, all of them together have the share of one owner.
BACKGROUND_SHARE = 0.5

# An owner counts as present for this long after its last request has ended.
OWNER_MEMORY_STEPS = 1000

# Factor on the prefill budget while nothing decodes: larger chunks take fewer steps, and only
# other prompts would wait for them.
PREFILL_ONLY_FACTOR = 2


# Waiting sequences by owner and queue, both in the order of their turns.
_Waiting = OrderedDict[str, OrderedDict[str, deque[Sequence]]]


@dataclass(slots=True)
class _PrefillBudget:
    """Prompt tokens that a step may still prefill."""

    tokens: int
    # How many of them may be of prompts whose log probabilities were asked for: each has a row of logits.
    scored: int

    def take(self, sequence: Sequence) -> int:
        """The next chunk of a prompt (tokens). After a chunk that does not finish its prompt there is no other."""
        is_scored = sequence.request.prompt_logprobs is not None
        most = min(self.tokens, self.scored) if is_scored else self.tokens
        chunk = min(most, sequence.uncached)
        self.tokens -= chunk
        if is_scored:
            self.scored -= chunk
        if chunk < sequence.uncached or self.scored == 0:
            self.tokens = 0
        return chunk


class Scheduler:
    """Continuous batching: sequences join at any step, and leave at once when they end."""

    def __init__(
        self,
        slots: int,
        prompt_tokens: int,
        cache_tokens: int | None = None,
        scored_tokens: int | None = None,
    ) -> None:
        """Run `slots` sequences at once, and prefill up to `prompt_tokens` tokens per step beside them.

        `cache_tokens`: limit of the number of sequences times the longest of them; None sets none. `scored_tokens`:
        limit of the prompt tokens per step whose log probabilities are computed; None sets none.
        """
        self.slots = slots
        # Number of slots with those for guests.
        self.total_slots = slots + int(GUEST_SHARE * slots)
        self.prompt_tokens = prompt_tokens
        self.cache_tokens = cache_tokens
        self.scored_tokens = scored_tokens
        self.running: list[Sequence] = []
        self._waiting: _Waiting = OrderedDict()
        # Those that wait in the background.
        self._background: _Waiting = OrderedDict()
        self._steps = 0
        # The last step in which each recent owner had a sequence outside the background.
        self._last_seen: dict[str, int] = {}

    @property
    def idle(self) -> bool:
        """Whether no sequence runs or waits."""
        return not (self._waiting or self._background or self.running)

    @property
    def waiting(self) -> int:
        """Number of waiting sequences."""
        owners = (*self._waiting.values(), *self._background.values())
        return sum(len(queue) for queues in owners for queue in queues.values())

    def fits(self, sequence: Sequence) -> bool:
        """Whether the KV cache could hold it if it ran alone."""
        return self.cache_tokens is None or sequence.max_length <= self.cache_tokens

    def add(self, sequence: Sequence) -> None:
        """Put a sequence at the end of its queue."""
        self._waiting_with(sequence).append(sequence)

    def add_first(self, sequence: Sequence) -> None:
        """Put a sequence before all others: it goes on in the next step, unless it is in the background."""
        self._waiting_with(sequence).appendleft(sequence)
        owners, owner = self._owners_beside(sequence), sequence.request.owner
        owners[owner].move_to_end(_queue(sequence), last=False)
        owners.move_to_end(owner, last=False)

    def _waiting_with(self, sequence: Sequence) -> deque[Sequence]:
        owner = sequence.request.owner
        if not sequence.request.is_background:
            self._last_seen[owner] = self._steps
        queues = self._owners_beside(sequence).setdefault(owner, OrderedDict())
        return queues.setdefault(_queue(sequence), deque())

    def remove(self, sequence: Sequence) -> None:
        """Remove a waiting sequence."""
        self._owners_beside(sequence)[sequence.request.owner][_queue(sequence)].remove(sequence)
        self._update_turns(sequence, took_turn=False)

    def release(self, sequence: Sequence) -> None:
        """Remove a running sequence."""
        self.running.remove(sequence)

    def schedule(self) -> list[int]:
        """Admit waiting sequences; return how many prompt tokens to prefill for each sequence at the end of `running`.

        Only the prefill of the last one may not end in this step: it goes on before others join. Joining sequences of
        one adapter are neighbours, which makes fewer and larger matrix products of their prompts.
        """
        self._steps += 1
        present = {*self._waiting, *_by_owner(self.running)}
        # Owners are forgotten late: one whose requests come one after the other counts as present between two of them.
        away = [
            owner
            for owner, step in self._last_seen.items()
            if self._steps - step > OWNER_MEMORY_STEPS
        ]
        for owner in away:
            del self._last_seen[owner]
        self._last_seen |= dict.fromkeys(present, self._steps)

        prefilling = [sequence for sequence in self.running if sequence.is_prefilling]
        decoding = len(self.running) - len(prefilling)
        fixed = self.prompt_tokens if decoding else PREFILL_ONLY_FACTOR * self.prompt_tokens
        tokens = max(fixed, PROMPT_TOKENS_PER_DECODE * decoding)
        budget = _PrefillBudget(tokens, self.scored_tokens or tokens)
        chunks = {sequence: budget.take(sequence) for sequence in prefilling}

        joining: list[Sequence] = []
        while budget.tokens > 0 and (sequence := self._next(joining)) is not None:
            joining.append(sequence)
            chunks[sequence] = budget.take(sequence)
        joining.sort(key=lambda one: (chunks[one] < one.uncached, one.request.adapter or ""))
        self.running.extend(joining)
        return [chunks[sequence] for sequence in self.running[decoding:]]

    def _next(self, joining: list[Sequence]) -> Sequence | None:
        """Take the first sequence of the owner and queue whose turn it is, if a slot and memory are free."""
        together = [*self.running, *joining]
        if len(together) >= self.total_slots:
            return None
        if self._waiting:
            # The background takes no slot from an owner, so it is not counted.
            owners, counts = self._waiting, _by_owner(together)
            is_alone = len(self._last_seen) == 1
            most = self.slots if is_alone else max(1, int(OWNER_SHARE * self.slots))
            if counts.total() >= self.slots:  # only guest slots are free
                most = 1
            owner = next((one for one in owners if counts[one] < most), None)
        else:
            owners = self._background
            share = OWNER_SHARE if self._last_seen else BACKGROUND_SHARE
            running = sum(sequence.request.is_background for sequence in together)
            is_full = running >= max(1, int(share * self.slots)) or len(together) >= self.slots
            owner = None if is_full else next(iter(owners), None)
        if owner is None:
            return None

        queue = next(iter(owners[owner].values()))
        # All rows of the cache are as long as the longest sequence. If the next one lacks memory, no
        # smaller one overtakes it: they would take what it needs for ever.
        longest = max(sequence.max_length for sequence in [*together, queue[0]])
        needed = (len(together) + 1) * longest
        if self.cache_tokens is not None and needed > self.cache_tokens:
            return None
        sequence = queue.popleft()
        self._update_turns(sequence, took_turn=True)
        return sequence

    def _owners_beside(self, sequence: Sequence) -> _Waiting:
        return self._background if sequence.request.is_background else self._waiting

    def _update_turns(self, sequence: Sequence, *, took_turn: bool) -> None:
        """Drop its queue and owner where nothing waits any more; after their turn, move them to the end."""
        owner, name = sequence.request.owner, _queue(sequence)
        owners = self._owners_beside(sequence)
        for waiting, key in ((owners[owner], name), (owners, owner)):
            if not waiting[key]:
                del waiting[key]
            elif took_turn:
                waiting.move_to_end(key)


def _by_owner(sequences: Iterable[Sequence]) -> Counter[str]:
    """The number of sequences of each owner, without background ones."""
    return Counter(one.request.owner for one in sequences if not one.request.is_background)


def _queue(sequence: Sequence) -> str:
    return sequence.request.queue or sequence.request.adapter or ""
