"""What the process may still take, read from what Linux shows; and caches that would take more."""

from __future__ import annotations

import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
from tiny import write_tiny

import pyinfer
from pyinfer import memory
from pyinfer.errors import OutOfMemoryError

MIB = 1 << 20
UNLIMITED = 9223372036854771712  # as version 1 says it


@pytest.fixture
def system(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty /proc and /sys."""
    monkeypatch.setattr(memory, "ROOT", tmp_path)
    monkeypatch.setattr(sys, "platform", "linux")
    return tmp_path


def put(root: Path, files: dict[str, str]) -> None:
    for name, text in files.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(text)


def group(folder: str, limit: int | str, used: int, cached: int = 0, *, version: int = 2) -> dict[str, str]:
    names = (
        ("memory.max", "memory.current")
        if version == 2
        else ("memory.limit_in_bytes", "memory.usage_in_bytes")
    )
    prefix = "" if version == 2 else "total_"
    stat = (
        f"anon 1\n{prefix}inactive_file {cached // 4}\n{prefix}active_file {cached - cached // 4}\nshmem 3\n"
    )
    values = (f"{limit}\n", f"{used}\n", stat)
    return {f"sys/fs/cgroup/{folder}/{n}": v for n, v in zip((*names, "memory.stat"), values, strict=True)}


MEMINFO = {"proc/meminfo": "MemTotal:       24683652 kB\nMemFree:  1 kB\nMemAvailable:    8192 kB\n"}


def test_nothing_known(system):
    assert memory.available() is None
    memory.check(1 << 60, weights=0, what="it", instead="")


def test_the_system(system):
    put(system, MEMINFO)
    assert memory.available() == 8 * MIB


def test_groups_of_version_2(system):
    """The tightest limit above the process counts; its page cache counts as free."""
    put(system, MEMINFO | {"proc/self/cgroup": "0::/a/b\n"})
    put(system, group("a/b", "max", 5 * MIB) | group("a", 6 * MIB, 4 * MIB, MIB) | group("", "max", 9 * MIB))
    assert memory.available() == 3 * MIB
    put(system, group("a/b", 2 * MIB, 2 * MIB))
    assert memory.available() == 0
    put(system, group("a/b", 100 * MIB, 0) | group("a", 100 * MIB, 0))
    assert memory.available() == 8 * MIB


def test_groups_of_version_1(system):
    """In a container the group's folder is the mount itself, whatever path the process is told."""
    put(
        system,
        MEMINFO | {"proc/self/cgroup": "5:devices:/x\n4:cpu,memory:/docker/x\n1:name=systemd:/\n0::/\n"},
    )
    put(system, group("memory", 4 * MIB, 3 * MIB, 2 * MIB, version=1))
    assert memory.available() == 3 * MIB
    put(system, group("memory", UNLIMITED, 3 * MIB, version=1))
    assert memory.available() == 8 * MIB
    put(system, group("memory/docker/x", MIB, 0, version=1))
    assert memory.available() == MIB


def test_this_machine():
    found = memory.available()
    assert found is None or 0 < found < 1 << 50
    if sys.platform in ("linux", "darwin"):
        assert found is not None


def test_check(system):
    put(system, MEMINFO)
    memory.check(6 * MIB, weights=2 * MIB, what="it", instead="")
    with pytest.raises(OutOfMemoryError) as raised:
        memory.check(6 * MIB + 1, weights=2 * MIB, what="the cache", instead="give less")
    assert str(raised.value) == (
        "the cache takes 6,291,457 bytes; 8,388,608 are available, of which the weights take 2,097,152; "
        "give less"
    )
    assert isinstance(raised.value, pyinfer.PyinferError)
    assert isinstance(raised.value, MemoryError)


def test_load(system, tmp_path, monkeypatch):
    """Before a weight is read."""
    path = write_tiny(tmp_path / "tiny.gguf", "llama", n_ctx=8192)
    per_token = 2 * 2 * 2 * 40 * 2
    put(system, MEMINFO)
    with pyinfer.load(path, progress=False) as model:  # 5 MiB
        assert model.describe()["kv_cache_bytes"] == 8192 * per_token
    loaded = []
    monkeypatch.setattr("pyinfer.model.registry.load", lambda *args, **more: loaded.append(args))
    for kv in ("positional", "paged"):
        with pytest.raises(OutOfMemoryError) as raised:
            pyinfer.load(path, kv_dtype="f32", kv=kv, progress=False)
        said = str(raised.value)
        assert f"({kv}, f32) of a context of 8192 tokens takes {2 * 8192 * per_token:,} bytes; " in said
        assert "8,388,608 are available, of which the weights take " in said
        assert said.endswith("; give a smaller ctx, a smaller kv_dtype, or a sliding window")
    assert loaded == []
    monkeypatch.undo()
    monkeypatch.setattr(memory, "ROOT", system)
    for options in ({"ctx": 4096}, {"kv": "sliding:100", "chunk": 64}):
        pyinfer.load(path, kv_dtype="f32", progress=False, **options).close()


def test_trim(monkeypatch: pytest.MonkeyPatch) -> None:
    memory.trim()
    called = []
    library = SimpleNamespace(malloc_trim=lambda keep: called.append(keep.value))
    monkeypatch.setattr(memory.ctypes, "CDLL", lambda _: library)
    memory.trim()
    assert called == [0]
    del library.malloc_trim  # musl, macOS
    memory.trim()
