"""Arrays of any library, dtype and stride, seen as four axes; nothing here knows attention."""

from __future__ import annotations

import functools
import math
import sys
from types import ModuleType
from typing import Any

import numpy as np

from .problem import DTYPES

_DLPACK_CPU = 1


def module_of(x: Any) -> ModuleType:
    """NumPy or CuPy, whichever made `x`; CuPy is not imported to find out."""
    cupy = sys.modules.get("cupy")
    return cupy if cupy is not None and isinstance(x, cupy.ndarray) else np


def as_array(name: str, x: Any) -> Any:
    """`x` as a NumPy or CuPy array of a supported dtype, without a copy where it is one already."""
    if isinstance(x, np.ma.MaskedArray):
        raise TypeError(f"{name} must not be a masked array: its mask would be ignored")
    if isinstance(x, (np.ndarray, list, tuple)):
        x = np.asarray(x)
    elif module_of(x) is np:
        x = _from_other_library(name, x)
    if dtype_name(x.dtype) not in DTYPES:
        raise TypeError(f"{name} must be one of {', '.join(DTYPES)}, got dtype {x.dtype.name}")
    if not x.dtype.isnative:
        raise TypeError(f"{name} must have native byte order, got dtype {x.dtype.str}")
    if module_of(x) is not np and x.data.ptr % x.itemsize:
        raise ValueError(f"{name} must be aligned to its elements of {x.itemsize} bytes on a GPU")
    return x


@functools.cache
def dtype_name(dtype: np.dtype) -> str:
    """`dtype.name`, which takes NumPy over a microsecond each time."""
    return dtype.name


def _from_other_library(name: str, x: Any) -> Any:
    # DLPack first: __cuda_array_interface__ has no name for bfloat16.
    dlpack = hasattr(x, "__dlpack__")
    if dlpack and x.__dlpack_device__()[0] == _DLPACK_CPU:
        return np.from_dlpack(x)
    if dlpack or hasattr(x, "__cuda_array_interface__"):
        import cupy

        return cupy.from_dlpack(x) if dlpack else cupy.asarray(x)
    raise TypeError(f"{name} must be a NumPy or CuPy array (or offer DLPack), got {type(x)}")


def device_of(x: Any) -> str:
    """'cpu', or 'cuda:0' and so on."""
    return "cpu" if module_of(x) is np else f"cuda:{x.data.device_id}"


def same_device(**named: Any) -> None:
    """Raise ValueError unless all arrays live on one device."""
    (first, a), *others = named.items()
    for name, x in others:
        if device_of(x) != device_of(a):
            raise ValueError(f"{name} is on {device_of(x)}, but {first} is on {device_of(a)}")


def same_dtype(**named: Any) -> None:
    """Raise ValueError unless all arrays have one dtype."""
    (first, a), *others = named.items()
    for name, x in others:
        if x.dtype != a.dtype:
            raise ValueError(f"{name} has dtype {x.dtype.name}, but {first} has {a.dtype.name}")


def four_axes(x: Any) -> Any:
    """(batch, heads, length, width): a view wherever strides allow, else a copy."""
    if x.ndim < 4:
        return x[(None,) * (4 - x.ndim)]
    return shaped(x, (math.prod(x.shape[:-3]), *x.shape[-3:]))


def three_axes(rows: Any) -> Any:
    """(batch, heads, length), for an array with one number per query."""
    return rows if rows.ndim == 3 else four_axes(rows[..., None])[..., 0]


def shaped(x: Any, shape: tuple[int, ...]) -> Any:
    """`x.reshape(shape)`; a view that changes nothing costs CuPy two microseconds."""
    return x if x.shape == shape else x.reshape(shape)


def empty_in_order(like: Any, shape: tuple[int, ...]) -> Any:
    """An array of `shape` whose axes lie in memory in the order of those of `like`."""
    # The stride of a broadcast axis, or of one of size 1, says nothing: such axes stay outside.
    steps = [
        abs(stride) if stride and size > 1 else math.inf
        for stride, size in zip(like.strides, like.shape, strict=True)
    ]
    order = sorted(range(like.ndim), key=steps.__getitem__, reverse=True)
    if order == list(range(like.ndim)):
        return module_of(like).empty(shape, like.dtype)
    array = module_of(like).empty([shape[axis] for axis in order], like.dtype)
    return array.transpose([order.index(axis) for axis in range(like.ndim)])


def start_of(x: Any) -> int:
    """The address of the first element."""
    return x.ctypes.data if module_of(x) is np else x.data.ptr


def overlaps_itself(x: Any) -> bool:
    """Whether a broadcast axis makes several elements share memory."""
    return any(stride == 0 and size > 1 for stride, size in zip(x.strides, x.shape, strict=True))
