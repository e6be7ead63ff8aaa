#!/usr/bin/env bash
# The kernel check under the address, undefined-behaviour and thread sanitizers of gcc: any report fails.
# Without optimisation: gcc takes minutes to optimise what these insert into unrolled kernels.
# In an environment with pyinfer's dependencies and pytest. Arguments: the tests for the first two (all of tests/kernels).
set -euo pipefail
cd "$(dirname "$0")/.."
top=$PWD
tmp=$(mktemp -d)
trap 'rm -rf "$tmp"' EXIT

sanitized() { # name, libraries to load first, flags, tests...
    local name=$1 libraries=$2 flags=$3 preload="" library
    shift 3
    mkdir -p "$tmp/$name"
    cp -r pyinfer "$tmp/$name/"
    rm -f "$tmp/$name"/pyinfer/_pi*.so
    PYINFER_CFLAGS="-O0 -g1 -fno-omit-frame-pointer $flags" \
        python setup.py -q build_ext --build-lib "$tmp/$name" --build-temp "$tmp/$name.o" >"$tmp/$name.log" 2>&1 ||
        { cat "$tmp/$name.log"; exit 1; }
    for library in $libraries; do preload+="$(gcc -print-file-name="$library") "; done
    echo "== $name"
    (cd "$tmp" && LD_PRELOAD=$preload PYTHONPATH=$tmp/$name:$top/tests PYTHONMALLOC=malloc \
        ASAN_OPTIONS=detect_leaks=0 UBSAN_OPTIONS=halt_on_error=1:print_stacktrace=1 TSAN_OPTIONS=halt_on_error=1 \
        python -m pytest -q -p no:cacheprovider --import-mode=importlib --rootdir "$top" -c "$top/pyproject.toml" "$@") |
        tee "$tmp/$name.out" || { echo "sanitize: $name found something" >&2; exit 1; }
    ! tail -1 "$tmp/$name.out" | grep -q skipped || { echo "sanitize: $name did not run all of these" >&2; exit 1; }
}
kernels=$top/tests/kernels
# For time, without what reaches no other memory and no other arithmetic of C: other floating-point environments; the two million
# inputs of exp, tens of thousands of keys and the decimal checks of rope, whose loops others enter; the larger of two matrices that
# go through all levels; and the test of the reference's fma. Tests that cross a fence on purpose would be reported; the fences
# themselves are no news here.
# And of the levels only the best, which has the most code: the plain C is a few loops, and slow here.
tests=("${@:-$kernels}") # relative to the top, too
levels="[ref or -ref- or -ref]"
grep -qw avx512bw /proc/cpuinfo && levels+=" or avx2"
# The checks left out find what the address sanitizer does too, and take a fifth of the compiler's time.
sanitized address "libasan.so libubsan.so" \
    "-fsanitize=address,undefined -fno-sanitize-recover=all -fno-sanitize=null,object-size,pointer-overflow" \
    "${tests[@]/#tests\//$top/tests/}" -k "not ($levels or environment or test_exp or keys_are_many or 161-4096 or within_one_ulp or rounds_once or fence or inaccessible)"
sanitized thread libtsan.so "-fsanitize=thread" "$kernels/test_pool.py" -k "not ($levels)"
echo "sanitize: no finding"
