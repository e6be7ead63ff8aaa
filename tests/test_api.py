"""The Python API on a tiny model: what comes out, what is refused and how, and that settings move no byte."""

from __future__ import annotations

import hashlib
import importlib.util
import os
import shutil
import subprocess
import sys
import threading
from pathlib import Path

import numpy as np
import pytest
import tiny
from gguf import GGUFWriter
from tiny import WIDE, tiny_weights, write_tiny

import pyinfer
from pyinfer import (
    BackendError,
    ChatError,
    ClosedError,
    ContextOverflowError,
    FetchError,
    InputError,
    ModelError,
    NonFiniteLogitsError,
    PyinferError,
)
from pyinfer.backend import create
from pyinfer.backend.native import levels
from pyinfer.sampling import Sampler, Sampling

F32 = np.float32
TOKENS = [1, 260, 33, 7, 7, 150, 12, 99, 0, 268, 44]  # with the first id, the last, and one twice


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny(tmp_path_factory.mktemp("api") / "tiny.gguf", "llama", type="Q8_0")


@pytest.fixture(scope="module")
def model(path):
    with pyinfer.load(path, backend="simd") as model:
        yield model


def sha(logits: np.ndarray) -> str:
    return hashlib.sha256(np.ascontiguousarray(logits, "<f4").tobytes()).hexdigest()


# ---- loading and closing -----------------------------------------------------------------------------------


def python(code: str, *args: object) -> str:
    env = {**os.environ, "PYTHONPATH": str(Path(pyinfer.__file__).parents[1])}
    command = [sys.executable, "-W", "ignore::DeprecationWarning", "-c", code, *map(str, args)]
    return subprocess.run(command, env=env, stdout=subprocess.PIPE, text=True, check=True, timeout=60).stdout


def test_import_is_light():
    heavy = "numpy", "gguf", "tokenizers", "huggingface_hub", "jinja2", "pyinfer.api", "pyinfer._pi"
    assert python(f"import sys, pyinfer; print([m for m in {heavy!r} if m in sys.modules])") == "[]\n"


def test_source_that_was_not_compiled_says_so(tmp_path):
    (tmp_path / "pyinfer").mkdir()
    for name in ("__init__.py", "errors.py"):
        shutil.copy(Path(pyinfer.__file__).with_name(name), tmp_path / "pyinfer")
    command = [sys.executable, "-c", "import pyinfer"]
    result = subprocess.run(
        command, cwd=tmp_path, env=os.environ | {"PYTHONPATH": ""}, capture_output=True, text=True
    )
    assert (result.returncode, "ImportError: " + str(tmp_path) in result.stderr) == (1, True), result.stderr
    assert "python setup.py build_ext --inplace" in result.stderr


def test_names():
    for name in pyinfer.__all__:
        assert getattr(pyinfer, name) is not None
    with pytest.raises(AttributeError, match="module 'pyinfer' has no attribute 'lode'"):
        _ = pyinfer.lode


def test_backends():
    found = pyinfer.backends()
    assert list(found) == ["reference", "scalar", "simd", "parallel", "metal"]
    assert {found[name] for name in ("reference", "scalar", "simd", "parallel")} == {"available"}
    if importlib.util.find_spec("pyinfer._metal") is None:
        assert found["metal"] == "unavailable: " + ("not built" if sys.platform == "darwin" else "not macOS")


