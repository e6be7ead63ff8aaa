#!/usr/bin/env bash
# The metal backend without a Mac, on a Debian machine: the shipped shim and kernels against a stand-in for Metal (tests/metal_host),
# held to the reference's bytes, with subnormals kept and flushed, the threads of kernels in two orders, and every access of memory
# looked at; and all other C files compiled for macOS. Says nothing of Apple's compiler and hardware: docs/metal.md.
#
# In an environment with pyinfer's dependencies, setuptools and pytest. METAL_DIR keeps what is built from run to run; METAL_PI
# is the C library, where it is built already.
set -euo pipefail
cd "$(dirname "$0")/.."
top=$PWD
tmp=$(mktemp -d)
trap 'rm -rf "$tmp"' EXIT
dir=${METAL_DIR:-$tmp/metal}
mkdir -p "$dir"

root() { if [ "$(id -u)" = 0 ]; then "$@"; else sudo "$@"; fi; }
if ! { command -v clang++-16 && command -v gnustep-config && [ -e /usr/include/GNUstep/Foundation/Foundation.h ] &&
    [ -e "$(gcc -print-file-name=include/objc/objc.h)" ]; } >/dev/null; then
    root apt-get update -qq
    root env DEBIAN_FRONTEND=noninteractive apt-get install -y -qq --no-install-recommends clang-16 gobjc libgnustep-base-dev gnustep-make >/dev/null
fi

export METAL_HOST_CACHE=$dir/kernels
tested() { # what it is; pytest's arguments. A test that skips did not run. (What the stand-in says before it aborts is for the terminal.)
    echo "== metal: $1"
    shift
    PYTHONPATH=$dir/build python -m pytest -q --capture=sys -p no:cacheprovider --junitxml="$tmp/report.xml" "$@"
    python - "$tmp/report.xml" <<'PY'
import sys
import xml.etree.ElementTree as ET

cases = list(ET.parse(sys.argv[1]).iter("testcase"))
if not cases or (skipped := [c.get("name") for c in cases if len(c.findall("skipped"))]):
    sys.exit(f"metal: did not run: {skipped if cases else 'anything'}")
PY
}

python tests/metal_host/build.py "$dir/build" ${METAL_PI:+"$METAL_PI"}
tested "the stand-in" --confcutdir=tests/metal_host tests/metal_host/test_host.py
cd "$tmp" # not at the top of the repository: its own pyinfer would be taken
backend() { tested "$1" --import-mode=importlib --rootdir "$top" -c "$top/pyproject.toml" "$top/tests/test_metal.py" "${@:2}"; }
backend "the backend"
# Of these the ordinary values alone, for time; subnormals kept and flushed are in the tests themselves.
METAL_HOST_SEED=1 METAL_HOST_THREADS=2 METAL_HOST_MACOS=14 \
    backend "another order, two threads, macOS 14" -k "kept and (random or model) or kernel_weights and random or smollm2"
METAL_HOST_CHECK=1 backend "every access of kernels looked at" -k "kernel and random and not flushed"
cd "$top"

echo "== metal: other C files for macOS"
python -m venv "$dir/zig"
"$dir/zig/bin/python" -m pip install -qq --disable-pip-version-check ziglang
export ZIG_GLOBAL_CACHE_DIR=$tmp/zig ZIG_LOCAL_CACHE_DIR=$tmp/zig
find csrc -name '*.c' | sort | xargs -P "$(nproc)" -I{} sh -c '"$0" -m ziglang cc -target aarch64-macos -std=gnu11 -O0 -Wall -Wextra -Werror \
    -Wno-unknown-pragmas -ffp-contract=off -fvisibility=hidden -I csrc -c "$1" -o "$2/$(echo "$1" | tr / _).o"' "$dir/zig/bin/python" {} "$tmp"
echo "metal: $(ls "$tmp"/csrc_*.o | wc -l) files"
echo "metal: kernels and models give the reference's bytes under the stand-in"
