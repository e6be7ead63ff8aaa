"""llama.cpp's side of a comparison, through llama-cpp-python's low-level API; needs only that and NumPy.

A process of its own, in whatever environment has the package: `python llama_side.py JOB`, with JOB and the
answer on stdout as JSON. Jobs: {"do": "rates", ...} (see `rates`), {"do": "logits", ...} (see `logits`).
"""

from __future__ import annotations

import ctypes
import json
import sys
import time
from typing import Any

import llama_cpp as lib
import numpy as np

BATCH = 512


class Llama:
    """A model on the CPU, and one sequence. Positions are those of tokens run so far."""

    def __init__(self, path: str, ctx: int, threads: int, flash: bool) -> None:
        self.quiet = lib.llama_log_callback(lambda level, text, data: None)
        lib.llama_log_set(self.quiet, ctypes.c_void_p(0))
        lib.llama_backend_init()
        how = lib.llama_model_default_params()
        how.n_gpu_layers = 0
        self.model = lib.llama_model_load_from_file(path.encode(), how)
        if not self.model:
            sys.exit(f"llama.cpp cannot load {path}")
        p = lib.llama_context_default_params()
        p.n_ctx, p.n_batch, p.n_ubatch, p.n_seq_max = ctx, BATCH, BATCH, 1
        p.n_threads = p.n_threads_batch = threads
        p.offload_kqv = False
        p.flash_attn_type = (lib.LLAMA_FLASH_ATTN_TYPE_DISABLED, lib.LLAMA_FLASH_ATTN_TYPE_ENABLED)[flash]
        self.ctx = lib.llama_init_from_model(self.model, p)
        if not self.ctx:
            sys.exit(f"llama.cpp cannot make a context of {ctx} tokens for {path}")
        self.n_vocab = lib.llama_vocab_n_tokens(lib.llama_model_get_vocab(self.model))
        self.memory = lib.llama_get_memory(self.ctx)
        self.batch = lib.llama_batch_init(BATCH, 0, 1)
        self.length = 0

    def run(self, tokens: list[int], all_logits: bool = False) -> list[Any]:
        """Logits (rows, n_vocab) of each batch if all are wanted; else only the last token's are computed."""
        out, b = [], self.batch
        for at in range(0, len(tokens), BATCH):
            part = tokens[at : at + BATCH]
            b.n_tokens = len(part)
            for i, token in enumerate(part):
                b.token[i], b.pos[i], b.n_seq_id[i], b.seq_id[i][0] = token, self.length + i, 1, 0
                b.logits[i] = all_logits or at + i == len(tokens) - 1
            if lib.llama_decode(self.ctx, b):
                sys.exit("llama_decode failed")
            self.length += len(part)
            if all_logits:
                logits = np.ctypeslib.as_array(lib.llama_get_logits(self.ctx), (len(part), self.n_vocab))
                out.append(logits.copy())
        lib.llama_get_logits_ith(self.ctx, -1)  # waits for the computation
        return out

    def truncate(self, length: int) -> None:
        lib.llama_memory_seq_rm(self.memory, 0, length, -1)
        self.length = length


def rates(job: dict[str, Any]) -> dict[str, list[float]]:
    """Tokens per second of `prompt` at once and of `step` one by one, after `depths` tokens of `context`:
    `repeats` times each, after a warm-up. By test, as "pp512", "tg128 @ 2048".
    """
    prompt, step, context, depths = job["prompt"], job["step"], job["context"], job["depths"]
    most = max(depths) + max(len(prompt), len(step))
    llama = Llama(job["model"], -(-most // 256) * 256, job["threads"], job["flash"])
    out: dict[str, list[float]] = {}
    for depth in depths:
        llama.truncate(0)
        if depth:
            llama.run(context[:depth])
        for test, tokens in (("pp", [prompt]), ("tg", [[token] for token in step])):
            n = sum(map(len, tokens))
            for i in range(job["repeats"] + 1 if n else 0):
                llama.truncate(depth)
                start = time.perf_counter()
                for part in tokens if i else tokens[:8]:
                    llama.run(part)
                if i:
                    seconds = time.perf_counter() - start
                    name = f"{test}{n} @ {depth}" if depth else f"{test}{n}"
                    out.setdefault(name, []).append(n / seconds)
    return out


def logits(job: dict[str, Any]) -> dict[str, str]:
    """Writes logits (windows, tokens, n_vocab) of each window, a fresh sequence, to `out` as .npy."""
    windows = job["windows"]
    llama = Llama(job["model"], -(-len(windows[0]) // 256) * 256, job["threads"], job["flash"])
    shape = (len(windows), len(windows[0]), llama.n_vocab)
    out = np.lib.format.open_memmap(job["out"], "w+", np.float32, shape)
    for i, window in enumerate(windows):
        llama.truncate(0)
        out[i] = np.concatenate(llama.run(window, all_logits=True))
    out.flush()
    return {"out": job["out"]}


if __name__ == "__main__":
    job = json.loads(sys.argv[1])
    answer = {"rates": rates, "logits": logits}[job["do"]](job)
    system = lib.llama_print_system_info().decode()
    print(json.dumps({"version": lib.__version__, "system": system, "answer": answer}))
