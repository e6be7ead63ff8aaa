"""Runs GGUF language models with the same logits, to the byte, on every machine and at every setting.

>>> import pyinfer
>>> with pyinfer.load("smollm2") as model:
...     print(model.generate("The capital of France is", max_tokens=8).text)
"""

from __future__ import annotations

from importlib.util import find_spec
from typing import TYPE_CHECKING, Any

from .errors import (
    BackendError,
    CacheFullError,
    ChatError,
    ClosedError,
    ContextOverflowError,
    FetchError,
    InputError,
    ModelError,
    NonFiniteLogitsError,
    OutOfMemoryError,
    PyinferError,
)

if TYPE_CHECKING:
    from .api import Chunk, Generation, Metrics, Model, load
    from .backend import backends

if find_spec("pyinfer._pi") is None:
    raise ImportError(
        f"{__path__[0]} is source that was not compiled: start Python in another folder, for a pyinfer that "
        "is installed, or compile this one by `python setup.py build_ext --inplace`"
    )

NUMERICS = 1  # the version of csrc/NUMERICS.md that this build follows

__all__ = [
    "NUMERICS",
    "BackendError",
    "CacheFullError",
    "ChatError",
    "Chunk",
    "ClosedError",
    "ContextOverflowError",
    "FetchError",
    "Generation",
    "InputError",
    "Metrics",
    "Model",
    "ModelError",
    "NonFiniteLogitsError",
    "OutOfMemoryError",
    "PyinferError",
    "backends",
    "load",
]


def __getattr__(name: str) -> Any:
    """NumPy, tokenizers and the C library are imported when needed, so that `pyinfer --help` is quick."""
    if name == "backends":
        from .backend import backends

        return backends
    if name in __all__:
        from . import api

        return getattr(api, name)
    raise AttributeError(f"module 'pyinfer' has no attribute {name!r}")
