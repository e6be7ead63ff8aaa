"""The command line over a stand-in engine: what goes to which stream, and how each command ends."""

import io
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from cli import fake
from tiny import write_tiny

import pyinfer
from pyinfer.cli import main

# Set, PYTHONUNBUFFERED would hide a missing flush.
ENV = {**os.environ, "PYTHONPATH": str(Path(pyinfer.__file__).parents[1]), "PYTHONUNBUFFERED": ""}
TEXT = "".join(fake.REPLY)


@pytest.fixture(autouse=True)
def models(monkeypatch):
    return fake.install(lambda *args: monkeypatch.setattr(*args, raising=False))


@pytest.fixture
def stdin(monkeypatch):
    def feed(content: bytes) -> None:
        monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(content)))

    return feed


def spawn(*args: str, stdout: object = subprocess.PIPE, **env: str) -> subprocess.Popen:
    command = [sys.executable, fake.__file__, *args]
    pipe = subprocess.PIPE
    return subprocess.Popen(command, stdin=pipe, stdout=stdout, stderr=pipe, env={**ENV, **env})


# generate ---------------------------------------------------------------------------------------------------


def test_generate(models, capsys):
    assert main(["generate", "Hello"]) == 0
    out, err = capsys.readouterr()
    assert out == TEXT + "\n"
    assert err == (
        "backend: parallel\n"
        "kv cache: positional\n"
        "\n"
        "metrics:\n"
        "  time_to_first_token_ms: 123.457\n"
        "  decode_tokens_per_second: 44.444\n"
        "  per_forward_ms: min 21.000  max 100.000  mean 38.000  (n=5)\n"
    )
    (model,) = models
    assert model.closed
    assert model.options == {
        **{"model": "smollm2", "backend": "auto", "threads": None, "kv": "positional", "kv_dtype": "f16"},
        **{
            "ctx": None,
            "chunk": None,
            "pack": True,
            "attention_policy": "auto",
            "unfused": (),
            "observers": [],
        },
    }
    defaults = {
        **{"max_tokens": 128, "temperature": 0.0, "top_k": 0, "top_p": 1.0, "min_p": 0.0},
        **{"repeat_penalty": 1.0, "seed": 0, "stop": ()},
    }
    assert model.calls == [("Hello", defaults)]


def test_every_option_reaches_the_engine(models):
    options = "-m a.gguf --backend x --threads 3 --kv sliding:9 --kv-dtype q8_0 --ctx 64 --chunk 16 --no-pack"
    options += " --attention-policy split --unfused swiglu,rms_norm"
    sampling = "-n 2 --temp 0.7 --top-k 40 --top-p 0.9 --min-p 0.05 --repeat-penalty 1.1 --seed 9"
    assert main(["generate", "Hi", *options.split(), *sampling.split(), "--stop", "a b", "--stop", "c"]) == 0
    (model,) = models
    assert model.options == {
        **{"model": "a.gguf", "backend": "x", "threads": 3, "kv": "sliding:9", "kv_dtype": "q8_0"},
        **{
            "ctx": 64,
            "chunk": 16,
            "pack": False,
            "attention_policy": "split",
            "unfused": ("swiglu", "rms_norm"),
        },
        "observers": [],
    }
    assert model.calls[0][1] == {
        **{"max_tokens": 2, "temperature": 0.7, "top_k": 40, "top_p": 0.9, "min_p": 0.05},
        **{"repeat_penalty": 1.1, "seed": 9, "stop": ("a b", "c")},
    }


def test_one_token_has_no_decode_rate(capsys):
    assert main(["generate", "Hello", "-n", "1"]) == 0
    err = capsys.readouterr().err
    assert "decode_tokens_per_second: n/a\n" in err
    assert "per_forward_ms: min 100.000  max 100.000  mean 100.000  (n=1)\n" in err


def test_generate_json(capsys):
    assert main(["generate", "Hello", "--json"]) == 0
    out, err = capsys.readouterr()
    assert err == ""
    assert json.loads(out) == {
        "text": TEXT,
        "tokens": [7, 8, 9, 10, 11],
        "finish_reason": "stop",
        "backend": "parallel",
        "kv": "positional",
        "metrics": {
            "n_prompt_tokens": 5,
            "time_to_first_token_ms": 123.4567,
            "decode_tokens_per_second": pytest.approx(4e3 / 90),
            "per_forward_ms": [100.0, 21.0, 22.0, 23.0, 24.0],
        },
    }