def test_describe(model, path):
    said = model.describe()
    assert (said["architecture"], said["layers"], said["vocabulary"]) == ("llama", 2, 269)
    assert (said["backend"], said["threads"], said["kv_cache"]) == ("simd", 1, "positional, f16")
    assert said["context"] == said["trained_context"] == 128
    assert said["kv_cache_bytes"] == 2 * 2 * (2 * 40) * 128 * 2  # K and V, layers, width, tokens, bytes
    assert said["kv_caches_bytes"] == {
        f"{kv}, {dtype}": 2 * 2 * (2 * 40) * 128 * size
        for kv in ("append", "positional", "paged")
        for dtype, size in (("f16", 2), ("f32", 4))
    }
    assert said["parameters"] == sum(w.size for w in tiny_weights("llama").values())
    assert said["tensor_types"] == {"Q8_0": 15, "F32": 5}
    assert (model.backend, model.n_ctx, said["file"]) == ("simd", 128, str(path))
    assert repr(model) == "<pyinfer.Model tiny.gguf (simd, 128 tokens)>"


def test_chat_template_that_cannot_be_used_says_why(tmp_path, monkeypatch):
    monkeypatch.setattr(tiny, "CHAT_TEMPLATE", "{% if %}")
    broken = write_tiny(tmp_path / "broken.gguf", "llama")
    with pyinfer.load(broken, backend="simd") as model:
        assert model.describe()["architecture"] == "llama"
        assert model.generate("hello", max_tokens=2).tokens
        with pytest.raises(ChatError, match=r"tokenizer\.chat_template is not valid Jinja at line 1"):
            _ = model.chat_template
    monkeypatch.setattr(GGUFWriter, "add_chat_template", lambda self, _: None)
    with pyinfer.load(write_tiny(tmp_path / "none.gguf", "llama"), backend="simd") as model:
        assert model.chat_template is None
    number = lambda self, _: self.add_uint32("tokenizer.chat_template", 7)  # noqa: E731
    monkeypatch.setattr(GGUFWriter, "add_chat_template", number)
    with (
        pyinfer.load(write_tiny(tmp_path / "number.gguf", "llama"), backend="simd") as model,
        pytest.raises(ChatError, match=r"tokenizer\.chat_template is of type int"),
    ):
        _ = model.chat_template


def test_close(path):
    with pyinfer.load(path, backend="parallel", threads=2) as model:
        unstarted, running = model.stream("hello"), model.stream("hello")
        next(running)
    model.close()  # again
    assert repr(model) == "<pyinfer.Model tiny.gguf (closed)>"
    uses = {
        "generate": lambda: model.generate("hello"),
        "stream": lambda: model.stream("hello"),
        "a stream not started": lambda: next(unstarted),
        "a stream half way": lambda: next(running),
        "logits": lambda: model.logits("hello"),
        "digest": lambda: model.digest("hello"),
        "describe": lambda: model.describe(),
        "chat_template": lambda: model.chat_template,
        "backend": lambda: model.backend,
        "with": lambda: model.__enter__(),
    }
    for name, use in uses.items():
        with pytest.raises(ClosedError, match=r"tiny\.gguf was closed; load it again"):
            pytest.fail(f"{name} gave {use()!r}")


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        ({"threds": 2}, TypeError, "threds"),
        ({"backend": "gpu"}, BackendError, "there is no backend 'gpu'"),
        ({"threads": 0}, BackendError, "threads=0"),
        ({"backend": "scalar", "threads": 2}, BackendError, "scalar runs on one thread"),
        (
            {"kv": "ring"},
            InputError,
            "there is no KV cache 'ring'; there are append, positional, paged, sliding",
        ),
        ({"kv": "sliding"}, InputError, "KV cache 'sliding': give the window in tokens, as in sliding:1024"),
        ({"kv": "sliding:0"}, InputError, "KV cache 'sliding:0': give the window"),
        ({"kv_dtype": "q8"}, InputError, "a KV cache does not store 'q8'; it stores f16, f32, q8_0"),
        ({"kv_dtype": "q8_0"}, InputError, "q8_0 stores values by 32, and this model's heads have 40"),
        ({"ctx": 0}, InputError, "ctx=0: give a whole number, at least 1"),
        ({"ctx": 12.0}, InputError, "ctx=12.0"),
        ({"ctx": 129}, InputError, "ctx=129: the model was trained for 128 tokens at most"),
        ({"chunk": -1}, InputError, "chunk=-1"),
        ({"chunk": True}, InputError, "chunk=True"),
        ({"pack": "no"}, InputError, "pack='no': give True or False"),
    ],
)
def test_load_refuses(options, error, message, path):
    with pytest.raises(error, match=message):
        pyinfer.load(path, **options)


