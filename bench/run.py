"""Check, then time: all contenders of a case on the same inputs, in turn."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from dataclasses import asdict, dataclass, field
from typing import Any

import numpy as np

from . import check, measure
from .cases import Case, Inputs
from .contenders import Call, Contender, Refused

Device = measure.Cpu | measure.Gpu


@dataclass
class Result:
    """One contender on one case; times only where `status` is "ok"."""

    case: Case
    contender: str
    status: str = "ok"  # or "wrong", "refused", "out of memory", "failed"
    note: str = ""
    error: float | None = None
    extra_bytes: int | None = None
    seconds: list[float] = field(default_factory=list)
    host_seconds: list[float] = field(default_factory=list)

    @property
    def median(self) -> float | None:
        return float(np.median(self.seconds)) if self.seconds else None

    @property
    def spread(self) -> float:
        """Interquartile range over the median."""
        low, high = np.percentile(self.seconds, (25, 75))
        return float(high - low) / self.median

    @property
    def flops_per_second(self) -> float:
        """The same count for everyone, also for who computes more or less."""
        return self.case.problem("cpu").flops(self.case.backward) / self.median

    @property
    def bytes_per_second(self) -> float:
        """Of the fewest bytes that must move: small beside the copy unless lengths are."""
        return self.case.problem("cpu").nbytes(self.case.backward) / self.median

    @property
    def host(self) -> float | None:
        return float(np.median(self.host_seconds)) if self.host_seconds else None

    def to_json(self) -> dict[str, Any]:
        data = asdict(self) | {
            "name": self.case.name,
            "tolerance": check.TOLERANCE[self.case.dtype],
        }
        if self.seconds:
            data["median"] = self.median
            data["flops_per_second"] = self.flops_per_second
            data["bytes_per_second"] = self.bytes_per_second
        return data

    @classmethod
    def from_json(cls, data: dict[str, Any]) -> Result:
        kept = {name: data[name] for name in cls.__dataclass_fields__}
        return cls(**kept | {"case": Case(**data["case"])})


def run_case(
    device: Device, case: Case, contenders: list[Contender], seconds: float, seed: int = 0
) -> list[Result]:
    """A Result for each contender, in their order."""
    x = case.inputs(device.xp, seed)
    parts = check.expected(case, x)
    results = [Result(case, contender.name) for contender in contenders]
    for result, contender in zip(results, contenders, strict=True):
        device.free()
        with recorded(result), contender.around():
            verify(result, contender, x, parts)
    del parts
    right = _right(list(zip(results, contenders, strict=True)))
    # S x S contenders at great lengths would not fit beside each other: each is timed alone.
    limit = device.memory_limit()
    together = [pair for pair in right if (pair[0].extra_bytes or 0) <= limit]
    alone = [[pair] for pair in right if (pair[0].extra_bytes or 0) > limit]
    for group in (together, *alone):
        device.free()
        _time_in_turn(device, x, group, seconds)
    device.free()
    return results


def verify(result: Result, contender: Contender, x: Inputs, parts: list[check.Part]) -> None:
    """Whether what comes out is right; the memory of a warm call, too."""
    case = result.case
    result.error = check.error(case, contender.prepare(case, x)(), parts)
    if not result.error <= check.TOLERANCE[case.dtype]:  # NaN is wrong too
        result.status = "wrong"
        return
    # By now everything is compiled and loaded: what follows is the memory of a warm call.
    result.extra_bytes = measure.extra_memory(contender.memory, lambda: contender.prepare(case, x))


def _time_in_turn(
    device: Device, x: Inputs, group: list[tuple[Result, Contender]], seconds: float
) -> None:
    """Some calls of each, then again from the first on, so that all see the same clocks."""
    ready: list[tuple[Result, Contender, Call, float]] = []
    for result, contender in group:
        with recorded(result), contender.around():
            call = contender.prepare(result.case, x)
            one = device.time(call, 2)[1]  # the first allocates again what free() gave back
            ready.append((result, contender, call, one))
    if not ready:
        return
    rounds = measure.repeats_within(seconds, max(one for *_, one in ready), 3, device.rounds)
    for _ in range(rounds):
        for result, contender, call, one in _right(ready):
            with recorded(result), contender.around():
                repeats = measure.repeats_within(seconds / rounds, one, 1, 50)
                device.settle()
                result.seconds += device.time(call, repeats)
    for result, contender, call, one in _right(ready):
        with recorded(result), contender.around():
            result.host_seconds = device.host_time(call, measure.repeats_within(0.05, one, 3, 20))


def _right(ready: list[Any]) -> list[Any]:
    return [entry for entry in ready if entry[0].status == "ok"]


@contextlib.contextmanager
def recorded(result: Result) -> Iterator[None]:
    """What stops one contender, whatever it is, is its result; the others go on."""
    try:
        yield
    except Refused as reason:
        result.status, result.note = "refused", str(reason)
    except Exception as stopped:
        name = type(stopped).__name__
        memory = isinstance(stopped, MemoryError) or name == "OutOfMemoryError"
        result.status = "out of memory" if memory else "failed"
        result.note = f"{name}: {stopped}".partition("\n")[0]
    if result.status != "ok":
        result.seconds = []
