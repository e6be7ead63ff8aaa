"""A report as one HTML page that loads nothing: tables, with bars in them, and pictures in SVG.

A picture is drawn twice, for a wide and for a narrow screen, so that its text is of one size on both; the
style sheet shows one of them. All text goes through `tag`, which escapes it.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from .markup import STYLE, Markup, join, tag
from .phases import BUCKETS
from .report import Bucket, Phase, Report, spans

# Each has three times the contrast of a white and of a dark page, and they differ for red-green blind eyes.
COLOURS = dict(
    zip(
        BUCKETS,
        (
            *("#3c4bff", "#3c6996", "#ff4b96", "#a587c3", "#d200d2", "#3c9687", "#c369ff"),
            *("#874bd2", "#0f87ff", "#879600", "#a54b5a", "#96690f"),
        ),
        strict=True,
    )
)
OTHER = "#858585"
WIDE, MIDDLE, NARROW = 900, 640, 360  # MIDDLE: with a table beside it
FONT = 12  # pixels, of text in pictures
SPANS = 8  # lines of the table of rates


def page(r: Report) -> str:
    """The whole page."""
    name = str(r.facts.get("model", "a model"))
    body = [
        tag("h1", name),
        _head(r),
        *_time(r.phases),
        *_calls(r),
        *_rates(r),
        *_roofline(r),
        *_slowest(r),
        *_schedule(r),
    ]
    meta = Markup(
        '<meta charset="utf-8"><meta name="viewport" content="width=device-width,initial-scale=1">'
        '<meta name="color-scheme" content="light dark">'
    )
    head = tag("head", meta, tag("title", f"{name}: a trace of pyinfer"), tag("style", Markup(STYLE)))
    return f'<!doctype html>\n<html lang="en">{head}\n<body>\n{chr(10).join(body)}\n</body></html>\n'


# ---- the facts ---------------------------------------------------------------------------------------------


def _head(r: Report) -> Markup:
    f = r.facts
    machine = f["machine"] if isinstance(f.get("machine"), dict) else {}
    levels = sorted(set(map(str, f.get("kernels", {}).values())))
    facts = {
        "backend": f["backend"],
        "kernels": ", ".join(levels) or "none",
        "threads": f.get("threads"),
        "KV cache": f.get("kv_cache"),
        "weights": ", ".join(f"{n} {t}" for t, n in f.get("tensor_types", {}).items()) or None,
        "tokens in, out": f"{r.tokens_in:,}, {r.tokens_out:,}",
        "time to first token": None if r.first_ms is None else f"{_figure(r.first_ms)} ms",
        "decoding": None if r.rate is None else f"{_figure(r.rate)} tokens/s",
        "processor": machine.get("cpu"),
        "reads memory at": None if r.limits is None else f"{_figure(r.limits.read_gb)} GB/s",
    }
    return tag("dl", *(tag("div", tag("dt", k), tag("dd", v)) for k, v in facts.items() if v is not None))


# ---- tables ------------------------------------------------------------------------------------------------

Row = Sequence[object]


def table(
    head: Row, rows: Iterable[Row], *, text: Sequence[int] = (), spare: Sequence[int] = (), foot: Row = ()
) -> Markup:
    """Columns in `text` are set to the left, those in `spare` are for wide screens alone."""

    def line(cells: Row, kind: str) -> Markup:
        marks = [" ".join(["text"] * (i in text) + ["spare"] * (i in spare)) for i in range(len(cells))]
        return tag(
            "tr",
            *(
                tag(kind, cell, class_="bar" if isinstance(cell, Bar) else mark or None)
                for cell, mark in zip(cells, marks, strict=True)
            ),
        )

    body = tag("tbody", *(line(row, "td") for row in rows))
    return tag(
        "table", tag("thead", line(head, "th")), body, tag("tfoot", line(foot, "td")) if foot else None
    )


class Bar(Markup):
    """A cell with a bar in it."""


def bar(share: float, colour: str, title: str) -> Bar:
    rect = tag("rect", tag("title", title), width=f"{100 * share:.2f}%", height=11, rx=2, fill=colour)
    return Bar(tag("svg", rect, role="img", aria_label=title))


def key(bucket: str | None, name: str, more: str = "") -> Markup:
    """A name behind a patch of its bucket's colour, and what may follow it."""
    patch = tag("i", style=f"background:{colour(bucket)}")
    return join([tag("b", patch, name), *([Markup(" "), tag("small", more)] if more else [])])


