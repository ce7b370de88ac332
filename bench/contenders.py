"""Who is timed. To add one, write a function `prepare` and put a Contender in `contenders`.

``prepare(case, x)`` gets the inputs (NumPy arrays, or CuPy arrays of one GPU) and returns a
function of no arguments: the work that is timed. That returns `out`, or (dq, dk, dv) for a
backward case, on the axes of cuflash, as arrays or PyTorch tensors. What a backward pass needs
from the forward pass is made in `prepare`. It raises Refused where it cannot do the case.
`_flash_attention_4` shows how a wheel comes in.
"""

from __future__ import annotations

import contextlib
import functools
import importlib.util
import os
import warnings
from collections.abc import Callable, Collection
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any

import numpy as np

from cuflash import api, arrays

from .cases import Case, Inputs

Call = Callable[[], Any]


class Refused(Exception):
    """The contender cannot do this case; the text says why."""


@dataclass(frozen=True)
class Contender:
    """`memory` names whose allocator knows what a call needs ("" for nobody's)."""

    name: str
    prepare: Callable[[Case, Inputs], Call]
    memory: str
    #: Settings that must hold around `prepare` and the calls, entered outside of the timed part.
    around: Callable[[], AbstractContextManager[Any]] = contextlib.nullcontext


def contenders(
    device: str, only: Collection[str] = (), skip: Collection[str] = ()
) -> list[Contender]:
    """What is installed and runs on "cpu" or "cuda", with a text of `only` and none of `skip`."""
    own = "cupy" if device == "cuda" else "numpy"
    found = [cuflash(name, own) for name in api.BACKENDS]
    found.append(Contender("materialised", _materialised, own))
    if device == "cuda":
        found.append(Contender("materialised by head", _materialised_by_head, own))
    if importlib.util.find_spec("torch"):
        found += _torch_on_gpu() if device == "cuda" else [Contender("PyTorch", _torch, "")]
        if device == "cuda" and _importable("flash_attn.cute"):
            found.append(Contender("FlashAttention-4", _flash_attention_4, "torch"))
        if device == "cuda" and _importable("flash_attn3_jax"):
            found.append(Contender("FlashAttention-3", _flash_attention_3, ""))
    return [
        contender
        for contender in found
        if not any(text in contender.name for text in skip)
        and (not only or any(text in contender.name for text in only))
    ]


def _importable(module: str) -> bool:
    try:
        return importlib.util.find_spec(module) is not None
    except ModuleNotFoundError:  # its package is missing
        return False


# --- cuflash. ---


def cuflash(backend: str, memory: str, config: Any = None) -> Contender:
    """A backend of ours, with its own choice of configuration or a given one."""

    def prepare(case: Case, x: Inputs) -> Call:
        problem = case.problem("cpu" if arrays.module_of(x.q) is np else "cuda")
        if reason := api.refusal(backend, problem):
            raise Refused(reason)
        options = {"causal": case.causal, "backend": backend, "config": config}
        if not case.backward:
            return lambda: api.flash_attention(x.q, x.k, x.v, **options)
        saved = api.flash_attention(x.q, x.k, x.v, return_lse=True, **options)
        return lambda: api.flash_attention_grad(*x, *saved, **options)

    shown = "" if config is None else f" {config}"
    return Contender(f"cuflash {backend}{shown}", prepare, memory)


# --- The formula as a user writes it, in the dtype of the arrays. ---


def _materialised(case: Case, x: Inputs) -> Call:
    xp = arrays.module_of(x.q)
    if xp is not np and case.dtype == "bfloat16":
        raise Refused("CuPy has no product of stacks of bfloat16 matrices")
    return _formula(case, x, xp, xp.matmul)


def _materialised_by_head(case: Case, x: Inputs) -> Call:
    """CuPy multiplies stacks of 16-bit matrices in float32; one by one, on the matrix units."""
    if case.dtype not in ("float16", "bfloat16"):
        raise Refused("only 16-bit dtypes gain from products head by head")
    xp = arrays.module_of(x.q)

    def product(a: Any, b: Any) -> Any:
        out = xp.empty((*a.shape[:-1], b.shape[-1]), a.dtype)
        for i in np.ndindex(a.shape[:-2]):
            xp.dot(a[i], b[i], out=out[i])
        return out

    return _formula(case, x, xp, product)


def _formula(case: Case, x: Inputs, xp: Any, product: Callable[[Any, Any], Any]) -> Call:
    """softmax(scale q k^T) v, or its gradients; the S x S arrays are reused where they can be."""
    _fail_before_linux_kills_us(case, x)
    group, scale = case.heads // case.heads_kv, x.q.dtype.type(case.d**-0.5)
    hidden = None
    if case.causal:  # made once: a user would keep it
        visible = xp.tri(case.sq, case.sk, case.sk - case.sq, dtype=bool)
        hidden = xp.where(visible, np.float32(0), np.float32(-np.inf)).astype(x.q.dtype)

    def probabilities(k: Any) -> Any:
        p = product(x.q, k.swapaxes(-1, -2))
        p *= scale
        if hidden is not None:
            p += hidden
        p -= p.max(-1, keepdims=True)
        xp.exp(p, out=p)
        p /= p.sum(-1, keepdims=True)
        return p

    def repeated(a: Any) -> Any:
        return xp.repeat(a, group, axis=1) if group > 1 else a

    def summed(a: Any) -> Any:
        shape = (case.batch, case.heads_kv, group, *a.shape[2:])
        return a.reshape(shape).sum(2) if group > 1 else a

    def forward() -> Any:
        return product(probabilities(repeated(x.k)), repeated(x.v))

    def backward() -> Any:
        k = repeated(x.k)
        p = probabilities(k)
        ds = product(x.dout, repeated(x.v).swapaxes(-1, -2))
        dv = product(p.swapaxes(-1, -2), x.dout)
        ds -= (p * ds).sum(-1, keepdims=True)
        ds *= p
        ds *= scale
        return product(ds, k), summed(product(ds.swapaxes(-1, -2), x.q)), summed(dv)

    return backward if case.backward else forward


