"""The cffi builder of `pyinfer._pi`: api.h is both compiled and read as declarations, every C file here is
globbed.

One set of flags for all files; what needs more than the baseline CPU says so in its source (pi.h, target
regions). PYINFER_CFLAGS adds flags, for development: -Werror, -O0, sanitizers.
"""

import os
import shlex
from pathlib import Path

from cffi import FFI

CSRC = Path("csrc")
CFLAGS = [
    "-std=gnu11",
    "-O3",
    "-g0",  # Python asks for debug information, which doubles the time and the size
    "-Wall",
    "-Wextra",
    "-Wno-unknown-pragmas",
    "-ffp-contract=off",  # the order law: a fused multiply-add only where one is written
    "-fno-fast-math",  # whatever the user's CFLAGS say
    "-fvisibility=hidden",
    "-pthread",
]
extra = shlex.split(os.environ.get("PYINFER_CFLAGS", ""))

ffi = FFI()
ffi.cdef((CSRC / "api.h").read_text())
ffi.set_source(
    "pyinfer._pi",
    '#include <stdint.h>\n#include "api.h"',
    sources=sorted(str(p) for p in CSRC.rglob("*.c")),
    depends=sorted(str(p) for p in CSRC.rglob("*.h")),
    include_dirs=[str(CSRC)],
    extra_compile_args=CFLAGS + extra,
    extra_link_args=["-pthread", *extra],
)
