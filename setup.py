"""Builds the C library as one cffi extension (csrc/ffi.py); everything else about the package is in
pyproject.toml.
"""

from setuptools import setup

setup(
    cffi_modules=["csrc/ffi.py:ffi"],
    options={"bdist_wheel": {"py_limited_api": "cp310"}},
)
