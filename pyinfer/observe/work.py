"""What an op costs a machine, and which entries of the kernel table it runs."""

from __future__ import annotations

from collections.abc import Mapping

from ..backend.tracing import Call

ENTRIES = {
    "rms_norm": ("rms_norm",),
    "rms_norm_heads": ("rms_norm",),
    "apply_rope": ("rope",),
    "swiglu": ("swiglu",),
    "silu": ("silu",),
    "softmax_rows": ("softmax",),
    "add": ("add",),
    "hadamard": ("mul",),
    "narrow_f16": ("narrow",),
}
# Of one query, and of a block of them.
ATTENTION = (("scores", "softmax", "context"), ("rows_scores", "rows_exp", "rows_context"))


def work(call: Call, tokens: int, before: int) -> tuple[int, int]:
    """Bytes of weights and cache that an op reads, and multiply-adds that it makes, in a forward of `tokens`
    behind `before` others.
    """
    if call.attends is not None:
        a, least = call.attends, 0 if call.attends.window else before
        seen = [min(a.window, before + t + 1) for t in range(tokens)] if a.window else None
        keys = sum(seen) if seen else tokens * before + tokens * (tokens + 1) // 2
        held = min(before + tokens, a.window + tokens) if a.window else least + tokens
        return a.token_bytes * held, 2 * a.n_heads * a.head_dim * keys
    if call.op == "gather_rows":
        return sum(w.n_bytes // w.shape[0] * call.shapes[-1][0] for w in call.weights), 0
    matrices = [w for w in call.weights if call.op.startswith("matmul")]
    rows = call.shapes[0][0] if matrices else 0
    return sum(w.n_bytes for w in call.weights), sum(rows * w.shape[0] * w.shape[1] for w in matrices)


def kernels(call: Call, table: Mapping[str, str]) -> str:
    """The entries that an op runs and their levels, of a backend's `kernels()`: "scores_f16 softmax
    context_f16 avx512". "" where there is no table, or the op only moves values.
    """
    if call.op.startswith("matmul") and call.weights:
        names = [f"matmul_{w.type.lower()}" for w in call.weights]
    elif call.op == "matmul":
        names = ["saxpy"]
    elif call.attends is not None:
        block = call.op == "fused_attention" and call.shapes[0][0] > 1
        scores, softmax, context = ATTENTION[block]
        names = [f"{scores}_{call.attends.dtype}", softmax, f"{context}_{call.attends.dtype}"]
    else:
        names = list(ENTRIES.get(call.op, ()))
    by_level: dict[str, list[str]] = {}
    for name in dict.fromkeys(names):
        if name in table:
            by_level.setdefault(table[name], []).append(name)
    return ", ".join(f"{' '.join(found)} {level}" for level, found in by_level.items())
