"""How far float32 attention is off when its products are made of 16-bit ones on tensor cores.

    python bench/float32_split.py [--keys 512 4096] [--width 64] [--scale 1 30 1000] [--backward]

NumPy only. Tensor cores are modelled as they have been found to add (Fasi et al. 2021, PeerJ
Comput. Sci. 7:e330, for V100 and A100; Hopper keeps one bit more): of 16 products and the
accumulator each is cut off 25 bits below the largest one's exponent, and the sum is cut to float32.
All errors are against float64; `float32` is the materialised formula, NumPy's own products.
"""

from __future__ import annotations

import argparse

import numpy as np

STEP = 16  # products that an instruction adds at a time
KEPT = 25  # bits behind the leading one of the largest


def bf16(x):
    bits = np.float32(x).view(np.uint32).astype(np.uint64)
    return ((bits + 0x7FFF + (bits >> 16 & 1)) >> 16 << 16).astype(np.uint32).view(np.float32)


def fp16(x):
    return np.float32(x).astype(np.float16).astype(np.float32)


def tf32(x):
    bits = np.float32(x).view(np.uint32).astype(np.uint64)
    return ((bits + 0xFFF + (bits >> 13 & 1)) >> 13 << 13).astype(np.uint32).view(np.float32)


def split(x, rounded, parts, axis):
    """`x` as a sum of `parts` rounded arrays, times a power of two for each row along `axis`."""
    top = np.abs(x).max(axis, keepdims=True)
    power = np.minimum(15 - np.frexp(top)[1], 100) if rounded is fp16 else 0
    factor = np.ldexp(np.ones_like(top), power)
    left, result = x * factor, []
    for _ in range(parts):
        result.append(rounded(left))
        left = left - result[-1]
    return result, 1 / factor


def cut(x, exponent):
    """`x` without what lies below 2^exponent."""
    return np.ldexp(np.trunc(np.ldexp(x, -exponent)), exponent)


def multiply(c, a, b):
    """c + a b^T as tensor cores add; c float64 holding float32 numbers."""
    for k in range(0, a.shape[-1], STEP):
        terms = a[:, None, k : k + STEP].astype("f8") * b[None, :, k : k + STEP]
        tops = np.maximum(np.abs(terms).max(-1), np.abs(c))
        exponent = np.frexp(tops)[1] - 1 - KEPT
        c = cut(terms, exponent[..., None]).sum(-1) + cut(c, exponent)
        c = cut(c, np.frexp(c)[1] - 24)  # to float32, toward 0
    return c


def product(a, b, orders):
    """Sum of products of parts, the small ones first."""
    c = np.zeros((a[0].shape[0], b[0].shape[0]))
    for i, j in orders:
        c = multiply(c, a[i], b[j])
    return c.astype(np.float32)


SCHEMES = {
    "bf16x3": (bf16, [(1, 0), (0, 1), (0, 0)]),
    "bf16x6": (bf16, [(2, 0), (1, 1), (0, 2), (1, 0), (0, 1), (0, 0)]),
    "bf16x9": (bf16, [(2, 2), (2, 1), (1, 2), (2, 0), (1, 1), (0, 2), (1, 0), (0, 1), (0, 0)]),
    "fp16x1": (fp16, [(0, 0)]),
    "fp16x3": (fp16, [(1, 0), (0, 1), (0, 0)]),
    "fp16x4": (fp16, [(1, 1), (1, 0), (0, 1), (0, 0)]),
    "tf32x1": (tf32, [(0, 0)]),
    "tf32x3": (tf32, [(1, 0), (0, 1), (0, 0)]),
}


def attention(q, k, v, rounded, orders, block, outside=True):
    """The tiled forward pass; `outside`: P V of a block begins with 0, and is added in float32."""
    parts = max(map(max, orders)) + 1
    unit = np.float32(q.shape[1] ** -0.5 * np.log2(np.e))
    (q_parts, q_factor), out = split(q, rounded, parts, 1), np.zeros((len(q), v.shape[1]), "f4")
    top, total = np.full((len(q), 1), -np.inf, "f4"), np.zeros((len(q), 1), "f4")
    for k0 in range(0, len(k), block):
        k_parts, k_factor = split(k[k0 : k0 + block], rounded, parts, 1)
        v_parts, v_factor = split(v[k0 : k0 + block], rounded, parts, 0)
        if not outside:
            v_parts, v_factor = split(v[k0 : k0 + block], rounded, parts, None)
        s = product(q_parts, k_parts, orders) * q_factor * k_factor.T
        new = np.maximum(top, s.max(1, keepdims=True))
        rescale = np.exp2((top - new) * unit)
        p = np.exp2((s - new) * unit)
        total, out, top = total * rescale + p.sum(1, keepdims=True, dtype="f4"), out * rescale, new
        p_parts, p_factor = split(p, rounded, parts, 1)
        if rounded is fp16:  # a factor for all rows
            p_parts, p_factor = split(np.c_[p, np.ones(len(p), "f4")], rounded, parts, None)
            p_parts = [part[:, :-1] for part in p_parts]
        v_parts = [np.ascontiguousarray(part.T) for part in v_parts]
        if outside:
            out = out + product(p_parts, v_parts, orders) * (p_factor * v_factor)
        else:
            c = out.astype("f8") / (p_factor * v_factor)
            for i, j in orders:
                c = multiply(c, p_parts[i], v_parts[j])
            out = (c * (p_factor * v_factor)).astype("f4")
    return out / total


