"""From the files in cuda_src/ to kernels: one string per variant, compiled on first use.

CuPy's kernel cache does not look into headers that an -I finds, so includes are written into the
one string that it hashes; `#line` keeps the real file names in errors and profilers.
"""

from __future__ import annotations

import functools
import logging
import re
import time
from pathlib import Path
from typing import Any

_HERE = Path(__file__).resolve().parent
#: Beside the package when installed, beside its folder in a checkout.
SOURCES = _HERE / "cuda_src" if (_HERE / "cuda_src").is_dir() else _HERE.parent / "cuda_src"

log = logging.getLogger("cuflash")

Macros = tuple[tuple[str, Any], ...]


@functools.cache
def source(name: str) -> str:
    """The text of a file with its includes written out, each once."""
    return _inlined(name, set())


def _inlined(name: str, seen: set[str]) -> str:
    lines = [f'#line 1 "{name}"']
    for number, line in enumerate((SOURCES / name).read_text().splitlines(), 1):
        include = re.fullmatch(r'#include "(.+)"', line)
        if include is None:
            lines.append("" if line == "#pragma once" else line)
            continue
        if include[1] not in seen:
            seen.add(include[1])
            lines.append(_inlined(include[1], seen))
        lines.append(f'#line {number + 1} "{name}"')
    return "\n".join(lines)


def kernel(name: str, entry: str, macros: Macros, shared_bytes: int) -> Any:
    """The kernel `entry` of file `name`, on the current device, compiled or from CuPy's cache."""
    import cupy

    # sm90: what only Hopper's own instruction set has. CuPy names the plain architecture otherwise.
    arch = ("-arch=sm_90a",) if "sm90" in name else ()
    options = ("-std=c++17", *arch, *(f"-D{key}={value}" for key, value in macros))
    start = time.perf_counter()
    function = cupy.RawModule(code=source(name), options=options).get_function(entry)
    function.max_dynamic_shared_size_bytes = shared_bytes
    variant = " ".join(f"{key}={value}" for key, value in macros)
    log.info("%s of %s (%s): %.2f s", entry, name, variant, time.perf_counter() - start)
    return function


def cubin(name: str, macros: Macros, arch: str) -> tuple[bytes, str]:
    """Machine code for `arch` ("sm_90a") and the compiler's log; needs cuda-core and no GPU."""
    import io

    from cuda.core import Program, ProgramOptions

    options = ProgramOptions(
        arch=arch,
        std="c++17",
        ftz=True,  # as CuPy compiles
        define_macro=[f"{key}={value}" for key, value in macros],
        ptxas_options=["-v"],
    )
    messages = io.StringIO()
    code = Program(source(name), "c++", options).compile("cubin", logs=messages).code
    return bytes(code), messages.getvalue()
