"""Says in the head of every test run which pyinfer is tested, and at which instruction-set level."""

from pathlib import Path

import pyinfer
from pyinfer import backend


def pytest_report_header() -> str:
    level = backend.create("simd").level
    return f"pyinfer: {Path(pyinfer.__file__).parent}, level {level}, numerics {pyinfer.NUMERICS}"