def test_load_refuses_files(tmp_path):
    with pytest.raises(FetchError, match=r"nowhere\.gguf"):
        pyinfer.load(tmp_path / "nowhere.gguf")
    for nothing in (None, 5, b"model.gguf"):
        with pytest.raises(FetchError, match="a model is a name or a path, not"):
            pyinfer.load(nothing)
    (tmp_path / "text.gguf").write_text("hello" * 100)
    with pytest.raises(ModelError):
        pyinfer.load(tmp_path / "text.gguf")


# ---- generating --------------------------------------------------------------------------------------------


def test_generate_is_the_stream_joined(model):
    chunks = list(model.stream("hello", max_tokens=24))
    whole = model.generate("hello", max_tokens=24)
    assert whole.text == "".join(c.text for c in chunks)
    assert whole.tokens == [c.token for c in chunks if c.token is not None]
    assert len(whole.tokens) == 24
    assert len(set(whole.tokens)) > 8
    assert whole.text == model.tokenizer.decode(whole.tokens)
    assert whole.finish_reason == chunks[-1].finish_reason == "length"
    assert {c.finish_reason for c in chunks[:-1]} == {None}
    assert model.generate(model.tokenizer.encode("hello"), max_tokens=24).tokens == whole.tokens


def test_greedy_follows_the_logits(model):
    tokens = model.generate(TOKENS, max_tokens=10).tokens
    logits = model.logits([*TOKENS, *tokens])
    assert logits.argmax(axis=-1)[len(TOKENS) - 1 : -1].tolist() == tokens


def test_logprob(model):
    chunks = [
        c
        for c in model.stream(TOKENS, max_tokens=10, temperature=0.8, top_k=40, seed=5)
        if c.token is not None
    ]
    tokens = [c.token for c in chunks]
    z = model.logits([*TOKENS, *tokens])[len(TOKENS) - 1 : -1].astype(np.float64)
    z -= z.max(axis=-1, keepdims=True)
    want = z - np.log(np.exp(z).sum(axis=-1, keepdims=True))
    np.testing.assert_allclose([c.logprob for c in chunks], want[range(len(tokens)), tokens], atol=1e-5)


def test_metrics(model):
    made = model.generate(TOKENS, max_tokens=5).metrics
    assert made is model.metrics
    assert (made.n_prompt_tokens, len(made.per_forward_ms)) == (len(TOKENS), 5)
    assert made.time_to_first_token_ms == made.per_forward_ms[0] > 0
    assert made.decode_tokens_per_second == pytest.approx(4000 / sum(made.per_forward_ms[1:]))
    one = model.generate(TOKENS, max_tokens=1).metrics
    assert (len(one.per_forward_ms), one.decode_tokens_per_second) == (1, None)


def test_the_model_ends(model):
    whole = model.generate("hello", max_tokens=60, temperature=1.0, seed=0)
    assert whole.finish_reason == "stop"
    assert len(whole.tokens) < 60
    assert whole.tokens[-1] in model.tokenizer.stop_ids
    assert not model.tokenizer.stop_ids & set(whole.tokens[:-1])


