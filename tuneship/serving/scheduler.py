"""Which sequences run in the next step, and how much of whose prompt enters.

Waiting sequences take turns by queue, so that a hundred requests of one deployment do not hold up one of another.
Of the running ones those that generate come before one whose prompt is entering in parts. Knows nothing of tensors and
rows; `engine` acts on what it says.
"""

from collections import OrderedDict, deque

from tuneship.serving.sequence import Sequence

TOKENS_PER_ROW = 2
"""New prompt tokens per generating row that a step may take beyond its fixed share: it takes about three times as long
then as without any, however many rows there are."""

UNSHARED = 2
"""Times that share while none generates: larger parts take fewer steps, and only joiners would wait."""


class Scheduler:
    """Continuous batching: joiners enter at any step, the ended leave at once."""

    def __init__(self, rows: int, prompt_tokens: int, cache_tokens: int | None = None) -> None:
        """`rows` run at once; `prompt_tokens` new ones enter beside them, so that joiners do not stall the rest.

        `cache_tokens`: what rows times the longest of them may come to at most.
        """
        self.rows = rows
        self.prompt_tokens = prompt_tokens
        self.cache_tokens = cache_tokens
        self.running: list[Sequence] = []
        self._queues: OrderedDict[str, deque[Sequence]] = OrderedDict()

    @property
    def idle(self) -> bool:
        """Nothing to run."""
        return not (self._queues or self.running)

    @property
    def waiting(self) -> int:
        """How many wait."""
        return sum(map(len, self._queues.values()))

    def fits(self, sequence: Sequence) -> bool:
        """Whether it could run alone."""
        return self.cache_tokens is None or sequence.longest <= self.cache_tokens

    def add(self, sequence: Sequence) -> None:
        """Wait behind those of the same queue."""
        self._queues.setdefault(_queue(sequence), deque()).append(sequence)

    def remove(self, sequence: Sequence) -> None:
        """Forget one that waits."""
        queue = self._queues[_queue(sequence)]
        queue.remove(sequence)
        if not queue:
            del self._queues[_queue(sequence)]

    def schedule(self) -> list[int]:
        """Let waiting sequences join; returns how many prompt tokens each of the last ones brings into this step.

        Only the last one may come to no end in this step: it goes on before others join. Joiners of one adapter stand
        side by side, which makes fewer, larger matrix products of their prompts.
        """
        entering = [sequence for sequence in self.running if sequence.is_entering]
        generating = len(self.running) - len(entering)
        share = self.prompt_tokens if generating else UNSHARED * self.prompt_tokens
        budget = max(share, TOKENS_PER_ROW * generating)
        parts = {one: min(budget, one.missing) for one in entering}
        budget -= sum(parts.values())
        joiners: list[Sequence] = []
        while budget > 0 and (joiner := self._next(joiners)) is not None:
            joiners.append(joiner)
            parts[joiner] = min(budget, joiner.missing)
            budget -= parts[joiner]
        joiners.sort(key=lambda one: (parts[one] < one.missing, one.request.adapter or ""))
        self.running.extend(joiners)
        return [parts[sequence] for sequence in self.running[generating:]]

    def release(self, sequence: Sequence) -> None:
        """Forget one that runs."""
        self.running.remove(sequence)

    def _next(self, joiners: list[Sequence]) -> Sequence | None:
        """The first of the queue whose turn it is, if there is a row and room for it.

        One that has to wait for room is waited for: smaller ones would take what it needs again and again.
        """
        if not self._queues or len(self.running) + len(joiners) >= self.rows:
            return None
        name, queue = next(iter(self._queues.items()))
        if not self._has_room([*self.running, *joiners, queue[0]]):
            return None
        sequence = queue.popleft()
        if queue:
            self._queues.move_to_end(name)
        else:
            del self._queues[name]
        return sequence

    def _has_room(self, sequences: list[Sequence]) -> bool:
        if self.cache_tokens is None:
            return True
        return len(sequences) * max(one.longest for one in sequences) <= self.cache_tokens


def _queue(sequence: Sequence) -> str:
    return sequence.request.queue or sequence.request.adapter or ""
