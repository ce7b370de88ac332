"""Raw CUDA kernels: which tiles a problem gets, and its launches."""

from __future__ import annotations

import array
import ctypes
import dataclasses
import functools
import math
import operator
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from . import _compile
from .cuda_tiles import (
    BACKWARD_HOPPER,
    BACKWARD_HOPPER_32,
    BACKWARD_HOPPER_64,
    BACKWARD_HOPPER_LONG,
    FORWARD_HOPPER,
    FORWARD_HOPPER_32,
    FORWARD_HOPPER_64,
    FORWARD_HOPPER_SHORT,
    FORWARD_HOPPER_TF32,
    WIDE_HOPPER,
    ForwardOnHopper,
    HopperBackward,
    HopperDouble,
    HopperDoubleBackward,
    HopperTiles,
    HopperTwoPass,
    OnHopper,
    Portable,
    SplitTiles,
    WideHopper,
    WideTiles,
    tables,
)
from .cuda_variants import (
    ELEMENTS,
    KIB,
    PARAMS,
    Variant,
    backward_steps,
    forward_steps,
    rounded_up,
    split_bytes,
    split_pointers,
    split_widths,
    stats_rows,
    transform,
    workspace,
)
from .problem import Problem

WIDEST = 1024


@dataclass(frozen=True)
class Config:
    """Tiles of the forward and of the backward kernel."""

    forward: Portable | ForwardOnHopper
    backward: Portable | OnHopper


def config_for(problem: Problem, capability: int, shared_limit: int) -> Config:
    """The first row of each table that fits in `shared_limit` bytes of shared memory a block."""
    width = max(problem.d, problem.dv)
    # Larger forward tiles spill on Turing, where half the products need two steps.
    forward_limit = min(shared_limit, 48 * KIB) if capability < 80 else shared_limit

    def first(table, steps, limit):
        def shared_bytes(tiles):
            return max(v.shared_bytes for v, _ in steps(problem, tiles, True))

        rows = next(rows for w, rows in table.items() if w >= width)
        return next(tiles for tiles in rows if shared_bytes(tiles) <= limit)

    split = problem.dtype == "float32" and problem.precision != "ieee" and not problem.softcap
    wide = width > max(FORWARD_HOPPER)
    if capability == 90 and wide and (problem.dtype in ELEMENTS or split):
        parts = {"float32": 2, "tf32": 1}[problem.precision] if split else 0
        tiles = WIDE_HOPPER._replace(parts=parts)
        return Config(tiles, tiles._replace(parts=2 if split else 0))
    on_hopper = capability == 90 and not wide
    if on_hopper and problem.dtype in ELEMENTS:
        row = next(w for w in FORWARD_HOPPER if w >= width)
        masked = not _uniform(problem)
        forward, backward = FORWARD_HOPPER, BACKWARD_HOPPER
        if problem.sk <= 1024 and masked:
            forward = forward | FORWARD_HOPPER_SHORT
        if problem.sk >= (8192 if masked else 4096) and not transform(problem):
            backward = backward | BACKWARD_HOPPER_LONG
        chosen = backward[row]
        if isinstance(chosen, HopperBackward):
            # Few blocks of a head come to dQ at the same time, and very many wait for the slowest.
            turns = problem.sk <= 512 and not masked
            zeros = problem.sk >= 16384 and chosen.streamed == 80
            chosen = chosen._replace(turns=turns, zeros=zeros)
        return Config(forward[row], chosen)
    if on_hopper and split:
        of_parts = FORWARD_HOPPER_TF32 if problem.precision == "tf32" else FORWARD_HOPPER_32
        row = next(w for w in of_parts if w >= width)
        return Config(of_parts[row], BACKWARD_HOPPER_32[row])
    if capability == 90 and problem.dtype == "float64":
        row = next(w for w in FORWARD_HOPPER_64 if w >= width)
        return Config(FORWARD_HOPPER_64[row], BACKWARD_HOPPER_64[row])
    forward_table, backward_table = tables(problem.dtype, capability)
    return Config(
        first(forward_table, forward_steps, forward_limit),
        first(backward_table, backward_steps, shared_limit),
    )


