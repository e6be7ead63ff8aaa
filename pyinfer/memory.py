"""How much memory this process may still take, by the system and by the control groups that it is in; and
giving back what it no longer uses.
"""

from __future__ import annotations

import contextlib
import ctypes
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

from .errors import OutOfMemoryError

ROOT = Path("/")  # of /proc and /sys
PAGE_CACHE = ("inactive_file", "active_file")  # counted as used, and given back when asked for


def available() -> int | None:
    """Bytes, or None if that is unknown; on macOS all that the machine has: it does not say what is free."""
    if sys.platform == "darwin":
        return _sysctl("hw.memsize")
    found = [*_meminfo(), *_groups()]
    return min(found) if found else None


def check(needed: int, *, weights: int, what: str, instead: str) -> None:
    """Raises OutOfMemoryError if `needed` bytes do not fit beside the weights; `what` takes them, and
    `instead` says what to do.
    """
    left = available()
    if left is not None and needed > max(0, left - weights):
        beside = f", of which the weights take {weights:,}" if weights else ""
        raise OutOfMemoryError(f"{what} takes {needed:,} bytes; {left:,} are available{beside}; {instead}")


def trim() -> None:
    """Gives the system what was freed and lies scattered, where the C library knows how (glibc)."""
    with contextlib.suppress(AttributeError, OSError):
        ctypes.CDLL(None).malloc_trim(ctypes.c_size_t(0))


def _meminfo() -> Iterator[int]:
    for line in _text(ROOT / "proc/meminfo").splitlines():
        name, _, value = line.partition(":")
        if name == "MemAvailable":
            yield int(value.split()[0]) * 1024


def _groups() -> Iterator[int]:
    """What each limit leaves, of the own group and those above: version 2, and version 1 of the memory
    controller.
    """
    for line in _text(ROOT / "proc/self/cgroup").splitlines():
        _, controllers, path = line.split(":", 2)
        if not controllers:
            mount, limit, used, prefix = ROOT / "sys/fs/cgroup", "memory.max", "memory.current", ""
        elif "memory" in controllers.split(","):
            mount, prefix = ROOT / "sys/fs/cgroup/memory", "total_"
            limit, used = "memory.limit_in_bytes", "memory.usage_in_bytes"
        else:
            continue
        group = mount / path.lstrip("/")
        for folder in (group, *group.parents):
            most, now = _text(folder / limit).strip(), _text(folder / used).strip()
            if most.isdigit() and now.isdigit():  # not "max"; and the folder may be another container's
                stat = dict(line.split() for line in _text(folder / "memory.stat").splitlines())
                yield int(most) - int(now) + sum(int(stat.get(prefix + name, 0)) for name in PAGE_CACHE)
            if folder == mount:
                break


def _sysctl(name: str) -> int | None:
    try:
        said = subprocess.run(
            ["/usr/sbin/sysctl", "-n", name], capture_output=True, text=True, check=True, timeout=5
        )
        return int(said.stdout)
    except (OSError, subprocess.SubprocessError, ValueError):
        return None


def _text(file: Path) -> str:
    try:
        return file.read_text()
    except (OSError, UnicodeDecodeError):
        return ""