@pytest.mark.parametrize("content", ["två\nrader\n", "två\nrader"])
def test_prompt_from_stdin(models, stdin, content):
    stdin(content.encode())
    assert main(["generate", "-"]) == 0
    assert models[0].calls[0][0] == "två\nrader"


def test_stdin_that_is_not_text(models, stdin, capsys):
    stdin(b"\xff\xfe")
    assert main(["digest", "-"]) == 1
    assert capsys.readouterr().err.startswith("pyinfer: error: standard input is not UTF-8 text: ")
    assert models == []


# How it ends ------------------------------------------------------------------------------------------------


def test_each_piece_is_flushed_and_ctrl_c_reports():
    # Less than a buffer in all: without the flush it would come at the end, too late for the signal.
    with spawn("generate", "Hello", "-n", "200", FAKE_DELAY="0.05", FAKE_ENDLESS="1") as process:
        assert process.stdout.read(4) == b"Hej "
        process.send_signal(signal.SIGINT)
        out, err = process.communicate(timeout=20)
    assert process.returncode == 130
    assert out.endswith(b"\n")
    assert b"metrics:\n  time_to_first_token_ms: 123.457\n" in err
    assert b"Traceback" not in err


def test_ctrl_c_with_json_gives_what_there_is():
    command = ("generate", "Hello", "--json", "-n", "100000")
    with spawn(*command, FAKE_DELAY="0.05", FAKE_ENDLESS="1", FAKE_READY="1") as process:
        assert process.stderr.readline() == b"started\n"
        assert process.stderr.readline() == b"two pieces are out\n"
        process.send_signal(signal.SIGINT)
        out, err = process.communicate(timeout=20)
    assert (process.returncode, err) == (130, b"")
    result = json.loads(out)
    assert result["finish_reason"] is None
    assert result["text"].startswith("Hej då, ")


def test_ctrl_c_while_reading_stdin():
    with spawn("generate", "-", FAKE_READY="1") as process:
        assert process.stderr.readline() == b"started\n"
        time.sleep(0.3)
        process.send_signal(signal.SIGINT)
        assert process.communicate(timeout=20) == (b"", b"")
    assert process.returncode == 130


def test_reader_that_leaves_early():
    with spawn("generate", "Hello", "-n", "100000", FAKE_ENDLESS="1") as process:
        assert process.stdout.read(4) == b"Hej "
        process.stdout.close()
        err = process.stderr.read()
    assert err == b""
    assert process.returncode == 141


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="only Linux has /dev/full")
def test_stdout_that_is_full():
    with open("/dev/full", "wb") as full, spawn("generate", "Hello", stdout=full) as process:
        err = process.communicate(timeout=20)[1].decode()
    assert process.returncode == 1
    assert err == "pyinfer: error: [Errno 28] No space left on device\n"


def test_closed_stdout_and_stdin():
    command = f'exec "{sys.executable}" "{fake.__file__}" generate'
    for script, code, message in [
        (f"{command} Hello >&- <&-", 0, "(n=5)\n"),
        (f"{command} - <&-", 1, "pyinfer: error: PROMPT is -, but standard input is closed\n"),
    ]:
        result = subprocess.run(["sh", "-c", script], env=ENV, capture_output=True, text=True)
        assert (result.returncode, result.stdout) == (code, "")
        assert result.stderr.endswith(message)
        assert "Traceback" not in result.stderr


@pytest.mark.parametrize("encoding", ["ascii", "latin-1", "utf-16"])
def test_utf8_comes_out_in_every_locale(encoding):
    env = {"PYTHONIOENCODING": encoding, "PYTHONUTF8": "0", "LC_ALL": "C", "PYTHONCOERCECLOCALE": "0"}
    with spawn("generate", "Hello", **env) as process:
        out, err = process.communicate(timeout=20)
    assert out.decode("utf-8") == TEXT + "\n"
    assert process.returncode == 0, err


def test_an_error_is_one_line(capsys):
    assert main(["generate", "Hello", "--backend", "quantum"]) == 1
    assert capsys.readouterr() == (
        "",
        "pyinfer: error: backend 'quantum' is unknown: `pyinfer backends` lists them\n",
    )