def test_stop_strings(model):
    whole = model.generate("hello", max_tokens=24)
    at = whole.text.index("\x10\x10")  # this model's words
    cut = model.generate("hello", max_tokens=24, stop=["nowhere", "\x10\x10"])
    assert (cut.text, cut.finish_reason) == (whole.text[:at], "stop")
    assert cut.tokens == whole.tokens[: len(cut.tokens)]
    assert len(cut.tokens) < 24
    assert model.generate("hello", max_tokens=24, stop="\x10\x10").text == cut.text
    assert model.generate("hello", max_tokens=24, stop="nowhere").text == whole.text


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"max_tokens": 0}, "max_tokens=0"),
        ({"max_tokens": 2.0}, r"max_tokens=2\.0"),
        ({"max_tokens": True}, "max_tokens=True"),
        ({"stop": ["x", ""]}, r"stop\[1\] is ''"),
        ({"temperature": -0.1}, r"temperature=-0\.1: give a number at least 0"),
        ({"temperature": float("nan")}, "temperature=nan"),
        ({"temperature": "hot"}, "temperature='hot': give a number"),
        ({"top_k": -1}, "top_k=-1"),
        ({"top_k": 1.5}, r"top_k=1\.5: give a whole number"),
        ({"top_p": 0.0}, r"top_p=0\.0: give a number above 0 and at most 1"),
        ({"top_p": 1.1}, r"top_p=1\.1"),
        ({"min_p": 2}, "min_p=2"),
        ({"repeat_penalty": 1e-4}, r"repeat_penalty=0\.0001: give a number at least 0\.001"),
        ({"stop": None}, "stop=None: give a text, or several"),
        ({"seed": -1}, "seed=-1"),
        ({"seed": 0.5}, r"seed=0\.5"),
    ],
)
def test_refused_values(options, message, model):
    """At the call, before a stream is asked for its first chunk; every such error is a ValueError too."""
    for call in (model.generate, model.stream):
        with pytest.raises(InputError, match=message) as caught:
            call("hello", **options)
        assert isinstance(caught.value, PyinferError)
        assert isinstance(caught.value, ValueError)


def test_unknown_keyword(model):
    for call in (model.generate, model.stream, model.logits, model.digest):
        with pytest.raises(TypeError, match="temprature"):
            call("hello", temprature=0.5)


@pytest.mark.parametrize(
    ("prompt", "message"),
    [
        ("", "there are no tokens to run"),
        ([], "there are no tokens to run"),
        ([3, 269], r"tokens\[1\] is 269; a token id is a whole number from 0 to 268"),
        ([-1], r"tokens\[0\] is -1"),
        ([True], r"tokens\[0\] is True"),
        ([1.0], r"tokens\[0\] is 1\.0"),
        (["hello"], r"tokens\[0\] is 'hello'"),
        (np.zeros((2, 2), int), r"tokens\[0\] is"),
        (b"hello", "a prompt is a str or a sequence of token ids, not bytes"),
        ({1: 2}, "token ids, not dict"),
        (None, "token ids, not NoneType"),
        ("a\ud800", "surrogate|Unicode"),
    ],
)
def test_refused_prompts(prompt, message, model):
    for call in (model.generate, model.stream, model.logits, model.digest):
        with pytest.raises(InputError, match=message):
            call(prompt)


def test_refused_counts(model):
    for n in (-1, 1.0, True):
        with pytest.raises(InputError, match=f"n={n!r}: give a whole number"):
            model.digest("hello", n)
    for chunk in (0, -1, 1.0, True):
        with pytest.raises(InputError, match=f"chunk={chunk!r}: give a whole number"):
            model.logits("hello", chunk=chunk)


def test_context_overflow(path):
    with pyinfer.load(path, ctx=8) as model:
        assert model.n_ctx == 8
        assert len(model.logits(TOKENS[:8])) == 8
        for call in (model.generate, model.stream, model.logits, model.digest):
            with pytest.raises(ContextOverflowError, match=r"\b9 (tokens|more).*\b8\b"):
                call(TOKENS[:9])
        with pytest.raises(ContextOverflowError, match="prompt of 5 tokens and 4 more do not fit into 8"):
            model.digest(TOKENS[:5], 4)
        # 5 of the prompt and 3 made are run; the last one made need not be.
        full = model.generate(TOKENS[:5], max_tokens=100)
        assert (len(full.tokens), full.finish_reason) == (4, "length")
        assert len(model.generate(TOKENS[:8], max_tokens=100).tokens) == 1
        assert len(model.digest(TOKENS[:5], 3)["tokens"]) == 8


