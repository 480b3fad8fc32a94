"""Many adapters over one base: every row of a batch gets the delta of its own adapter.

Loaded adapters rest in a registry at the size of their files. Those that run are copied into slots of stacked
tensors (one stack per site of the model), so that rows of different adapters share matrix products.
Reads no files (`adapters`) and knows no attention (`llama`, `generic`).
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
    gather: Tensor
    """[slots * group size] the token for each place; padding repeats token 0."""
    places: Tensor
    """[n] where the tokens of `rows` are in the gathered order."""
    rows: Tensor
    """[n] tokens that have an adapter."""
    all_rows: bool


@dataclass(frozen=True, slots=True)
class Routes:
    """Which flat tokens of a batch use which slot."""

    spans: tuple[tuple[int, int, int], ...]
    """(slot, start, stop): neighbouring tokens of one adapter."""
    groups: Groups | None


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
        self._registry: dict[str, dict[int, dict[int, Matrices]]] = {}
        self._stacks = [_Stack(site, dtype) for site in self._sites]
        self._residents: list[str | None] = []
        self._rank = 0
        self._users: Counter[str] = Counter()
        self._used_at: dict[str, int] = {}
        self._clock = 0
        self._grouped_for: tuple[int | None, ...] = ()
        self._groups: Groups | None = None

    def __contains__(self, adapter: str) -> bool:
        """Whether it is loaded."""
        return adapter in self._registry

    def __len__(self) -> int:
        """Loaded adapters."""
        return len(self._registry)

    def load(self, adapter: str, matrices: Mapping[str, Matrices]) -> None:
        """Register; an adapter of the same name is replaced unless it runs. Raises `AdapterRefused`."""
        if self._users[adapter]:
            raise AdapterRefused("an adapter of this name is answering requests")
        fitted: dict[int, dict[int, Matrices]] = {}
        for module, pair in matrices.items():
            number, member = self._fit(module, pair)
            fitted.setdefault(number, {})[member] = self._own(pair, number, member)
        self.unload(adapter)
        self._registry[adapter] = fitted

    def unload(self, adapter: str) -> bool:
        """Forget; False when it was not loaded. Raises `AdapterRefused` while it runs."""
        if self._users[adapter]:
            raise AdapterRefused("the adapter is answering requests")
        self._residents = [None if name == adapter else name for name in self._residents]
        self._used_at.pop(adapter, None)
        del self._users[adapter]
        return self._registry.pop(adapter, None) is not None

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
            out[start:stop].addmm_(x[start:stop] @ stack.a[slot].t(), stack.b[slot])
        if routes.groups is not None:
            _add_grouped(stack, x, out, routes.groups)

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
        sites = self._registry[adapter]
        rank = max(pair.a.shape[0] for members in sites.values() for pair in members.values())
        if rank > self._rank:
            self._rank = rank
            self._resize(len(self._residents))
        for number, stack in enumerate(self._stacks):
            stack.fill(slot, sites.get(number, {}))
        self._residents[slot] = adapter

    def _free_slot(self) -> int:
        """An empty one, else the least recently used that no running row needs, else twice as many."""
        free = [
            slot for slot, name in enumerate(self._residents) if not (name and self._users[name])
        ]
        if not free:
            free = [len(self._residents)]
            self._resize(max(1, 2 * len(self._residents)))
        return min(free, key=lambda slot: self._used_at.get(self._residents[slot] or "", 0))

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
        for slot in reversed(active):
            if slot < len(active):
                break
            target = next(holes)
            for stack in self._stacks:
                stack.copy(slot, target)
            self._residents[target], self._residents[slot] = self._residents[slot], None


class _Stack:
    """The slots of one site: a [slot, members * rank, in], b [slot, members * rank, out] (block diagonal)."""

    def __init__(self, site: Site, dtype: torch.dtype) -> None:
        self._site = site
        self._rank = 0
        self.touched = False
        self.a = torch.zeros(0, 0, site.inputs, dtype=dtype)
        self.b = torch.zeros(0, 0, sum(site.outputs), dtype=dtype)

    def resize(self, slots: int, rank: int) -> None:
        """More slots or a larger rank; what was filled stays."""
        self.a = self._resized(self.a, slots, rank)
        self.b = self._resized(self.b, slots, rank)
        self._rank = rank

    def fill(self, slot: int, members: Mapping[int, Matrices]) -> None:
        """Write one adapter's matrices; members it does not have stay zero."""
        if not members and not self.touched:
            return
        self.touched = True
        self.a[slot].zero_()
        self.b[slot].zero_()
        for member, pair in members.items():
            start = member * self._rank
            left = sum(self._site.outputs[:member])
            rows = slice(start, start + pair.a.shape[0])
            self.a[slot, rows] = pair.a
            self.b[slot, rows, left : left + pair.b.shape[1]] = pair.b

    def copy(self, source: int, target: int) -> None:
        """Fill a slot from another."""
        if self.touched:
            self.a[target] = self.a[source]
            self.b[target] = self.b[source]

    def _resized(self, old: Tensor, slots: int, rank: int) -> Tensor:
        members = len(self._site.modules)
        new = old.new_zeros(slots, members, rank, old.shape[2])
        if self.touched:
            filled = old.view(old.shape[0], members, self._rank, old.shape[2])
            new[: old.shape[0], :, : self._rank] = filled
        return new.view(slots, members * rank, old.shape[2])


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
        gather=torch.tensor(gather),
        places=torch.tensor([place_of[row] for row in rows]),
        rows=torch.tensor(rows),
        all_rows=len(rows) == len(slots),
    )


def _add_grouped(stack: _Stack, x: Tensor, out: Tensor, groups: Groups) -> None:
    gathered = x.index_select(0, groups.gather).view(groups.slots, -1, x.shape[1])
    low = torch.bmm(gathered, stack.a[: groups.slots].transpose(1, 2))
    delta = torch.bmm(low, stack.b[: groups.slots]).view(-1, out.shape[1])
    if groups.all_rows:
        out[: len(groups.rows)] += delta.index_select(0, groups.places)
    else:
        out.index_add_(0, groups.rows, delta.index_select(0, groups.places))


def _joined(spans: Items[tuple[int, int, int]]) -> tuple[tuple[int, int, int], ...]:
    """Neighbouring spans of one slot become one."""
    joined: list[tuple[int, int, int]] = []
    for slot, start, stop in spans:
        if joined and joined[-1][0] == slot and joined[-1][2] == start:
            joined[-1] = (slot, joined[-1][1], stop)
        else:
            joined.append((slot, start, stop))
    return tuple(joined)