@pytest.mark.parametrize(
    ("args", "message"),
    [
        ("", "required: COMMAND"),
        ("fly", "invalid choice: 'fly'"),
        ("generate", "required: PROMPT"),
        ("generate x -n -1", "argument -n/--max-tokens: '-1' is not a whole number at least 1"),
        ("generate x -n many", "'many' is not a whole number at least 1"),
        ("generate x --threads 0", "argument --threads: '0' is not a whole number at least 1"),
        ("generate x --top-p 2", "argument --top-p: '2' is not a number above 0 and at most 1"),
        ("generate x --top-p 0", "argument --top-p"),
        ("generate x --min-p -0.1", "'-0.1' is not a number at least 0 and at most 1"),
        ("generate x --temp nan", "argument --temp: 'nan' is not a number at least 0"),
        ("generate x --temp inf", "argument --temp"),
        ("generate x --repeat-penalty 0", "argument --repeat-penalty: '0' is not a number at least 0.001"),
        ("generate x --seed -1", "argument --seed"),
        ("generate x --seed 18446744073709551616", "argument --seed"),
        ("generate x --ctx 1.5", "argument --ctx"),
        ("generate x --kv ring", "argument --kv: 'ring' is none of positional, paged, append, sliding:N"),
        ("generate x --kv sliding", "argument --kv: 'sliding' is none of"),
        ("generate x --kv sliding:0", "argument --kv: 'sliding:0' is none of"),
        ("generate x --kv sliding:1k", "argument --kv: 'sliding:1k' is none of"),
        ("generate x --kv-dtype f8", "argument --kv-dtype"),
        ("generate x --max 5", "unrecognized arguments: --max"),
        ("generate x --stop=", "argument --stop: an empty string would match everywhere"),
        ("digest x -n 0", "argument -n: '0' is not a whole number at least 1"),
        ("generate \udcff", "is not valid text"),
    ],
)
def test_usage_errors(models, capsys, args, message):
    with pytest.raises(SystemExit) as leave:
        main(args.split(" ") if args else [])
    assert leave.value.code == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert message in err
    assert models == []


# chat -------------------------------------------------------------------------------------------------------


def chat(*args: str, stdin: str, **env: str) -> tuple[int, str, str]:
    with spawn("chat", *args, **env) as process:
        out, err = process.communicate(stdin.encode(), timeout=20)
    return process.returncode, out.decode(), err.decode()


def conversation(call: tuple) -> str:
    return "".join(map(chr, call[0]))


def test_chat_keeps_and_resets_the_history(models, stdin, capsys):
    stdin("Hello\n\n/help\nMer\n/reset\n/nope\nå/b\n/exit\nunread\n".encode())
    assert main(["chat", "--system", "Be brief."]) == 0
    out, err = capsys.readouterr()
    assert out == f"{TEXT}\n" * 3  # no prompt: this is no terminal
    assert err.count("/exit ends the conversation") == 2
    assert "unknown command /nope" in err
    assert [conversation(call) for call in models[0].calls] == [
        "sBe brief.uHello",
        f"sBe brief.uHelloa{TEXT}uMer",
        "sBe brief.uå/b",
    ]
    assert models[0].closed


def test_chat_ends_with_its_input():
    assert chat(stdin="") == (0, "", "")
    assert chat(stdin="Hello") == (0, TEXT + "\n", "")


def test_chat_says_when_a_reply_is_cut():
    assert chat("-n", "2", stdin="Hello\n") == (0, "Hej då, \n", "[cut at 2 tokens: -n sets more]\n")


def test_chat_stops_when_the_context_is_full():
    code, out, err = chat("--ctx", "8", stdin="Hello\nunread\n")  # u, H, e, l, l, o: room for two
    assert (code, out) == (1, "Hej då, \n")
    assert err == (
        "pyinfer: error: the context of 8 tokens is full; /reset begins again; a larger --ctx holds more\n"
    )
    code, out, err = chat("--ctx", "6", stdin="Hello\n")
    assert (code, out) == (1, "")
    assert "the conversation has 6 tokens and the context holds 6" in err


def test_chat_needs_a_template():
    code, out, err = chat(stdin="Hello\n", FAKE_NO_TEMPLATE="1")
    assert (code, out) == (1, "")
    assert err == "pyinfer: error: toy.gguf has no chat template; use `pyinfer generate`\n"
    code, out, err = chat(stdin="Hello\n", FAKE_BAD_TEMPLATE="1")
    assert (code, out) == (1, "")
    assert err == "pyinfer: error: tokenizer.chat_template is not valid Jinja at line 3: why\n"