def default_config(problem: Problem) -> Config:
    import cupy

    return config_for(problem, *_limits(cupy.cuda.runtime.getDevice())[:2])


def resources(problem: Problem) -> list[tuple[str, int, int, int, int]]:
    """What forward and backward launch on this device, compiled where they were not.

    Entry point, threads, registers a thread, bytes of local memory a thread and of shared memory a
    block.
    """
    import cupy

    device, config = cupy.cuda.runtime.getDevice(), default_config(problem)
    steps = [
        *forward_steps(problem, config.forward, True),
        *backward_steps(problem, config.backward, True),
    ]
    kernels = [(v, _kernel(device, v)) for v, _ in steps]
    return [
        (v.entry, v.threads, kernel.num_regs, kernel.local_size_bytes, v.shared_bytes)
        for v, kernel in kernels
    ]


@functools.cache
def _limits(device: int) -> tuple[int, int, int]:
    """Compute capability (major * 10 + minor), shared memory that a block may opt in to, and
    multiprocessors."""
    import cupy

    properties = cupy.cuda.runtime.getDeviceProperties(device)
    capability = properties["major"] * 10 + properties["minor"]
    return capability, properties["sharedMemPerBlockOptin"], properties["multiProcessorCount"]


def unsupported(problem: Problem) -> str | None:
    if problem.device == "cpu":
        return "it takes arrays on a GPU, and these are NumPy arrays; cupy.asarray copies them"
    if max(problem.d, problem.dv) > WIDEST:
        return f"its widths end at {WIDEST}, and these are {problem.d} and {problem.dv}"
    import cupy

    capability, *_ = _limits(cupy.cuda.runtime.getDevice())
    needed = 80 if problem.dtype == "bfloat16" else 75
    if capability < needed:
        return f"{problem.dtype} needs compute capability {needed / 10}, and not {capability / 10}"
    return None


def forward(problem: Problem, config: Config, q, k, v, out, lse) -> None:
    """Write `out` and `lse`; all arrays on (batch, heads, length[, width]) axes."""
    tiles = config.forward
    if isinstance(tiles, HopperTiles | WideHopper) and tiles.parts:
        _forward_split(problem, tiles, q, k, v, out, lse)
        return
    if isinstance(tiles, ForwardOnHopper):
        _forward_hopper(problem, tiles, q, k, v, out, lse)
        return
    pointers, layout = _described([q, k, v, out])
    plan = _forward_plan(q.data.device_id, problem, tiles, *layout)
    _launch(plan, pointers, [lse.data.ptr])


def _forward_hopper(problem: Problem, tiles: ForwardOnHopper, q, k, v, out, lse) -> None:
    if _nothing_seen(problem, out, lse):
        return
    pointers, layout = _described([q, k, v, out])
    if not _fit_for_tensor_maps(problem.itemsize, layout[0][:3], layout[1]):
        q, k, v = _aligned_copy(q), _aligned_copy(k), _aligned_copy(v)
        pointers, layout = _described([q, k, v, out])
    plan = _forward_plan(q.data.device_id, problem, tiles, *layout)
    counter = _counter(plan)
    _launch(plan, pointers, [lse.data.ptr, *[0] * 5, counter and counter.ptr], pointers)


def _nothing_seen(problem: Problem, out, lse) -> bool:
    """Whether there is nothing to launch: there is no tensor map of an empty array."""
    if out.size and problem.sk:
        return False
    out.fill(0)
    lse.fill(-float("inf"))
    return True


def _counter(plan: Plan) -> Any:
    """Memory holding 0, where tiles are given out by a counter; else 0."""
    if not plan.counts:
        return 0
    import cupy

    counter = cupy.ndarray(1, cupy.int32).data
    counter.memset_async(0, 4)
    return counter


