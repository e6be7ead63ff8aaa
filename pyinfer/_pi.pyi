"""The C library as cffi builds it: `lib` has what csrc/api.h declares, and no types that Python can check."""

from typing import Any

ffi: Any
lib: Any
