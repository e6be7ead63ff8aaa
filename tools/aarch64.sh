#!/usr/bin/env bash
# Runs pyinfer's aarch64 build on an x86-64 Debian machine under qemu, from nothing: cross compiler, an arm64 Python tree, arm64
# wheels, the extension; then, per CPU model (cortex-a72: NEON, cortex-a76: dotprod, max: i8mm), the command that follows.
#
#   tools/aarch64.sh                      the tests and digests that CI runs
#   tools/aarch64.sh shell COMMAND...     `python COMMAND...` on the CPU model in QEMU_CPU (default max)
#
# AARCH64_DIR keeps the tree and the wheels between runs (default: a folder in the user's cache).
set -euo pipefail
cd "$(dirname "$0")/.."
dir=${AARCH64_DIR:-${XDG_CACHE_HOME:-$HOME/.cache}/pyinfer-aarch64}
tree=$dir/tree site=$dir/site
mkdir -p "$dir"

root() { if [ "$(id -u)" = 0 ]; then "$@"; else sudo "$@"; fi; }
if ! { command -v aarch64-linux-gnu-gcc && command -v qemu-aarch64-static && command -v mmdebstrap; } >/dev/null; then
    root apt-get update -qq
    root apt-get install -y -qq gcc-aarch64-linux-gnu libc6-dev-arm64-cross qemu-user-static mmdebstrap >/dev/null
fi
if [ ! -e "$tree/.done" ]; then
    rm -rf "$tree"
    mmdebstrap --quiet --variant=extract --arch=arm64 --skip=check/qemu \
        --include=python3,libpython3-dev,libstdc++6 "$(. /etc/os-release && echo "$VERSION_CODENAME")" "$tree"
    touch "$tree/.done"
fi
python=$(basename "$(ls "$tree"/usr/bin/python3.?? | head -1)") # python3.11
version=${python#python}
if [ ! -e "$site/.done" ]; then
    rm -rf "$site"
    python3 -m pip install --quiet --disable-pip-version-check --target "$site" --platform manylinux2014_aarch64 \
        --platform manylinux_2_28_aarch64 --python-version "$version" --implementation cp --abi "cp${version/./}" --abi abi3 --abi none \
        --only-binary=:all: numpy cffi gguf tokenizers jinja2 huggingface_hub platformdirs tqdm filelock pytest
    touch "$site/.done"
fi

# The extension: cffi writes its C file here, the cross compiler builds it with all of csrc.
build=$dir/build
rm -rf "$build" && mkdir -p "$build"
cp -r pyinfer tests pyproject.toml "$build/" && rm -f "$build"/pyinfer/*.so
python3 - "$build/_pi.c" <<'PY'
import runpy, sys
ffi = runpy.run_path("csrc/ffi.py")["ffi"]
ffi.emit_c_code(sys.argv[1])
PY
aarch64-linux-gnu-gcc -shared -fPIC -std=gnu11 -O3 -Wall -Wextra -Werror -Wno-unknown-pragmas -ffp-contract=off -fvisibility=hidden -pthread \
    -DPy_LIMITED_API=0x030a0000 -isystem "$tree/usr/include/$python" -idirafter "$tree/usr/include" -I csrc \
    "$build/_pi.c" $(find csrc -name '*.c' | sort) -o "$build/pyinfer/_pi.abi3.so"

run() { # on the CPU model in QEMU_CPU
    cd "$build" && PYTHONPATH=$build:$site PYTHONDONTWRITEBYTECODE=1 PYTHONHOME=$tree/usr QEMU_CPU=${QEMU_CPU:-max} \
        qemu-aarch64-static -L "$tree" "$tree/usr/bin/$python" "$@"
}
if [ "${1:-}" = shell ]; then
    shift
    run "$@"
    exit
fi
for cpu in cortex-a72 cortex-a76 max; do
    export QEMU_CPU=$cpu
    echo "== aarch64, qemu $cpu: $(run -c 'from pyinfer.backend.native import levels; print(*[n for n, ok in levels().items() if ok])')"
    run -m pyinfer digest "The capital of France is" -n 2
done
