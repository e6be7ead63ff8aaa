"""Random models of real shapes and weight types, to measure on without a download.

    python bench/synth.py qwen3-0.6b Q4_K_M out.gguf

The weights are random blocks, written as bytes and repeated, with scales such that the values spread by about
1/32 around 0: the logits stay finite, and mean nothing. Both pyinfer and llama.cpp load the file. The same
seed gives the same bytes.
"""

from __future__ import annotations

import argparse
import random
import sys
from collections.abc import Callable, Iterator
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
from gguf import GGML_QUANT_SIZES, GGMLQuantizationType, GGUFWriter, LlamaFileType
from gguf.quants import dequantize, quantize
from numpy.typing import NDArray
from tokenizers.pre_tokenizers import ByteLevel

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "tests"))
from tiny import MERGES, SPECIALS, Shape, add_header, add_tokenizer

Bytes = NDArray[np.uint8]

SHAPES: dict[str, tuple[str, Shape]] = {
    "tiny": ("qwen3", Shape(2, 4, 2, 64, 256, 512, 769, n_ctx=512)),
    "tiny-llama": ("llama", Shape(2, 4, 2, 64, 256, 512, 769, n_ctx=512, tied=False)),
    "smollm2-135m": ("llama", Shape(30, 9, 3, 64, 576, 1536, 49152, rope_base=1e5, n_ctx=8192)),
    "llama-3.2-1b": ("llama", Shape(16, 32, 8, 64, 2048, 8192, 128256, rope_base=5e5, n_ctx=131072)),
    "llama-3.2-3b": ("llama", Shape(28, 24, 8, 128, 3072, 8192, 128256, rope_base=5e5, n_ctx=131072)),
    "qwen3-0.6b": ("qwen3", Shape(28, 16, 8, 128, 1024, 3072, 151936, rope_base=1e6, eps=1e-6, n_ctx=40960)),
    "qwen3-1.7b": ("qwen3", Shape(28, 16, 8, 128, 2048, 6144, 151936, rope_base=1e6, eps=1e-6, n_ctx=40960)),
    "qwen3-4b": ("qwen3", Shape(36, 32, 8, 128, 2560, 9728, 151936, rope_base=1e6, eps=1e-6, n_ctx=40960)),
}

# Weight type -> the fields of a block that are f16 scales, then those that are f16 minimums, as byte offsets.
SCALES: dict[str, tuple[list[int], list[int]]] = {
    "Q4_0": ([0], []),
    "Q4_1": ([0], [2]),
    "Q5_0": ([0], []),
    "Q5_1": ([0], [2]),
    "Q8_0": ([0], []),
    "Q2_K": ([80], [82]),
    "Q3_K": ([108], []),
    "Q4_K": ([0], [2]),
    "Q5_K": ([0], [2]),
    "Q6_K": ([208], []),
    "IQ4_NL": ([0], []),
    "IQ4_XS": ([0], []),
}
TYPES = ("F32", "F16", "BF16", *SCALES, "MXFP4")
SPREAD = 1 / 32
POOL = 65521  # blocks before they repeat: a prime, so that thousands of rows in succession differ


def merges(n_vocab: int) -> list[str]:
    """Random ones that fill a vocabulary, so that it takes as long to load as a real one."""
    letters, made, rng = sorted(ByteLevel.alphabet()), list(MERGES), random.Random(0)
    texts = [*letters, *(pair.replace(" ", "") for pair in made)]
    known = {*texts, *SPECIALS}
    while len(texts) + len(SPECIALS) < n_vocab:
        left, right = rng.choice(texts), rng.choice(letters)
        if left + right not in known:
            made.append(f"{left} {right}")
            texts.append(left + right)
            known.add(left + right)
    return made


def more_bits(layer: int, n_layers: int) -> bool:
    """The layers that llama.cpp's mixtures give more bits: the first and last eighth, and each third."""
    eighth = n_layers // 8
    return layer < eighth or layer >= 7 * n_layers // 8 or (layer - eighth) % 3 == 2


def q3_k_m(tensor: str, layer: int, n_layers: int) -> str:
    if tensor == "attn_v":
        return "Q5_K" if layer < 2 else "Q4_K"
    if tensor == "attn_output":
        return "Q4_K"
    if tensor == "ffn_down":
        return "Q5_K" if layer < n_layers // 16 else "Q4_K" if more_bits(layer, n_layers) else "Q3_K"
    return "Q3_K"