def colour(bucket: str | None) -> str:
    return COLOURS.get(bucket or "", OTHER)


def _figure(x: float) -> str:
    """Three digits or more, three decimals at most: 0.012, 4.56, 78.9, 1,234."""
    return f"{x:,.{min(3, max(0, 2 - math.floor(math.log10(x)))) if x > 0 else 0}f}"


def _part(x: float | None, of: float | None) -> str:
    return "" if not x or not of else f"{x / of:.0%}"


# ---- 1: time by phase --------------------------------------------------------------------------------------


def _time(phases: Sequence[Phase]) -> Iterable[Markup]:
    yield tag("h2", "Time by phase")
    yield tag("p", "python: what a forward takes beyond its ops; sample: all that picking a token takes.")
    yield tag("div", *(_phase(p) for p in phases), class_="two")


def _phase(p: Phase) -> Markup:
    most = max(b.us for b in p.buckets) or 1.0
    rows = [
        (
            key(b.name, b.name),
            bar(
                max(b.us, 0) / most,
                colour(b.name),
                f"{p.name} {b.name}: {b.us / 1e3:,.3f} ms in {b.calls:,} calls",
            ),
            _figure(b.us / 1e3),
            f"{b.us / (p.us or 1):.1%}",
            f"{b.calls:,}",
        )
        for b in p.buckets
    ]
    foot = ("all", "", _figure(p.us / 1e3), "100%", f"{sum(b.calls for b in p.buckets):,}")
    title = f"{p.name}, {p.tokens:,} token{'s' * (p.tokens != 1)}"
    return tag("div", tag("h3", title), table(("bucket", "", "ms", "share", "calls"), rows, foot=foot))


# ---- 2: calls ----------------------------------------------------------------------------------------------


def _calls(r: Report) -> Iterable[Markup]:
    names = [p.name for p in r.phases]
    total, most = sum(op.us for op in r.ops), max((op.us for op in r.ops), default=0) or 1.0
    rows = []
    for op in r.ops:
        name, _, weights = op.label.partition(" ")
        rows.append(
            (
                key(op.bucket, name, weights),
                bar(
                    op.us / most, colour(op.bucket), f"{op.label}: {op.us / 1e3:,.3f} ms, {op.us / total:.1%}"
                ),
                _figure(op.us / 1e3),
                _figure(op.mean_us),
                *(f"{op.calls[name]:,}" for name in names),
            )
        )
    foot = ("all", "", _figure(total / 1e3), "", *(f"{sum(op.calls[n] for op in r.ops):,}" for n in names))
    yield tag("h2", "Calls by op")
    yield tag("p", "Calls to the backend, by the weights they take, of all layers; grey: part of another op.")
    yield table(("op", "", "ms", "mean µs", *names), rows, foot=foot)


# ---- pictures ----------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Box:
    x: float
    y: float
    width: float
    height: float

    def meets(self, other: Box) -> bool:
        across = self.x < other.x + other.width and other.x < self.x + self.width
        return across and self.y < other.y + other.height and other.y < self.y + self.height

    def within(self, other: Box) -> bool:
        across = other.x <= self.x and self.x + self.width <= other.x + other.width
        return across and other.y <= self.y and self.y + self.height <= other.y + other.height


def text_width(text: str) -> float:
    return 0.58 * FONT * len(text)  # of most fonts, rather too much


