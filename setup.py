"""Builds the C library as one cffi extension (csrc/ffi.py), and on macOS the Metal shim as another
(csrc/metal/ffi.py); all else of the package is in pyproject.toml.
"""

import sys
from multiprocessing.pool import ThreadPool
from typing import Any

from setuptools import setup
from setuptools.command.build_ext import build_ext


class BuildExt(build_ext):
    """Compiles the files of the extension side by side: setuptools takes one after the other."""

    def build_extensions(self) -> None:
        one_by_one = self.compiler.compile

        def side_by_side(sources: list[str], **options: Any) -> list[str]:
            with ThreadPool() as pool:
                objects = pool.map(lambda source: one_by_one([source], **options), sources, chunksize=1)
            return [name for names in objects for name in names]

        self.compiler.compile = side_by_side
        super().build_extensions()


setup(
    cmdclass={"build_ext": BuildExt},
    cffi_modules=["csrc/ffi.py:ffi", *(["csrc/metal/ffi.py:ffi"] if sys.platform == "darwin" else [])],
    options={"bdist_wheel": {"py_limited_api": "cp310"}},
)