@pytest.mark.parametrize("bad", [np.nan, np.inf])
@pytest.mark.parametrize("type", ["F32", "BF16", "Q8_0", "Q4_1", "MXFP4", "Q6_K", "Q2_K"])
@pytest.mark.parametrize("level", [level for level, runs in levels().items() if runs])
@pytest.mark.parametrize("norm", ["output_norm", "blk.0.ffn_norm"])
def test_non_finite_logits(norm, level, type, bad, tmp_path, monkeypatch):
    """One such number in a norm: no matmul, its input quantised or not, makes it a number again."""
    monkeypatch.setenv("PYINFER_CPU", level)
    shape = WIDE if type.endswith("_K") else {}
    weight = tiny_weights("llama", **shape)[f"{norm}.weight"]
    data = write_tiny(tmp_path / "tiny.gguf", "llama", type=type, **shape).read_bytes()
    assert data.count(weight.tobytes()) == 1
    spoilt = weight.copy()
    spoilt[45] = bad
    (tmp_path / "bad.gguf").write_bytes(data.replace(weight.tobytes(), spoilt.tobytes()))
    with pyinfer.load(tmp_path / "bad.gguf", backend="simd") as model:
        assert not np.isfinite(model.logits(TOKENS)).any()
        for options in ({}, {"temperature": 1.0}, {"repeat_penalty": 1.5}):
            with pytest.raises(
                NonFiniteLogitsError, match=r"the logit of token 0 is (nan|-?inf): the weights"
            ):
                model.generate(TOKENS, **options)
        with pytest.raises(NonFiniteLogitsError):
            model.digest(TOKENS, 1)


# ---- sampling ----------------------------------------------------------------------------------------------


def test_seeds(model):
    runs = [
        model.generate("hello", max_tokens=20, temperature=1.0, seed=seed).tokens for seed in (1, 1, 2, 3)
    ]
    assert runs[0] == runs[1]
    assert len({tuple(r) for r in runs}) == 3
    assert runs[0] != model.generate("hello", max_tokens=20).tokens


@pytest.mark.parametrize(
    "narrow",
    [
        {"top_k": 1},
        {"top_p": 1e-6},
        {"min_p": 1.0},
        *({"temperature": 10.0**-e} for e in (4, 37, 39, 46, 320)),
    ],
    ids=str,
)
def test_the_narrowest_sampling_is_greedy(narrow, model):
    greedy = model.generate("hello", max_tokens=20).tokens
    assert (
        model.generate("hello", max_tokens=20, **{"temperature": 5.0, "seed": 9, **narrow}).tokens == greedy
    )


def test_top_k(model):
    tokens = model.generate(TOKENS, max_tokens=30, temperature=9.0, top_k=3).tokens
    logits = model.logits([*TOKENS, *tokens])[len(TOKENS) - 1 : -1]
    ranks = [int((row > row[token]).sum()) for row, token in zip(logits, tokens, strict=True)]
    assert set(ranks) == {0, 1, 2}


def test_repeat_penalty(model):
    tokens = model.generate(TOKENS, max_tokens=30, repeat_penalty=1e6).tokens
    assert len(set(tokens)) == 30
    assert not set(tokens) & set(TOKENS)
    assert len(set(model.generate(TOKENS, max_tokens=30).tokens)) < 30


def picks(logits: list[float], n: int = 1, history: tuple[int, ...] = (), **how: float) -> list[int]:
    sampler = Sampler(create("scalar"), Sampling(**how), history)
    return [sampler.pick(np.array(logits, F32)) for _ in range(n)]