def test_chat_on_a_terminal_asks_and_survives_ctrl_c():
    import pty

    pid, terminal = pty.fork()
    if pid == 0:
        os.environ.update(ENV, FAKE_DELAY="0.2", TERM="dumb")
        os.execv(sys.executable, [sys.executable, fake.__file__, "chat", "-n", "4"])
    seen = b""

    def until(text: str, count: int = 1) -> None:
        nonlocal seen
        deadline = time.monotonic() + 20
        while seen.count(text.encode()) < count:
            assert time.monotonic() < deadline, seen
            seen += os.read(terminal, 1000)

    try:
        until("> ")
        os.write(terminal, b"Hello\n")
        until("Hej ")
        os.write(terminal, b"\x03")
        until("> ", 2)
        os.write(terminal, b"/exit\n")
    finally:
        assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0
        os.close(terminal)
    assert b"Traceback" not in seen


# The others -------------------------------------------------------------------------------------------------


def test_digest(capsys):
    assert main(["digest", "Hello", "-n", "2"]) == 0
    out = capsys.readouterr().out
    assert json.loads(out) == {
        **{"numerics": 1, "model_sha256": "ab", "tokens": [5, 5], "logits_sha256": "cd"},
    }
    assert out.startswith('{\n  "numerics": 1,\n')


def test_pull(tmp_path, capsys):
    model = tmp_path / "m.gguf"
    model.touch()
    assert main(["pull", str(model)]) == 0
    assert capsys.readouterr().out == f"{model}\n"
    model.unlink()
    assert main(["pull", str(model)]) == 1
    assert capsys.readouterr() == ("", f"pyinfer: error: {model}: no such file\n")


def test_pull_prints_a_path_that_is_not_utf8(tmp_path):
    model = os.fsencode(tmp_path) + b"/\xff.gguf"
    try:
        open(model, "w").close()
    except OSError:
        return  # a file system that has no such names
    with spawn("pull", model) as process:
        out = process.communicate(timeout=20)[0]
    assert (process.returncode, out) == (0, model + b"\n")


def test_info(models, capsys):
    assert main(["info", "a.gguf", "--ctx", "512"]) == 0
    assert capsys.readouterr().out == (
        "architecture: llama\n"
        "parameter count: 134,515,008\n"
        "file bytes: 98,362,432 (93.8 MiB)\n"
        "kv caches bytes:\n"
        "  paged, f16: 94,371,840 (90.0 MiB)\n"
        "tensor types:\n"
        "  Q4_1: 210\n"
        "  F32: 61\n"
        "kernels:\n"
        "  matmul_q4_1: pi_matmul_q4_1_avx2\n"
    )
    assert models[0].options["ctx"] == 512
    assert main(["info", "a.gguf", "--json"]) == 0
    assert json.loads(capsys.readouterr().out) == models[1].describe()


def test_backends(capsys):
    assert main(["backends"]) == 0
    assert capsys.readouterr().out == "parallel: available\nmetal: unavailable: not a Mac\n"


def test_version(capsys):
    with pytest.raises(SystemExit) as leave:
        main(["--version"])
    assert leave.value.code == 0
    assert capsys.readouterr().out.startswith("pyinfer ")


def test_help_imports_nothing_heavy():
    script = "import sys\nfrom pyinfer.cli import main\ntry: main(['--help'])\nfinally: print(*sys.modules)"
    result = subprocess.run([sys.executable, "-c", script], env=ENV, capture_output=True, text=True)
    loaded = set(result.stdout.split())
    assert "argparse" in loaded
    assert not loaded & {"numpy", "gguf", "tokenizers", "huggingface_hub", "jinja2", "cffi", "tqdm"}


def test_python_m_pyinfer():
    result = subprocess.run(
        [sys.executable, "-m", "pyinfer", "--help"], env=ENV, capture_output=True, text=True
    )
    assert (result.returncode, result.stderr) == (0, "")
    assert result.stdout.startswith("usage: pyinfer [-h]")


# plan, diff, and what is to be seen of a run ----------------------------------------------------------------


@pytest.fixture
def tiny(tmp_path, monkeypatch):
    monkeypatch.undo()  # the engine itself
    return str(write_tiny(tmp_path / "tiny.gguf", "qwen3", type="Q8_0"))


def test_plan(tiny, capsys):
    assert main(["plan", tiny, "--backend", "scalar", "-p", "3"]) == 0
    golden = Path(__file__).parents[1] / "golden" / "plan.txt"
    assert capsys.readouterr().out == golden.read_text()
    assert main(["plan", tiny, "--unfused", "quantum"]) == 1
    assert "no coarse op 'quantum'" in capsys.readouterr().err
    for option in ("-p", "--ctx"):
        assert main(["plan", tiny, option, "100000"]) == 1
        assert "the model was trained for" in capsys.readouterr().err


