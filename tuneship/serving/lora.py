"""Many adapters over one base: every row of a batch gets the delta of its own adapter.

The matrices of an adapter are in one place only: at rest in a registry, at the size of its file, or, since it last
ran, in a slot of stacked tensors (one stack per site of the model), so that rows of different adapters share matrix
products. Reads no files (`adapters`) and knows no attention (`llama`, `generic`).
"""

from collections import Counter
from collections.abc import Mapping
from collections.abc import Sequence as Items
from dataclasses import dataclass

import torch
from torch import Tensor

from tuneship.serving.adapters import AdapterRefused, Matrices


@dataclass(frozen=True, slots=True)
class Site:
    """A matrix product of the model that adapters may change; one product may serve several modules (q, k, v)."""

    modules: tuple[str, ...]
    inputs: int
    outputs: tuple[int, ...]
    """One width per module, side by side in the product's output."""
    order: tuple[Tensor | None, ...]
    """Per module: how the model reordered its output channels, or None."""


@dataclass(frozen=True, slots=True)
class Groups:
    """Rows gathered by slot and padded to equal groups, so that one batched product serves them all."""

    slots: int
    gather: Tensor | None
    """[slots * group size] the token for each place; padding repeats token 0. None: the tokens are in this order."""
    places: Tensor
    """[n] where the tokens of `rows` are in the gathered order."""
    rows: Tensor
    """[n] tokens that have an adapter."""
    all_rows: bool

    def ordered(self, x: Tensor) -> Tensor:
        """The tokens group by group; prompts' tokens, which come behind, are not among them."""
        return x[: len(self.rows)] if self.gather is None else x.index_select(0, self.gather)


@dataclass(frozen=True, slots=True)
class Routes:
    """Which flat tokens of a batch use which slot."""

    spans: tuple[tuple[int, int, int], ...]
    """(slot, start, stop): neighbouring tokens of one adapter."""
    groups: Groups | None


Fitted = dict[int, dict[int, Matrices]]
"""One adapter's matrices by site and member of the site."""
SPARE_SLOTS = 32
"""Adapters keep the slots they ran in up to this number; more slots are made only for more that run at once."""


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
        self._residents: list[str | None] = []
        self._rank = 0
        self._users: Counter[str] = Counter()
        self._used_at: dict[str, int] = {}
        self._clock = self._moves = 0
        self._grouped_for: tuple[int | None, ...] = ()
        self._groups: Groups | None = None

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
        if len(set(rows)) > 1:
            self._compact()
        slot_of = {name: slot for slot, name in enumerate(self._residents) if name}
        spans = [(slot_of[name], start, stop) for name, start, stop in prompts if name]
        slots = tuple(slot_of[name] if name else None for name in rows)
        if len(set(slots)) > 1:
            if slots != self._grouped_for:
                self._grouped_for, self._groups = slots, _group(slots)
            return Routes(tuple(spans), self._groups)
        if slots and slots[0] is not None:
            spans.insert(0, (slots[0], 0, len(slots)))
        return Routes(_joined(spans), None)

    def add(self, site: int, x: Tensor, out: Tensor, routes: Routes) -> None:
        """Add to out [T, outputs] every token's own delta of x [T, inputs]."""
        stack = self._stacks[site]
        if not stack.touched:
            return
        for slot, start, stop in routes.spans:
            stack.add_one(slot, x[start:stop], out[start:stop])
        if routes.groups is not None:
            stack.add_grouped(x, out, routes.groups)

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

    def _compact(self) -> None:
        """Grouped products run over all slots up to the last one in use: close the gaps when most are idle."""
        active = [slot for slot, name in enumerate(self._residents) if name and self._users[name]]
        if not active or active[-1] < 2 * len(active):
            return
        holes = (slot for slot in range(len(active)) if slot not in active)
        names = self._residents
        for slot in reversed(active):
            if slot < len(active):
                break
            hole = next(holes)
            for stack in self._stacks:
                stack.swap(slot, hole)
            names[slot], names[hole] = names[hole], names[slot]


