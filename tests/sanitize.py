"""A few small launches of the CUDA kernels, to run under compute-sanitizer (`make sanitize`).

Each array has its own allocation, so that a step beyond it is one that memcheck sees. With
`portable` as an argument, Hopper's 16-bit kernels and those of wide heads in float32 are left out:
initcheck does not see what tensor and bulk copies store, and reports row_delta, store_dq and CuPy's
own kernels for reading it. With `unclustered`, those in clusters of blocks: under racecheck they
end in an internal error of the sanitizer, though it leaves them out.
"""

from __future__ import annotations

import sys

from cases import Run, case, config_on, on_hopper, portable_config

from cuflash import cuda_tiles, cuda_variants

CASES = [
    case(70, 150, d=64, dv=64, dtype="bfloat16", layout="contiguous", causal=True),
    case(65, 49, d=24, dv=40, dtype="float16", window=(9, 3)),
    case(150, 70, d=128, dv=128, batch=1, heads=2, heads_kv=1, dtype="float16",
         layout="contiguous", softcap=2.0),
    case(170, 4100, d=128, dv=128, batch=1, heads=1, heads_kv=1, dtype="bfloat16",
         layout="contiguous"),
    case(33, 40, d=256, dv=192, batch=1, heads=1, heads_kv=1, dtype="bfloat16",
         layout="contiguous"),
    # More tiles than multiprocessors: blocks take several.
    case(40, 50, d=64, dv=64, batch=1, heads=140, heads_kv=140, dtype="bfloat16",
         layout="contiguous"),
    case(40, 50, d=128, dv=128, batch=1, heads=140, heads_kv=140, dtype="float32",
         layout="contiguous"),
    case(70, 150, d=64, dv=64, dtype="float64", layout="contiguous", causal=True),
    case(150, 70, d=96, dv=128, batch=1, heads=2, heads_kv=1, dtype="float64",
         layout="contiguous", window=(60, 9)),
    case(40, 150, d=264, dv=320, batch=1, heads=1, heads_kv=1, dtype="float64",
         layout="contiguous", causal=True),
    case(40, 150, d=520, dv=600, batch=1, heads=1, heads_kv=1, dtype="float64",
         layout="contiguous", window=(60, 9)),
    case(70, 150, d=320, dv=264, batch=1, heads=2, heads_kv=1, dtype="bfloat16",
         layout="contiguous", causal=True),
    case(40, 150, d=264, dv=320, batch=1, heads=1, heads_kv=1, dtype="float32",
         layout="contiguous", window=(60, 9)),
    case(0, 5, d=64, dv=64, dtype="float16"),
]  # fmt: skip

if __name__ == "__main__":
    import cupy

    cupy.cuda.set_allocator(None)
    for c in CASES:
        run = Run(c, cupy)
        configs = [None, portable_config(c.dtype, c.d, c.dv)] if on_hopper() else [None]
        tiles = config_on(90, 227, c.dtype, c.d, c.dv).backward
        unseen = c.dtype in cuda_variants.ELEMENTS or isinstance(tiles, cuda_tiles.WideHopper)
        clustered = isinstance(tiles, cuda_tiles.HopperDoubleBackward) and tiles.cluster > 1
        if ("portable" in sys.argv and unseen) or ("unclustered" in sys.argv and clustered):
            configs = configs[-1:]
        for config in configs:
            out, lse = run.forward(backend="cuda", config=config)
            grads = run.backward(out, lse, backend="cuda", config=config)
            cupy.cuda.Device().synchronize()
            assert c.sq == 0 or all(bool(cupy.isfinite(g.astype("float32")).all()) for g in grads)
            print(c, config, flush=True)
