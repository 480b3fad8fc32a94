"""LoRA adapters over one base model: every token of a batch gets the delta of its own adapter.

The matrices of an adapter are in one place only: in a registry at the size of its file, or, once it has run, in an
adapter slot of stacked tensors (one stack per site of the model), so that tokens of different adapters share matrix
products. Reads no files (`adapters`) and knows no attention (`llama`, `generic`). "Slot" means an adapter's slot here,
not one of the KV cache.
"""

import math
from collections import Counter
from collections.abc import Collection, Mapping
from collections.abc import Sequence as Items
from dataclasses import dataclass

import torch
from torch import Tensor

from tuneship.host.memory import free_memory
from tuneship.serving.adapters import AdapterRefused, Matrices
from tuneship.serving.kernels.quantised import ConstantProduct
from tuneship.serving.merged_weights import MERGED_BYTES, Merged
from tuneship.serving.models.gather_sum import weighted_sums
from tuneship.serving.models.linear import Product

# Matrix products beat sums of matrix rows from this many numbers (tokens times inputs) on: for a
# run of tokens that is the only one of its batch, and for one beside others.
PRODUCT_MIN_NUMBERS = {torch.float32: (0, 5 << 10), torch.bfloat16: (20 << 10, 20 << 10)}

# Adapters that do not run keep their slots up to this number of slots; more slots are made only
# for adapters that run at the same time.
SPARE_SLOTS = 32


@dataclass(frozen=True, slots=True)
class Site:
    """A matrix product of the model that adapters may change; one product may serve several modules (q, k, v)."""

    modules: tuple[str, ...]
    inputs: int
    # One width per module, side by side in the product's output.
    outputs: tuple[int, ...]
    # How the model reordered the output channels of each module, or None.
    order: tuple[Tensor | None, ...]
    # The product itself, where the model leaves it to `Lora.multiply`.
    product: ConstantProduct | None = None


class TokenSlots:
    """The slot of each token whose delta is a sum of matrix rows, and the positions of these rows in the stacks."""

    def __init__(self, slots: tuple[int | None, ...]) -> None:
        """`slots`: of the first tokens of a batch; None for a token without an adapter, or with a delta that is a
        product.
        """
        self.slots = slots
        tokens = [token for token, slot in enumerate(slots) if slot is not None]
        self._tokens = None if len(tokens) == len(slots) else torch.tensor(tokens)
        taken = [slot for slot in slots if slot is not None]
        self._slots = torch.tensor(taken, dtype=torch.int32)[:, None]
        self._indices: dict[tuple[int, int], tuple[Tensor, Tensor]] = {}

    def select(self, x: Tensor) -> Tensor:
        """Select the tokens that have a slot from flat tokens [T, width]."""
        return x[: len(self.slots)] if self._tokens is None else x.index_select(0, self._tokens)

    def add(self, out: Tensor, delta: Tensor) -> None:
        """Add the deltas of the selected tokens to out [T, width]."""
        if self._tokens is None:
            out[: len(self.slots)].add_(delta)
        else:
            out.index_add_(0, self._tokens, delta)

    def indices(self, height: int, size: int) -> tuple[Tensor, Tensor]:
        """Return each token's rows in a stack of `height` rows per slot, and the starts of sums over `size` rows."""
        if (height, size) not in self._indices:
            rows = (self._slots * height + torch.arange(height, dtype=torch.int32)).flatten()
            starts = torch.arange(0, len(rows), size, dtype=torch.int32)
            self._indices[height, size] = rows, starts
        return self._indices[height, size]


@dataclass(frozen=True, slots=True)
class Routes:
    """The adapter slot of each token of a flat batch."""

    # (slot, start, stop) of neighbouring tokens of one adapter whose deltas are matrix products.
    runs: tuple[tuple[int, int, int], ...]
    # The tokens whose deltas are sums of matrix rows; None: there are none.
    tokens: TokenSlots | None
    # Products with merged weights for the first sites, which replace the base's products and all deltas.
    merged: Items[Product] = ()


