"""Which pyinfer is tested: said in the head of every run, and the one that child processes find too."""

import importlib.util
import os
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest

import pyinfer
from pyinfer import backend

FOLDER = Path(pyinfer.__file__).parent

# The GPU's extension is built on macOS, and in metal_host/, which has tests of its own.
collect_ignore = ["metal_host"]
if importlib.util.find_spec("pyinfer._metal") is None:
    collect_ignore.append("test_metal.py")

# A shell that starts the tests in the background has interrupts ignored, and child processes inherit that.
signal.signal(signal.SIGINT, signal.default_int_handler)


def pytest_report_header() -> str:
    return f"pyinfer: {FOLDER}, level {backend.create('simd').level}, numerics {pyinfer.NUMERICS}"


@pytest.fixture(autouse=True, scope="session")
def children_find_the_same(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Not at the top of the repository: there `python -c` takes its pyinfer, which is not compiled."""
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(tmp_path_factory.mktemp("empty"))
        patch.setenv("PYTHONPATH", str(FOLDER.parent), prepend=os.pathsep)
        yield
