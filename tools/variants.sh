#!/usr/bin/env bash
# The golden digests do not move with the compiler or its optimisation: builds the extension in several ways and holds every level
# of this CPU to the committed digests. Two builds must fail, or the check could not: one with -ffast-math, and, where this CPU has
# AVX-512 without VNNI, one whose emulated VNNI is wrong.
#
# In an environment with pyinfer's dependencies and pytest. Needs gcc and clang.
set -euo pipefail
cd "$(dirname "$0")/.."
top=$PWD
tmp=$(mktemp -d)
trap 'rm -rf "$tmp"' EXIT

built() { # name compiler flags -> a package in $tmp/name
    local name=$1 cc=$2
    shift 2
    mkdir -p "$tmp/$name"
    cp -r pyinfer "$tmp/$name/"
    rm -f "$tmp/$name"/pyinfer/_pi*.so
    CC=$cc LDSHARED="$cc -shared" PYINFER_CFLAGS="$*" \
        python setup.py -q build_ext --build-lib "$tmp/$name" --build-temp "$tmp/$name.o" >"$tmp/$name.log" 2>&1 ||
        { cat "$tmp/$name.log"; exit 1; }
}
digests() { # name tests... : the golden tests on that package
    local name=$1
    shift
    (cd "$tmp" && PYTHONPATH=$tmp/$name:$top/tests python -m pytest -q -p no:cacheprovider --import-mode=importlib \
        --rootdir "$top" -c "$top/pyproject.toml" "$top/tests/golden" "$@" >"$tmp/$name.out" 2>&1)
}
same() {
    echo "== $1: $2 ${*:3}"
    built "$@"
    digests "$1" -k "op or tiny" || { tail -30 "$tmp/$1.out"; echo "variants: $1 moved a digest" >&2; exit 1; }
    tail -1 "$tmp/$1.out"
}
different() {
    echo "== $1, which must fail: $2 ${*:3}"
    built "$@"
    if digests "$1" -k "op or tiny"; then
        echo "variants: $1 should have moved a digest" >&2
        exit 1
    fi
    tail -1 "$tmp/$1.out"
}

same gcc-O0 gcc -O0
same gcc-native gcc -O3 -march=native
same clang-O2 clang -O2
same clang-native clang -O3 -march=native
different fast-math gcc -O3 -ffast-math
if grep -qw avx512bw /proc/cpuinfo && ! grep -qw avx512_vnni /proc/cpuinfo; then
    same vnni-emulated gcc -include "$top/tests/kernels/emulate_vnni.h"
    different vnni-broken gcc -DPI_BREAK_VNNI -include "$top/tests/kernels/emulate_vnni.h"
fi
echo "variants: all as they should be"
