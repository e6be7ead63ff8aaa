"""A pyinfer with the metal backend on Linux: python tests/metal_host/build.py FOLDER, then PYTHONPATH=FOLDER.

The package is what setup.py builds (or, given as a second argument, a _pi.abi3.so that it has built);
beside it comes `pyinfer._metal`, of the shipped shim and kernels as they are, against the stand-in. Needs
clang 16, GNUstep's base library and gcc's Objective-C runtime (tools/metal.sh installs them by name); runs
in an environment with pyinfer's build requirements.
"""

import os
import runpy
import shlex
import shutil
import subprocess
import sys
import sysconfig
from collections.abc import Sequence
from pathlib import Path

HERE = Path(__file__).resolve().parent
TOP = HERE.parents[1]
CLANG = os.environ.get("METAL_HOST_CC", "clang-16")


def objc_flags() -> list[str]:
    """To compile Objective-C for GNUstep, with this folder's Metal/Metal.h."""
    said = subprocess.run(["gnustep-config", "--objc-flags"], check=True, capture_output=True, text=True)
    flags = [f for f in shlex.split(said.stdout) if f not in ("-MMD", "-MP", "-g", "-I.")]
    cc1obj = subprocess.run(["gcc", "-print-file-name=include"], check=True, capture_output=True, text=True)
    return [*flags, f"-I{HERE}", "-idirafter", cc1obj.stdout.strip()]


def link(out: Path, sources: Sequence[Path], *flags: str) -> None:
    """The sources and the stand-in, as a shared library or, without `-shared` among the flags, a program."""
    temp = out.parent / f"{out.name}.objects"
    temp.mkdir(parents=True, exist_ok=True)
    warn = ["-Wall", "-Wextra", "-Werror", "-Wno-unknown-pragmas", "-O2", "-fPIC", "-g1"]
    objects = []
    for source in [*sources, HERE / "metal.m", HERE / "dispatch.c"]:
        objects.append(str(temp / f"{source.stem}.o"))
        of = [*objc_flags(), f'-DMETAL_HOST_FOLDER="{HERE}"'] if source.suffix == ".m" else ["-std=gnu11"]
        own = [f for f in flags if f.startswith(("-I", "-D"))]
        subprocess.run([CLANG, *of, *warn, *own, "-c", str(source), "-o", objects[-1]], check=True)
    command = [CLANG, *objects, *flags, "-pthread", "-lgnustep-base", "-lobjc", "-ldl", "-o", str(out)]
    subprocess.run(command, check=True)
    shutil.rmtree(temp)


def build(folder: Path, pi: Path | None = None) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    package = folder / "pyinfer"
    shutil.copytree(
        TOP / "pyinfer", package, ignore=shutil.ignore_patterns("*.so", "__pycache__"), dirs_exist_ok=True
    )
    if pi is not None:
        shutil.copy(pi, package)
    else:
        where = ["--build-lib", str(folder), "--build-temp", str(folder / "objects")]
        subprocess.run([sys.executable, "setup.py", "-q", "build_ext", *where], cwd=TOP, check=True)
    os.chdir(TOP)  # as setup.py has it, for the paths in ffi.py
    ffi = runpy.run_path("csrc/metal/ffi.py")["ffi"]
    c_file = folder / "_metal.c"
    ffi.emit_c_code(str(c_file))
    flags = ["-shared", "-Icsrc/metal", f"-I{sysconfig.get_path('include')}", "-DPy_LIMITED_API=0x030a0000"]
    link(package / "_metal.abi3.so", [c_file, TOP / "csrc/metal/shim.m"], *flags)


if __name__ == "__main__":
    if len(sys.argv) not in (2, 3):
        sys.exit("usage: build.py FOLDER [_pi.abi3.so]")
    build(*(Path(argument).resolve() for argument in sys.argv[1:]))
