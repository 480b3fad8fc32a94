"""Many adapters over one base: every row of a batch gets the delta of its own adapter.

The matrices of an adapter are in one place only: at rest in a registry, at the size of its file, or, since it last
ran, in a slot of stacked tensors (one stack per site of the model), so that rows of different adapters share matrix
products. Reads no files (`adapters`) and knows no attention (`llama`, `generic`).
"""

import math
from collections import Counter
from collections.abc import Mapping
from collections.abc import Sequence as Items
from dataclasses import dataclass

import torch
from torch import Tensor

from tuneship.serving.adapters import AdapterRefused, Matrices
from tuneship.serving.gather_sum import weighted_sums
from tuneship.serving.linear import Product
from tuneship.serving.merging import Merged


@dataclass(frozen=True, slots=True)
class Site:
    """A matrix product of the model that adapters may change; one product may serve several modules (q, k, v)."""

    modules: tuple[str, ...]
    inputs: int
    outputs: tuple[int, ...]
    """One width per module, side by side in the product's output."""
    order: tuple[Tensor | None, ...]
    """Per module: how the model reordered its output channels, or None."""
    product: Product | None = None
    """The product itself, where the model leaves it to `Lora.multiply`."""


class TokenSlots:
    """The slot of each token whose delta is a weighted sum, and where what it reads is in the stacks."""

    def __init__(self, slots: tuple[int | None, ...]) -> None:
        """Of the first tokens of a batch; None: one without an adapter, or whose delta is a product."""
        self.slots = slots
        tokens = [token for token, slot in enumerate(slots) if slot is not None]
        self._tokens = None if len(tokens) == len(slots) else torch.tensor(tokens)
        taken = [slot for slot in slots if slot is not None]
        self._slots = torch.tensor(taken, dtype=torch.int32)[:, None]
        self._places: dict[tuple[int, int], tuple[Tensor, Tensor]] = {}

    def select(self, x: Tensor) -> Tensor:
        """Of the flat tokens [T, width] those that have a slot."""
        return x[: len(self.slots)] if self._tokens is None else x.index_select(0, self._tokens)

    def add(self, out: Tensor, delta: Tensor) -> None:
        """Add to those tokens of out [T, width]."""
        if self._tokens is None:
            out[: len(self.slots)].add_(delta)
        else:
            out.index_add_(0, self._tokens, delta)

    def places(self, height: int, size: int) -> tuple[Tensor, Tensor]:
        """In a stack of `height` lines a slot: the lines of each token, and the starts of sums over `size` of them."""
        if (height, size) not in self._places:
            lines = (self._slots * height + torch.arange(height, dtype=torch.int32)).flatten()
            starts = torch.arange(0, len(lines), size, dtype=torch.int32)
            self._places[height, size] = lines, starts
        return self._places[height, size]


# Numbers (tokens times inputs) from which a run of tokens takes less time by products than by
# sums, for fewer of them the calls of the products take longer: of a run that is the only one of
# a batch, and of one beside others.
FEWEST = {torch.float32: (0, 5 << 10), torch.bfloat16: (20 << 10, 20 << 10)}


@dataclass(frozen=True, slots=True)
class Routes:
    """Which flat tokens of a batch use which slot."""

    runs: tuple[tuple[int, int, int], ...]
    """(slot, start, stop): neighbouring tokens of one adapter, whose deltas are products."""
    tokens: TokenSlots | None
    """Those whose deltas are sums; None: no token's are."""
    merged: Items[Product] = ()
    """Of the first sites: what takes the place of their products and all deltas."""


# One adapter's matrices by site and member of the site.
Fitted = dict[int, dict[int, Matrices]]
# Adapters keep the slots they ran in up to this number; more slots are made only for more that
# run at once.
SPARE_SLOTS = 32


