"""Exact attention for NumPy and CuPy arrays, tiled so that the S x S matrix never exists."""

from .api import (
    AttentionGrads,
    flash_attention,
    flash_attention_grad,
    merge_attention,
    warmup,
)
from .numpy_backend import trace
from .reference import attention_reference, attention_reference_grad

__version__ = "0.1.0"
__all__ = [
    "AttentionGrads",
    "attention_reference",
    "attention_reference_grad",
    "flash_attention",
    "flash_attention_grad",
    "merge_attention",
    "trace",
    "warmup",
]