def k_m(base: str) -> Callable[[str, int, int], str]:
    def pick(tensor: str, layer: int, n_layers: int) -> str:
        return "Q6_K" if tensor in ("attn_v", "ffn_down") and more_bits(layer, n_layers) else base

    return pick


MIXTURES: dict[str, Callable[[str, int, int], str]] = {
    "Q3_K_M": q3_k_m,
    "Q4_K_M": k_m("Q4_K"),
    "Q5_K_M": k_m("Q5_K"),
}
# What llama.cpp takes instead where rows are not whole blocks of 256.
FALLBACK = {"Q2_K": "IQ4_NL", "Q3_K": "IQ4_NL", "IQ4_XS": "IQ4_NL",
            "Q4_K": "Q5_0", "Q5_K": "Q5_1", "Q6_K": "Q8_0"}  # fmt: skip


def type_of(mix: str, tensor: str, layer: int, s: Shape, cols: int, output: str | None) -> str:
    """The weight type of a matrix. output: that of the output matrix, which the embedding is if they are
    tied; None: the mixture's.
    """
    last = tensor == ("token_embd" if s.tied else "output")
    pick = MIXTURES.get(mix)
    kind = pick(tensor, layer, s.n_layers) if pick else mix
    if last:
        kind = output or ("Q6_K" if pick else mix)
    return FALLBACK.get(kind, kind) if cols % 256 else kind


@cache
def pool(type: str, seed: int) -> Bytes:
    """POOL random blocks of a type, (POOL, bytes of a block); their values spread by SPREAD around 0."""
    kind = GGMLQuantizationType[type]
    rng = np.random.default_rng([seed, int(kind)])
    size = GGML_QUANT_SIZES[kind][1]
    if type in ("F32", "F16", "BF16"):
        values = rng.standard_normal((1, POOL), np.float32) * np.float32(SPREAD)
        return quantize(values, kind).view(np.uint8).reshape(POOL, size)
    blocks = rng.integers(0, 256, (POOL, size), np.uint8)
    jitter = rng.uniform(0.7, 1.3, POOL)
    if type == "MXFP4":  # one exponent
        blocks[:, 0] = 127
        exponent = np.log2(SPREAD / dequantize(blocks[:1000], kind).std())
        blocks[:, 0] = 127 + np.rint(exponent + np.log2(jitter))
        return blocks
    scales, minimums = SCALES[type]

    def part(offsets: list[int]) -> NDArray[np.float32]:
        """Values of some blocks where only these fields are 1, and the other scales 0."""
        some = blocks[:1000].copy()
        for at in scales + minimums:
            some[:, at : at + 2] = np.array(float(at in offsets), "<f2").reshape(1).view(np.uint8)
        values: NDArray[np.float32] = dequantize(some, kind)
        return values

    values, ratio = part(scales), 0.0
    if minimums:
        ratio = -float(values.mean() / part(minimums).mean())
        values = values + np.float32(ratio) * part(minimums)
    for offsets, factor in ((scales, 1.0), (minimums, ratio)):
        field = (jitter * factor * SPREAD / values.std()).astype("<f2")
        for at in offsets:
            blocks[:, at : at + 2] = field[:, None].view(np.uint8)
    return blocks