class Lora:
    """Adapters by name: the registry, the slots, and the deltas."""

    def __init__(self, sites: Items[Site], dtype: torch.dtype) -> None:
        """No memory before the first adapter."""
        self._sites = tuple(sites)
        self._dtype = dtype
        self._place = {
            module: (number, member)
            for number, site in enumerate(self._sites)
            for member, module in enumerate(site.modules)
        }
        self._at_rest: dict[str, Fitted] = {}
        self._stacks = [_Stack(site, dtype) for site in self._sites]
        width = self._sites[0].inputs if self._sites else 1
        self._lone, self._fewest = (math.ceil(numbers / width) for numbers in FEWEST[dtype])
        """Tokens of a run whose deltas are products."""
        self._residents: list[str | None] = []
        self._rank = 0
        self._users: Counter[str] = Counter()
        self._used_at: dict[str, int] = {}
        self._clock = self._moves = 0
        self._tokens = TokenSlots(())
        self._merged = Merged([site.product for site in self._sites], dtype)

    def __contains__(self, adapter: str) -> bool:
        """Whether it is loaded."""
        return adapter in self._at_rest or adapter in self._residents

    def __len__(self) -> int:
        """Loaded adapters."""
        return len(self._at_rest) + sum(name is not None for name in self._residents)

    @property
    def moves(self) -> int:
        """Grows whenever matrices come, move or go, and memory may have been freed."""
        return self._moves

    def load(self, adapter: str, matrices: Mapping[str, Matrices]) -> None:
        """Register; an adapter of the same name is replaced unless it runs. Raises `AdapterRefused`."""
        if self._users[adapter]:
            raise AdapterRefused("an adapter of this name is answering requests")
        fitted: Fitted = {}
        for module, pair in matrices.items():
            number, member = self._fit(module, pair)
            fitted.setdefault(number, {})[member] = self._own(pair, number, member)
        self.unload(adapter)
        self._at_rest[adapter] = fitted
        self._moves += 1

    def unload(self, adapter: str) -> bool:
        """Forget; False when it was not loaded. Raises `AdapterRefused` while it runs."""
        if self._users[adapter]:
            raise AdapterRefused("the adapter is answering requests")
        was_loaded = adapter in self
        self._moves += 1
        self._merged.forget(adapter)
        self._residents = [None if name == adapter else name for name in self._residents]
        self._at_rest.pop(adapter, None)
        self._used_at.pop(adapter, None)
        del self._users[adapter]
        return was_loaded

    def hold(self, adapter: str) -> None:
        """One more running row uses it: it gets a slot."""
        self._users[adapter] += 1
        self._clock += 1
        self._used_at[adapter] = self._clock
        if adapter not in self._residents:
            self._settle(adapter, self._free_slot())

    def release(self, adapter: str) -> None:
        """One row less. It keeps its slot until another adapter needs it."""
        self._users[adapter] -= 1

    def route(self, rows: Items[str | None], prompts: Items[tuple[str | None, int, int]]) -> Routes:
        """`rows`: the adapter of each decoding row; `prompts`: adapter, start and stop of each joiner's tokens."""
        merged = self._merge({*rows, *(name for name, *_ in prompts)})
        if merged and len(merged) == len(self._sites):
            return Routes((), None, merged)
        slot_of = {name: slot for slot, name in enumerate(self._residents) if name}
        spans = [*((name, row, row + 1) for row, name in enumerate(rows)), *prompts]
        runs = _joined([(slot_of[name], start, stop) for name, start, stop in spans if name])
        fewest = self._lone if len(runs) == 1 else self._fewest
        many = tuple(run for run in runs if run[2] - run[1] >= fewest)
        slots: list[int | None] = []
        for slot, start, stop in runs:
            if (slot, start, stop) not in many:
                slots.extend([None] * (start - len(slots)) + [slot] * (stop - start))
        if slots and tuple(slots) != self._tokens.slots:
            self._tokens = TokenSlots(tuple(slots))
        return Routes(many, self._tokens if slots else None, merged)

    def multiply(self, site: int, x: Tensor, routes: Routes) -> Tensor:
        """The site's product of x [T, inputs] with every token's own delta: [T, outputs]."""
        if site < len(routes.merged):
            return routes.merged[site](x)
        out = self._product(site)(x)
        self.add(site, x, out, routes)
        return out

    def multiply_onto(self, residual: Tensor, site: int, x: Tensor, routes: Routes) -> Tensor:
        """The same added to a residual [T, outputs], as a new tensor."""
        if site < len(routes.merged):
            return routes.merged[site].onto(residual, x)
        out = self._product(site).onto(residual, x)
        self.add(site, x, out, routes)
        return out

    def add(self, site: int, x: Tensor, out: Tensor, routes: Routes) -> None:
        """Add to out [T, outputs] every token's own delta of x [T, inputs]."""
        stack = self._stacks[site]
        if not stack.touched:
            return
        for slot, start, stop in routes.runs:
            stack.add_one(slot, x[start:stop], out[start:stop])
        if routes.tokens is not None:
            stack.add_each(x, out, routes.tokens)

    def _product(self, site: int) -> Product:
        product = self._sites[site].product
        if product is None:
            raise ValueError("the model multiplies at this site itself")
        return product

    def _merge(self, names: set[str | None]) -> Items[Product]:
        (name, *others) = names
        if others or name is None:
            self._merged.interrupt()
            return ()
        slot = self._residents.index(name)
        return self._merged.step(name, lambda site: self._stacks[site].delta(slot))

    def _fit(self, module: str, pair: Matrices) -> tuple[int, int]:
        if module not in self._place:
            raise AdapterRefused(f"the base model has no linear layer {module} that takes adapters")
        number, member = self._place[module]
        site = self._sites[number]
        if pair.a.shape[1] != site.inputs or pair.b.shape[1] != site.outputs[member]:
            raise AdapterRefused(f"the LoRA matrices of {module} do not fit the base model")
        return number, member

    def _own(self, pair: Matrices, number: int, member: int) -> Matrices:
        """Copies in the model's number format and channel order: the file may go away."""
        order = self._sites[number].order[member]
        b = pair.b if order is None else pair.b[:, order]
        return Matrices(
            a=pair.a.to(self._dtype, copy=True), b=b.to(self._dtype, copy=True).contiguous()
        )

    def _settle(self, adapter: str, slot: int) -> None:
        sites = self._at_rest.pop(adapter)
        self._moves += 1
        rank = max(pair.a.shape[0] for members in sites.values() for pair in members.values())
        if rank > self._rank:
            self._rank = rank
            self._resize(len(self._residents))
        for number, stack in enumerate(self._stacks):
            stack.fill(slot, sites.get(number, {}))
        self._residents[slot] = adapter

    def _free_slot(self) -> int:
        """An empty one, else a new one, else the least recently used that no running row needs."""
        if None in self._residents:
            return self._residents.index(None)
        count = len(self._residents)
        idle = [slot for slot, name in enumerate(self._residents) if name and not self._users[name]]
        if count < SPARE_SLOTS or not idle:
            self._resize(max(1, 2 * count))
            return count
        slot = min(idle, key=lambda slot: self._used_at[self._residents[slot] or ""])
        self._vacate(slot)
        return slot

    def _vacate(self, slot: int) -> None:
        """Back into the registry."""
        found = {number: stack.read(slot) for number, stack in enumerate(self._stacks)}
        self._at_rest[self._residents[slot] or ""] = {n: one for n, one in found.items() if one}
        self._residents[slot] = None

    def _resize(self, slots: int) -> None:
        self._residents.extend([None] * (slots - len(self._residents)))
        for stack in self._stacks:
            stack.resize(slots, self._rank)


