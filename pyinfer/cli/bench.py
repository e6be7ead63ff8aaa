"""`pyinfer bench`: tokens per second, and how far that is from what the machine could do."""

import argparse
import time
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..errors import InputError, PyinferError
from . import common

if TYPE_CHECKING:
    from ..bench import Bench, Limits, Result

PICTURES = (".png", ".svg", ".pdf")
NOTE = (
    "GB/s: weights and cache read, beside the speed at which the machine reads memory; "
    "GMAC/s: multiply-adds, beside the most that the level makes; Python: its part of a decoded token"
)


def add(commands: common.Commands) -> None:
    parser = commands.add_parser(
        "bench",
        help="measure speed, beside what this machine could do",
        description=f"Medians after a warm-up, as llama-bench measures. {NOTE}.",
        allow_abbrev=False,
    )
    option, whole = parser.add_argument, common.number(int, 0)
    option("models", metavar="MODEL", nargs="+", help=common.MODEL_HELP)
    option("-p", type=whole, default=512, metavar="N", help="tokens of the prompt; 0: none (%(default)s)")
    option("-n", type=whole, default=128, metavar="N", help="tokens to decode; 0: none (%(default)s)")
    option("-d", type=several(whole), default=[0], metavar="N,...", help="tokens in the context before (0)")
    option("-t", type=several(common.number(int, 1)), metavar="N,...", help="threads (one per core)")
    option("-r", type=common.number(int, 1), default=5, metavar="N", help="repeats (%(default)s)")
    option("--kv-dtype", default="f16", choices=common.KV_DTYPES, help="how K and V are stored (%(default)s)")
    option("--no-limits", action="store_true", help="do not measure what the machine could do")
    option("--plot", type=Path, metavar="FILE.png", help="draw them too; needs matplotlib: 'pyinfer[plot]'")
    form = parser.add_mutually_exclusive_group()
    form.add_argument("--json", action="store_true", help="print JSON, with every repeat")
    form.add_argument("--markdown", action="store_true", help="print a Markdown table")
    parser.set_defaults(run=run)


def several(parse: Callable[[str], int]) -> Callable[[str], list[int]]:
    """An argparse type: numbers between commas, in the order given, each once."""

    def numbers(text: str) -> list[int]:
        return list(dict.fromkeys(parse(part) for part in text.split(",")))

    return numbers


def run(args: argparse.Namespace) -> int:
    pyplot = _pyplot(args.plot) if args.plot else None
    from ..backend import default_threads
    from ..bench import Bench, Plan, as_dict
    from ..fetch import resolve

    plan = Plan(args.p, args.n, args.d, args.t or [default_threads()], args.r, args.kv_dtype)
    bench = Bench(common.say, measure_limits=not args.no_limits)
    paths = [resolve(model) for model in args.models]
    for path in paths:
        bench.check(path, plan)  # before minutes go by
    results = []
    for path in paths:
        for result in bench.run(path, plan):
            results.append(result)
            common.say(f"  {result.label}: {result.median:.1f} tokens/s, spread {result.spread:.0%}")
    if args.json:
        common.print_json(as_dict(results, bench))
    else:
        print("\n".join(report(results, bench, markdown=args.markdown)), flush=True)
    if pyplot is not None:
        draw(pyplot, results, args.plot)
    return 0


# ---- tables ------------------------------------------------------------------------------------------------

HEAD = (
    *("model", "type", "MB", "threads", "test", "tokens/s", "spread"),
    *("GB/s", "of read", "GMAC/s", "of peak", "Python"),
)


def report(results: "Sequence[Result]", bench: "Bench", *, markdown: bool) -> list[str]:
    """A table, under lines that say on what machine, and when."""
    from ..bench import machine

    m, today = machine(), time.strftime("%Y-%m-%d")
    lines = [
        f"{m['cpu']}, {m['cores']} CPUs, {m['system']}; level {results[0].level}; {today}",
        *(f"{n} thread(s): {_limits(found)}" for n, found in bench.limits.items()),
    ]
    if markdown:
        lines = [*(f"- {line}" for line in lines), f"- {NOTE}"]
    return [*lines, "", *table(HEAD, [_row(r) for r in results], markdown=markdown)]


