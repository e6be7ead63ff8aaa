"""How far the logits of pyinfer, and of llama.cpp, are from the f32 computation on the dequantised weights.

    python bench/accuracy.py [MODEL] [--peer-python PYTHON] [--text FILE...]

The same text in the same windows for all: the model as it is in pyinfer and in llama.cpp, both with an f16
cache, and its weights dequantised into an F32 file that pyinfer runs with an f32 cache. Printed: the mean
over all positions of KL(f32 || quantised), in nats, and how often the likeliest token is the same.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

import numpy as np
from gguf import GGMLQuantizationType, GGUFReader, GGUFWriter, LlamaFileType
from gguf.quants import dequantize
from numpy.typing import NDArray
from peers import check_peer, llama

import pyinfer
from pyinfer.cli.bench import table
from pyinfer.cli.common import number, say
from pyinfer.fetch import resolve

ROOT = Path(__file__).resolve().parents[1]
TEXT = [ROOT / name for name in ("README.md", "csrc/NUMERICS.md", "CONTRIBUTING.md", "NEWS.md")]
LEAST = 2000  # tokens
Logits = NDArray[np.float32]


def write_f32(source: Path, target: Path) -> Path:
    """A copy of a GGUF file with every tensor dequantised to F32."""
    reader = GGUFReader(source)
    arch = reader.fields["general.architecture"].contents()
    writer = GGUFWriter(target, arch)
    for key, f in reader.fields.items():
        if key not in ("general.architecture", "general.file_type") and not key.startswith("GGUF."):
            writer.add_key_value(key, f.contents(), f.types[0], f.types[-1] if len(f.types) > 1 else None)
    writer.add_file_type(LlamaFileType.ALL_F32)
    for t in reader.tensors:
        values = np.ascontiguousarray(dequantize(t.data, t.tensor_type), np.float32)
        writer.add_tensor(t.name, values, raw_dtype=GGMLQuantizationType.F32)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return target


def kl(p_logits: Logits, q_logits: Logits) -> NDArray[np.float64]:
    """KL(p || q) in nats of each row, in float64."""

    def log_softmax(x: Logits) -> NDArray[np.float64]:
        x64 = x.astype(np.float64)
        x64 -= x64.max(axis=-1, keepdims=True)
        result: NDArray[np.float64] = x64 - np.log(np.exp(x64).sum(axis=-1, keepdims=True))
        return result

    p, q = log_softmax(p_logits), log_softmax(q_logits)
    found: NDArray[np.float64] = (np.exp(p) * (p - q)).sum(axis=-1)
    return found


class Score:
    """KL and agreement of one engine, gathered window by window."""

    def __init__(self) -> None:
        self.kl: list[float] = []
        self.same: list[bool] = []

    def add(self, want: Logits, got: Logits) -> None:
        for at in range(0, len(want), 64):  # in pieces: float64 rows are large
            self.kl += kl(want[at : at + 64], got[at : at + 64]).tolist()
        self.same += (want.argmax(-1) == got.argmax(-1)).tolist()

    def row(self, name: str) -> list[str]:
        error = np.std(self.kl) / len(self.kl) ** 0.5
        return [name, f"{np.mean(self.kl):.6f}", f"{error:.6f}", f"{np.mean(self.same):.2%}"]


def windows(tokens: Sequence[int], length: int, least: int) -> list[list[int]]:
    """Whole windows of `tokens`, as many as hold `least` tokens. Raises InputError if there are too few."""
    found = [list(tokens[at : at + length]) for at in range(0, len(tokens) - length + 1, length)]
    n = -(-least // length)
    if len(found) < n:
        raise pyinfer.InputError(f"the text has {len(tokens)} tokens; {n} windows of {length} are needed")
    return found[:n]


def main() -> int:
    parser = argparse.ArgumentParser(description="Distance of the logits from the f32 computation.")
    option, counted = parser.add_argument, number(int, 1)
    option("model", nargs="?", default="smollm2")
    option("--peer-python", metavar="PYTHON", help="where llama-cpp-python is; without it only pyinfer")
    option("--fa", action="store_true", help="let llama.cpp use flash attention")
    option(
        "--text", nargs="+", type=Path, default=TEXT, metavar="FILE", help="UTF-8 (the project's own pages)"
    )
    option("--tokens", type=counted, default=LEAST, metavar="N", help="at least (%(default)s)")
    option("--window", type=number(int, 2), default=512, metavar="N", help="tokens (%(default)s)")
    option("--threads", type=counted, metavar="N")
    args = parser.parse_args()
    try:
        if args.peer_python:
            check_peer(args.peer_python)
        print("\n".join(measure(args)))
    except (pyinfer.PyinferError, OSError, UnicodeDecodeError) as error:
        say(f"accuracy: error: {error}")
        return 1
    return 0


def measure(args: argparse.Namespace) -> list[str]:
    path = resolve(args.model)
    text = "\n\n".join(file.read_text(encoding="utf-8") for file in args.text)
    scores = {"pyinfer": Score()}
    with tempfile.TemporaryDirectory() as folder:
        peer: NDArray[np.float32] | None = None
        with pyinfer.load(path, threads=args.threads, ctx=args.window) as model:
            cut = windows(model.tokenizer.encode(text), args.window, args.tokens)
            if args.peer_python:
                say("llama.cpp ...")
                job = {
                    "do": "logits",
                    "model": str(path),
                    "windows": cut,
                    "threads": model.describe()["threads"],
                }
                about = llama(args.peer_python, {**job, "flash": args.fa, "out": f"{folder}/logits.npy"})
                name = f"llama.cpp ({about['version']})"
                scores[name] = Score()
                peer = np.load(f"{folder}/logits.npy", mmap_mode="r")
            say("the F32 copy ...")
            copy = write_f32(path, Path(folder) / "f32.gguf")
            with pyinfer.load(copy, threads=args.threads, ctx=args.window, kv_dtype="f32") as exact:
                for i, window in enumerate(cut):
                    say(f"window {i + 1} of {len(cut)} ...")
                    want = exact.logits(window)
                    scores["pyinfer"].add(want, model.logits(window))
                    if peer is not None:
                        scores[name].add(want, peer[i])
        del peer
    head = ("engine", "mean KL, nats", "standard error", "same likeliest token")
    lines = [f"- {path.name}: {len(cut)} windows of {args.window} tokens", ""]
    lines += table(head, [score.row(name) for name, score in scores.items()], markdown=True)
    if len(scores) > 1:
        ours, theirs = (np.array(score.kl) for score in scores.values())
        gap = ours - theirs  # position by position: both meet the same ones
        error = gap.std() / len(gap) ** 0.5
        lines += [
            "",
            f"pyinfer's KL is {ours.mean() / theirs.mean():.3f} of llama.cpp's; "
            f"the difference is {gap.mean():+.6f}, standard error {error:.6f}.",
        ]
    return lines


if __name__ == "__main__":
    sys.exit(main())