def _forward_split(problem: Problem, tiles: HopperTiles | WideHopper, q, k, v, out, lse) -> None:
    """float32: split.cu writes its parts as float16 arrays, which fwd_sm90 takes."""
    import cupy

    if _nothing_seen(problem, out, lse):
        return
    memory = cupy.ndarray(split_bytes(problem, tiles, True), cupy.uint8).data
    split = split_pointers(problem, tiles, True, memory.ptr)
    pointers, layout = _described([q, k, v, out])
    plan = _forward_plan(q.data.device_id, problem, tiles, *layout)
    counter = _counter(plan)
    rows = [lse.data.ptr, *[0] * 5, counter and counter.ptr, *split]
    _launch(plan, pointers, rows, split[4:7])


def _parts_encoder(p: Problem, tiles: SplitTiles, rows: tuple[int, ...]) -> Callable:
    """As `_encoder`, for the parts, which are contiguous."""
    widths = split_widths(p, tiles)
    of_q, of_kv = (p.heads, p.sq), (p.heads_kv, p.sk)
    shapes = zip((of_q, of_kv, of_kv, of_q), widths, strict=True)
    strides = tuple([(2 * h * s * w, 2 * s * w, 2 * w, 2) for (h, s), w in shapes])
    d, _, dv, _ = widths
    return _encoder(dataclasses.replace(p, dtype="float16", d=d, dv=dv), rows, strides)


def _uniform(problem: Problem) -> bool:
    """Whether all queries see all keys, so that all tiles take the same time."""
    return problem.left is None and problem.right is None


@functools.lru_cache(4096)
def _fit_for_tensor_maps(itemsize: int, strides: tuple, aligned: bool) -> bool:
    """Whether tensor maps of arrays with these strides are possible."""
    return (
        aligned and _rows_of_groups(itemsize, strides) and all(min(array) >= 0 for array in strides)
    )


def _aligned_copy(x: Any) -> Any:
    """For a tensor map. From some 500 keys on a copy costs less than the portable kernel would."""
    import cupy

    *lengths, width = x.shape
    copy = cupy.ndarray((*lengths, rounded_up(width, 8)), x.dtype)[..., :width]
    copy[...] = x
    return copy


def _encoder(p: Problem, rows: tuple[int, ...], strides: tuple) -> Callable[..., tuple[Any, int]]:
    """From the arrays' pointers to their tensor maps; pointers come again and again."""
    return functools.lru_cache(1024)(functools.partial(_tensor_maps, p, rows, strides))


