"""How many threads are worth starting: physical cores, within the affinity and the cgroup quota."""

from __future__ import annotations

import math
import os
import subprocess
import sys
from pathlib import Path


def default_threads() -> int:
    """At least 1."""
    if sys.platform == "darwin":
        return _performance_cores() or os.cpu_count() or 1
    allowed = os.sched_getaffinity(0) if hasattr(os, "sched_getaffinity") else set(range(os.cpu_count() or 1))
    cores = {_siblings(cpu) for cpu in allowed}
    return max(1, min(len(cores), _quota()))


def _siblings(cpu: int) -> str:
    """A name of the core that a logical CPU belongs to."""
    try:
        return Path(f"/sys/devices/system/cpu/cpu{cpu}/topology/thread_siblings_list").read_text()
    except OSError:
        return str(cpu)


def _quota() -> int:
    """Whole CPUs that the cgroups, this one and those above it, leave to the process; a large number without
    one.
    """
    best = 1 << 20
    try:
        for line in Path("/proc/self/cgroup").read_text().splitlines():
            _, controllers, path = line.split(":", 2)
            if controllers == "":
                root = Path("/sys/fs/cgroup")
            elif "cpu" in controllers.split(","):
                root = Path("/sys/fs/cgroup") / controllers
            else:
                continue
            here = root / path.lstrip("/")
            for folder in (here, *here.parents):
                best = min(best, _quota_of(folder))
                if folder == root:
                    break
    except (OSError, ValueError):
        pass
    return best


def _quota_of(folder: Path) -> int:
    try:
        if (file := folder / "cpu.max").exists():  # version 2: "max 100000" or "150000 100000"
            quota, period = file.read_text().split()
        else:
            quota = (folder / "cpu.cfs_quota_us").read_text().strip()
            period = (folder / "cpu.cfs_period_us").read_text().strip()
    except (OSError, ValueError):
        return 1 << 20
    return 1 << 20 if quota in ("max", "-1") else max(1, math.ceil(int(quota) / int(period)))


def _performance_cores() -> int:
    try:
        out = subprocess.run(
            ["sysctl", "-n", "hw.perflevel0.physicalcpu"],
            capture_output=True,
            text=True,
            check=True,
            timeout=5,
        )
        return int(out.stdout)
    except (OSError, ValueError, subprocess.SubprocessError):
        return 0
