"""Benchmarks: the option --threads, and a table of rates by level after pytest-benchmark's own of times."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable
from functools import cache
from typing import Any

import pytest

from pyinfer.backend.native import NativeBackend, levels

LEVELS = [name for name, runs in levels().items() if runs]
RATES = pytest.StashKey[dict[str, dict[str, str]]]()  # op, type and shape -> level -> rate


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--threads", type=int, default=1, help="threads of the backend under benchmark (1)")


def pytest_configure(config: pytest.Config) -> None:
    config.stash[RATES] = defaultdict(dict)


@pytest.hookimpl(trylast=True)  # after the marks: the level is what varies fastest, and comes last in the id
def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """Every benchmark runs at every level of this machine, so that one table compares them."""
    metafunc.parametrize("level", LEVELS)


@cache
def backend(level: str, threads: int) -> NativeBackend:
    return NativeBackend("bench", level, threads)


@pytest.fixture
def ops(level: str, request: pytest.FixtureRequest) -> NativeBackend:
    return backend(level, request.config.getoption("--threads"))


Measure = Callable[[Callable[[], Any], float, str], None]


@pytest.fixture
def measure(benchmark: Any, level: str, request: pytest.FixtureRequest) -> Measure:
    """measure(run, work, unit): times run(), and notes its rate in the fastest round: work, in units of 1e9,
    per second.

    The fastest, because whatever else the machine does can only make a round slower.
    """

    def run(function: Callable[[], Any], work: float, unit: str) -> None:
        name = request.node.name.replace(f"-{level}]", "]").removeprefix("test_")
        benchmark.group = name.partition("[")[0]
        benchmark(function)
        if benchmark.stats is not None:  # None with --benchmark-disable
            rate = work / benchmark.stats.stats.min / 1e9
            benchmark.extra_info[unit] = round(rate, 2)
            request.config.stash[RATES][f"{name} {unit}"][level] = f"{rate:.1f}"

    return run


@pytest.hookimpl(trylast=True)
def pytest_terminal_summary(terminalreporter: Any, config: pytest.Config) -> None:
    rates = config.stash[RATES]
    if not rates:
        return
    width = max(map(len, rates))
    terminalreporter.section(f"rates in the fastest round, {config.getoption('--threads')} thread(s)")
    terminalreporter.write_line(" " * width + "".join(f"{level:>12}" for level in LEVELS))
    for name, by_level in rates.items():
        terminalreporter.write_line(f"{name:{width}}" + "".join(f"{by_level.get(n, ''):>12}" for n in LEVELS))