def place(
    points: Sequence[tuple[float, float]], texts: Sequence[str], taken: Sequence[Box], area: Box
) -> list[Box]:
    """A box for the label of each point, inside of `area`, near it, and over no point, box or other label:
    the first that is free, on rings around it. Where there is none the least bad one, beside it.
    """
    radius, height = 7.0, FONT + 3.0
    busy = [*taken, *(Box(x - radius, y - radius, 2 * radius, 2 * radius) for x, y in points)]
    found = []
    for (x, y), text in zip(points, texts, strict=True):
        w = text_width(text)
        rings = [
            Box(x + math.cos(a) * (d + w / 2) - w / 2, y + math.sin(a) * (d + 3) - height / 2, w, height)
            for d in (10, 18, 28, 40, 54, 70, 90, 115, 145, 180)
            for a in (
                math.pi * k / 12
                for k in (0, 12, 1, -1, 11, 13, 2, -2, 10, 14, 3, -3, 9, 15, 4, -4, 8, 16, 6, 18)
            )
        ]
        free = (b for b in rings if b.within(area) and not any(b.meets(other) for other in busy))
        found.append(next(free, rings[0]))
        busy.append(found[-1])
    return found


def _svg(width: int, height: int, label: str, parts: Iterable[Markup]) -> Markup:
    kind = "narrow" if width == NARROW else "wide"
    return tag("svg", *parts, viewBox=f"0 0 {width} {height}", class_=kind, role="img", aria_label=label)


def _line(x1: float, y1: float, x2: float, y2: float, kind: str) -> Markup:
    return tag("line", x1=x1, y1=y1, x2=x2, y2=y2, class_=kind)


def _label(x: float, y: float, text: str, anchor: str = "middle", kind: str | None = "soft") -> Markup:
    return tag("text", text, x=x, y=y, text_anchor=None if anchor == "start" else anchor, class_=kind)


def ticks(high: float, about: int, low: float = 0) -> list[float]:
    """Round numbers from `low` to `high`, some `about` of them."""
    raw = (high - low) / about
    unit = 10.0 ** math.floor(math.log10(raw))
    step = next(unit * k for k in (1, 2, 5, 10) if unit * k >= raw)
    return [step * i for i in range(math.ceil(low / step), int(high / step) + 1)]


def log_ticks(low: float, high: float, about: int) -> list[float]:
    """1, 2 and 5 times powers of ten, or powers of ten alone where that were more than `about`."""
    powers = range(math.floor(math.log10(low)), math.ceil(math.log10(high)) + 1)
    fine = [k * 10.0**p for p in powers for k in (1, 2, 5) if low <= k * 10.0**p <= high]
    return fine if len(fine) <= about else [x for x in (10.0**p for p in powers) if low <= x <= high]


# ---- 3: tokens per second ----------------------------------------------------------------------------------


def _rates(r: Report) -> Iterable[Markup]:
    if not r.steps:
        return
    yield tag("h2", "Tokens per second over context length")
    yield tag("p", "A point for each decoding forward, and the running median. Picking a token is not in it.")
    rows = [
        (f"{s.first:,} to {s.last:,}", *(_figure(x) for x in (s.median, s.least, s.most)))
        for s in spans(r.steps, SPANS)
    ]
    pictures = tag("figure", _rate_picture(r, MIDDLE, 260), _rate_picture(r, NARROW, 230))
    yield tag("div", pictures, table(("tokens", "median", "least", "most"), rows), class_="beside")