class _Stack:
    """The slots of one site: a [slot, members * rank, in] and, per member, b [slot, rank, out]."""

    def __init__(self, site: Site, dtype: torch.dtype) -> None:
        self._site = site
        self._dtype = dtype
        self._slots = self._rank = 0
        self._ranks: dict[tuple[int, int], int] = {}
        """Of what was filled, by slot and member: the rest of the stack's rank is zero."""
        self.touched = False
        self._a = torch.empty(0)
        self._b: list[Tensor] = []
        stops = [sum(site.outputs[: member + 1]) for member in range(len(site.outputs))]
        self._columns = [
            slice(stop - width, stop) for stop, width in zip(stops, site.outputs, strict=True)
        ]

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
        site, rank = self._site, self._rank
        height = len(site.outputs) * rank
        self._a = torch.zeros(self._slots, height, site.inputs, dtype=self._dtype)
        self._b = [
            torch.zeros(self._slots, rank, width, dtype=self._dtype) for width in site.outputs
        ]

    def fill(self, slot: int, members: Mapping[int, Matrices]) -> None:
        """Write one adapter's matrices; members it does not have become zero."""
        if not self.touched:
            if not members:
                return
            self._allocate()
        for member, b in enumerate(self._b):
            pair = members.get(member)
            a = self._a[slot, member * self._rank : (member + 1) * self._rank]
            rank = 0 if pair is None else pair.a.shape[0]
            self._ranks[slot, member] = rank
            a[rank:].zero_()
            b[slot, rank:].zero_()
            if pair is not None:
                a[:rank] = pair.a
                b[slot, :rank] = pair.b

    def read(self, slot: int) -> dict[int, Matrices]:
        """Copies of what was filled."""
        found: dict[int, Matrices] = {}
        for member, b in enumerate(self._b):
            rank, start = self._ranks.get((slot, member), 0), member * self._rank
            if rank:
                a = self._a[slot, start : start + rank]
                found[member] = Matrices(a=a.clone(), b=b[slot, :rank].clone())
        return found

    def swap(self, one: int, other: int) -> None:
        """Exchange two slots."""
        for stacked in (self._a, *self._b) if self.touched else ():
            stacked[[one, other]] = stacked[[other, one]]
        for member in range(len(self._b)):
            ours, theirs = (one, member), (other, member)
            ranks = self._ranks.get(theirs, 0), self._ranks.get(ours, 0)
            self._ranks[ours], self._ranks[theirs] = ranks

    def add_one(self, slot: int, x: Tensor, out: Tensor) -> None:
        """Every row gets the delta of one slot."""
        low = x @ self._a[slot].t()
        for b, columns, narrow in zip(self._b, self._columns, self._split(low), strict=True):
            out[:, columns].addmm_(narrow, b[slot])

    def add_grouped(self, x: Tensor, out: Tensor, groups: Groups) -> None:
        """Every row gets the delta of the slot whose group it is in."""
        ordered = groups.ordered(x)
        grouped = ordered.view(groups.slots, -1, x.shape[1])
        low = torch.bmm(grouped, self._a[: groups.slots].transpose(1, 2))
        deltas = [
            torch.bmm(narrow, b[: groups.slots]).view(len(ordered), -1)
            for b, narrow in zip(self._b, self._split(low), strict=True)
        ]
        if groups.gather is None:
            for delta, columns in zip(deltas, self._columns, strict=True):
                out[: len(delta), columns] += delta
            return
        delta = deltas[0] if len(deltas) == 1 else torch.cat(deltas, dim=1)
        delta = delta.index_select(0, groups.places)
        if groups.all_rows:
            out[: len(delta)] += delta
        else:
            out.index_add_(0, groups.rows, delta)

    def _split(self, low: Tensor) -> tuple[Tensor, ...]:
        return low.split(self._rank, dim=-1)


def _group(slots: tuple[int | None, ...]) -> Groups:
    members: dict[int, list[int]] = {}
    for row, slot in enumerate(slots):
        if slot is not None:
            members.setdefault(slot, []).append(row)
    count, size = max(members) + 1, max(map(len, members.values()))
    gather = [0] * (count * size)
    place_of: dict[int, int] = {}
    for slot, rows in members.items():
        for number, row in enumerate(rows):
            gather[slot * size + number] = row
            place_of[row] = slot * size + number
    rows = sorted(place_of)
    return Groups(
        slots=count,
        gather=None if gather == list(range(len(slots))) else torch.tensor(gather),
        places=torch.tensor([place_of[row] for row in rows]),
        rows=torch.tensor(rows),
        all_rows=len(rows) == len(slots),
    )


def _joined(spans: Items[tuple[int, int, int]]) -> tuple[tuple[int, int, int], ...]:
    """Neighbouring spans of one slot become one."""
    joined: list[tuple[int, int, int]] = []
    for slot, start, stop in spans:
        if joined and joined[-1][0] == slot and joined[-1][2] == start:
            joined[-1] = (slot, joined[-1][1], stop)
        else:
            joined.append((slot, start, stop))
    return tuple(joined)