def _fail_before_linux_kills_us(case: Case, x: Inputs) -> None:
    """Linux hands out memory that it does not have and kills who writes to it, so ask first."""
    if isinstance(x.q, np.ndarray) and hasattr(os, "sysconf"):
        needed = 3 * case.batch * case.heads * case.sq * case.sk * x.q.itemsize
        free = os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
        if needed > free:
            raise MemoryError(f"{needed / 1e9:.0f} GB needed, {free / 1e9:.0f} GB free")


# --- PyTorch's scaled_dot_product_attention. ---


def _torch_on_gpu() -> list[Contender]:
    """Each implementation inside PyTorch by itself: left alone, it picks one."""
    import torch
    from torch.nn.attention import SDPBackend, sdpa_kernel

    if not torch.cuda.is_available():
        return []
    kinds = {
        "cuDNN": SDPBackend.CUDNN_ATTENTION,
        "flash": SDPBackend.FLASH_ATTENTION,
        "efficient": SDPBackend.EFFICIENT_ATTENTION,
        "math": SDPBackend.MATH,
    }
    return [
        Contender(f"PyTorch {name}", _torch, "torch", functools.partial(sdpa_kernel, kind))
        for name, kind in kinds.items()
    ]


def _torch(case: Case, x: Inputs) -> Call:
    import torch

    if case.causal and case.sq != case.sk:
        raise Refused("is_causal joins the first query to the first key, not last to last")
    dout, q, k, v = (_tensor(a) for a in x)
    attention = functools.partial(
        torch.nn.functional.scaled_dot_product_attention,
        is_causal=case.causal,
        enable_gqa=case.heads != case.heads_kv,
    )
    with warnings.catch_warnings(record=True) as why:
        warnings.simplefilter("always")
        try:
            return _torch_call(case, lambda: attention(q, k, v), (dout, q, k, v))
        except torch.OutOfMemoryError:
            raise
        except RuntimeError as refusal:
            reasons = (str(w.message).partition(" (Triggered")[0] for w in why)
            raise Refused("; ".join([str(refusal).partition("\n")[0], *reasons])) from None


def _flash_attention_4(case: Case, x: Inputs) -> Call:
    """The wheel flash-attn-4; it wants (batch, length, heads, width) memory."""
    from flash_attn.cute import flash_attn_func

    if case.dtype not in ("float16", "bfloat16"):
        raise Refused("16-bit dtypes only")
    dout, q, k, v = (_tensor(a).transpose(1, 2).contiguous().transpose(1, 2) for a in x)

    def attention() -> Any:
        out = flash_attn_func(*(t.transpose(1, 2) for t in (q, k, v)), causal=case.causal)
        return (out[0] if isinstance(out, tuple) else out).transpose(1, 2)

    return _torch_call(case, attention, (dout, q, k, v))


def _flash_attention_3(case: Case, x: Inputs) -> Call:
    """The wheel flash-attn3-jax, as FlashAttention-3 has no other; same memory as above.

    JAX has a stream of its own. DLPack orders it with ours on the GPU, without the host waiting:
    the first input, handed over in each call, makes JAX's stream wait for the event before the
    call, and taking the results makes our stream wait for JAX before the event after it. So the
    time is that of the kernels and of two waits between streams. JAX compiles in `prepare`.
    """
    if case.dtype not in ("float16", "bfloat16"):
        raise Refused("16-bit dtypes only")
    if (case.d, case.dv) != (128, 128):
        raise Refused("the wheel has kernels of width 128 only")
    os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")  # JAX would take 75 % of it
    import jax
    import torch
    from flash_attn3_jax import flash_mha

    dout, q, k, v = (_tensor(a).transpose(1, 2).contiguous() for a in x)
    leaves = [jax.dlpack.from_dlpack(t) for t in (q, k, v)]
    attention = jax.jit(functools.partial(flash_mha, is_causal=case.causal))
    work, first, rest = attention, q, leaves[1:]
    if case.backward:  # what jax.vjp returns is a tree of the arrays saved by the forward pass
        work, first, rest = jax.jit(lambda a, pull: pull(a)), dout, [jax.vjp(attention, *leaves)[1]]

    def call() -> Any:
        results = work(jax.dlpack.from_dlpack(first), *rest)
        return jax.tree.map(lambda a: torch.from_dlpack(a).transpose(1, 2), results)

    call()
    return call


def _torch_call(case: Case, attention: Call, tensors: tuple) -> Call:
    """`attention`, or the gradients of its result; it has been called once."""
    import torch

    dout, *leaves = tensors
    for leaf in leaves if case.backward else ():
        leaf.requires_grad_()
    out = attention()
    if not case.backward:
        return attention
    return lambda: torch.autograd.grad(out, leaves, dout, retain_graph=True)


def _tensor(a: Any) -> Any:
    """The same memory as a PyTorch tensor; bfloat16 goes as its bits, as not all can name it."""
    import torch

    if a.dtype.name == "bfloat16":
        return torch.from_dlpack(a.view(np.int16)).view(torch.bfloat16)
    return torch.from_dlpack(a)