# One adapter's matrices by site and member of the site.
Fitted = dict[int, dict[int, Matrices]]


class Lora:
    """Adapters by name: the registry, the slots, and the deltas."""

    def __init__(
        self, sites: Items[Site], dtype: torch.dtype, merged_bytes: int = MERGED_BYTES
    ) -> None:
        """Allocate nothing before the first adapter."""
        self._sites = tuple(sites)
        self._dtype = dtype
        self._member_of = {
            module: (number, member)
            for number, site in enumerate(self._sites)
            for member, module in enumerate(site.modules)
        }
        self._registry: dict[str, Fitted] = {}
        self._stacks = [_Stack(site, dtype) for site in self._sites]
        width = self._sites[0].inputs if self._sites else 1
        # Tokens of a run from which on its deltas are matrix products.
        self._min_alone, self._min_beside = (
            math.ceil(numbers / width) for numbers in PRODUCT_MIN_NUMBERS[dtype]
        )
        # The adapter in each slot.
        self._residents: list[str | None] = []
        # The largest rank of each loaded adapter.
        self._ranks: dict[str, int] = {}
        self._users: Counter[str] = Counter()
        self._used_at: dict[str, int] = {}
        self._clock = self._moves = 0
        self._tokens = TokenSlots(())
        self._merged = Merged([site.product for site in self._sites], dtype, merged_bytes)

    def __contains__(self, adapter: str) -> bool:
        """Whether an adapter of this name is loaded."""
        return adapter in self._registry or adapter in self._residents

    def __len__(self) -> int:
        """Number of loaded adapters."""
        return len(self._registry) + sum(name is not None for name in self._residents)

    @property
    def moves(self) -> int:
        """A counter that grows whenever matrices are loaded, moved or dropped, which may free memory."""
        return self._moves

    @property
    def bytes_allocated(self) -> int:
        """The bytes of all slots, taken or not."""
        return sum(stack.bytes_allocated for stack in self._stacks)

    def load(self, adapter: str, matrices: Mapping[str, Matrices]) -> None:
        """Register an adapter by module names, replacing one of the same name. Raises `AdapterRefused`."""
        if self._users[adapter]:
            raise AdapterRefused("an adapter of this name is answering requests")
        fitted: Fitted = {}
        for module, pair in matrices.items():
            if module not in self._member_of:
                raise AdapterRefused(
                    f"the base model has no linear layer {module} that takes adapters"
                )
            number, member = self._member_of[module]
            site = self._sites[number]
            if pair.a.shape[1] != site.inputs or pair.b.shape[1] != site.outputs[member]:
                raise AdapterRefused(f"the LoRA matrices of {module} do not fit the base model")
            order = site.order[member]
            b = pair.b if order is None else pair.b[:, order]
            # Copies, since the tensors of the file keep the whole file in memory.
            fitted.setdefault(number, {})[member] = Matrices(
                a=pair.a.to(self._dtype, copy=True), b=b.to(self._dtype, copy=True).contiguous()
            )
        rank = max(pair.a.shape[0] for members in fitted.values() for pair in members.values())
        others = [known for name, known in self._ranks.items() if name != adapter]
        # All of them may run at the same time, each in a slot of the largest rank, as empty slots are, too.
        slots = max(len(self._residents), min(len(others) + 1, SPARE_SLOTS))
        if not self._has_room(slots, max([rank, *others]), fitted.keys()):
            raise AdapterRefused(
                f"the adapter is of rank {rank}, for which the free memory is not enough beside the others "
                f"({len(others)})"
            )
        # All of it fits: only now the adapter of the same name may go.
        self.unload(adapter)
        self._registry[adapter] = fitted
        self._ranks[adapter] = rank
        self._moves += 1

    def unload(self, adapter: str) -> bool:
        """Drop an adapter; False when it was not loaded. Raises `AdapterRefused` while it runs."""
        if self._users[adapter]:
            raise AdapterRefused("the adapter is answering requests")
        was_loaded = adapter in self
        self._moves += 1
        self._merged.forget(adapter)
        if adapter in self._residents:
            slot = self._residents.index(adapter)
            self._residents[slot] = None
            for stack in self._stacks:
                stack.empty(slot)
        self._registry.pop(adapter, None)
        self._used_at.pop(adapter, None)
        self._ranks.pop(adapter, None)
        del self._users[adapter]
        self._resize()
        return was_loaded

    def acquire(self, adapter: str) -> None:
        """Count one more running sequence of an adapter, and give the adapter a slot."""
        self._users[adapter] += 1
        self._clock += 1
        self._used_at[adapter] = self._clock
        if adapter in self._residents:
            return
        slot = self._free_slot(adapter)
        self._resize(self._ranks[adapter])
        sites = self._registry.pop(adapter)
        self._moves += 1
        for number, stack in enumerate(self._stacks):
            stack.fill(slot, sites.get(number, {}))
        self._residents[slot] = adapter

    def release(self, adapter: str) -> None:
        """Count one running sequence less; the adapter keeps its slot until another one needs it."""
        self._users[adapter] -= 1

    def route(
        self, decoding: Items[str | None], prefills: Items[tuple[str | None, int, int]]
    ) -> Routes:
        """Map tokens to slots: the adapter of each decoding sequence; adapter, start and stop of each prefill."""
        names = {*decoding, *(name for name, *_ in prefills)}
        only = next(iter(names)) if len(names) == 1 else None
        merged: Items[Product] = ()
        if only is None:
            self._merged.interrupt()
        else:
            own = self._residents.index(only)
            merged = self._merged.step(only, lambda site: self._stacks[site].delta(own))
            if merged and len(merged) == len(self._sites):
                return Routes((), None, merged)

        slot_of = {name: slot for slot, name in enumerate(self._residents) if name}
        spans = [*((name, at, at + 1) for at, name in enumerate(decoding)), *prefills]
        runs: list[tuple[int, int, int]] = []
        for name, start, stop in spans:
            if not name:
                continue
            slot = slot_of[name]
            # Neighbours of one slot are one run: longer products are faster.
            is_neighbour = runs and runs[-1][0] == slot and runs[-1][2] == start
            runs.append((slot, runs.pop()[1] if is_neighbour else start, stop))
        fewest = self._min_alone if len(runs) == 1 else self._min_beside
        products = tuple(run for run in runs if run[2] - run[1] >= fewest)
        slots: list[int | None] = []
        for slot, start, stop in runs:
            if (slot, start, stop) not in products:
                slots.extend([None] * (start - len(slots)) + [slot] * (stop - start))
        # The indices of the step before are kept while the same adapters decode.
        if slots and tuple(slots) != self._tokens.slots:
            self._tokens = TokenSlots(tuple(slots))
        return Routes(products, self._tokens if slots else None, merged)

    def multiply(self, site: int, x: Tensor, routes: Routes) -> Tensor:
        """Multiply x [T, inputs] at a site, with every token's own delta: [T, outputs]."""
        if site < len(routes.merged):
            return routes.merged[site](x)
        out = self._product(site)(x)
        self.add(site, x, out, routes)
        return out

    def multiply_onto(self, residual: Tensor, site: int, x: Tensor, routes: Routes) -> Tensor:
        """Multiply like `multiply` and add a residual [T, outputs], into a new tensor."""
        if site < len(routes.merged):
            return routes.merged[site].onto(residual, x)
        out = self._product(site).onto(residual, x)
        self.add(site, x, out, routes)
        return out

    def add(self, site: int, x: Tensor, out: Tensor, routes: Routes) -> None:
        """Add every token's own delta of x [T, inputs] to out [T, outputs]."""
        stack = self._stacks[site]
        if not stack.is_used:
            return
        for slot, start, stop in routes.runs:
            stack.add_products(slot, x[start:stop], out[start:stop])
        if routes.tokens is not None:
            stack.add_sums(x, out, routes.tokens)

    def _product(self, site: int) -> ConstantProduct:
        product = self._sites[site].product
        if product is None:
            raise ValueError("the model multiplies at this site itself")
        return product

    def _free_slot(self, adapter: str) -> int:
        """Find an empty slot, else add one, else empty the least recently used slot without a running sequence."""
        if None in self._residents:
            return self._residents.index(None)
        count = len(self._residents)
        idle = [slot for slot, name in enumerate(self._residents) if name and not self._users[name]]
        rank = self._largest_rank(self._ranks[adapter])
        has_room = self._has_room(2 * count, rank, self._registry[adapter].keys())
        if not idle or (count < SPARE_SLOTS and has_room):
            self._residents.extend([None] * (max(1, count) if has_room else 1))
            return count
        slot = min(idle, key=lambda slot: self._used_at[self._residents[slot] or ""])
        sites = {number: stack.read(slot) for number, stack in enumerate(self._stacks)}
        self._registry[self._residents[slot] or ""] = {
            n: pairs for n, pairs in sites.items() if pairs
        }
        self._residents[slot] = None
        for stack in self._stacks:
            stack.empty(slot)
        return slot

    def _has_room(self, slots: int, rank: int, sites: Collection[int] = ()) -> bool:
        """Whether this many slots of a rank, at the used sites and these, leave at least as much memory free as they
        take.
        """
        more = [
            stack.bytes_of(slots, rank) - stack.bytes_allocated
            for number, stack in enumerate(self._stacks)
            if stack.is_used or number in sites
        ]
        return sum(more) <= free_memory() // 2

    def _largest_rank(self, rank: int) -> int:
        """The largest rank among this one and the adapters in slots."""
        return max([rank, *(self._ranks[name] for name in self._residents if name)])

    def _resize(self, rank: int = 1) -> None:
        """Fit all stacks to the slots, and to the adapters in them and one of this rank.

        Every token's sums run over the largest rank.
        """
        rank = self._largest_rank(rank)
        for stack in self._stacks:
            stack.resize(len(self._residents), rank)


