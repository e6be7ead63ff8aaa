"""Backends by name. Every one gives the same bytes; they differ in speed."""

from __future__ import annotations

import sys

from ..errors import BackendError
from .base import COARSE, Backend, unfused
from .cpus import default_threads
from .kv import KVBufferView
from .tracing import TracingBackend

NAMES = ("reference", "scalar", "simd", "parallel", "metal")
MAX_THREADS = 256


def create(name: str = "auto", threads: int | None = None) -> Backend:
    """A backend: "reference" (NumPy), "scalar" (plain C), "simd" (the best instruction set), "parallel"
    (that, on `threads` threads; None: one per physical core), "metal" (an Apple GPU; `threads` for what runs
    beside it). "auto" is parallel.

    The environment variable PYINFER_CPU forces the instruction-set level of simd and parallel. Raises
    BackendError for a name or level that is unknown or unavailable, and for a thread count that is out of
    range.
    """
    if name == "auto":
        name = "parallel"
    if name not in NAMES:
        raise BackendError(f"there is no backend {name!r}; there are auto, {', '.join(NAMES)}")
    check_threads(threads)
    if name == "metal":
        return _metal(threads)
    if name != "parallel" and threads not in (None, 1):
        raise BackendError(f"backend {name} runs on one thread; for {threads} threads use backend parallel")
    if name == "reference":
        from .reference import ReferenceBackend

        return ReferenceBackend()
    from .native import NativeBackend, chosen_level

    if name == "scalar":
        return NativeBackend(name, "ref", 1)
    return NativeBackend(name, chosen_level(), 1 if name == "simd" else threads or default_threads())


def _metal(threads: int | None) -> Backend:
    try:
        from .metal import MetalBackend
    except ImportError:  # its extension is built on macOS
        why = "not built" if sys.platform == "darwin" else "not macOS"
        raise BackendError(f"backend metal: {why}") from None
    return MetalBackend(threads)


def check_threads(threads: int | None) -> None:
    """Raises BackendError for a count that is out of range."""
    if threads is not None and (not isinstance(threads, int) or not 1 <= threads <= MAX_THREADS):
        raise BackendError(f"threads={threads!r}: give a whole number from 1 to {MAX_THREADS}")


def backends() -> dict[str, str]:
    """Name of every backend to "available", or "unavailable: " and why."""
    found = {}
    for name in NAMES:
        try:
            create(name)
            found[name] = "available"
        except (BackendError, ImportError) as error:
            found[name] = "unavailable: " + str(error).removeprefix(f"backend {name}: ")
    return found


__all__ = [
    "COARSE",
    "NAMES",
    "Backend",
    "KVBufferView",
    "TracingBackend",
    "backends",
    "check_threads",
    "create",
    "default_threads",
    "unfused",
]
