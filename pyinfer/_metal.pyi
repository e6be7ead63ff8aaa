"""The GPU of a Mac as cffi builds it: `lib` has what csrc/metal/shim.h declares. Only there on macOS."""

from typing import Any

ffi: Any
lib: Any