def _tensor_maps(
    p: Problem, rows: tuple[int, ...], strides: tuple, *pointers: int
) -> tuple[Any, int]:
    """The CUtensorMap of q, k, v, of out or dout, dk and dv, in a row, as kernels take them.

    Memory, and where in it they begin. Boxes are 128 bytes wide, swizzled, and of so
    many rows; what lies outside of an array is 0. Source: CUDA driver API, cuTensorMapEncodeTiled.
    """
    encode = _driver().cuTensorMapEncodeTiled
    memory = ctypes.create_string_buffer(64 + 6 * 128)
    start = rounded_up(ctypes.addressof(memory), 64)  # as the driver wants it
    of_q, of_k, of_v = (p.d, p.sq, p.heads), (p.d, p.sk, p.heads_kv), (p.dv, p.sk, p.heads_kv)
    sizes = of_q, of_k, of_v, (p.dv, p.sq, p.heads), of_k, of_v
    element = {"float16": 6, "float64": 8, "bfloat16": 9}[p.dtype]
    interleave_none, swizzle_128, promote_l2_128, fill_zeros = 0, 3, 2, 0
    for i, box in enumerate(rows):
        batch_stride, head_stride, row_stride, _ = strides[i]
        error = encode(
            ctypes.c_void_p(start + 128 * i),
            element,
            4,
            ctypes.c_void_p(pointers[i]),
            (ctypes.c_uint64 * 4)(*sizes[i], p.batch),
            (ctypes.c_uint64 * 3)(row_stride, head_stride, batch_stride),
            (ctypes.c_uint32 * 4)(128 // p.itemsize, box, 1, 1),
            (ctypes.c_uint32 * 4)(1, 1, 1, 1),
            interleave_none,
            swizzle_128,
            promote_l2_128,
            fill_zeros,
        )
        if error:
            raise RuntimeError(f"cuTensorMapEncodeTiled failed: CUDA error {error}")
    return memory, start


@functools.cache
def _driver() -> Any:
    return ctypes.CDLL("nvcuda.dll" if sys.platform == "win32" else "libcuda.so.1")


def backward(
    problem: Problem, config: Config, deterministic: bool, dout, q, k, v, out, lse, dlse, dq, dk, dv
) -> None:
    """Write `dq`, `dk` and `dv`."""
    import cupy

    tiles = config.backward
    if isinstance(tiles, OnHopper) and not q.size * k.size:
        for grad in (dq, dk, dv):  # there is no tensor map of an empty array
            grad.fill(0)
        return
    lse = cupy.ascontiguousarray(lse)
    dlse = None if dlse is None else cupy.ascontiguousarray(dlse)
    pointers, layout = _described([q, k, v, out, dout, dq, dk, dv])
    inputs = [q, k, v, dout]
    mapped_as_they_are = isinstance(tiles, OnHopper) and problem.dtype != "float32"
    if mapped_as_they_are and not _fit_for_tensor_maps(problem.itemsize, *_described(inputs)[1]):
        q, k, v, dout = [_aligned_copy(x) for x in inputs]
        pointers, layout = _described([q, k, v, out, dout, dq, dk, dv])
    if deterministic and isinstance(tiles, HopperBackward | HopperDoubleBackward):
        tiles = tiles._replace(turns=True)
    stats = cupy.ndarray((2, stats_rows(problem, tiles)), problem.compute)
    plan = _backward_plan(q.data.device_id, problem, tiles, *layout)
    rows = [lse.data.ptr, 0 if dlse is None else dlse.data.ptr]
    rows += [stats.data.ptr, stats.data.ptr + stats.nbytes // 2]  # lse in base 2, and delta
    sums, turns, tickets = workspace(problem, tiles)
    if sums + turns:
        numbers = cupy.ndarray(sums + turns + tickets, cupy.float32).data
        start = 4 * sums if turns and tickets else 0  # see bwd_sm90.cu
        (numbers + start).memset_async(0, 4 * (sums + turns + tickets) - start)
        counters = numbers.ptr + 4 * sums
        rows += [numbers.ptr, counters if turns else 0, counters + 4 * turns]
    mapped: Sequence[int] = backward_mapped(pointers)
    if isinstance(tiles, SplitTiles) and tiles.parts:
        memory = cupy.ndarray(split_bytes(problem, tiles, False), cupy.uint8).data
        split = split_pointers(problem, tiles, False, memory.ptr)
        rows += [0, 0, 0, *split]
        mapped = split[4:8]
    _launch(plan, pointers, rows, mapped)


def backward_mapped(all_arrays: Sequence) -> tuple:
    """Of q, k, v, out, dout, dq, dk and dv, those that may have tensor maps."""
    q, k, v, _, dout, _, dk, dv = all_arrays
    return q, k, v, dout, dk, dv


def backward_boxes(tiles: OnHopper, vector: bool) -> list[tuple[int, ...]]:
    """For each kernel that copies by tensor maps: rows of a copy of q, k, v, dout, dk and dv."""
    if isinstance(tiles, HopperBackward):
        return [(tiles.streamed, 128, 128, tiles.streamed, *([64, 64] if vector else []))]
    if isinstance(tiles, WideHopper):
        return [(64, 64, 64, 64)] * 3
    if isinstance(tiles, HopperDoubleBackward):
        return [(tiles.part, tiles.resident, tiles.resident, tiles.part)]
    of_q = tiles.queries, tiles.keys, tiles.keys, tiles.queries
    return [of_q, (tiles.streamed, 64, 64, tiles.streamed)]


def _described(operands: list) -> tuple[list[int], tuple[tuple, bool]]:
    """Pointers; strides, and whether all pointers are aligned to 16 bytes."""
    pointers = [x.data.ptr for x in operands]
    strides = tuple([x.strides for x in operands])
    return pointers, (strides, functools.reduce(operator.or_, pointers) % 16 == 0)


class Plan(NamedTuple):
    """What launches need: Params but for the pointers, as 8-byte words; and the launches."""

    template: array.array
    # Kernel, grid, block, shared memory, and the encoder of the tensor maps that it takes.
    launches: list[tuple[Any, tuple, tuple, int, Callable[..., tuple[Any, int]] | None]]
    counts: bool = False  # forward: more tiles than blocks, of unlike work


@functools.lru_cache(4096)
def _forward_plan(
    device, problem: Problem, tiles: Portable | ForwardOnHopper, strides, aligned: bool
) -> Plan:
    vector = aligned and _whole_groups(problem, strides)
    encoders = []
    if isinstance(tiles, HopperDouble):
        encoders = [_encoder(problem, (tiles.resident, tiles.streamed, tiles.part), strides)]
    elif isinstance(tiles, ForwardOnHopper):
        of_kv = 64 if isinstance(tiles, WideHopper) else tiles.streamed
        boxes = tiles.resident, of_kv, of_kv, 64
        if tiles.parts:
            encoders = [_parts_encoder(problem, tiles, boxes[:3])]
        else:
            vector = vector and min(strides[3]) >= 0  # then `out` has a tensor map too
            encoders = [_encoder(problem, boxes if vector else boxes[:3], strides)]
    multiprocessors = _limits(device)[2]
    tiles_of_q = -(-problem.sq // tiles.resident)
    section = _section(problem, 2 * multiprocessors / max(1, tiles_of_q))
    template = _template(problem, strides, section)
    steps = forward_steps(problem, tiles, vector)
    more = isinstance(tiles, HopperTiles) and steps[-1][1] > multiprocessors
    return Plan(template, _loaded(device, steps, encoders), more and not _uniform(problem))


@functools.lru_cache(4096)
def _backward_plan(
    device, problem: Problem, tiles: Portable | OnHopper, strides, aligned: bool
) -> Plan:
    vector = aligned and _whole_groups(problem, strides)
    steps = backward_steps(problem, tiles, vector)
    encoders = []
    if isinstance(tiles, HopperDoubleBackward) and tiles.turns:
        section = problem.batch * problem.heads  # blocks of a head wait for each other
    elif isinstance(tiles, WideTiles | WideHopper | HopperDoubleBackward):
        tiles_of_head = max(1, -(-problem.sq // tiles.resident))
        section = _section(problem, 2 * _limits(device)[2] / tiles_of_head)
    elif isinstance(tiles, HopperBackward):
        section = _together(problem, tiles, _limits(device)[2])
    elif isinstance(tiles, HopperTwoPass):
        section = tiles.together
    else:
        section = 0  # these order blocks by themselves
    if isinstance(tiles, OnHopper):
        all_boxes = backward_boxes(tiles, vector)
        if isinstance(tiles, SplitTiles) and tiles.parts:
            encoders = [_parts_encoder(problem, tiles, boxes) for boxes in all_boxes]
        else:
            mapped = backward_mapped(strides)
            encoders = [_encoder(problem, boxes, mapped) for boxes in all_boxes]
    in_turns = isinstance(tiles, HopperBackward) and tiles.turns
    template = _template(problem, strides, section, in_turns)
    return Plan(template, _loaded(device, steps, encoders))


def _whole_groups(problem: Problem, strides: tuple) -> bool:
    """Whether rows are whole 16-byte groups, so that copies of 16 bytes are possible."""
    group = 16 // problem.itemsize
    whole = problem.d % group == problem.dv % group == 0
    return whole and _rows_of_groups(problem.itemsize, strides)


def _rows_of_groups(itemsize: int, strides: tuple) -> bool:
    """Whether elements of a row are neighbours, and rows begin a multiple of 16 bytes apart."""
    return all(
        array[-1] == itemsize and not any(stride % 16 for stride in array[:-1]) for array in strides
    )


def _section(p: Problem, heads_that_fill: float) -> int:
    """Heads that a Hopper launch works on at a time.

    One after the other where all tiles are alike, so that its keys and values are read from the L2
    cache; else the longest tiles of as many heads as have theirs in 32 MB of it, first. Sections
    are about as large, and the last has two tiles for each multiprocessor: with 1 of 16 heads left
    over the longest of its tiles ended alone (docs/kernels.md).
    """
    if _uniform(p):
        return 1
    heads = p.batch * p.heads
    cached = 32e6 / max(1, p.sk * (p.d + p.dv) * p.itemsize) * p.group
    sections = max(1, round(heads / max(cached, heads_that_fill)))
    return max(1, -(-heads // sections))


def _together(p: Problem, tiles: HopperBackward, multiprocessors: int) -> int:
    """Key/value heads that a Hopper backward launch works on at a time.

    As many as have a tile of keys for each multiprocessor: more read more of q and dout, and add to
    more of dq, than the L2 cache holds (8 instead of 2 heads of 8,192 keys: 3 % slower). Two tiles
    where blocks take turns at 128 queries, and so wait longer for those before them, and four under
    a mask, where more of them begin at the same place (8,192 causal: 469 instead of 379 with one).
    And without a rest, as 64 heads in sections of 9 were 6 % slower than of 8 (docs/kernels.md).
    """
    heads = p.batch * p.heads_kv
    tiles_each = (2 if _uniform(p) else 4) if tiles.turns and tiles.streamed == 128 else 1
    wanted = tiles_each * multiprocessors / max(1, -(-p.sk // tiles.resident))
    sections = (n for n in range(1, heads + 1) if heads % n == 0)
    return min(sections, key=lambda n: abs(math.log(n / wanted)), default=1)


def _turns(p: Problem) -> tuple[int, int]:
    """Of bwd_sm80: 2^this queries are a turn at dQ, and whether it is passed on at once.

    Turns of 64 cost 5 % at a width of 128, and turns of 128 cost 8 % at 256. Where heads are few,
    all blocks of one wait for each other.
    """
    few = p.batch * p.heads < 16
    return 6 if few or p.d > 128 else 7, int(few)


def _template(p: Problem, strides: tuple, section: int, in_turns: bool = False) -> array.array:
    words = [word for array in strides for word in (0, *array)]
    words += [0] * (56 - len(words))
    sizes = p.batch, p.heads, p.group, p.sq, p.sk, p.d, p.dv, *p.band, section
    packed = PARAMS.pack(*words, *sizes, *_turns(p), in_turns, p.scale, p.softcap or 0.0)
    return array.array("q", packed)


def _loaded(device: int, steps: list[tuple[Variant, int]], encoders: list) -> list[tuple]:
    left, most = iter(encoders), _limits(device)[2]

    def grid(entry, blocks):  # a block of these two takes many tiles
        return min(blocks, most) if entry in ("fwd_sm90", "bwd_sm90") else blocks

    # The function behind a RawKernel, which itself looks for the device at every launch.
    return [
        (
            _kernel(device, v).kernel, (grid(v.entry, blocks),), (v.threads,), v.shared_bytes,
            next(left) if "sm90" in v.entry else None,
        )
        for v, blocks in steps
        if blocks
    ]  # fmt: skip


@functools.cache
def _kernel(device: int, variant: Variant) -> Any:
    return _compile.kernel(variant.file, variant.entry, variant.macros, variant.shared_bytes)


@functools.cache
def _by_address() -> Any:
    """CuPy's type of an argument found at an address.

    A NumPy array of one element is passed by value too, but looking into it takes CuPy 0.7 us a
    launch, and NumPy scalars of this size need CuPy 14.2.
    """
    from cupy.cuda.function import CPointer

    return CPointer


def _launch(plan: Plan, pointers: list[int], rows: list[int], mapped: Sequence[int] = ()) -> None:
    """`mapped`: pointers of the arrays that have tensor maps."""
    params = plan.template[:]
    for i, pointer in enumerate(pointers):
        params[5 * i] = pointer
    for i, pointer in enumerate(rows, 40):
        params[i] = pointer
    by_address = _by_address()
    args = (by_address(params.buffer_info()[0]),)
    for kernel, grid, block, shared_bytes, encode in plan.launches:
        more = (by_address(encode(*mapped)[1]),) if encode else ()
        kernel(grid, block, args + more, shared_bytes)