def _rate_picture(r: Report, width: int, height: int) -> Markup:
    left, top, right, foot = 44, 10, 10, 40
    first, last = r.steps[0].context, r.steps[-1].context
    high = max(s.rate for s in r.steps) * 1.05

    def x(context: float) -> float:
        return left + (context - first) / max(last - first, 1) * (width - left - right)

    def y(rate: float) -> float:
        return height - foot - rate / high * (height - top - foot)

    parts = []
    for rate in ticks(high, 5):
        parts += [
            _line(left, y(rate), width - right, y(rate), "grid"),
            _label(left - 6, y(rate) + 4, f"{rate:,g}", "end"),
        ]
    for context in ticks(last, max(3, width // 110), first if first < last else 0):
        if context >= first and context == int(context):
            parts.append(_label(x(context), height - foot + 16, f"{context:,.0f}"))
    parts.append(_label((left + width - right) / 2, height - 5, "tokens in the context"))
    for s in r.steps:
        title = tag("title", f"{s.context:,} tokens: {s.rate:,.2f} tokens/s, median {s.median:,.2f}")
        parts.append(tag("circle", title, cx=x(s.context), cy=y(s.rate), r=2.2, class_="dot"))
    path = " ".join(f"{x(s.context):.1f},{y(s.median):.1f}" for s in r.steps)
    parts.append(tag("polyline", points=path, class_="trend"))
    return _svg(width, height, "Tokens per second over the length of the context", parts)


# ---- 4: roofline -------------------------------------------------------------------------------------------


def _roofline(r: Report) -> Iterable[Markup]:
    found = [(p, [b for b in p.buckets if b.bytes]) for p in r.phases]
    points = [(p.name, b) for p, buckets in found for b in buckets if b.macs]
    if not points:
        return
    yield tag("h2", "Beside what the machine could do")
    what = (
        "Weights and cache read, and multiply-adds made, per second. A point just under the slope waits for "
        "memory, one just under a level line for arithmetic; one over the slope reads from the CPU's caches. "
        "Round: decode; square: prefill."
    )
    yield tag("p", what if r.limits else f"{what} The limits were not measured.")
    yield tag("figure", _roof_picture(r, points, WIDE, 440), _roof_picture(r, points, NARROW, 400))
    yield tag("div", *(_work(r, p, buckets) for p, buckets in found if buckets), class_="two")
    note = (
        "of read: of the speed at which memory is read; of peak: of the most multiply-adds, of floats for "
        "attention, of bytes for quantised weights."
    )
    yield tag("p", note)


def _work(r: Report, p: Phase, buckets: Sequence[Bucket]) -> Markup:
    read = r.limits.read_gb if r.limits else None
    rows = [
        (
            key(b.name, b.name),
            _figure(b.intensity) if b.macs else "",
            _figure(b.gb),
            _part(b.gb, read),
            _figure(b.gmac) if b.macs else "",
            _part(b.gmac, r.peak(b.name)),
        )
        for b in buckets
    ]
    return tag(
        "div",
        tag("h3", p.name),
        table(("bucket", "MAC/byte", "GB/s", "of read", "GMAC/s", "of peak"), rows, spare=(1,)),
    )


def _roof_picture(r: Report, points: Sequence[tuple[str, Bucket]], width: int, height: int) -> Markup:
    left, top, right, foot = 44, 10, 12, 40
    roofs = [(r.limits.int8_gmac, "bytes"), (r.limits.f32_gmac, "floats")] if r.limits else []
    peaks = sorted(((peak, what) for peak, what in roofs if peak), reverse=True)
    read = r.limits.read_gb if r.limits else None
    xs = [b.intensity for _, b in points] + ([peaks[0][0] / read * 1.6] if peaks and read else [])
    ys = [b.gmac for _, b in points] + [peak for peak, _ in peaks]
    x0, x1, y0, y1 = min(xs) / 2.2, max(xs) * 1.8, min(ys) / 2, max(ys) * 1.8

    def x(value: float) -> float:
        return left + math.log(value / x0) / math.log(x1 / x0) * (width - left - right)

    def y(value: float) -> float:
        return height - foot - math.log(value / y0) / math.log(y1 / y0) * (height - top - foot)

    parts = []
    for value in log_ticks(y0, y1, 12):
        parts += [
            _line(left, y(value), width - right, y(value), "grid"),
            _label(left - 6, y(value) + 4, f"{value:,g}", "end"),
        ]
    for value in log_ticks(x0, x1, width // 60):
        parts += [
            _line(x(value), top, x(value), height - foot, "grid"),
            _label(x(value), height - foot + 16, f"{value:,g}"),
        ]
    parts.append(_label((left + width - right) / 2, height - 5, "multiply-adds per byte"))
    parts.append(_label(left + 4, top + 12, "GMAC/s", "start"))
    taken = [Box(left, top, text_width("GMAC/s") + 8, 18)]
    if read:
        bend = min(peaks[0][0] / read if peaks else x1, x1)
        low = max(x0, y0 / read)
        parts.append(_line(x(low), y(low * read), x(bend), y(bend * read), "roof"))
        text = f"memory, {_figure(read)} GB/s"
        room = x0 * (x1 / x0) ** (
            (text_width(text) + 8) / (width - left - right)
        )  # the text ends at the slope
        at = min(max((low * bend) ** 0.5, room), bend)
        end = max(x(at) - 8, left + text_width(text))
        parts.append(_label(end, y(at * read) - 6, text, "end", None))
        taken.append(Box(end - text_width(text), y(at * read) - 6 - FONT, text_width(text), FONT + 4))
        steps = [low * (bend / low) ** (i / 40) for i in range(41)]
        taken += [Box(x(v) - 3, y(v * read) - 3, 6, 6) for v in steps]
    for peak, what in peaks:
        text = f"{what}, {_figure(peak)} GMAC/s"
        start = x(max(x0, peak / (read or peak / x0)))
        parts.append(_line(start, y(peak), width - right, y(peak), "roof"))
        parts.append(_label(width - right - 2, y(peak) - 5, text, "end", None))
        taken.append(Box(start, y(peak) - 2, width - right - start, 4))
        taken.append(
            Box(width - right - 2 - text_width(text), y(peak) - 5 - FONT, text_width(text), FONT + 4)
        )
    area = Box(left + 2, top, width - left - right - 2, height - foot - top)
    at = [(x(b.intensity), y(b.gmac)) for _, b in points]
    for (px, py), (phase, b), box in zip(
        at, points, place(at, [b.name for _, b in points], taken, area), strict=True
    ):
        middle = box.x + box.width / 2
        near = (min(max(px, box.x), box.x + box.width), min(max(py, box.y + 2), box.y + box.height - 2))
        if math.dist(near, (px, py)) > 12:
            parts.append(_line(px, py, *near, "lead"))
        title = tag(
            "title", f"{phase} {b.name}: {b.intensity:.3f} MAC/byte, {b.gmac:.2f} GMAC/s, {b.gb:.2f} GB/s"
        )
        if phase == "prefill":
            parts.append(
                tag(
                    "rect",
                    title,
                    x=px - 4.5,
                    y=py - 4.5,
                    width=9,
                    height=9,
                    fill=colour(b.name),
                    class_="edge",
                )
            )
        else:
            parts.append(tag("circle", title, cx=px, cy=py, r=4.5, fill=colour(b.name), class_="edge"))
        parts.append(_label(middle, box.y + FONT - 0.5, b.name, kind=None))
    return _svg(
        width, height, "Multiply-adds per second over multiply-adds per byte, and the machine's limits", parts
    )


# ---- 5: what stands out ------------------------------------------------------------------------------------


def _slowest(r: Report) -> Iterable[Markup]:
    rows = [
        (
            join([key(s.bucket, *s.label.split(" ", 1)), Markup("<br>"), tag("small", s.shapes)]),
            s.phase,
            "" if s.layer is None else s.layer,
            _figure(s.us / 1e3),
            f"{s.us / max(s.median_us, 1e-3):,.1f} x",
            f"{s.at_ms:,.1f}",
        )
        for s in r.slowest
    ]
    if rows:
        yield tag("h2", "Slowest single ops")
        yield tag(
            "p",
            "Three of a kind at most, beside the median of the same op in the same phase.",
        )
        yield table(("op", "phase", "layer", "ms", "of median", "at ms"), rows, text=(0, 1), spare=(5,))


def _schedule(r: Report) -> Iterable[Markup]:
    if r.downgrades:
        rows = [
            (d.requested, d.used, d.reason, d.layers, f"{d.times:,}", f"{d.at_ms:,.1f}") for d in r.downgrades
        ]
        yield tag("h2", "Schedules that could not be had")
        head = ("requested", "used", "reason", "layers", "times", "first at ms")
        yield table(head, rows, text=(0, 1, 2, 3), spare=(5,))
