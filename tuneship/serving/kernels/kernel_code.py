"""Writes the kernels of `integer_kernels.py` as LLVM code and compiles them for this processor.

Importing it loads LLVM, so it is imported only where weights of 4 or 8 bits are served.
"""

from collections.abc import Callable, Sequence
from typing import Any

from llvmlite import binding, ir

from tuneship.serving.kernels.layout import (
    ARGUMENTS,
    DONE,
    FUNCTION,
    GROUP,
    LANES,
    PATIENCE,
    REMAINING,
    TOKENS_AT_ONCE,
    VECTOR_BYTES,
    WAITED,
)

_INT8, _INT16, _INT32, _INT64 = (ir.IntType(bits) for bits in (8, 16, 32, 64))
_FLOAT, _POINTER = ir.FloatType(), ir.IntType(8).as_pointer()
_BYTES, _SHORTS = ir.VectorType(_INT8, VECTOR_BYTES), ir.VectorType(_INT16, 2 * LANES)
_INTS, _FLOATS = ir.VectorType(_INT32, LANES), ir.VectorType(_FLOAT, LANES)
_KERNEL = ir.FunctionType(ir.VoidType(), [_INT64.as_pointer(), _INT64])
_GROUP_FLOATS, _GROUP_INTS = ir.VectorType(_FLOAT, GROUP), ir.VectorType(_INT32, GROUP)

# Factors of the powers of a number in its exponential function, the highest power first.
EXPONENTIAL = (1.9875691e-4, 1.3981999e-3, 8.3334519e-3, 4.1665795e-2, 0.16666665, 0.5, 1.0, 1.0)


def host_has(features: Sequence[str]) -> bool:
    """Whether this processor has all of LLVM's features with these names."""
    present = binding.get_host_cpu_features()
    return all(present.get(name) for name in features)


def compiled_kernels(*, dots: bool) -> Any:
    """Compile, which takes up to half a second; returns the engine that owns the code.

    `dots`: use the instruction of `DOT_FEATURES`.
    """
    binding.initialize_native_target()
    binding.initialize_native_asmprinter()
    machine = binding.Target.from_default_triple().create_target_machine(
        cpu=binding.get_host_cpu_name(),
        features=binding.get_host_cpu_features().flatten(),
        opt=3,
    )
    engine: Any = binding.create_mcjit_compiler(binding.parse_assembly(""), machine)
    products = (_product_module(bits, dots) for bits in (4, 8))
    for module in (_round_module(), *products, _attention_module(), _sharing_module()):
        parsed = binding.parse_assembly(str(module))
        parsed.verify()
        engine.add_module(parsed)
    engine.finalize_object()
    return engine


class _Code:
    """A function under construction: it gets 64-bit arguments and the number of a piece."""

    def __init__(self, name: str, module: ir.Module | None = None) -> None:
        self.module = module or ir.Module(name)
        self.definition: Any = ir.Function(self.module, _KERNEL, name)
        self.b: Any = ir.IRBuilder(self.definition.append_basic_block())
        self.arguments, self.piece = self.definition.args

    def argument(self, place: int) -> Any:
        return self.b.load(self.b.gep(self.arguments, [_INT64(place)]))

    def pointer(self, place: int) -> Any:
        return self.b.inttoptr(self.argument(place), _POINTER)

    def function(self, name: str, result: Any, *arguments: Any) -> Callable[..., Any]:
        known: Any = self.module.globals.get(name)
        declared = known or ir.Function(self.module, ir.FunctionType(result, arguments), name)
        return lambda *values: self.b.call(declared, values)

    def at(self, pointer: Any, index: Any, size: int, offset: int = 0) -> Any:
        """The address at `index * size + offset` bytes after a pointer."""
        place = self.b.add(self.b.mul(index, _INT64(size)), _INT64(offset))
        return self.b.gep(pointer, [place])

    def load(self, pointer: Any, kind: Any) -> Any:
        return self.b.load(self.b.bitcast(pointer, kind.as_pointer()), align=1)

    def store(self, value: Any, pointer: Any) -> None:
        self.b.store(value, self.b.bitcast(pointer, value.type.as_pointer()), align=1)

    def spread(self, value: Any, kind: Any) -> Any:
        """Copy a number to all lanes of a vector."""
        nothing = ir.Constant(kind, ir.Undefined)
        lanes = ir.Constant(ir.VectorType(_INT32, kind.count), [0] * kind.count)
        return self.b.shuffle_vector(
            self.b.insert_element(nothing, value, _INT32(0)), nothing, lanes
        )

    def bfloats(self, pointer: Any) -> Any:
        shorts = self.b.zext(self.load(pointer, ir.VectorType(_INT16, LANES)), _INTS)
        return self.b.bitcast(self.b.shl(shorts, _all(_INTS, 16)), _FLOATS)


