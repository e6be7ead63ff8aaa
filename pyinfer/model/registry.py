"""From a GGUF file to a model that runs: one line per architecture."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import numpy as np
from tqdm import tqdm

from ..backend.base import Backend, Tensor
from ..cache import Cache
from ..gguf_file import GGUFFile
from .config import Config
from .llama import Llama
from .qwen3 import Qwen3
from .rope import RopeTables

ARCHITECTURES: dict[str, type[Llama] | type[Qwen3]] = {"llama": Llama, "qwen3": Qwen3}


class Decoder(Protocol):
    config: Config
    ops: Backend

    def forward(self, tokens: Sequence[int], cache: Cache, *, last_only: bool = True) -> Tensor: ...


def load(
    file: GGUFFile,
    ops: Backend,
    *,
    config: Config | None = None,
    pack: bool = True,
    progress: bool = False,
) -> Decoder:
    """Checks the file and packs its weights for the backend. Raises ModelError naming what is at fault.

    config: the file's, if it has been read already.
    pack: else matrices stay in the mapped file and are packed piece by piece while they are used.
    progress: a bar on stderr, if that is a terminal, when it takes longer than half a second.
    """
    config = config or Config.from_gguf(file)
    tensors, factors = {}, None
    total = sum(t.nbytes for t in file.tensors.values())
    with tqdm(
        total=total,
        desc="packing weights",
        unit="B",
        unit_scale=True,
        delay=0.5,
        leave=False,
        disable=None if progress else True,
    ) as bar:
        # The largest first, each let go behind the packer: so file and copy never stand in memory together.
        for name, info in sorted(file.tensors.items(), key=lambda item: -item[1].nbytes):
            data = file.data(name)
            if name == "rope_freqs.weight":
                factors = data.view("<f4").astype(np.float32)
            elif len(info.shape) == 1:
                tensors[name] = ops.tensor(data.view("<f4").astype(np.float32)[None])
            else:
                rows, cols = info.shape
                tensors[name] = ops.weight(info.type, rows, cols, data, pack=pack)
            if name in tensors:
                ops.named(name, tensors[name])
            if pack:
                file.drop_pages()
            bar.update(info.nbytes)
    return ARCHITECTURES[config.arch](config, ops, tensors, RopeTables(ops, config, factors))
