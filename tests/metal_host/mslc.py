"""Compiles Metal Shading Language for this machine: mslc.py [--fast-math] [--check] FOLDER < source.

Prints the library's path. The source is preprocessed, its attributes are read and taken out, and to each
kernel a function is added that calls it with what the runtime has bound (runtime.h, mh_kernel). What comes
out is kept in FOLDER under a hash of all that went in. Status 1 and the compiler's messages on standard
error for a source that Metal would refuse, as far as this can tell:

- a first pass, as another language that clang knows address spaces of, finds pointers and references of the
  wrong space;
- C++14, as MSL is, with no hexadecimal floats;
- the position attributes of one kernel agree in their number of components.
"""

import hashlib
import os
import re
import subprocess
import sys
from pathlib import Path

HERE = Path(__file__).parent
CLANG = os.environ.get("METAL_HOST_CLANG", "clang++-16")
VECTOR = r"(?:char|uchar|short|ushort|int|uint|long|ulong|float|half)[234]"
POSITIONS = {
    "thread_position_in_grid": "in_grid",
    "thread_position_in_threadgroup": "in_group",
    "threadgroup_position_in_grid": "group",
    "threads_per_threadgroup": "group_size",
    "threadgroups_per_grid": "groups",
}
NUMBERS = {
    "thread_index_in_threadgroup": "place->index",
    "thread_index_in_simdgroup": "place->lane",
    "simdgroup_index_in_threadgroup": "place->simdgroup",
    "threads_per_simdgroup": "32u",
    "simdgroups_per_threadgroup": "(place->group_size[0] * place->group_size[1] * place->group_size[2] + 31) "
    "/ 32",
}
SAME_TYPE = [("thread_position_in_threadgroup", "threads_per_threadgroup")]


class SourceError(Exception):
    """What Metal's compiler would say."""


def split_arguments(text: str) -> list[str]:
    """At commas outside brackets."""
    parts, depth = [""], 0
    for c in text:
        depth += (c in "([{<") - (c in ")]}>")
        if c == "," and depth == 0:
            parts.append("")
        else:
            parts[-1] += c
    return [p.strip() for p in parts if p.strip()]


def closing(text: str, start: int) -> int:
    """Where the parenthesis that was opened before `start` is closed."""
    depth = 1
    while depth:
        depth += {"(": 1, ")": -1}.get(text[start], 0)
        start += 1
    return start - 1


def argument(kernel: str, text: str, seen: dict[str, str]) -> tuple[str, str, int, str]:
    """An argument of a kernel: what to pass, its kind (buffer, threadgroup or ""), index, element type."""
    attribute = re.search(r"\[\[\s*(\w+)\s*(?:\(\s*(\w+)\s*\))?\s*\]\]", text)
    if not attribute:
        raise SourceError(f"kernel {kernel}: argument without an attribute: {text}")
    name, index = attribute.groups()
    declared = re.match(r"(.*?)\w+\s*$", text[: attribute.start()], re.S)
    assert declared
    type_ = " ".join(declared[1].split())
    if name in ("buffer", "threadgroup"):
        i = int(index or "")
        if not 0 <= i < 31:
            raise SourceError(f"kernel {kernel}: {name}({i}): the index must be 0 to 30")
        space = {"buffer": r"\b(device|constant)\b", "threadgroup": r"\bthreadgroup\b"}[name]
        if not re.search(space, type_) or type_[-1] not in "*&":
            raise SourceError(
                f"kernel {kernel}: {name}({i}) is not a pointer or reference of its address space: {type_}"
            )
        element = type_[:-1]
        of = "buffers" if name == "buffer" else "group_memory"
        return f"{'*' if type_[-1] == '&' else ''}({element}*){of}[{i}]", name, i, element
    if name in NUMBERS:
        if type_ not in ("uint", "ushort", "unsigned int", "unsigned short"):
            raise SourceError(f"kernel {kernel}: [[{name}]] is a uint or ushort, not {type_}")
        return f"({type_})({NUMBERS[name]})", "", 0, ""
    if name in POSITIONS:
        if not re.fullmatch(r"u(int|short)[23]?", type_):
            raise SourceError(
                f"kernel {kernel}: [[{name}]] is a uint or ushort, or a vector of 2 or 3, not {type_}"
            )
        seen[name] = type_
        width = int(type_[-1]) if type_[-1] in "23" else 1
        values = ", ".join(f"place->{POSITIONS[name]}[{k}]" for k in range(width))
        return f"mh_make<{type_}>({values})" if width > 1 else f"({type_}){values}", "", 0, ""
    raise SourceError(f"kernel {kernel}: the stand-in does not know [[{name}]]")


def callers(text: str) -> str:
    """For each kernel a function that calls it, which no check looks at, and its description."""
    out = []
    for m in re.finditer(
        r"((?:\[\[[^\]]*\]\]\s*)*)\bkernel\s+((?:\[\[[^\]]*\]\]\s*)*)void\s+(\w+)\s*\(", text
    ):
        name, seen = m[3], dict[str, str]()
        most = re.search(r"max_total_threads_per_threadgroup\s*\(\s*(\d+)", m[1] + m[2])
        passed, masks, least = [], {"buffer": 0, "threadgroup": 0}, {}
        for part in split_arguments(text[m.end() : closing(text, m.end())]):
            value, kind, i, element = argument(name, part, seen)
            passed.append(value)
            if kind:
                if masks[kind] >> i & 1:
                    raise SourceError(f"kernel {name}: {kind}({i}) twice")
                masks[kind] |= 1 << i
            if kind == "buffer" and element.split()[-1] != "void":
                least[i] = f"sizeof({element})"
        if len({t[-1] if t[-1] in "23" else "1" for t in seen.values()}) > 1:
            raise SourceError(
                f"kernel {name}: position attributes differ in their number of components: {seen}"
            )
        for a, b in SAME_TYPE:
            if a in seen and b in seen and seen[a] != seen[b]:
                raise SourceError(f"kernel {name}: [[{a}]] and [[{b}]] are of one type")
        sizes = ", ".join(least.get(i, "0") for i in range(31))
        out.append(
            f'extern "C" __attribute__((no_sanitize("coverage"))) void mh_run_{name}'
            "(void *const *buffers, void *const *group_memory, const mh_place *place) "
            f"{{ (void)buffers, (void)group_memory, (void)place; {name}({', '.join(passed)}); }}\n"
            f'extern "C" __attribute__((visibility("default"))) const mh_kernel mh_kernel_{name};\n'
            f'const mh_kernel mh_kernel_{name} = {{"{name}", mh_run_{name}, {masks["buffer"]}u, '
            f"{masks['threadgroup']}u, {most[1] if most else 0}u, {{{sizes}}}}};\n"
        )
    return "".join(out)


