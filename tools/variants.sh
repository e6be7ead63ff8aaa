#!/usr/bin/env bash
# The golden digests do not move with the compiler or its optimisation: builds the extension in several ways and holds every level
# of this CPU to the committed digests, and rope's tables to the reference. One must fail, or the checks could not: with -ffast-math,
# which contracts as well.
#
# What -ffp-contract=off is for. No float32 product in csrc feeds an addition and nothing else, so there is nothing to fuse in the
# kernels, and the digests of ops and models hold without the flag: gcc 12 and clang 14 with -O3 -march=native -ffp-contract=fast.
# The double-doubles of rope's tables do need it: gcc moves about one value in 3000 (test_rope_table_shows_contraction); clang
# fuses other products there, which moved none of 2 * 10^8.
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
checked() { # name: the golden tests on that package, and what contraction would move
    (cd "$tmp" && PYTHONPATH=$tmp/$1:$top/tests python -m pytest -q -p no:cacheprovider --import-mode=importlib \
        --rootdir "$top" -c "$top/pyproject.toml" "$top/tests/golden" "$top/tests/kernels/test_rope.py" \
        -k "test_op or tiny or contraction" >"$tmp/$1.out" 2>&1)
}
same() {
    echo "== $1: $2 ${*:3}"
    built "$@"
    checked "$1" || { tail -30 "$tmp/$1.out"; echo "variants: $1 moved a byte" >&2; exit 1; }
    tail -1 "$tmp/$1.out"
}
different() { # the tests that must fail, then as above
    local test tests=$1
    shift
    echo "== $1, which must fail $tests: $2 ${*:3}"
    built "$@"
    checked "$1" || true
    for test in $tests; do
        grep -q "^FAILED .*::$test" "$tmp/$1.out" && continue
        tail -30 "$tmp/$1.out"
        echo "variants: $1 should have failed $test" >&2
        exit 1
    done
    tail -1 "$tmp/$1.out"
}

# gcc -O3 is the build that everything else runs on.
same gcc-O0 gcc -O0
same clang-native clang -O3 -march=native
must_fail=test_op
if grep -qw fma /proc/cpuinfo; then must_fail+=" test_rope_table_shows_contraction"; fi
different "$must_fail" fast-math gcc -O1 -march=native -ffast-math
echo "variants: all as they should be"
