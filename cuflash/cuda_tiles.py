"""Tiles of the raw CUDA kernels: what there is to choose, and by which tables."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple


class Tiles(NamedTuple):
    """Rows that stay with a block, rows that stream past at a time, warps, and buffers."""

    resident: int
    streamed: int
    warps: int
    # Of a 16-bit backward pass; elsewhere there is one buffer.
    stages: int = 2
    # Of that and with mma: how many of the warps divide streamed rows among them; the others,
    # resident.
    across: int = 1
    # In float32 and float64: columns at a time; resident rows stay in shared memory and do not
    # stream too; products on tensor cores; columns of a result that a block makes.
    slice: int = 64
    whole: bool = True
    mma: bool = False
    chunk: int = 256


class WideTiles(NamedTuple):
    """The same of wide_sm80.cu, for 16-bit heads wider than 256: 64 rows stay, with 8 warps."""

    streamed: int
    slice: int  # columns at a time
    whole: bool = True
    chunk: int = 512
    resident: int = 64


class WideHopper(NamedTuple):
    """The same of wide_sm90.cu: two warpgroups share 64 rows, and pairs of 64 rows stream past."""

    slice: int = 128  # columns at a time, or fewer where they do not fit
    chunk: int = 512
    resident: int = 64
    parts: int = 0  # as in HopperTiles

    @property
    def streamed(self) -> int:
        return 2 * self.resident

    @property
    def keys(self) -> int:
        return self.streamed


class HopperTiles(NamedTuple):
    """Queries that stay with a block, 64 a computing warpgroup, and keys that stream past."""

    resident: int
    streamed: int
    stages: int = 2  # buffers for K, and for V
    # float16 numbers that a float32 becomes: two are as accurate as float32; one, as TF32.
    parts: int = 0


class HopperBackward(NamedTuple):
    """Of a backward pass on Hopper, where 128 keys stay with a block: queries that stream past."""

    streamed: int
    dq_stages: int  # buffers for dQ
    turns: bool = False  # blocks add to dQ in the order of their keys, as for `deterministic`
    zeros: bool = False  # else: to zeros, and not to what the first of them stores
    resident: int = 128


class HopperTwoPass(NamedTuple):
    """The same where dK and dV are too wide for that, or float32: two passes, of seven products.

    Queries that stream past 64 keys in the pass for dK and dV, and keys that stream past `queries`
    in the pass for dQ.
    """

    streamed: int
    keys: int
    p_stages: int = 2  # buffers for P between the warpgroups
    together: int = 8  # heads that are worked on at a time
    parts: int = 0  # as in HopperTiles
    queries: int = 128  # of the pass for dQ, 64 a computing warpgroup


class HopperDouble(NamedTuple):
    """float64: 16 queries stay with each warp, or with each `across` warps, of eight."""

    streamed: int  # keys of which scores are made at a time
    part: int  # keys of which P V is made at a time
    boxes: int  # times 16 columns of P V are made at a time, by a warp
    across: int = 1  # warps that share queries; each has so much of the output's columns
    cluster: int = 1  # blocks that share queries; each has so much of all columns
    # Of a block's columns, over which scores are summed first: backward a block has one.
    groups: int = 1

    @property
    def resident(self) -> int:
        return 128 // self.across

    @property
    def rounds(self) -> int:
        return 1  # as in HopperDoubleBackward


class HopperDoubleBackward(NamedTuple):
    """float64: 16 keys stay with each `across` warps, of eight."""

    across: int  # each has so much of the columns of dK and dV
    turns: bool = False  # as in HopperBackward
    streamed: int = 64  # queries of which scores are made at a time
    cluster: int = 1  # blocks that share keys; each has so much of all columns

    @property
    def resident(self) -> int:
        return 128 // self.across

    @property
    def rounds(self) -> int:
        """In which blocks tell each other scores: in one, four would have a slot less."""
        return 2 if self.cluster > 2 else 1

    @property
    def part(self) -> int:
        """Queries that are multiplied at a time for dK and dV: whole slots for all these warps."""
        return min(32, 128 // self.across)


OnHopper = HopperBackward | HopperTwoPass | WideHopper | HopperDoubleBackward
SplitTiles = HopperTiles | HopperTwoPass | WideHopper
Portable = Tiles | WideTiles
ForwardOnHopper = HopperTiles | WideHopper | HopperDouble
Table = Mapping[int, Sequence[Portable]]


# Beyond a width of 256, float16 and bfloat16.
_WIDE_16 = [
    WideTiles(128, 64), WideTiles(64, 64), WideTiles(128, 64, whole=False),
    WideTiles(64, 64, whole=False, chunk=256),
]  # fmt: skip
# By dtype, then by the larger of the two widths: candidates, the first that fits the device is
# taken. The last of a row fits 64 KiB (forward 48), so every GPU. TFLOP/s: bfloat16 on an H200,
# 2 x 16 heads, S = 8192, full, beside PyTorch's FlashAttention-2 in the same run; more in
# docs/kernels.md.
_FORWARD_16: Table = {
    64: [Tiles(128, 96, 4)],  # 316, FlashAttention-2 286; 301 with 64 keys at a time
    128: [Tiles(128, 48, 4), Tiles(64, 32, 4)],  # 372, FlashAttention-2 346; 358 with 64
    192: [Tiles(128, 64, 8), Tiles(64, 32, 4)],
    256: [Tiles(128, 64, 8), Tiles(64, 64, 4), Tiles(32, 16, 2)],  # 325, FlashAttention-2 329
    1024: _WIDE_16,
}
# On compute capability 9.0. TFLOP/s: bfloat16 on an H200, 16,384 tokens, hidden 2048, S = 8192,
# full / causal, beside cuDNN in the same run; other rows in docs/kernels.md.
FORWARD_HOPPER = {
    64: HopperTiles(192, 128, 4),  # 625 / 578, cuDNN 496 / 439
    128: HopperTiles(128, 128),  # 747 / 727, cuDNN 653 / 568
    192: HopperTiles(128, 80),
    256: HopperTiles(128, 64),  # 820 / 781, cuDNN 736 / 598
}
# Under a mask with up to 1,024 keys smaller blocks of them compute less for nothing.
FORWARD_HOPPER_SHORT = {128: HopperTiles(128, 64, 4)}  # S = 512: 359; 344 with the row above
# float32, of which split.cu makes two float16 each: three products of four. TFLOP/s: batch 1, 16
# heads, S = 8192 (above 128: 4096), full / causal, beside CUDA cores.
FORWARD_HOPPER_32: dict[int, ForwardOnHopper] = {
    64: HopperTiles(128, 112, parts=2),  # 158 / 140, CUDA cores 43 / 43
    128: HopperTiles(128, 64, parts=2),  # 201 / 172, CUDA cores 40 / 41
    192: HopperTiles(128, 32, parts=2),  # 169 / 120, CUDA cores 36 / 36
    256: WideHopper(parts=2),  # 173 / 142, CUDA cores 35 / 36; HopperTiles(128, 32, 1) 171 / 107
}
FORWARD_HOPPER_TF32 = {
    64: HopperTiles(128, 128, 4, parts=1),  # 254 / 207
    128: HopperTiles(128, 80, parts=1),  # 393 / 305
    192: HopperTiles(128, 64, parts=1),  # 370 / 238
    256: HopperTiles(128, 32, 3, parts=1),  # 298 / 213
}
BACKWARD_HOPPER: dict[int, OnHopper] = {
    64: HopperBackward(128, 1),  # 561 / 534, cuDNN 419 / 382
    128: HopperBackward(64, 2),  # at 2,048 520 / 479, cuDNN 448 / 383
    192: HopperTwoPass(80, 64),  # 456 / 444, cuDNN 344 / 336
    256: HopperTwoPass(64, 48),  # 422 / 441, cuDNN 344 / 374
}
# From 8,192 keys on, or 4,096 that all queries see, unless scores are transformed: 80 queries are
# more than registers hold then.
BACKWARD_HOPPER_LONG = {128: HopperBackward(80, 1)}  # 634 / 587, cuDNN 546 / 484
# Wider than that, forward / backward, full, S = 4096: bfloat16, 16 heads of 512 or 8 of 1,024,
# 640 / 330 and 305 / 185 (wide_sm80.cu 195 / 87 and 130 / 70); float32, a quarter of them,
# 177 / 120 and 130 / 73 (CUDA cores 34 / 24 and 20 / 16), TF32 at 512 328.
WIDE_HOPPER = WideHopper()
# float32, as forward.
BACKWARD_HOPPER_32: dict[int, OnHopper] = {
    64: HopperTwoPass(96, 128, 1, parts=2),  # 130 / 120, CUDA cores 36 / 36
    128: HopperTwoPass(64, 48, 1, parts=2),  # 138 / 135, CUDA cores 32 / 31
    192: HopperTwoPass(32, 32, 1, parts=2, queries=64),  # 112 / 108, CUDA cores 23 / 23
    256: WideHopper(parts=2),  # 106 / 99; HopperTwoPass(16, 16, 1, queries=64) 75 / 72
}
_BACKWARD_16: Table = {
    64: [Tiles(128, 32, 4, 3), Tiles(64, 32, 4, 3)],  # 292, FlashAttention-2 264; and 214
    128: [
        Tiles(128, 64, 8, 3, 2),  # 319, FlashAttention-2 290
        Tiles(128, 64, 8, 2, 2),  # 307
        Tiles(64, 32, 4, 3, 2), Tiles(32, 32, 4, 1, 2),  # 200, 123
    ],
    192: [Tiles(64, 64, 8, 2, 4), Tiles(32, 32, 4, 2, 2), Tiles(32, 32, 4, 1, 2)],  # 231, 105
    256: [
        Tiles(64, 64, 8, 2, 4),  # 260, FlashAttention-2 250
        Tiles(64, 64, 8, 1, 4),  # 226
        Tiles(32, 32, 4, 1, 2), Tiles(16, 32, 2, 1, 2),  # 98
    ],
    1024: _WIDE_16,
}  # fmt: skip
# On CUDA cores a thread has resident * across / (4 warps) rows, as many as registers allow. A
# list's first is for 227 KiB, those between for GPUs with 163 or 99. TFLOP/s, of 67 in float32 and
# 33 in float64: H200, 16 heads, S = 4096 (2048 at 256), full.
_SMALL = Tiles(64, 32, 4, slice=32, whole=False)
_WIDE_32 = [
    Tiles(64, 64, 8, across=2, slice=128, whole=False, chunk=512),
    Tiles(64, 64, 8, across=2, whole=False, chunk=512),
    _SMALL._replace(chunk=128),
]
_FORWARD_32 = {
    64: [Tiles(128, 64, 4), Tiles(128, 32, 4), _SMALL],  # 43; 41; (256, 64, 8) 44
    128: [Tiles(128, 32, 4), Tiles(64, 32, 4), _SMALL],  # 42; (128, 64, 8) 40
    256: [Tiles(128, 64, 8), Tiles(64, 32, 4), _SMALL],  # 38; 33
    1024: [Tiles(64, 64, 8, across=2, slice=128, chunk=512), *_WIDE_32],
}
_BACKWARD_32 = {
    64: [Tiles(256, 32, 8), Tiles(128, 32, 4), Tiles(64, 32, 4), _SMALL],  # 37.8
    128: [Tiles(128, 32, 8), Tiles(64, 32, 4), _SMALL],  # 33.5
    256: [Tiles(64, 32, 4), Tiles(64, 32, 4, whole=False), _SMALL],  # 22.3
    1024: _WIDE_32,
}
_SMALL_64 = Tiles(32, 32, 4, slice=32, whole=False)
_WIDE_64 = [Tiles(64, 32, 8, whole=False), _SMALL_64._replace(chunk=128)]
_FORWARD_64 = {
    64: [Tiles(128, 64, 8), Tiles(64, 32, 4), _SMALL_64],  # 19.7; 17.4; (128, 32, 8) 19.2
    128: [Tiles(128, 32, 8), Tiles(32, 32, 4), _SMALL_64],  # 19.7
    256: [Tiles(64, 32, 8), _SMALL_64],  # 16.3
    1024: _WIDE_64,
}
_BACKWARD_64 = {
    64: [Tiles(128, 32, 8), Tiles(64, 32, 4), _SMALL_64],  # 18.9
    128: [Tiles(64, 32, 8), _SMALL_64],
    256: [Tiles(64, 32, 8, whole=False), _SMALL_64],
    1024: _WIDE_64,
}

# float64 on tensor cores, where they are twice as fast as CUDA cores: compute capability 8.0, which
# has 163 KiB, and 9.0. A thread has resident * across / (8 warps) rows.
MMA_CAPABILITIES = 80, 90
_WIDE_MMA = Tiles(32, 64, 8, across=4, whole=False, mma=True, chunk=512)
FORWARD_MMA = {
    64: [Tiles(128, 64, 8, mma=True)],  # 40.2
    128: [Tiles(128, 32, 8, mma=True), Tiles(64, 32, 8, across=2, mma=True)],  # 36.5 (S = 4096)
    256: [Tiles(64, 32, 8, across=2, mma=True), Tiles(32, 32, 4, across=2, mma=True)],
    1024: [_WIDE_MMA],
}
BACKWARD_MMA = {
    64: [Tiles(128, 32, 8, mma=True), Tiles(64, 32, 8, across=2, mma=True)],  # 36.0
    128: [Tiles(64, 32, 8, across=2, mma=True), Tiles(32, 64, 8, across=4, mma=True)],  # 29.4
    256: [Tiles(32, 64, 8, across=4, whole=False, mma=True)],
    1024: [_WIDE_MMA],
}

# float64 on Hopper. 16 heads (from 512 on 8), S = 4096, full / causal, beside the rows above and
# the materialised formula.
FORWARD_HOPPER_64: dict[int, ForwardOnHopper] = {
    64: HopperDouble(64, 64, 2),  # 38.8 / 38.1; 37.7 / 37.1; 8.8
    128: HopperDouble(32, 32, 2),  # 40.6 / 39.8; 36.6 / 35.6; 15.5
    256: HopperDouble(64, 32, 2, across=2),  # 39.9 / 37.3; 31.7 / 31.5; 24.4
    512: HopperDouble(128, 32, 1, across=4, groups=2),  # 39.1 / 37.2; 25.9 / 25.1; 33.4
    1024: HopperDouble(64, 32, 1, across=4, cluster=2, groups=2),  # 34.0 / 33.4; 14; 42.7
}
BACKWARD_HOPPER_64: dict[int, Portable | OnHopper] = {
    64: BACKWARD_MMA[64][0],  # HopperDoubleBackward(2) 28
    128: HopperDoubleBackward(2),  # 34.5 / 34.0; 29.4 / 29.3; 14.8
    256: HopperDoubleBackward(4),  # 31.2 / 31.0; 17.5 / 17.1; 23.7
    512: HopperDoubleBackward(4, cluster=2),  # 28.3 / 27.5; 16.6 / 15.5; 32.8
    1024: HopperDoubleBackward(4, cluster=4),  # 25.2 / 24.8; 10.3; 43.3
}

FORWARD: dict[str, Table] = {
    "float16": _FORWARD_16, "bfloat16": _FORWARD_16, "float32": _FORWARD_32, "float64": _FORWARD_64,
}  # fmt: skip
BACKWARD: dict[str, Table] = {
    "float16": _BACKWARD_16, "bfloat16": _BACKWARD_16,
    "float32": _BACKWARD_32, "float64": _BACKWARD_64,
}  # fmt: skip


def tables(dtype: str, capability: int) -> tuple[Table, Table]:
    """Of the forward and of the backward kernel, without Hopper's own."""
    if dtype == "float64" and capability in MMA_CAPABILITIES:
        return FORWARD_MMA, BACKWARD_MMA
    return FORWARD[dtype], BACKWARD[dtype]
