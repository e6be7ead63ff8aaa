"""What every machine must compute: sha256 of each op's results and of whole models' logits, by numerics
version.

`python tests/golden/digests.py` (in an environment with pyinfer, PYTHONPATH=tests) writes digests.json anew,
by the plain C kernels. That a digest moves means a new numerics version, or a bug.
"""

from __future__ import annotations

import hashlib
import json
import sys
import tempfile
from pathlib import Path
from typing import Any

from kernels.cases import CASES, FIRST_TYPES
from kernels.harness import BLOCK, TYPES, Native
from tiny import WIDE, write_tiny

import pyinfer

FILE = Path(__file__).with_name("digests.json")
PROMPT = [(7 * i * i + 3 * i) % 260 for i in range(40)]
# Architecture, weight type, what else write_tiny is told.
MODELS: dict[str, tuple[str, str, dict[str, Any]]] = {
    f"{arch}-{type_}": (arch, type_, {}) for arch in ("llama", "qwen3") for type_ in FIRST_TYPES
}
MODELS |= {
    f"qwen3-{type_}": ("qwen3", type_, {"n_layers": 1} | (WIDE if BLOCK[type_] == 256 else {}))
    for type_ in TYPES
    if type_ not in FIRST_TYPES
}
MODELS["llama-Q4_K_M"] = ("llama", "Q4_K", {"types": {"attn_v": "Q6_K", "token_embd": "Q6_K"}, **WIDE})


def op(name: str, level: str) -> str:
    """Of all results of one case of tests/kernels/cases.py."""
    sha = hashlib.sha256()
    for array in CASES[name](Native(level)):
        sha.update(array.tobytes())
    return sha.hexdigest()


def tiny(name: str, folder: Path, kv_dtype: str, **how: object) -> str:
    """Of the logits of a prompt and four greedy tokens, on a model of tests/tiny.py."""
    arch, type_, more = MODELS[name]
    path = write_tiny(folder / f"{name}.gguf", arch, type=type_, **more)
    with pyinfer.load(path, kv_dtype=kv_dtype, progress=False, **how) as model:
        return str(model.digest(PROMPT, 4)["logits_sha256"])


def smollm2(n: int, **how: object) -> str:
    """Of the logits of `The capital of France is` and n greedy tokens."""
    with pyinfer.load("smollm2", progress=False, **how) as model:
        return str(model.digest("The capital of France is", n)["logits_sha256"])


def compute() -> dict[str, object]:
    with tempfile.TemporaryDirectory() as folder:
        return {
            "numerics": pyinfer.NUMERICS,
            "ops": {name: op(name, "ref") for name in CASES},
            "models": {
                f"{name}-kv_{dtype}": tiny(name, Path(folder), dtype, backend="scalar")
                for name in MODELS
                for dtype in ("f16", "f32")
            },
            "smollm2": {str(n): smollm2(n, backend="scalar") for n in (2, 64)},
        }


if __name__ == "__main__":
    FILE.write_text(json.dumps(compute(), indent=1) + "\n")
    print(f"wrote {FILE}", file=sys.stderr)
