"""One run of every kernel test for each instruction-set level that this machine has."""

from __future__ import annotations

import pytest
from kernels.harness import LEVELS, Native


@pytest.fixture(scope="session", params=LEVELS)
def native(request: pytest.FixtureRequest) -> Native:
    return Native(request.param)
