"""The cffi builder of `pyinfer._metal`: shim.h is both compiled and read as declarations, the kernels go in
as one text.

An extension of its own, so that `pyinfer._pi` is the same everywhere. Built by setup.py on macOS.
"""

import re
import struct
from pathlib import Path

from cffi import FFI

HERE = Path("csrc/metal")
FILES = ["common.metal", "rows.metal", "matmul.metal", "attention.metal"]


def exp_constants() -> str:
    """exp_const.h for Metal, whose language has no hexadecimal floats: by their bits."""
    found = re.findall(
        r"#define PI_(\w+) +\((-?0x[\d.a-f]+p[-+]\d+)f\)", Path("csrc/exp_const.h").read_text()
    )
    bits = {name: struct.unpack("<I", struct.pack("<f", float.fromhex(value)))[0] for name, value in found}
    return "".join(f"#define {name} as_type<float>(0x{u:08x}u)\n" for name, u in bits.items())


def source() -> str:
    """All kernels. The compiler names file and line of what it does not like."""
    texts = [exp_constants()]
    texts += [f'#line 1 "{name}"\n{(HERE / name).read_text()}' for name in FILES]
    return "".join(texts)


def c_string(text: str) -> str:
    """As C source, which keeps its line breaks."""
    lines = [line.replace("\\", r"\\").replace('"', r"\"") for line in text.split("\n")]
    return "\n".join(f'"{line}\\n"' for line in lines)


HEAD = """
#include <stdint.h>
#include "shim.h"
const char *pi_gpu_source(void) { return
"""

ffi = FFI()
ffi.cdef((HERE / "shim.h").read_text())
ffi.set_source(
    "pyinfer._metal",
    f"{HEAD}{c_string(source())};\n}}\n",
    sources=[str(HERE / "shim.m")],
    depends=[str(HERE / "shim.h"), *(str(HERE / name) for name in FILES)],
    include_dirs=[str(HERE)],
    extra_compile_args=["-O2", "-g0", "-Wall", "-Wextra", "-fvisibility=hidden"],
    extra_link_args=["-framework", "Metal", "-framework", "Foundation"],
)