def _limits(found: "Limits") -> str:
    peak = (
        ""
        if found.int8_gmac is None
        else f", {found.int8_gmac:.0f} GMAC/s of bytes, {found.f32_gmac:.0f} of f32"
    )
    return f"reads {found.read_gb:.1f} GB/s{peak}"


def _row(r: "Result") -> list[str]:
    part = ["" if x is None else f"{x:.0%}" for x in (r.of_read, r.of_multiply)]
    decoding = r.test.startswith("tg")
    return [
        r.model,
        r.type,
        f"{r.file_bytes / 1e6:.0f}",
        str(r.threads),
        r.label,
        f"{r.median:.1f}",
        f"{r.spread:.0%}",
        f"{r.gb:.1f}" if decoding else "",  # a prefill reads the weights once for many tokens
        part[0] if decoding else "",
        f"{r.gmac:.0f}",
        part[1],
        "" if r.python is None else f"{r.python:.1%}",
    ]


def table(head: Sequence[str], rows: Iterable[Sequence[str]], *, markdown: bool) -> list[str]:
    """Lines of a table; the first column to the left, the others to the right."""
    cells = [list(head), *(list(row) for row in rows)]
    width = [max(map(len, column)) for column in zip(*cells, strict=True)]
    padded = [
        [c.ljust(w) if i == 0 else c.rjust(w) for i, (c, w) in enumerate(zip(row, width, strict=True))]
        for row in cells
    ]
    if not markdown:
        return ["  ".join(row).rstrip() for row in padded]
    rule = ["-" * w if i == 0 else "-" * (w - 1) + ":" for i, w in enumerate(width)]
    return [f"| {' | '.join(row)} |" for row in (padded[0], rule, *padded[1:])]


# ---- the picture -------------------------------------------------------------------------------------------


def _pyplot(file: Path) -> Any:
    """matplotlib's pyplot, without a window. Raises, before anything is measured, what would fail after."""
    if file.suffix not in PICTURES:
        raise InputError(f"--plot {file}: the name must end in one of {', '.join(PICTURES)}")
    common.writable("--plot", file)
    try:
        import matplotlib
    except ImportError:
        raise PyinferError("--plot needs matplotlib: pip install 'pyinfer[plot]'") from None
    matplotlib.use("Agg")
    import matplotlib.pyplot

    return matplotlib.pyplot


def draw(pyplot: Any, results: "Sequence[Result]", file: Path) -> None:
    """Prefill and decoding side by side: bars by model and threads, or lines over depth."""
    tests = list(dict.fromkeys(r.test for r in results))
    figure, axes = pyplot.subplots(1, len(tests), figsize=(5.5 * len(tests), 4), squeeze=False)
    for ax, test in zip(axes[0], tests, strict=True):
        series: dict[str, list[Result]] = {}
        for r in results:
            if r.test == test:
                series.setdefault(f"{r.model}, {r.threads} thread{'s' * (r.threads > 1)}", []).append(r)
        over_depth = any(len(found) > 1 for found in series.values())
        for label, found in series.items():
            y = [r.median for r in found]
            if over_depth:
                ax.plot([r.depth for r in found], y, marker="o", label=label)
            else:
                error = [[y[0] - min(found[0].samples)], [max(found[0].samples) - y[0]]]
                ax.bar(label, y[0], yerr=error, capsize=3)
                at_foot = {"xytext": (0, 4), "textcoords": "offset points", "ha": "center", "color": "white"}
                ax.annotate(f"{y[0]:.0f}", (label, 0), **at_foot)
        ax.set(title=test, ylabel="tokens/s", ylim=(0, None))
        if over_depth:
            ax.set(xlabel="tokens in the context")
            ax.legend()
        else:
            ax.tick_params(axis="x", labelrotation=20)
    figure.tight_layout()
    try:
        figure.savefig(file, dpi=144)
    finally:
        pyplot.close(figure)
