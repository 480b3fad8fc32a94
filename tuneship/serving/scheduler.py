"""Which sequences run in the next step, and how much of whose prompt enters.

Waiting sequences take turns by owner, and those of an owner by queue: a hundred requests of one tenant do not hold up
one of another, whether they are for one deployment or for fifty. When one owner has all rows, an owner that has none
gets one of the guests' rows: otherwise it would wait until a generation ends, which may take minutes.
Of the running ones those that generate come before one whose prompt is entering in parts. Knows nothing of tensors and
rows; `engine` acts on what it says.
"""

from collections import Counter, OrderedDict, deque

from tuneship.serving.sequence import Sequence

# New prompt tokens per generating row that a step may take beyond its fixed share: it takes about
# three times as long then as without any, however many rows there are.
TOKENS_PER_ROW = 2

# Rows beyond the limit, as a share of it, each for an owner that has nothing running. They are
# within the cache's.
GUESTS = 0.25

# Of the rows, what one owner may have while there are others, whose every token takes as long as
# a step of all: on the shipped base one with 8 other rows takes 1.7 times as long as one alone,
# with 16 it takes 2.4 times.
SHARED = 0.25

# For so long there is an owner after its last request has ended.
RECENT_STEPS = 1000

# Times that share while none generates: larger parts take fewer steps, and only joiners would
# wait.
UNSHARED = 2


class Scheduler:
    """Continuous batching: joiners enter at any step, the ended leave at once."""

    def __init__(self, rows: int, prompt_tokens: int, cache_tokens: int | None = None) -> None:
        """`rows` run at once; `prompt_tokens` new ones enter beside them, so that joiners do not stall the rest.

        `cache_tokens`: what rows times the longest of them may come to at most.
        """
        self.rows = rows
        self.all_rows = rows + int(GUESTS * rows)
        """The guests' included."""
        self.prompt_tokens = prompt_tokens
        self.cache_tokens = cache_tokens
        self.running: list[Sequence] = []
        self._owners: OrderedDict[str, OrderedDict[str, deque[Sequence]]] = OrderedDict()
        """Who waits, by owner and queue, each in the order of their turns."""
        self._steps = 0
        self._seen: dict[str, int] = {}
        """The last step of each owner of late."""

    @property
    def idle(self) -> bool:
        """Nothing to run."""
        return not (self._owners or self.running)

    @property
    def waiting(self) -> int:
        """How many wait."""
        return sum(len(queue) for queues in self._owners.values() for queue in queues.values())

    def fits(self, sequence: Sequence) -> bool:
        """Whether it could run alone."""
        return self.cache_tokens is None or sequence.longest <= self.cache_tokens

    def add(self, sequence: Sequence) -> None:
        """Wait behind those of the same queue."""
        self._seen[sequence.request.owner] = self._steps
        queues = self._owners.setdefault(sequence.request.owner, OrderedDict())
        queues.setdefault(_queue(sequence), deque()).append(sequence)

    def remove(self, sequence: Sequence) -> None:
        """Forget one that waits."""
        self._owners[sequence.request.owner][_queue(sequence)].remove(sequence)
        self._turn(sequence, is_over=False)

    def schedule(self) -> list[int]:
        """Let waiting sequences join; returns how many prompt tokens each of the last ones brings into this step.

        Only the last one may come to no end in this step: it goes on before others join. Joiners of one adapter stand
        side by side, which makes fewer, larger matrix products of their prompts.
        """
        self._look_around()
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

    def _look_around(self) -> None:
        """Remember whom this step is for, and forget who has not been there for long."""
        self._steps += 1
        present = {*self._owners, *(one.request.owner for one in self.running)}
        old = [one for one, seen in self._seen.items() if self._steps - seen > RECENT_STEPS]
        for owner in old:
            del self._seen[owner]
        self._seen |= dict.fromkeys(present, self._steps)

    def release(self, sequence: Sequence) -> None:
        """Forget one that runs."""
        self.running.remove(sequence)

    def _next(self, joiners: list[Sequence]) -> Sequence | None:
        """The first of the owner and the queue whose turn it is, if there is a row and room for it.

        One that has to wait for room is waited for: smaller ones would take what it needs again and again.
        """
        together = [*self.running, *joiners]
        owner = self._next_owner(together)
        if owner is None:
            return None
        queue = next(iter(self._owners[owner].values()))
        if not self._has_room([*together, queue[0]]):
            return None
        sequence = queue.popleft()
        self._turn(sequence, is_over=True)
        return sequence

    def _next_owner(self, together: list[Sequence]) -> str | None:
        if not self._owners or len(together) >= self.all_rows:
            return None
        rows = Counter(one.request.owner for one in together)
        most = self.rows if len(self._seen) == 1 else max(1, int(SHARED * self.rows))
        if len(together) >= self.rows:
            most = 1
        return next((owner for owner in self._owners if rows[owner] < most), None)

    def _turn(self, sequence: Sequence, *, is_over: bool) -> None:
        """One of them waits no more: forget what is empty; after their turn, owner and queue are the last in line."""
        owner, name = sequence.request.owner, _queue(sequence)
        for waiting, key in ((self._owners[owner], name), (self._owners, owner)):
            if not waiting[key]:
                del waiting[key]
            elif is_over:
                waiting.move_to_end(key)

    def _has_room(self, sequences: list[Sequence]) -> bool:
        if self.cache_tokens is None:
            return True
        return len(sequences) * max(one.longest for one in sequences) <= self.cache_tokens


def _queue(sequence: Sequence) -> str:
    return sequence.request.queue or sequence.request.adapter or ""