class _Loop:
    """A loop over [start, stop) in whole steps; `index` and `values` are those of the current turn, after `end` of the
    last.
    """

    def __init__(self, code: _Code, start: Any, stop: Any, step: int = 1, values: Any = ()) -> None:
        b = self._b = code.b
        before, self._head = b.block, b.append_basic_block()
        body, self._after = b.append_basic_block(), b.append_basic_block()
        b.branch(self._head)
        b.position_at_end(self._head)
        self.index, self.values = b.phi(_INT64), [b.phi(value.type) for value in values]
        for phi, value in zip([self.index, *self.values], [start, *values], strict=True):
            phi.add_incoming(value, before)
        self._next = b.add(self.index, _INT64(step))
        b.cbranch(b.icmp_signed("<=", self._next, stop), body, self._after)
        b.position_at_end(body)

    def end(self, *values: Any) -> None:
        """Close the loop's body; the values are carried into the next iteration."""
        for phi, value in zip([self.index, *self.values], [self._next, *values], strict=True):
            phi.add_incoming(value, self._b.block)
        self._b.branch(self._head)
        self._b.position_at_end(self._after)


def _all(kind: Any, value: float) -> Any:
    return ir.Constant(kind, [value] * kind.count)


def _round_module() -> ir.Module:
    """Rounds groups of float32 to 8 bits: values, scales, sums, and corrections for a weight's zero."""
    code = _Code("round")
    b = code.b
    largest = code.function("llvm.vector.reduce.fmax.v32f32", _FLOAT, _GROUP_FLOATS)
    magnitude = code.function("llvm.fabs.v32f32", _GROUP_FLOATS, _GROUP_FLOATS)
    nearest = code.function("llvm.rint.v32f32", _GROUP_FLOATS, _GROUP_FLOATS)
    total = code.function("llvm.vector.reduce.add.v32i32", _INT32, _GROUP_INTS)
    float_total = code.function("llvm.vector.reduce.fadd.v32f32", _FLOAT, _FLOAT, _GROUP_FLOATS)
    x, values, scales, sums, corrections = (code.pointer(place) for place in range(5))
    groups = _Loop(code, _INT64(0), code.argument(5))
    numbers = code.load(code.at(x, groups.index, 4 * GROUP), _GROUP_FLOATS)
    most = largest(magnitude(numbers))
    # Zero, or not a number if one of them is infinite or none: the engine looks for it in the logits.
    faults = float_total(_FLOAT(0.0), b.fmul(numbers, _all(_GROUP_FLOATS, 0.0)))
    scale = b.fadd(b.fmul(most, _FLOAT(1 / 127)), faults)
    tiny = _FLOAT(2.0**-100)
    factor = b.fdiv(_FLOAT(127.0), b.select(b.fcmp_ordered(">", most, tiny), most, tiny))
    rounded = b.fptosi(nearest(b.fmul(numbers, code.spread(factor, _GROUP_FLOATS))), _GROUP_INTS)
    sum_ = total(rounded)
    code.store(b.trunc(rounded, _BYTES), code.at(values, groups.index, GROUP))
    code.store(scale, code.at(scales, groups.index, 4))
    code.store(b.fmul(b.sitofp(sum_, _FLOAT), scale), code.at(sums, groups.index, 4))
    correction = b.mul(sum_, b.neg(b.trunc(code.argument(6), _INT32)))
    code.store(correction, code.at(corrections, groups.index, 4))
    groups.end()
    b.ret_void()
    return code.module