def matrix(type: str, rows: int, cols: int, seed: int = 0) -> Bytes:
    """A random matrix as GGUF data, (rows, bytes of a row). Raises KeyError for a type that is not in TYPES,
    ValueError if a row is not whole blocks.
    """
    block, size = GGML_QUANT_SIZES[GGMLQuantizationType[type]]
    if cols % block:
        raise ValueError(f"rows of {cols} values are not whole blocks of {block}, as {type} needs")
    blocks = pool(type, 0).reshape(-1)
    n = rows * (cols // block) * size
    start = seed * 7919 % POOL * size
    whole = np.resize(np.roll(blocks, -start), n)
    return whole.reshape(rows, -1)


def tensors(arch: str, s: Shape) -> Iterator[tuple[str, int, tuple[int, ...]]]:
    """Name, layer (-1: none) and shape (rows, cols) or (n,) of every tensor of a model."""
    yield "token_embd", -1, (s.n_vocab, s.d_model)
    for l in range(s.n_layers):
        yield "attn_norm", l, (s.d_model,)
        yield "attn_q", l, (s.n_heads * s.head_dim, s.d_model)
        yield "attn_k", l, (s.n_kv_heads * s.head_dim, s.d_model)
        yield "attn_v", l, (s.n_kv_heads * s.head_dim, s.d_model)
        if arch == "qwen3":
            yield "attn_q_norm", l, (s.head_dim,)
            yield "attn_k_norm", l, (s.head_dim,)
        yield "attn_output", l, (s.d_model, s.n_heads * s.head_dim)
        yield "ffn_norm", l, (s.d_model,)
        yield "ffn_gate", l, (s.d_ff, s.d_model)
        yield "ffn_up", l, (s.d_ff, s.d_model)
        yield "ffn_down", l, (s.d_model, s.d_ff)
    yield "output_norm", -1, (s.d_model,)
    if not s.tied:
        yield "output", -1, (s.n_vocab, s.d_model)


def write(path: str | Path, name: str, mix: str, *, output: str | None = None, seed: int = 0) -> Path:
    """Writes the model `name` of SHAPES with weights of `mix`, a type or mixture, to `path`, and returns it.

    output: a type of its own for the output matrix. Raises ValueError for a name or type that is not known.
    """
    for given, known in ((name, SHAPES), (mix, (*TYPES, *MIXTURES)), (output or mix, (*TYPES, *MIXTURES))):
        if given not in known:
            raise ValueError(f"{given!r} is not known; there are {', '.join(known)}")
    arch, s = SHAPES[name]
    plan: list[tuple[str, str, tuple[int, ...]]] = []
    for tensor, layer, shape in tensors(arch, s):
        full = f"blk.{layer}.{tensor}.weight" if layer >= 0 else f"{tensor}.weight"
        kind = type_of(mix, tensor, layer, s, shape[-1], output) if len(shape) == 2 else "F32"
        plan.append((full, kind, shape))

    writer = GGUFWriter(path, arch)
    file_types = [f.name for f in LlamaFileType if f.name.startswith((f"MOSTLY_{mix}", f"ALL_{mix}"))]
    add_header(writer, arch, s, f"{name} {mix}", file_types[0])
    pre = "qwen2" if arch == "qwen3" else "smollm" if name.startswith("smollm") else "llama-bpe"
    add_tokenizer(writer, pre, s.n_vocab, merges(s.n_vocab))
    for full, kind, shape in plan:
        block, size = GGML_QUANT_SIZES[GGMLQuantizationType[kind]]
        nbytes = int(np.prod(shape)) // block * size
        raw = GGMLQuantizationType[kind]
        writer.add_tensor_info(full, shape, np.dtype(np.float32), nbytes, raw)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_ti_data_to_file()
    rng = np.random.default_rng(seed)
    for i, (_, kind, shape) in enumerate(plan):
        if len(shape) == 1:
            data: NDArray[Any] = rng.uniform(0.75, 1.25, shape).astype("<f4")
        else:
            data = matrix(kind, *shape, seed=seed + i)
        writer.write_tensor_data(data)
    writer.close()
    return Path(path)


def main() -> None:
    parser = argparse.ArgumentParser(description="Writes a random GGUF model of a real shape.")
    parser.add_argument("name", choices=SHAPES)
    parser.add_argument(
        "type", choices=(*TYPES, *MIXTURES), metavar="TYPE", help=", ".join((*TYPES, *MIXTURES))
    )
    parser.add_argument("out", type=Path)
    parser.add_argument(
        "--output", choices=TYPES, metavar="TYPE", help="of the output matrix; llama-quantize takes Q6_K"
    )
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    if args.seed < 0:
        parser.error("--seed: give a whole number, at least 0")
    try:
        path = write(args.out, args.name, args.type, output=args.output, seed=args.seed)
    except OSError as error:
        parser.error(f"{args.out}: {error.strerror}")
    print(f"{path}: {path.stat().st_size / 1e6:,.0f} MB")


if __name__ == "__main__":
    main()