def refuse(text: str) -> None:
    """What would compile here, and mean something else."""
    if m := re.search(rf"\(\s*{VECTOR}\s*\)\s*[\w(]", text):
        raise SourceError(f"a cast of a vector as in C: write it as a constructor: {m[0]}")
    body = re.sub(r"\[\[[^\]]*\]\]", "", text)
    if m := re.search(r"\bthreadgroup\s+[\w<>]+\s+\w+\s*(?:\[[^\]]*\]\s*)*;", body):
        raise SourceError(f"the stand-in has threadgroup memory by [[threadgroup(n)]] alone: {m[0]}")


def clang(*arguments: str, text: str) -> str:
    done = subprocess.run([CLANG, *arguments], input=text, capture_output=True, text=True)
    if done.returncode:
        raise SourceError(done.stderr)
    return done.stdout


def target_flags() -> list[str]:
    """One instruction for fma and for half: without, clang calls functions."""
    try:
        cpu = Path("/proc/cpuinfo").read_text()
    except OSError:
        return []
    return [f"-m{flag}" for flag in ("fma", "f16c", "avx2") if re.search(rf"^flags.*\b{flag}\b", cpu, re.M)]


def compile_source(source: str, folder: Path, fast_math: bool, check: bool) -> Path:
    flags = [
        "-O2",
        "-fPIC",
        "-shared",
        "-fvisibility=hidden",
        "-fsigned-char",
        "-fno-exceptions",
        "-fno-rtti",
        "-fno-builtin",
    ]
    flags += ["-Xclang", "-ffloat16-excess-precision=none", "-ffp-contract=on", "-fno-strict-aliasing"]
    flags += ["-Wall", "-Wno-unused-function", "-Wno-unused-const-variable", "-Wno-duplicate-decl-specifier"]
    flags += ["-Werror=c++17-extensions", *target_flags()]
    if fast_math:
        flags += ["-ffast-math"]
    if check:
        flags += [
            "-DMH_CHECK",
            "-fsanitize-coverage=func,trace-loads,trace-stores",
            "-fno-vectorize",
            "-fno-slp-vectorize",
        ]
    parts = [source, *flags, *((HERE / n).read_text() for n in ("msl.h", "runtime.h", "mslc.py"))]
    library = folder / f"{hashlib.sha256(chr(0).join(parts).encode()).hexdigest()[:24]}.so"
    if library.exists():
        return library
    define = ["-D__METAL__=1", "-D__METAL_VERSION__=230", "-std=c++14", "-nostdinc"]
    named = f'#line 1 "program_source"\n{source}'
    text = clang("-E", "-x", "c++", *define, f"-I{HERE / 'msl'}", "-", text=named)
    text = re.sub(r"^#pragma METAL fp contract", "#pragma clang fp contract", text, flags=re.M)
    refuse(text)
    extra = callers(re.sub(r"^#.*$", "", text, flags=re.M))
    plain = re.sub(r"\[\[[^\]]*\]\]", "", text)
    plain = re.sub(rf"\b({VECTOR})\s*\(", r"mh_make<\1>(", plain)
    features = "-__opencl_c_generic_address_space,-__opencl_c_pipes,-__opencl_c_device_enqueue"
    spaces = [
        "-x",
        "clcpp",
        "-cl-std=clc++2021",
        "-target",
        "spir64",
        "-fsyntax-only",
        "-w",
        "-cl-no-stdinc",
        "-DMH_SYNTAX",
    ]
    spaces += ["-Xclang", f"-cl-ext={features},+cl_khr_fp16,+cl_khr_fp64"]
    header = [f"-I{HERE}", "-include", str(HERE / "msl.h")]
    clang(*spaces, *header, "-", text=plain)
    folder.mkdir(parents=True, exist_ok=True)
    unfinished = library.with_suffix(f".{os.getpid()}")
    whole = f'{plain}\n#line 1 "callers"\n{extra}'
    if check:
        whole += "".join(
            f'extern "C" __attribute__((no_sanitize("coverage"))) void __sanitizer_cov_{kind}{n}'
            f"(const void *p) {{ mh_calls_of.access(p, {n}, {write}); }}\n"
            for kind, write in (("load", 0), ("store", 1))
            for n in (1, 2, 4, 8, 16)
        )
    clang("-x", "c++", "-std=c++14", *flags, *header, "-", "-o", str(unfinished), text=whole)
    unfinished.rename(library)
    return library


if __name__ == "__main__":
    try:
        options = [f"--{name}" in sys.argv for name in ("fast-math", "check")]
        print(compile_source(sys.stdin.read(), Path(sys.argv[-1]), *options))
    except SourceError as error:
        sys.exit(str(error))
