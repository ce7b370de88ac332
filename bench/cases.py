"""What is timed: one attention problem and a direction, by name; and the named sets of them."""

from __future__ import annotations

import argparse
import math
import re
import zlib
from dataclasses import asdict, dataclass
from types import ModuleType
from typing import Any, NamedTuple

import numpy as np

from cuflash.problem import Problem


class Inputs(NamedTuple):
    """Arrays of one case on four axes; a forward pass leaves `dout` alone."""

    dout: Any
    q: Any
    k: Any
    v: Any


@dataclass(frozen=True)
class Case:
    """Sizes as in cuflash's Problem; `causal` joins the last query to the last key."""

    dtype: str
    batch: int
    heads: int
    heads_kv: int
    sq: int
    sk: int
    d: int
    dv: int
    causal: bool
    direction: str  # "forward" or "backward"

    @property
    def backward(self) -> bool:
        return self.direction == "backward"

    @property
    def mask(self) -> str:
        return "causal" if self.causal else "full"

    @property
    def name(self) -> str:
        """As `parse` reads it, for instance float32-b1-h8:2-s4096-d64-causal-forward."""
        h, s, d = (str(a) if a == b else f"{a}:{b}" for a, b in self.sizes())
        return f"{self.dtype}-b{self.batch}-h{h}-s{s}-d{d}-{self.mask}-{self.direction}"

    def sizes(self) -> tuple[tuple[int, int], ...]:
        """(query side, key side) of heads and lengths, and the widths of keys and values."""
        return (self.heads, self.heads_kv), (self.sq, self.sk), (self.d, self.dv)

    @classmethod
    def parse(cls, name: str) -> Case | None:
        """The case of this name, or None where it is not a whole name."""
        size = r"(\d+)(?::(\d+))?"
        pattern = rf"(\w+)-b(\d+)-h{size}-s{size}-d{size}-(full|causal)-(forward|backward)"
        found = re.fullmatch(pattern, name)
        if not found:
            return None
        dtype, batch, *sizes, mask, direction = found.groups()
        (h, hkv), (sq, sk), (d, dv) = (
            (int(a), int(b or a)) for a, b in zip(sizes[::2], sizes[1::2], strict=True)
        )
        return cls(dtype, int(batch), h, hkv, sq, sk, d, dv, mask == "causal", direction)

    def matches(self, words: str) -> bool:
        """Whether each word is a part of the name: "float32 s4096 causal"."""
        return set(words.split()) <= set(self.name.split("-"))

    def problem(self, device: str) -> Problem:
        sizes = {k: v for k, v in asdict(self).items() if k not in ("causal", "direction")}
        right = 0 if self.causal else None
        return Problem(device=device, scale=1 / math.sqrt(self.d), right=right, **sizes)

    def inputs(self, xp: ModuleType, seed: int) -> Inputs:
        """Standard normal numbers: zeros draw less power, and some GPUs run faster on them."""
        if self.dtype == "bfloat16":
            import ml_dtypes  # noqa: F401  NumPy knows the name from here on
        rng = xp.random.default_rng(zlib.crc32(self.name.encode()) ^ seed)
        drawn = np.float64 if self.dtype == "float64" else np.float32

        def normal(heads: int, length: int, width: int) -> Any:
            x = rng.standard_normal((self.batch, heads, length, width), dtype=drawn)
            return x.astype(self.dtype, copy=False)

        return Inputs(
            dout=normal(self.heads, self.sq, self.dv),
            q=normal(self.heads, self.sq, self.d),
            k=normal(self.heads_kv, self.sk, self.d),
            v=normal(self.heads_kv, self.sk, self.dv),
        )


def _all_masks_and_directions(dtype: str, batch: int, heads: int, s: int, d: int) -> list[Case]:
    return [
        Case(dtype, batch, heads, heads, s, s, d, d, causal, direction)
        for causal in (False, True)
        for direction in ("forward", "backward")
    ]


def _cpu() -> list[Case]:
    sizes = [("float32", 64, s) for s in (512, 1024, 2048, 4096)]
    sizes += [("float32", 128, 1024), ("float64", 64, 1024)]
    return [c for dtype, d, s in sizes for c in _all_masks_and_directions(dtype, 1, 8, s, d)]


def _dtypes() -> list[Case]:
    return [
        case
        for dtype in ("float32", "float64", "float16", "bfloat16")
        for d in (64, 128)
        for case in _all_masks_and_directions(dtype, 1, 16, 4096, d)
    ]


def _tokens16k() -> list[Case]:
    """The sizes of the FlashAttention papers: 16,384 tokens in all, heads times width 2,048."""
    return [
        case
        for d in (64, 128, 256)
        for s in (512, 1024, 2048, 4096, 8192, 16384)
        for case in _all_masks_and_directions("bfloat16", 16384 // s, 2048 // d, s, d)
    ]


def _wide() -> list[Case]:
    """Heads around and beyond the width where tiling stops saving traffic."""
    return [
        Case(dtype, 1, 8, 8, 4096, 4096, d, d, False, direction)
        for dtype in ("bfloat16", "float32", "float64")
        for d in (64, 128, 256, 512, 784, 1024)
        for direction in ("forward", "backward")
    ]


def _decode() -> list[Case]:
    """One new query a sequence: the keys and values are read once, so GB/s is what counts."""
    sizes = [(8, 8192), (32, 8192), (1, 131072)]
    return [Case("bfloat16", b, 32, 8, 1, s, 128, 128, False, "forward") for b, s in sizes]


SETS = {
    "cpu": _cpu(),
    "gpu": _dtypes() + _tokens16k(),
    "dtypes": _dtypes(),
    "tokens16k": _tokens16k(),
    "wide": _wide(),
    "decode": _decode(),
}


def add_options(parser: argparse.ArgumentParser, default: str) -> None:
    """What `select` is asked by; `default` names the set that is meant without --set."""
    add = parser.add_argument
    add("--set", choices=SETS, action="append", help=f"named cases; default: {default}; repeats")
    add(
        "--case",
        action="append",
        default=[],
        metavar="WORDS",
        help='only cases whose name has these parts ("float32 s4096 causal"), or any case by its '
        "whole name, as `python -m bench --list` shows it; repeats",
    )


def select(sets: list[str], wanted: list[str]) -> list[Case]:
    """The cases of these sets; with `wanted`, the cases named there or matching its words."""
    pool = [case for name in sets for case in SETS[name]]
    if wanted:
        named = [case for text in wanted if (case := Case.parse(text))]
        pool = named + [c for c in pool if any(c.matches(text) for text in wanted)]
    return list(dict.fromkeys(pool))