def test_ties_go_to_the_lowest_id():
    assert picks([0, 3, 1, 3, 3]) == [1]
    assert picks([0, 3, 1, 3, 3], temperature=1.0, top_k=1) == [1]
    assert set(picks([0, 3, 1, 3, 3], 50, temperature=1.0, top_k=2)) == {1, 3}


@pytest.mark.parametrize("logits", [[-1, -3, -1.5], [0, -1, -2], [3e38, 1, 3e38]])
def test_coldest(logits):
    assert set(picks(logits, 20, temperature=1e-39)) == {0}
    assert set(picks(logits, 20, temperature=1e-39, top_p=0.9, min_p=0.1, repeat_penalty=1e-3)) == {0}


def test_penalty_by_sign():
    """Seen: positive logits are divided, negative ones multiplied."""
    assert picks([2.0, -1.0, 1.5], history=(0, 1), repeat_penalty=2.0) == [2]
    assert picks([-1.0, -1.5, -9.0], history=(0,), repeat_penalty=2.0) == [1]
    assert picks([3.0, 2.0, 1.0], 3, repeat_penalty=8.0) == [0, 1, 2]  # what is picked is seen


P = np.log([0.2, 0.5, 0.3]).tolist()


@pytest.mark.parametrize(
    ("how", "share"),
    [
        ({"temperature": 1.0}, [0.2, 0.5, 0.3]),
        ({"temperature": 0.5}, np.array([0.04, 0.25, 0.09]) / 0.38),
        ({"temperature": 1.0, "top_k": 2}, [0, 0.625, 0.375]),
        ({"temperature": 1.0, "top_p": 0.4}, [0, 1, 0]),
        ({"temperature": 1.0, "top_p": 0.6}, [0, 0.625, 0.375]),
        ({"temperature": 1.0, "top_p": 0.9}, [0.2, 0.5, 0.3]),
        ({"temperature": 1.0, "min_p": 0.5}, [0, 0.625, 0.375]),
        ({"temperature": 1.0, "min_p": 0.35}, [0.2, 0.5, 0.3]),
        ({"temperature": 1.0, "min_p": 0.7}, [0, 1, 0]),
    ],
)
def test_shares(how, share):
    n = 3000
    found = np.bincount(picks(P, n, **how), minlength=3) / n
    np.testing.assert_allclose(found, share, atol=0.03)
    assert (found[np.array(share) == 0] == 0).all()


# ---- the same bytes ----------------------------------------------------------------------------------------


def test_digest(model, path):
    said = model.digest(TOKENS, 6)
    assert said["tokens"] == [*TOKENS, *model.generate(TOKENS, max_tokens=6).tokens]
    assert said["logits_sha256"] == sha(model.logits(said["tokens"]))
    assert said["model_sha256"] == hashlib.sha256(path.read_bytes()).hexdigest()
    assert said["numerics"] == pyinfer.NUMERICS
    assert model.digest(said["tokens"])["logits_sha256"] == said["logits_sha256"]
    assert model.digest(said["tokens"][:-1])["logits_sha256"] != said["logits_sha256"]
    assert model.digest("hello")["tokens"] == model.tokenizer.encode("hello")


@pytest.mark.parametrize(
    "options",
    [
        {"backend": "reference"},
        {"backend": "scalar"},
        {"backend": "parallel", "threads": 1},
        {"backend": "parallel", "threads": 3},
        {"threads": None},
        {"kv": "append"},
        {"kv": "paged"},
        {"kv": "paged", "threads": 3, "chunk": 5},
        {"kv": "sliding:1000"},
        {"chunk": 1},
        {"chunk": 4},
        {"ctx": 17},
        {"pack": False},
        {"pack": False, "backend": "reference"},
        {"pack": False, "threads": 3, "chunk": 5},
    ],
    ids=str,
)
def test_digest_is_the_same(options, model, path):
    with pyinfer.load(path, **options) as other:
        assert other.digest(TOKENS, 6) == model.digest(TOKENS, 6)