def _product_module(bits: int, dots: bool) -> ir.Module:
    """Multiplies all tokens with a piece of the blocks of a weight."""
    code = _Code(f"product{bits}")
    tile = _Tile(code, bits, dots)
    tokens, groups, blocks = (code.argument(place) for place in range(7, 10))
    first = code.b.mul(code.piece, code.argument(11))
    end = code.b.add(first, code.argument(11))
    end = code.b.select(code.b.icmp_signed("<", end, blocks), end, blocks)
    block = _Loop(code, first, end)
    start: Any = _INT64(0)
    for count in TOKENS_AT_ONCE[dots]:
        loop = _Loop(code, start, tokens, count)
        tile.multiply(
            block.index, groups, [code.b.add(loop.index, _INT64(n)) for n in range(count)]
        )
        loop.end()
        start = loop.index
    block.end()
    code.b.ret_void()
    return code.module


def _attention_module() -> ir.Module:
    """Attends from one token of a sequence, with the query heads of one head of keys and values: a piece."""
    code = _Code("attend")
    attention = _Attention(code)
    attention.store()
    member = _Loop(code, _INT64(0), attention.group)
    attention.attend(member.index)
    member.end()
    code.b.ret_void()
    return code.module


class _Attention:
    """One token and one head of keys and values in the layout of `SlotCache`."""

    def __init__(self, code: _Code) -> None:
        self._code, b = code, code.b
        self._b, self._dim = b, code.argument(10)
        self._qkv, keys, values, slots, positions, rotation, out, scores = map(
            code.pointer, range(8)
        )
        self._out = out
        self.group, kv_heads, self._length, room = (code.argument(n) for n in (8, 9, 11, 12))
        token, self._own = b.udiv(code.piece, kv_heads), b.urem(code.piece, kv_heads)
        self._position, slot = (
            code.load(code.at(part, token, 8), _INT64) for part in (positions, slots)
        )
        heads = b.mul(self.group, kv_heads)
        self._row = b.mul(token, b.add(heads, b.mul(kv_heads, _INT64(2))))
        self._out_row = b.mul(token, heads)
        key = b.add(b.add(self._row, heads), self._own)
        self._key = self._head(self._qkv, key)
        self._value = self._head(self._qkv, b.add(key, kv_heads))
        place = b.mul(b.add(b.mul(slot, kv_heads), self._own), self._length)
        self._keys, self._values = self._head(keys, place), self._head(values, place)
        self._angles = self._head(rotation, token)
        self._scores = b.gep(scores, [b.mul(b.mul(code.piece, room), _INT64(4))])
        self._fma = code.function("llvm.fma.v32f32", _GROUP_FLOATS, *[_GROUP_FLOATS] * 3)

    def store(self) -> None:
        """Rotate the key, and store it and the value."""
        code, b = self._code, self._b
        self._rotate(self._key, _FLOAT(1.0))
        part = _Loop(code, _INT64(0), self._dim)
        at = b.add(b.mul(part.index, self._length), self._position)
        code.store(code.load(code.at(self._key, part.index, 4), _FLOAT), code.at(self._keys, at, 4))
        part.end()
        part = _Loop(code, _INT64(0), self._dim, GROUP)
        numbers = code.load(code.at(self._value, part.index, 4), _GROUP_FLOATS)
        at = b.add(b.mul(self._position, self._dim), part.index)
        code.store(numbers, code.at(self._values, at, 4))
        part.end()

    def attend(self, member: Any) -> None:
        """Rotate a query head, and add up the values by the softmax of the scores."""
        code, b = self._code, self._b
        stop = b.add(self._position, _INT64(1))
        whole = b.and_(b.add(self._position, _INT64(GROUP)), _INT64(-GROUP))
        number = b.add(b.mul(self._own, self.group), member)
        query = self._head(self._qkv, b.add(self._row, number))
        self._rotate(query, b.bitcast(b.trunc(code.argument(13), _INT32), _FLOAT))
        share = self._weigh(query, stop, whole)
        out = self._head(self._out, b.add(self._out_row, number))
        part = _Loop(code, _INT64(0), self._dim, GROUP)
        known = _Loop(code, _INT64(0), stop, 1, [_all(_GROUP_FLOATS, 0.0)])
        weight = code.load(code.at(self._scores, known.index, 4), _FLOAT)
        at = b.add(b.mul(known.index, self._dim), part.index)
        numbers = code.load(code.at(self._values, at, 4), _GROUP_FLOATS)
        known.end(self._fma(code.spread(weight, _GROUP_FLOATS), numbers, known.values[0]))
        total = b.fmul(known.values[0], code.spread(share, _GROUP_FLOATS))
        code.store(total, code.at(out, part.index, 4))
        part.end()

    def _weigh(self, query: Any, stop: Any, whole: Any) -> Any:
        """Store the exponentials of the scores; returns one over their sum."""
        code, b = self._code, self._b
        highest = code.function("llvm.vector.reduce.fmax.v32f32", _FLOAT, _GROUP_FLOATS)
        total = code.function("llvm.vector.reduce.fadd.v32f32", _FLOAT, _FLOAT, _GROUP_FLOATS)
        nothing = _all(_GROUP_FLOATS, float("-inf"))
        most = _Loop(code, _INT64(0), whole, GROUP, [nothing])
        part = _Loop(code, _INT64(0), self._dim, 1, [_all(_GROUP_FLOATS, 0.0)])
        x = code.spread(code.load(code.at(query, part.index, 4), _FLOAT), _GROUP_FLOATS)
        at = b.add(b.mul(part.index, self._length), most.index)
        part.end(self._fma(x, code.load(code.at(self._keys, at, 4), _GROUP_FLOATS), part.values[0]))
        # Lanes behind the token hold what was there before.
        lanes = ir.Constant(ir.VectorType(_INT64, GROUP), list(range(GROUP)))
        here = b.add(code.spread(most.index, lanes.type), lanes)
        is_known = b.icmp_signed("<", here, code.spread(stop, lanes.type))
        score = b.select(is_known, part.values[0], nothing)
        code.store(score, code.at(self._scores, most.index, 4))
        (before,) = most.values
        most.end(b.select(b.fcmp_ordered(">", score, before), score, before))
        top = code.spread(highest(most.values[0]), _GROUP_FLOATS)
        mass = _Loop(code, _INT64(0), whole, GROUP, [_all(_GROUP_FLOATS, 0.0)])
        at = code.at(self._scores, mass.index, 4)
        weight = _exponential(code, b.fsub(code.load(at, _GROUP_FLOATS), top))
        code.store(weight, at)
        mass.end(b.fadd(mass.values[0], weight))
        return b.fdiv(_FLOAT(1.0), total(_FLOAT(0.0), mass.values[0]))

    def _rotate(self, head: Any, factor: Any) -> None:
        code, b = self._code, self._b
        signs = ir.Constant(_GROUP_FLOATS, [-1.0, 1.0] * (GROUP // 2))
        part = _Loop(code, _INT64(0), self._dim, GROUP)
        at = code.at(head, part.index, 4)
        x = code.load(at, _GROUP_FLOATS)
        turn = code.load(code.at(self._angles, part.index, 4), _GROUP_FLOATS)
        sines = b.fmul(_lanes(b, turn, lambda lane: lane | 1), signs)
        turned = b.fmul(_lanes(b, x, lambda lane: lane ^ 1), sines)
        turned = self._fma(x, _lanes(b, turn, lambda lane: lane & ~1), turned)
        code.store(b.fmul(turned, code.spread(factor, _GROUP_FLOATS)), at)
        part.end()

    def _head(self, pointer: Any, number: Any) -> Any:
        """The address `number` heads after a pointer."""
        return self._b.gep(pointer, [self._b.mul(number, self._b.mul(self._dim, _INT64(4)))])


def _lanes(b: Any, vector: Any, source: Callable[[int], int]) -> Any:
    """The lanes of a vector in another order."""
    order = ir.Constant(ir.VectorType(_INT32, GROUP), [source(lane) for lane in range(GROUP)])
    return b.shuffle_vector(vector, vector, order)


def _exponential(code: _Code, x: Any) -> Any:
    """The exponential function of numbers up to 0 by the polynomial of Cephes, exact to the last bit or two."""
    b = code.b
    fma = code.function("llvm.fma.v32f32", _GROUP_FLOATS, *[_GROUP_FLOATS] * 3)
    nearest = code.function("llvm.rint.v32f32", _GROUP_FLOATS, _GROUP_FLOATS)
    power = nearest(b.fmul(x, _all(_GROUP_FLOATS, 1.44269504)))
    rest = fma(power, _all(_GROUP_FLOATS, -0.693359375), x)
    rest = fma(power, _all(_GROUP_FLOATS, 2.12194440e-4), rest)
    sum_ = _all(_GROUP_FLOATS, EXPONENTIAL[0])
    for factor in EXPONENTIAL[1:]:
        sum_ = fma(sum_, rest, _all(_GROUP_FLOATS, factor))
    bits = b.shl(b.add(b.fptosi(power, _GROUP_INTS), _all(_GROUP_INTS, 127)), _all(_GROUP_INTS, 23))
    found = b.fmul(sum_, b.bitcast(bits, _GROUP_FLOATS))
    is_tiny = b.fcmp_ordered("<", x, _all(_GROUP_FLOATS, -87.0))
    return b.select(is_tiny, _all(_GROUP_FLOATS, 0.0), found)


def _sharing_module() -> ir.Module:
    """Shares the pieces of a job among threads: `work` takes pieces, `run` starts a job, `help` waits for jobs.

    Pieces are taken by counting down, so that a thread that comes too late finds a number below zero; whatever it finds
    above was stored after everything else of that job. Threads that wait leave their core to others.
    """
    work = _Code("work")
    module, b = work.module, work.b
    taking, working, end = (b.append_basic_block() for _ in range(3))
    b.branch(taking)
    b.position_at_end(taking)
    before = b.atomic_rmw("sub", work.arguments, _INT64(1), "acq_rel")
    piece = b.sub(before, _INT64(1))
    b.cbranch(b.icmp_signed("<", piece, _INT64(0)), end, working)
    b.position_at_end(working)
    function = b.inttoptr(work.argument(FUNCTION), _KERNEL.as_pointer())
    b.call(function, [b.gep(work.arguments, [_INT64(ARGUMENTS)]), piece])
    b.atomic_rmw("add", b.gep(work.arguments, [_INT64(DONE)]), _INT64(1), "acq_rel")
    b.branch(taking)
    b.position_at_end(end)
    b.ret_void()

    run = _Code("run", module)
    done = run.b.gep(run.arguments, [_INT64(DONE)])
    run.b.store(_INT64(0), done)
    run.b.store_atomic(run.piece, run.arguments, "release", 8)
    run.b.call(work.definition, [run.arguments, _INT64(0)])
    cycles = run.function("llvm.readcyclecounter", _INT64)
    begun = cycles()
    waiting = _Waiting(run, done, _INT64(1 << 40))
    run.b.cbranch(run.b.icmp_signed("==", waiting.found, run.piece), waiting.end, waiting.again)
    run.b.position_at_end(waiting.end)
    waited = run.b.gep(run.arguments, [_INT64(WAITED)])
    run.b.store(run.b.sub(cycles(), begun), waited)
    run.b.ret_void()

    help_ = _Code("help", module)
    waiting = _Waiting(help_, help_.b.gep(help_.arguments, [_INT64(REMAINING)]), _INT64(PATIENCE))
    helping = help_.b.append_basic_block()
    has_work = help_.b.icmp_signed(">", waiting.found, _INT64(0))
    help_.b.cbranch(has_work, helping, waiting.again)
    help_.b.position_at_end(helping)
    help_.b.call(work.definition, [help_.arguments, _INT64(0)])
    waiting.restart()
    help_.b.position_at_end(waiting.end)
    help_.b.ret_void()
    return module


class _Waiting:
    """A loop that loads a number, looks at it and rests, at most `patience` times; the caller says where it goes on."""

    def __init__(self, code: _Code, watched: Any, patience: Any) -> None:
        b = self._b = code.b
        before, self._head = b.block, b.append_basic_block()
        self.again, self._yielding, self.end = (b.append_basic_block() for _ in range(3))
        rest = code.function("llvm.x86.sse2.pause", ir.VoidType())
        leave_core = code.function("sched_yield", _INT32)
        b.branch(self._head)
        b.position_at_end(self.again)
        rest()
        turn = b.block
        b.position_at_end(self._head)
        self._turns = b.phi(_INT64)
        self._turns.add_incoming(_INT64(0), before)
        self.found = b.load_atomic(watched, "acquire", 8)
        b.position_at_end(turn)
        turns = b.add(self._turns, _INT64(1))
        self._turns.add_incoming(turns, self._yielding)
        is_over = b.icmp_signed(">=", turns, patience)
        more = b.append_basic_block()
        b.cbranch(is_over, self.end, more)
        b.position_at_end(more)
        is_long = b.icmp_signed("==", b.and_(turns, _INT64(127)), _INT64(0))
        self._turns.add_incoming(turns, more)
        b.cbranch(is_long, self._yielding, self._head)
        b.position_at_end(self._yielding)
        leave_core()
        b.branch(self._head)
        b.position_at_end(self._head)

    def restart(self) -> None:
        """Go on with the whole patience."""
        self._turns.add_incoming(_INT64(0), self._b.block)
        self._b.branch(self._head)


class _Tile:
    """The product of one block of a weight with a few tokens."""

    def __init__(self, code: _Code, bits: int, dots: bool) -> None:
        self._code, self._bits = code, bits
        self._group_bytes = LANES * GROUP * bits // 8
        self._products = self._dot_products if dots else self._pair_products
        if dots:
            name = "llvm.x86.avx512.vpdpbusd.256"
            self._dot = code.function(name, _INTS, _INTS, _BYTES, _BYTES)
        self._pairs = code.function("llvm.x86.avx2.pmadd.ub.sw", _SHORTS, _BYTES, _BYTES)
        self._fours = code.function("llvm.x86.avx2.pmadd.wd", _INTS, _SHORTS, _SHORTS)
        self._fma = code.function("llvm.fma.v8f32", _FLOATS, *[_FLOATS] * 3)
        self._weight, self._scales, self._x, *self._sums, self._out = map(code.pointer, range(7))
        self._rows = code.argument(10)

    def multiply(self, block: Any, groups: Any, tokens: list[Any]) -> None:
        """Add up the groups and store the sums of each token."""
        code, b = self._code, self._code.b
        group = _Loop(code, _INT64(0), groups, 1, [_all(_FLOATS, 0.0) for _ in tokens])
        place = b.add(b.mul(block, groups), group.index)
        places = [b.add(b.mul(token, groups), group.index) for token in tokens]
        weight = code.at(self._weight, place, self._group_bytes)
        products = self._products(weight, [code.at(self._x, at, GROUP) for at in places])
        sums: list[Any] = []
        for at, product, before in zip(places, products, group.values, strict=True):
            scale, sum_ = (
                code.spread(code.load(code.at(numbers, at, 4), _FLOAT), _FLOATS)
                for numbers in self._sums[:2]
            )
            correction = code.load(code.at(self._sums[2], at, 4), _INT32)
            exact = b.sitofp(b.add(product, code.spread(correction, _INTS)), _FLOATS)
            if self._bits == 8:
                sums.append(self._fma(exact, scale, before))
                continue
            steps, offsets = (
                code.bfloats(code.at(self._scales, place, 4 * LANES, shift))
                for shift in (0, 2 * LANES)
            )
            so_far = self._fma(b.fmul(exact, scale), steps, before)
            sums.append(self._fma(offsets, sum_, so_far))
        group.end(*sums)
        for token, total in zip(tokens, group.values, strict=True):
            row = code.at(self._out, b.mul(token, self._rows), 4)
            if self._bits == 8:
                steps = code.bfloats(code.at(self._scales, block, 2 * LANES))
                code.store(b.fmul(total, steps), code.at(row, block, 4 * LANES))
            else:
                code.store(total, code.at(row, block, 4 * LANES))

    def _dot_products(self, weight: Any, tokens: list[Any]) -> list[Any]:
        """The integer products of one group with each token: int32 [LANES]."""
        code = self._code
        products = [_all(_INTS, 0) for _ in tokens]
        for number in range(self._group_bytes // VECTOR_BYTES):
            packed = code.load(code.at(weight, _INT64(number), VECTOR_BYTES), _BYTES)
            # Four neighbouring inputs of each row, of 8 bits without a sign.
            fours = self._nibbles(packed) if self._bits == 4 else (packed,)
            for part, values in enumerate(fours):
                first = 4 * (number * len(fours) + part)
                for place, token in enumerate(tokens):
                    x = self._four(token, first)
                    products[place] = self._dot(products[place], values, x)
        return products

    def _pair_products(self, weight: Any, tokens: list[Any]) -> list[Any]:
        """The same, where sums of products must fit 16 bits."""
        code, b = self._code, self._code.b
        low, high = ([_all(_SHORTS, 0) for _ in tokens] for _ in range(2))
        for number in range(self._group_bytes // VECTOR_BYTES):
            packed = code.load(code.at(weight, _INT64(number), VECTOR_BYTES), _BYTES)
            lows, highs = self._nibbles(packed)
            for place, token in enumerate(tokens):
                first = number * (8 if self._bits == 4 else 4)
                x = self._four(token, first)
                low[place] = b.add(low[place], self._pairs(lows, x))
                if self._bits == 4:
                    x = self._four(token, first + 4)
                    low[place] = b.add(low[place], self._pairs(highs, x))
                else:
                    high[place] = b.add(high[place], self._pairs(highs, x))
        products = [self._fours(sums, _all(_SHORTS, 1)) for sums in low]
        if self._bits == 4:
            return products
        parts = [self._fours(sums, _all(_SHORTS, 16)) for sums in high]
        return [b.add(*pair) for pair in zip(products, parts, strict=True)]

    def _nibbles(self, packed: Any) -> tuple[Any, Any]:
        """The low and the high four bits of each byte."""
        b, nibble = self._code.b, _all(_BYTES, 15)
        shifted = b.lshr(b.bitcast(packed, _SHORTS), _all(_SHORTS, 4))
        return b.and_(packed, nibble), b.and_(b.bitcast(shifted, _BYTES), nibble)

    def _four(self, token: Any, first: int) -> Any:
        """Four neighbouring numbers of a token, for each of the rows."""
        numbers = self._code.load(self._code.at(token, _INT64(0), 1, first), _INT32)
        return self._code.b.bitcast(self._code.spread(numbers, _INTS), _BYTES)