def test_diff(tiny, tmp_path, capsys):
    def digest(name, *options):
        assert main(["digest", "hello", "-m", tiny, "-n", "2", *options]) == 0
        (tmp_path / name).write_text(capsys.readouterr().out)
        return str(tmp_path / name)

    a, b = digest("a", "--record", "ops"), digest("b", "--record", "ops", "--kv-dtype", "f32")
    c = digest("c", "--kv", "append")
    assert main(["diff", a, a]) == 0
    assert "\nall ops gave the same bytes at the " in capsys.readouterr().out
    assert main(["diff", a, c]) == 0
    assert capsys.readouterr().out.startswith("the same: ")
    assert main(["diff", a, b]) == 1
    assert "op fused_attention\n  kernels: scores_f16" in capsys.readouterr().out
    assert main(["diff", c, b]) == 1
    assert "record both runs with --record ops" in capsys.readouterr().out
    (tmp_path / "no").write_text("{")
    (tmp_path / "list").write_text("[]")
    for bad, words in (
        ("gone", "No such file"),
        ("no", "is no JSON"),
        ("list", "no digest"),
        (".", "directory"),
    ):
        assert main(["diff", a, str(tmp_path / bad)]) == 2
        assert words in capsys.readouterr().err


@pytest.mark.parametrize("command", [["generate", "hello", "-n", "3"], ["digest", "hello", "-n", "2"]])
def test_watching(command, tiny, tmp_path, capsys):
    trace = tmp_path / "trace.json"
    assert main([*command, "-m", tiny, "--profile", "--trace", str(trace)]) == 0
    out, err = capsys.readouterr()
    assert "\n  attn.fused_compute" in err
    assert json.loads(trace.read_text())["otherData"]["limits"]["read_gb"] > 0
    assert main([*command, "-m", tiny]) == 0
    assert capsys.readouterr().out == out


@pytest.mark.parametrize(
    ("option", "env", "words"),
    [
        (["--trace", "/gone/trace.json"], "", "there is no folder /gone"),
        (["--trace", "/"], "", "that is a folder"),
        ([], "loud", "PYINFER_LOG='loud': there are trace, debug, info, warning, error"),
    ],
)
def test_watching_that_cannot_be(option, env, words, models, monkeypatch, capsys):
    if env:
        monkeypatch.setenv("PYINFER_LOG", env)
    assert main(["generate", "hello", *option]) == 1
    assert words in capsys.readouterr().err
    assert models == []  # nothing was loaded


def test_a_trace_that_cannot_be_written(models, monkeypatch, tmp_path, capsys):
    model = tmp_path / "model.gguf"
    model.write_bytes(b"GGUF and the rest")
    assert main(["generate", "hello", "--trace", str(model)]) == 1
    assert "that is a model, which would be lost" in capsys.readouterr().err
    monkeypatch.setattr(os, "access", lambda path, mode: path != tmp_path)
    assert main(["generate", "hello", "--trace", str(tmp_path / "trace.json")]) == 1
    assert "trace.json: it may not be written" in capsys.readouterr().err
    assert models == []


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="only Linux has /dev/full")
def test_a_trace_that_did_not_fit(tiny, capsys):
    assert main(["generate", "hello", "-m", tiny, "-n", "2", "--trace", "/dev/full"]) == 1
    assert "No space left on device: '/dev/full'" in capsys.readouterr().err


@pytest.mark.parametrize(("options", "env"), [(["--trace-ops"], ""), ([], "trace")])
def test_lines(options, env, tiny, tmp_path):
    """In a process of its own: handlers of the log stay."""
    command = [sys.executable, "-m", "pyinfer", "generate", "hello", "-m", tiny, "-n", "2", *options]
    done = subprocess.run(
        command, env={**ENV, "PYINFER_LOG": env}, capture_output=True, text=True, timeout=60
    )
    assert done.returncode == 0
    lines = [line for line in done.stderr.splitlines() if line.startswith("TRACE pyinfer.ops: ")]
    assert sum(" fused_attention " in line for line in lines) == 2 * 2
    assert any(
        line.startswith("TRACE pyinfer.ops: [PARALLEL] op invocation counts (total ") for line in lines
    )
