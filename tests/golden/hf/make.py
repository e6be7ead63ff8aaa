"""Make the fixtures in this folder: logits of the tiny models, and of SmolLM2, by Hugging Face transformers.

    PYTHONPATH=tests python tests/golden/hf/make.py [SmolLM2-135M-Instruct.Q4_1.gguf]

needs torch, transformers, gguf and tokenizers. The models compute in float32, in orders that differ between
machines, and so do the last bits. Each <name of tiny.HF_MODELS>.npz holds

    tokens  int32 (24,)      logits  float32 (24, n_vocab), row i after tokens[: i + 1]
    weights str, the sha256 of the weights' bytes in the order of tiny_weights

and smollm2.npz, from the file's weights dequantised to float32,

    tokens  int32 (17,), a prompt of 5 and 12 picked greedily      greedy  int32 (12,), the picked ones
    top_ids int32 (17, 32), top_logits float32 (17, 32): each row's largest logits, descending

Every file names what made it in `versions`.
"""

import argparse
import hashlib
from pathlib import Path

import numpy as np
import torch
import transformers
from gguf import GGUFReader
from gguf.quants import dequantize
from tiny import HF_MODELS, ROPE_SCALING, SHAPES, Shape, replace, tiny_weights

HERE = Path(__file__).parent
VERSIONS = np.array(f"torch {torch.__version__}, transformers {transformers.__version__}")
PROMPT = [504, 3575, 282, 4649, 314]  # "The capital of France is"
N_GREEDY, N_TOP = 12, 32
SMOLLM2 = Shape(
    n_layers=30,
    n_heads=9,
    n_kv_heads=3,
    head_dim=64,
    d_model=576,
    d_ff=1536,
    n_vocab=49152,
    rope_base=1e5,
    n_ctx=8192,
)

CLASSES = {
    "llama": (transformers.LlamaForCausalLM, transformers.LlamaConfig),
    "qwen3": (transformers.Qwen3ForCausalLM, transformers.Qwen3Config),
}
NAMES = {
    "token_embd": "model.embed_tokens",
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_q_norm": "self_attn.q_norm",
    "attn_k_norm": "self_attn.k_norm",
    "attn_output": "self_attn.o_proj",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
    "output_norm": "model.norm",
    "output": "lm_head",
}


def hf_name(name: str) -> str:
    """blk.3.attn_q.weight -> model.layers.3.self_attn.q_proj.weight"""
    *block, stem, suffix = name.split(".")
    layer = ["model", "layers", block[1]] if block else []
    return ".".join([*layer, NAMES[stem], suffix])


def halves(w: np.ndarray, n_heads: int) -> np.ndarray:
    """Reorder each head's rows: a llama GGUF's rope turns adjacent pairs, that of transformers halves."""
    return w.reshape(n_heads, -1, 2, w.shape[-1]).swapaxes(1, 2).reshape(w.shape)


def hf_model(arch: str, s: Shape, weights: dict[str, np.ndarray]) -> torch.nn.Module:
    """The transformers model with these weights, given by GGUF tensor name."""
    state = {}
    for name, w in weights.items():
        if name == "rope_freqs.weight":
            continue  # transformers derives it from ROPE_SCALING, which checks the tensor too
        if arch == "llama" and name.endswith((".attn_q.weight", ".attn_k.weight")):
            w = halves(w, s.n_heads if ".attn_q." in name else s.n_kv_heads)
        state[hf_name(name)] = torch.from_numpy(w.copy())
    state.setdefault("lm_head.weight", state["model.embed_tokens.weight"])

    rope = {"rope_type": "llama3", **ROPE_SCALING} if s.rope_freqs else {"rope_type": "default"}
    model_class, config_class = CLASSES[arch]
    config = config_class(
        vocab_size=s.n_vocab,
        hidden_size=s.d_model,
        intermediate_size=s.d_ff,
        num_hidden_layers=s.n_layers,
        num_attention_heads=s.n_heads,
        num_key_value_heads=s.n_kv_heads,
        head_dim=s.head_dim,
        max_position_embeddings=s.n_ctx,
        rms_norm_eps=s.eps,
        rope_parameters={"rope_theta": s.rope_base, **rope},
        tie_word_embeddings=s.tied,
        attn_implementation="eager",
        dtype="float32",
    )
    model = model_class(config).eval()
    model.load_state_dict(state, strict=True)
    return model


@torch.inference_mode()
def logits(model: torch.nn.Module, tokens: list[int]) -> np.ndarray:
    """(tokens, n_vocab)"""
    return model(torch.tensor([tokens]), use_cache=False).logits[0].numpy()


def make_tiny(name: str) -> None:
    arch, changes = HF_MODELS[name]
    s = replace(SHAPES[arch], **changes)
    tokens = np.random.RandomState(1).randint(0, s.n_vocab, 24, dtype=np.int32)
    weights = tiny_weights(arch, **changes)
    rows = logits(hf_model(arch, s, weights), tokens.tolist())
    digest = hashlib.sha256(b"".join(w.tobytes() for w in weights.values())).hexdigest()
    np.savez_compressed(
        HERE / f"{name}.npz", tokens=tokens, logits=rows, weights=np.array(digest), versions=VERSIONS
    )
    print(f"{name}: logits {rows.min():.2f} to {rows.max():.2f}")


def make_smollm2(path: Path) -> None:
    weights = {t.name: dequantize(t.data, t.tensor_type) for t in GGUFReader(path).tensors}
    model = hf_model("llama", SMOLLM2, weights)
    tokens = list(PROMPT)
    for _ in range(N_GREEDY):
        tokens.append(int(logits(model, tokens)[-1].argmax()))
    rows = logits(model, tokens)
    top = np.argsort(-rows, axis=-1, kind="stable")[:, :N_TOP]
    np.savez_compressed(
        HERE / "smollm2.npz",
        tokens=np.array(tokens, np.int32),
        greedy=np.array(tokens[len(PROMPT) :], np.int32),
        top_ids=top.astype(np.int32),
        top_logits=np.take_along_axis(rows, top, axis=-1),
        versions=VERSIONS,
    )
    print(f"smollm2: greedy {tokens[len(PROMPT) :]}")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description="Make the fixtures of Hugging Face transformers.")
    parser.add_argument("smollm2", nargs="?", type=Path, help="SmolLM2-135M-Instruct.Q4_1.gguf")
    args = parser.parse_args()
    torch.set_num_threads(1)
    for name in HF_MODELS:
        make_tiny(name)
    if args.smollm2:
        make_smollm2(args.smollm2)