class _Stack:
    """The slots of one site.

    A token's delta is a weighted sum of rows of its slot, and so are its low-rank activations before. For one sum to
    serve all members, their outputs are cut into parts of one width. Many tokens of one slot take matrix products
    instead.
    """

    def __init__(self, site: Site, dtype: torch.dtype) -> None:
        self._site = site
        self._dtype = dtype
        self._slots = self._rank = 0
        # The rank of what was filled, by slot and member: the rest of the stack's rank is zero.
        self._ranks: dict[tuple[int, int], int] = {}
        self.is_used = False
        self._width = math.gcd(*site.outputs)
        self._member_of_part = [
            m for m, width in enumerate(site.outputs) for _ in range(width // self._width)
        ]
        # [slot, in, members * rank] and [slot, parts, rank, width]
        self._a = self._b = torch.empty(0)
        # The low-rank activation that each row of b takes; None: they are as many, in this order.
        self._expansion: Tensor | None = None

    def resize(self, slots: int, rank: int) -> None:
        """Change the number of slots and the rank, and keep the contents. An unused site takes no memory."""
        if (slots, rank) == (self._slots, self._rank):
            return
        filled = [(slot, self.read(slot)) for slot in range(self._slots)] if self.is_used else []
        self._slots, self._rank = slots, rank
        if self.is_used:
            self._allocate()
        for slot, members in filled:
            self.fill(slot, members)

    def bytes_of(self, slots: int, rank: int) -> int:
        """The memory of this many slots of a rank, in bytes."""
        site = self._site
        width = len(site.outputs) * site.inputs + sum(site.outputs)
        return slots * rank * width * self._dtype.itemsize

    @property
    def bytes_allocated(self) -> int:
        """The bytes of the present slots."""
        return self.bytes_of(self._slots, self._rank) if self.is_used else 0

    def _allocate(self) -> None:
        self.is_used = True
        site, rank, parts = self._site, self._rank, len(self._member_of_part)
        low = len(site.outputs) * rank
        self._a = torch.zeros(self._slots, site.inputs, low, dtype=self._dtype)
        self._b = torch.zeros(self._slots, parts, rank, self._width, dtype=self._dtype)
        if parts > len(site.outputs):
            self._expansion = torch.arange(low).view(-1, rank)[self._member_of_part].flatten()

    def fill(self, slot: int, members: Mapping[int, Matrices]) -> None:
        """Write one adapter's matrices to a slot; members that it does not change become zero."""
        if not self.is_used:
            if not members:
                return
            self._allocate()
        for member in range(len(self._site.outputs)):
            pair = members.get(member)
            a, b = self._views(slot, member)
            rank = 0 if pair is None else pair.a.shape[0]
            self._ranks[slot, member] = rank
            a[:, rank:].zero_()
            b[:, rank:].zero_()
            if pair is not None:
                a[:, :rank] = pair.a.t()
                b[:, :rank] = pair.b.view(rank, -1, self._width).transpose(0, 1)

    def empty(self, slot: int) -> None:
        """Forget the contents, so that a change of the stack copies nothing."""
        for member in range(len(self._site.outputs)):
            self._ranks.pop((slot, member), None)

    def read(self, slot: int) -> dict[int, Matrices]:
        """Copy the matrices of a slot, by member."""
        members: dict[int, Matrices] = {}
        for member in range(len(self._site.outputs)):
            rank = self._ranks.get((slot, member), 0)
            if rank:
                a, b = self._views(slot, member)
                whole = b[:, :rank].transpose(0, 1).clone(memory_format=torch.contiguous_format)
                low = a[:, :rank].t().clone(memory_format=torch.contiguous_format)
                members[member] = Matrices(a=low, b=whole.view(rank, -1))
        return members

    def delta(self, slot: int) -> Tensor | None:
        """Change of the weight [outputs, inputs] by one slot; None: its adapter changes nothing here."""
        members = self.read(slot)
        if not members:
            return None
        site = self._site
        return torch.cat(
            [
                members[member].b.t() @ members[member].a
                if member in members
                else torch.zeros(width, site.inputs, dtype=self._dtype)
                for member, width in enumerate(site.outputs)
            ]
        )

    def _views(self, slot: int, member: int) -> tuple[Tensor, Tensor]:
        """Views of a [in, rank] and b [parts, rank, width] of one member."""
        start, first = member * self._rank, self._member_of_part.index(member)
        stop = first + self._member_of_part.count(member)
        return self._a[slot, :, start : start + self._rank], self._b[slot, first:stop]

    def add_products(self, slot: int, x: Tensor, out: Tensor) -> None:
        """Add the delta of one slot to every token, by matrix products."""
        low = self._expanded(x @ self._a[slot]).view(len(x), -1, self._rank).transpose(0, 1)
        out.view(len(x), -1, self._width).transpose(0, 1).baddbmm_(low, self._b[slot])

    def add_sums(self, x: Tensor, out: Tensor, tokens: TokenSlots) -> None:
        """Add the delta of its slot to each token that has one, as sums of matrix rows."""
        x = tokens.select(x)
        low = weighted_sums(self._a, *tokens.indices(x.shape[1], x.shape[1]), x.reshape(-1))
        low = self._expanded(low)
        rows = len(self._member_of_part) * self._rank
        delta = weighted_sums(self._b, *tokens.indices(rows, self._rank), low.reshape(-1))
        tokens.add(out, delta.view(len(x), -1))

    def _expanded(self, low: Tensor) -> Tensor:
        """Repeat the low-rank activations [T, members * rank] for the parts of each member."""
        return low if self._expansion is None else low.index_select(1, self._expansion)
