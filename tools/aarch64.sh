#!/usr/bin/env bash
# Runs pyinfer's aarch64 build on an x86-64 Debian machine under qemu, from nothing: cross compiler, an arm64 Python tree, arm64
# wheels, the extension. CPU models: cortex-a72 has NEON alone, cortex-a76 dotprod, max i8mm too.
#
#   tools/aarch64.sh                      the kernel check and the golden digests of ops and tiny models at every level, SmolLM2 over
#                                         64 tokens at the best
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
    python3 -m pip install -qq --disable-pip-version-check --target "$site" --platform manylinux2014_aarch64 \
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
    cd "$build" && PYTHONPATH=$build:$build/tests:$site PYTHONDONTWRITEBYTECODE=1 PYTHONHOME=$tree/usr QEMU_CPU=${QEMU_CPU:-max} \
        qemu-aarch64-static -L "$tree" "$tree/usr/bin/$python" "$@"
}
if [ "${1:-}" = shell ]; then
    shift
    run "$@"
    exit
fi

# Three generations of CPU side by side, each for the level it is the first to have. What needs no second run has none: above NEON a
# level differs in its own kernels alone, which are matmuls of some types (held to that below); whole tiny models run at the best
# level and, of the types that differ most, at all. Left out are tests that do not turn on the instruction set: of threads, whose
# order qemu does not show, of rows read back, which no kernel of the table does and the digests cover, of arguments, and of the check
# itself; and those that start a child, which would need binfmt.
kernels=$(echo tests/kernels/test_{attention,exp,matmul,rope,rows,surroundings}.py)
elsewhere="threads or workers or ranges or gather or inaccessible or go_through_all or exports"
# For time, too: attention at every head_dim and group, and over tens of thousands of keys, whose edges its other tests have; FP
# environments for each weight type, and that of traps, of which these CPUs have none; matrices of 64, 256, 288 and 512 columns,
# since those of 96, or 768 where a block has 256, enter the same loops.
elsewhere+=" or test_attention[ or keys_are_many or environment and (matmul_ or trap) or test_matmul and (64] or 256] or 288] or 512])"
check() { # CPU model, levels it must have, the golden digests to check
    export QEMU_CPU=$1
    local has own files=$kernels which="not ($elsewhere) and neon"
    has=$(run -c 'from pyinfer.backend.native import levels; print(*[n for n, ok in levels().items() if ok])')
    own=$(run -c 'from kernels.test_surroundings import own; print(*own())')
    echo "== aarch64 $1: $has; of the last: $own"
    [ "$has" = "$2" ] || { echo "aarch64: $1 should have: $2" >&2; return 1; }
    if [ "$1" != cortex-a72 ]; then
        ! tr ' ' '\n' <<<"$own" | grep -v '^matmul_' || { echo "aarch64: $1 has more to check" >&2; return 1; }
        files=tests/kernels/test_matmul.py
        own=$(tr a-z A-Z <<<"${own//matmul_/}")
        which="not ($elsewhere) and ${2##* } and (${own// / or })"
    fi
    run -m pytest -q -p no:cacheprovider --junitxml="$dir/$1-kernels.xml" $files -k "$which" &&
        run -m pytest -q -p no:cacheprovider --junitxml="$dir/$1-golden.xml" tests/golden -k "$3"
}
smollm2() { # its digest over 64 tokens, held to the one that x86-64 gave
    local want got
    want=$(python3 -c 'import json; print(json.load(open("tests/golden/digests.json"))["smollm2"]["64"])')
    got=$(run -m pyinfer digest "The capital of France is" -n 64 | sed -n 's/.*"logits_sha256": "\(.*\)".*/\1/p')
    echo "== aarch64 $QEMU_CPU: SmolLM2 over 64 tokens: $got"
    [ "$got" = "$want" ] || { echo "aarch64: x86-64 gives $want" >&2; return 1; }
}
rm -f "$dir"/*.xml
check cortex-a72 "ref neon" "op" >"$dir/a72.log" 2>&1 & a72=$!
check cortex-a76 "ref neon dotprod" "op and dotprod" >"$dir/a76.log" 2>&1 & a76=$!
status=0
check max "ref neon dotprod i8mm" "op and i8mm or tiny and f16 and (i8mm or qwen3-Q8_0 or Q4_K_M or llama-F16)" && smollm2 || status=1
wait $a72 || status=1
wait $a76 || status=1
cat "$dir/a72.log" "$dir/a76.log"
[ $status = 0 ] || exit 1
# A level that the emulator has and that no test ran is a failure, and so is a skip.
python3 - "$dir" ref neon dotprod i8mm <<'PY'
import re, sys
import xml.etree.ElementTree as ET
from collections import Counter
from pathlib import Path

folder, *levels = sys.argv[1:]
ran = {kind: Counter() for kind in ("kernels", "golden")}
for kind, counts in ran.items():
    for report in Path(folder).glob(f"*-{kind}.xml"):
        for case in ET.parse(report).iter("testcase"):
            if len(case.findall("skipped")):
                sys.exit(f"aarch64: {case.get('name')} did not run")
            counts.update(set(re.split(r"[][-]", case.get("name"))) & set(levels))
print("levels run under qemu:", ", ".join(f"{n} ({ran['kernels'][n]} kernel tests, {ran['golden'][n]} digests)" for n in levels))
# (The plain C is held to its digests here, and to the reference on x86-64.)
if missing := [n for n in levels if not ran["golden"][n] or not (ran["kernels"][n] or n == "ref")]:
    sys.exit(f"aarch64: did not run: {missing}")
PY
echo "aarch64: ref neon dotprod i8mm give the committed digests"
