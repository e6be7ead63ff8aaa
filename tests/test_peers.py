"""bench/peers.py and bench/accuracy.py, without llama.cpp: a stand-in interpreter plays its side."""

import sys
from types import SimpleNamespace

import accuracy
import numpy as np
import peers
import pytest
import synth
from gguf import GGUFReader
from gguf.quants import dequantize

import pyinfer


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return synth.write(tmp_path_factory.mktemp("synth") / "m.gguf", "tiny", "Q4_1")


def test_ratios():
    pair = peers.Pair([10.0, 12.0, 11.0])
    pair.theirs[True] += [4.0, 6.0, 5.0]
    pair.theirs[False] += [5.0, 5.5, 6.0]
    assert not pair.flash
    assert pair.cells() == ["11.0", "18%", "5.5", "18%", "off", "2.00", "1.83 to 2.18"]


@pytest.fixture
def peer_python(tmp_path):
    """An interpreter whose llama.cpp makes one token per second, two with flash attention."""
    fake = tmp_path / "python"
    fake.write_text(
        f"#!{sys.executable}\n"
        "import json, sys\n"
        "if sys.argv[1] != '-c':\n"
        "    job = json.loads(sys.argv[2])\n"
        "    assert len(job['context']) == 20 and job['threads'] == 1\n"
        "    rate = [1.0 + job['flash']] * job['repeats']\n"
        "    tests = [f'pp{len(job[\"prompt\"])}', f'tg{len(job[\"step\"])}']\n"
        "    answer = {t + (f' @ {d}' if d else ''): rate for d in job['depths'] for t in tests}\n"
        "    print('chatter'); print(json.dumps({'version': '9', 'system': 'X', 'answer': answer}))\n"
    )
    fake.chmod(0o755)
    return str(fake)


def test_both_sides_in_turns(model, peer_python, monkeypatch, capsys):
    plan = ["-p", "8", "-n", "3", "-d", "0,20", "-t", "1", "--rounds", "2"]
    monkeypatch.setattr(sys, "argv", ["peers.py", str(model), *plan, "--peer-python", peer_python])
    assert peers.main() == 0
    out = capsys.readouterr().out.splitlines()
    rows = [[cell.strip() for cell in line.split("|")[1:-1]] for line in out if line.startswith("| tiny")]
    assert [row[2] for row in rows] == ["pp8", "tg3", "pp8 @ 20", "tg3 @ 20"]
    for row in rows:
        assert (row[5], row[7]) == ("2.0", "on")
        assert float(row[8]) == pytest.approx(float(row[3]) / 2, rel=0.01)


def test_a_peer_that_is_not_there(tmp_path):
    with pytest.raises(peers.PeerError, match=r"--peer-python .*none: No such file"):
        peers.check_peer(str(tmp_path / "none"))
    bare = tmp_path / "bare"
    bare.write_text("#!/bin/sh\necho 'ImportError: no' >&2; exit 1\n")
    bare.chmod(0o755)
    with pytest.raises(peers.PeerError, match=r"cannot import llama_cpp \(ImportError: no\): pip install"):
        peers.check_peer(str(bare))
    with pytest.raises(peers.PeerError, match="exit code 1: ImportError: no"):
        peers.answer([str(bare)])


def test_kl():
    p = np.array([[0, 0], [5, 5]], np.float32)
    q = np.array([[0, np.log(3)], [2, 2]], np.float32)
    assert accuracy.kl(p, q) == pytest.approx([0.5 * np.log(4 / 3), 0])


def test_the_f32_copy_computes_the_dequantised_weights(model, tmp_path):
    copy = accuracy.write_f32(model, tmp_path / "f32.gguf")
    want, got = GGUFReader(model), GGUFReader(copy)
    assert want.fields.keys() == got.fields.keys()
    assert got.fields["general.file_type"].contents() == 0
    assert got.fields["tokenizer.ggml.tokens"].contents() == want.fields["tokenizer.ggml.tokens"].contents()
    for a, b in zip(want.tensors, got.tensors, strict=True):
        assert (a.name, b.tensor_type.name) == (b.name, "F32")
        assert np.array_equal(dequantize(a.data, a.tensor_type), b.data)


def test_accuracy(model, tmp_path, monkeypatch):
    text = tmp_path / "text"
    text.write_text("hello world, " * 20)
    with pyinfer.load(model) as loaded:
        exact = accuracy.write_f32(model, tmp_path / "exact.gguf")
        cut = accuracy.windows(loaded.tokenizer.encode(text.read_text()), 16, 32)
    with pyinfer.load(exact, kv_dtype="f32") as loaded:
        logits = np.stack([loaded.logits(window) for window in cut])

    def nearly_exact(python, job):
        assert job["windows"] == cut
        np.save(job["out"], logits + np.float32(1e-3) * (logits > 0))
        return {"version": "9"}

    monkeypatch.setattr(accuracy, "llama", nearly_exact)
    args = {"model": str(model), "text": [text], "tokens": 32, "window": 16, "threads": 1, "fa": False}
    lines = accuracy.measure(SimpleNamespace(peer_python="x", **args))
    ours, theirs = ([cell.strip() for cell in line.split("|")[1:-1]] for line in lines[4:6])
    assert 0 < float(ours[1]) < 0.01
    assert theirs[0] == "llama.cpp (9)"
    assert float(theirs[1]) < float(ours[1])
    with pytest.raises(pyinfer.InputError, match="63 windows of 16 are needed"):
        accuracy.windows(list(range(40)), 16, 1000)