def gradients(q, k, v, dout, out, lse, rounded, orders, block, weighted=True):
    """The two backward passes: dq, dk and dv. `weighted`: P of a row is made to sum to 1."""
    parts, scale = max(map(max, orders)) + 1, np.float32(q.shape[1] ** -0.5)
    of_q, of_k, of_v, of_dout = (split(x, rounded, parts, 1) for x in (q, k, v, dout))
    delta, weight = (dout * out).sum(1, keepdims=True), np.ones_like(lse)
    dq, dk, dv = (np.zeros(x.shape, "f4") for x in (q, k, v))
    tiles = [(i, j) for i in blocks(len(q), block) for j in blocks(len(k), block)]

    def rows_product(a, rows, b, keys, factor):
        c = product([x[rows] for x in a[0]], [x[keys] for x in b[0]], orders)
        return c * a[1][rows] * (b[1][keys].T * factor)

    def summed(left, right, rows):  # left^T right, a sum over these rows
        left_parts, factor = split(left.T, rounded, parts, 1)
        right_parts = [np.ascontiguousarray(x[rows].T) for x in right[0]]
        return product(left_parts, right_parts, orders) * factor

    def probabilities(rows, keys):
        s = rows_product(of_q, rows, of_k, keys, scale)
        return np.exp2((s - lse[rows]) * np.float32(np.log2(np.e)))

    if weighted:
        total = np.zeros_like(lse)
        for rows, keys in tiles:
            total[rows] += probabilities(rows, keys).sum(1, keepdims=True)
        weight = 1 / total
    for rows, keys in tiles:
        p = probabilities(rows, keys) * weight[rows]
        ds = p * (rows_product(of_dout, rows, of_v, keys, np.float32(1)) - delta[rows])
        dv[keys] += summed(p * of_dout[1][rows], of_dout, rows)
        dk[keys] += summed(ds * of_q[1][rows], of_q, rows)
        dq[rows] += summed((ds * of_k[1][keys].T).T, of_k, keys)
    return dq * scale, dk * scale, dv


def blocks(length, size):
    return [slice(i, i + size) for i in range(0, length, size)]


def materialised_gradients(q, k, v, dout):
    scale = q.dtype.type(q.shape[1] ** -0.5)
    s = q @ k.T * scale
    p = np.exp(s - s.max(1, keepdims=True))
    p /= p.sum(1, keepdims=True)
    ds = p * (dout @ v.T - (dout * (p @ v)).sum(1, keepdims=True))
    return ds @ k * scale, ds.T @ q * scale, p.T @ dout


def compare_gradients(q, k, v, dout, schemes):
    wide = [x.astype("f8") for x in (q, k, v, dout)]
    right = materialised_gradients(*wide)
    s = wide[0] @ wide[1].T * q.shape[1] ** -0.5
    top = s.max(1, keepdims=True)
    lse = (top + np.log(np.exp(s - top).sum(1, keepdims=True))).astype("f4")
    out = materialised(*wide[:3]).astype("f4")

    def errors(grads):
        pairs = [x - y for x, y in zip(grads, right, strict=True)]
        return [(np.abs(x).max(), np.sqrt(np.square(x).mean())) for x in pairs]

    plain = errors(materialised_gradients(q, k, v, dout))
    for name in schemes:
        for weighted in (True, False):
            found = errors(gradients(q, k, v, dout, out, lse, *SCHEMES[name], 64, weighted))
            ratios = [
                f"{a / c:.2f} ({b / d:.2f})" for (a, b), (c, d) in zip(found, plain, strict=True)
            ]
            note = "" if weighted else ", P as lse has it"
            print(f"  {name}{note}: dq, dk, dv {', '.join(ratios)}", flush=True)


def materialised(q, k, v):
    s = q @ k.T * q.dtype.type(q.shape[1] ** -0.5)
    p = np.exp(s - s.max(1, keepdims=True))
    return p / p.sum(1, keepdims=True) @ v


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--keys", type=int, nargs="+", default=[512, 4096])
    parser.add_argument("--width", type=int, nargs="+", default=[64, 128])
    parser.add_argument("--scale", type=float, nargs="+", default=[1, 30, 1000])
    parser.add_argument("--queries", type=int, default=16)
    parser.add_argument("--schemes", nargs="+", default=list(SCHEMES))
    parser.add_argument("--backward", action="store_true")
    parser.add_argument("--inside", action="store_true", help="sums of P V in tensor cores alone")
    options = parser.parse_args()
    print("largest (and root mean square) error, in those of the materialised float32 formula")
    for width in options.width:
        for keys in options.keys:
            for scale in options.scale:
                rng = np.random.default_rng([width, keys])
                q, k, v = (rng.standard_normal((n, width)) for n in (options.queries, keys, keys))
                q = q * scale
                q, k, v = (x.astype("f4") for x in (q, k, v))
                if options.backward:
                    print(f"d={width} keys={keys} scale={scale:g}")
                    dout = rng.standard_normal((len(q), width)).astype("f4")
                    compare_gradients(q, k, v, dout, options.schemes)
                    continue
                right = materialised(*(x.astype("f8") for x in (q, k, v)))

                def errors(x, right=right):
                    return np.abs(x - right).max(), np.sqrt(np.square(x - right).mean())

                plain = errors(materialised(q, k, v))
                print(
                    f"d={width} keys={keys} scale={scale:g}: float32 {plain[0]:.2e} {plain[1]:.2e}"
                )
                for name in options.schemes:
                    rounded, orders = SCHEMES[name]
                    e = errors(attention(q, k, v, rounded, orders, 64, not options.inside))
                    print(f"  {name} {e[0] / plain[0]:.2f} ({e[1] / plain[1]:.2f})", flush=True)


if __name__ == "__main__":
    main()