class _Stack:
    """The slots of one site.

    A token's delta is a weighted sum of lines of its slot, and so are its low numbers before (`sums`). For one sum to
    serve all members, their outputs are cut into parts of one width. Many tokens of one slot take products instead.
    """

    def __init__(self, site: Site, dtype: torch.dtype) -> None:
        self._site = site
        self._dtype = dtype
        self._slots = self._rank = 0
        self._ranks: dict[tuple[int, int], int] = {}
        """Of what was filled, by slot and member: the rest of the stack's rank is zero."""
        self.touched = False
        self._width = math.gcd(*site.outputs)
        self._owners = [
            m for m, width in enumerate(site.outputs) for _ in range(width // self._width)
        ]
        """The member of each part."""
        self._a = self._b = torch.empty(0)
        """[slot, in, members * rank] and [slot, parts, rank, width]"""
        self._spread: Tensor | None = None
        """Which low number each line of b takes; None: they are as many, in this order."""

    def resize(self, slots: int, rank: int) -> None:
        """More slots or a larger rank; what was filled stays. A site that no adapter changes takes no memory."""
        filled = [(slot, self.read(slot)) for slot in range(self._slots)] if self.touched else []
        self._slots, self._rank = slots, rank
        if self.touched:
            self._allocate()
        for slot, members in filled:
            self.fill(slot, members)

    def _allocate(self) -> None:
        self.touched = True
        site, rank, parts = self._site, self._rank, len(self._owners)
        low = len(site.outputs) * rank
        self._a = torch.zeros(self._slots, site.inputs, low, dtype=self._dtype)
        self._b = torch.zeros(self._slots, parts, rank, self._width, dtype=self._dtype)
        if parts > len(site.outputs):
            self._spread = torch.arange(low).view(-1, rank)[self._owners].flatten()

    def fill(self, slot: int, members: Mapping[int, Matrices]) -> None:
        """Write one adapter's matrices; members it does not have become zero."""
        if not self.touched:
            if not members:
                return
            self._allocate()
        for member in range(len(self._site.outputs)):
            pair = members.get(member)
            a, b = self._of(slot, member)
            rank = 0 if pair is None else pair.a.shape[0]
            self._ranks[slot, member] = rank
            a[:, rank:].zero_()
            b[:, rank:].zero_()
            if pair is not None:
                a[:, :rank] = pair.a.t()
                b[:, :rank] = pair.b.view(rank, -1, self._width).transpose(0, 1)

    def read(self, slot: int) -> dict[int, Matrices]:
        """Copies of what was filled."""
        found: dict[int, Matrices] = {}
        for member in range(len(self._site.outputs)):
            rank = self._ranks.get((slot, member), 0)
            if rank:
                a, b = self._of(slot, member)
                whole = b[:, :rank].transpose(0, 1).clone(memory_format=torch.contiguous_format)
                low = a[:, :rank].t().clone(memory_format=torch.contiguous_format)
                found[member] = Matrices(a=low, b=whole.view(rank, -1))
        return found

    def delta(self, slot: int) -> Tensor | None:
        """[outputs, inputs] of one slot; None: its adapter changes nothing here."""
        found = self.read(slot)
        if not found:
            return None
        site = self._site
        return torch.cat(
            [
                found[member].b.t() @ found[member].a
                if member in found
                else torch.zeros(width, site.inputs, dtype=self._dtype)
                for member, width in enumerate(site.outputs)
            ]
        )

    def _of(self, slot: int, member: int) -> tuple[Tensor, Tensor]:
        """Views of a [in, rank] and b [parts, rank, width] of one member."""
        start, first = member * self._rank, self._owners.index(member)
        stop = first + self._owners.count(member)
        return self._a[slot, :, start : start + self._rank], self._b[slot, first:stop]

    def add_one(self, slot: int, x: Tensor, out: Tensor) -> None:
        """Every token gets the delta of one slot."""
        low = self._spread_out(x @ self._a[slot]).view(len(x), -1, self._rank).transpose(0, 1)
        out.view(len(x), -1, self._width).transpose(0, 1).baddbmm_(low, self._b[slot])

    def add_each(self, x: Tensor, out: Tensor, tokens: TokenSlots) -> None:
        """Every token that has a slot gets the delta of its own."""
        x = tokens.select(x)
        low = weighted_sums(self._a, *tokens.places(x.shape[1], x.shape[1]), x.reshape(-1))
        low = self._spread_out(low)
        lines = len(self._owners) * self._rank
        delta = weighted_sums(self._b, *tokens.places(lines, self._rank), low.reshape(-1))
        tokens.add(out, delta.view(len(x), -1))

    def _spread_out(self, low: Tensor) -> Tensor:
        return low if self._spread is None else low.index_select(1, self._spread)


def _joined(spans: Items[tuple[int, int, int]]) -> list[tuple[int, int, int]]:
    """Neighbouring spans of one slot become one."""
    joined: list[tuple[int, int, int]] = []
    for slot, start, stop in spans:
        if joined and joined[-1][0] == slot and joined[-1][2] == start:
            joined[-1] = (slot, joined[-1][1], stop)
        else:
            joined.append((slot, start, stop))
    return joined
