"""Arrays of any library, dtype and stride, seen as four axes; nothing here knows attention."""

from __future__ import annotations

import functools
import math
import sys
from types import ModuleType
from typing import Any, NamedTuple

import numpy as np

from .problem import DTYPES

_DLPACK_CPU = 1


def module_of(x: Any) -> ModuleType:
    """NumPy or CuPy, whichever made `x`; CuPy is not imported to find out."""
    cupy = sys.modules.get("cupy")
    return cupy if cupy is not None and isinstance(x, cupy.ndarray) else np


class Facts(NamedTuple):
    """What the checks of an argument depend on: all but its strides and its numbers."""

    device: str | int  # "cpu", or which GPU
    dtype: np.dtype
    shape: tuple[int, ...]
    aligned: bool

    @property
    def place(self) -> str:
        """'cpu', or 'cuda:0' and so on."""
        return "cpu" if self.device == "cpu" else f"cuda:{self.device}"


def look(name: str, x: Any) -> tuple[Any, tuple]:
    """`x` as a NumPy or CuPy array, without a copy where it is one already, and its `Facts`.

    These come as a plain tuple, a key for caches: to make a named one takes longer than the rest.
    """
    cupy = sys.modules.get("cupy")
    if cupy is None or not isinstance(x, cupy.ndarray):
        x = _from_elsewhere(name, x)
        if isinstance(x, np.ndarray):
            return x, ("cpu", x.dtype, x.shape, True)
    data = x.data
    return x, (data.device_id, x.dtype, x.shape, data.ptr % x.itemsize == 0)


def check(name: str, facts: tuple) -> Facts:
    """The named facts of an array that can be used: of a supported dtype, and aligned."""
    facts = Facts(*facts)
    dtype = facts.dtype
    if dtype_name(dtype) not in DTYPES:
        raise TypeError(f"{name} must be one of {', '.join(DTYPES)}, got dtype {dtype.name}")
    if not dtype.isnative:
        raise TypeError(f"{name} must have native byte order, got dtype {dtype.str}")
    if not facts.aligned:
        raise ValueError(
            f"{name} must be aligned to its elements of {dtype.itemsize} bytes on a GPU"
        )
    return facts


def as_array(name: str, x: Any) -> Any:
    """`x` as a NumPy or CuPy array of a supported dtype, without a copy where it is one already."""
    x, facts = look(name, x)
    check(name, facts)
    return x


@functools.cache
def dtype_name(dtype: np.dtype) -> str:
    """`dtype.name`, which takes NumPy over a microsecond each time."""
    return dtype.name


def _from_elsewhere(name: str, x: Any) -> Any:
    if isinstance(x, np.ma.MaskedArray):
        raise TypeError(f"{name} must not be a masked array: its mask would be ignored")
    if isinstance(x, (np.ndarray, list, tuple)):
        return np.asarray(x)
    # DLPack first: __cuda_array_interface__ has no name for bfloat16.
    dlpack = hasattr(x, "__dlpack__")
    if dlpack and x.__dlpack_device__()[0] == _DLPACK_CPU:
        return np.from_dlpack(x)
    if dlpack or hasattr(x, "__cuda_array_interface__"):
        import cupy

        return cupy.from_dlpack(x) if dlpack else cupy.asarray(x)
    raise TypeError(f"{name} must be a NumPy or CuPy array (or offer DLPack), got {type(x)}")


def same_device(**named: Facts) -> None:
    """Raise ValueError unless all arrays live on one device."""
    (first, a), *others = named.items()
    for name, x in others:
        if x.device != a.device:
            raise ValueError(f"{name} is on {x.place}, but {first} is on {a.place}")


def same_dtype(**named: Facts) -> None:
    """Raise ValueError unless all arrays have one dtype."""
    (first, a), *others = named.items()
    for name, x in others:
        if x.dtype != a.dtype:
            raise ValueError(f"{name} has dtype {x.dtype.name}, but {first} has {a.dtype.name}")


def on_axes(count: int, x: Any) -> Any:
    """`x` with its leading axes folded, or with new ones: a view wherever strides allow."""
    if x.ndim == count:
        return x
    shape = (1,) * (count - x.ndim) + x.shape
    return x.reshape(math.prod(shape[: 1 - count]), *shape[1 - count :])


def shaped(x: Any, shape: tuple[int, ...]) -> Any:
    """`x.reshape(shape)`; a view that changes nothing costs CuPy two microseconds."""
    return x if x.shape == shape else x.reshape(shape)


def empty_in_order(like: Any, shape: tuple[int, ...]) -> Any:
    """An array of `shape` whose axes lie in memory in the order of those of `like`."""
    order = _order(like.shape, like.strides)
    empty = module_of(like).ndarray
    if order is None:
        return empty(shape, like.dtype)
    array = empty([shape[axis] for axis in order], like.dtype)
    return array.transpose([order.index(axis) for axis in range(like.ndim)])


@functools.lru_cache(4096)
def _order(shape: tuple[int, ...], strides: tuple[int, ...]) -> list[int] | None:
    """The axes from the outermost to the innermost, None where that is as they come."""
    # The stride of a broadcast axis, or of one of size 1, says nothing: such axes stay outside.
    steps = [
        abs(stride) if stride and size > 1 else math.inf
        for stride, size in zip(strides, shape, strict=True)
    ]
    axes = list(range(len(shape)))
    order = sorted(axes, key=steps.__getitem__, reverse=True)
    return None if order == axes else order


def start_of(x: Any) -> int:
    """The address of the first element."""
    return x.ctypes.data if module_of(x) is np else x.data.ptr


def overlaps_itself(x: Any) -> bool:
    """Whether a broadcast axis makes several elements share memory."""
    return any(stride == 0 and size > 1 for stride, size in zip(x.strides, x.shape, strict=True))