def test_digest_follows_kv_dtype(model, path):
    with pyinfer.load(path, kv_dtype="f32") as one, pyinfer.load(path, kv_dtype="f32", kv="append") as other:
        assert one.digest(TOKENS) == other.digest(TOKENS)
        assert one.digest(TOKENS)["logits_sha256"] != model.digest(TOKENS)["logits_sha256"]


def test_digest_follows_the_window(model, path):
    tokens = TOKENS * 4
    with pyinfer.load(path, kv="sliding:7") as one, pyinfer.load(path, kv="sliding:7", chunk=3) as other:
        assert one.digest(tokens, 30) == other.digest(tokens, 30)
        assert one.digest(tokens)["logits_sha256"] != model.digest(tokens)["logits_sha256"]


def test_logits(model):
    whole = model.logits(TOKENS)
    assert (whole.shape, whole.dtype) == ((len(TOKENS), 269), F32)
    for chunk in (1, 2, 5, 100):
        assert sha(model.logits(TOKENS, chunk=chunk)) == sha(whole)
    assert sha(model.logits(np.array(TOKENS, np.int32))) == sha(whole)
    assert sha(model.logits("hello")) == sha(model.logits(model.tokenizer.encode("hello")))
    kept = whole.copy()
    model.logits(TOKENS[::-1])
    assert sha(whole) == sha(kept), "a result was written over by a later call"


@pytest.mark.parametrize("backend", ["simd", "parallel"])
def test_python_threads_share_a_model(backend, path):
    """Prompts of several lengths at once: results, chunks and metrics stay each with its own."""
    prompts = [(TOKENS * 11)[i : 2 * i + 3] for i in range(1, 30, 4)]
    with pyinfer.load(path, backend=backend, threads=2 if backend == "parallel" else None) as model:
        want = [(sha(model.logits(p)), model.generate(p, max_tokens=12).tokens) for p in prompts]
        got: dict[int, list[object]] = {i: [] for i in range(len(prompts))}

        def run(i: int) -> None:
            for _ in range(4):
                made = model.generate(prompts[i], max_tokens=12)
                got[i].append((sha(model.logits(prompts[i])), made.tokens))
                got[i].append((made.metrics.n_prompt_tokens, len(made.metrics.per_forward_ms)))

        switch = sys.getswitchinterval()
        sys.setswitchinterval(1e-5)
        try:
            threads = [threading.Thread(target=run, args=(i,)) for i in got]
            for t in threads:
                t.start()
            for t in threads:
                t.join(60)
        finally:
            sys.setswitchinterval(switch)
    assert got == {i: [want[i], (len(prompts[i]), len(want[i][1]))] * 4 for i in got}


def test_streams_in_turns(model):
    """Two streams of one model, a chunk of each at a time."""
    alone = [list(model.stream(p, max_tokens=9)) for p in (TOKENS, TOKENS[:3])]
    in_turns = zip(*(model.stream(p, max_tokens=9) for p in (TOKENS, TOKENS[:3])), strict=True)
    assert list(zip(*in_turns, strict=True)) == [tuple(chunks) for chunks in alone]


FORK = """
import os, sys, hashlib, pyinfer
model = pyinfer.load(sys.argv[1], backend="parallel", threads=3)
tokens = [(7 * i) % 269 for i in range(100)]
digest = lambda: model.digest(tokens, 4)["logits_sha256"]
before = digest()
read, write = os.pipe()
child = os.fork()
if child == 0:
    os.write(write, digest().encode())
    os._exit(0)
os.close(write)
inside = os.read(read, 100).decode()
assert os.waitpid(child, 0)[1] == 0
print(before == inside == digest(), len(inside))
"""


@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork")
def test_fork_after_load(path):
    assert python(FORK, path) == "True 64\n"
