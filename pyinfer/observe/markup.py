"""Elements of a page, and its style sheet."""

from __future__ import annotations

import html
from collections.abc import Iterable

STYLE = """
:root{color-scheme:light dark;--page:#fff;--ink:#1b1f24;--soft:#5a626c;--line:#dfe3e8;--faint:#f4f6f8}
@media(prefers-color-scheme:dark){
:root{--page:#15181c;--ink:#e6e9ed;--soft:#9aa4af;--line:#30363d;--faint:#1d2126}}
*{box-sizing:border-box}
body{margin:0 auto;max-width:1080px;padding:24px 20px 48px;background:var(--page);color:var(--ink);
font:15px/1.45 system-ui,sans-serif}
h1{font-size:24px;line-height:1.2;margin:0 0 14px;overflow-wrap:anywhere}
h2{font-size:18px;line-height:1.25;margin:40px 0 2px}
h3{font-size:14px;margin:14px 0 4px}
p{margin:2px 0 10px;color:var(--soft);font-size:13px}
dl{display:grid;grid-template-columns:repeat(auto-fit,minmax(170px,1fr));gap:10px 18px;margin:0;
padding:14px 16px;background:var(--faint);border-radius:8px}
dt{font-size:12px;color:var(--soft)}
dd{margin:0;font-weight:600;overflow-wrap:anywhere}
table{border-collapse:collapse;width:100%;font-size:13px;font-variant-numeric:tabular-nums}
th,td{padding:3px 0 3px 10px;text-align:right;border-bottom:1px solid var(--line);vertical-align:baseline}
th{font-weight:600;color:var(--soft);font-size:12px;vertical-align:bottom}
th:first-child,td:first-child{text-align:left;padding-left:0}
.text{text-align:left}
td.bar{width:32%;min-width:50px}
td.bar svg{display:block;width:100%;height:11px}
tfoot td{font-weight:600;border-bottom:0}
small{color:var(--soft);font-size:12px;overflow-wrap:anywhere}
b{font-weight:400;white-space:nowrap}
i{display:inline-block;width:9px;height:9px;border-radius:2px;margin-right:6px}
.two,.beside{display:grid;grid-template-columns:repeat(2,minmax(0,1fr));gap:8px 36px}
.beside{grid-template-columns:minmax(0,640fr) minmax(0,360fr);align-items:start}
figure{margin:0}
figure svg{display:block;width:100%;height:auto}
.narrow{display:none;max-width:540px;margin:auto}
text{font:12px system-ui,sans-serif;fill:var(--ink)}
.soft{fill:var(--soft)}
.grid{stroke:var(--line)}
.roof{stroke:var(--ink);stroke-width:1.5;fill:none}
.lead{stroke:var(--soft);stroke-width:.8}
.dot{fill:var(--soft);opacity:.55}
.trend{stroke:#0f87ff;stroke-width:2;fill:none}
.edge{stroke:var(--page);stroke-width:1.2}
@media(max-width:1000px){.beside{grid-template-columns:minmax(0,1fr)}}
@media(max-width:760px){
body{padding:16px 14px 32px}
.two{grid-template-columns:minmax(0,1fr)}
.wide,.spare{display:none}
.narrow{display:block}
th,td{padding-left:7px}
table,small{font-size:12px}
td.bar{width:20%;min-width:34px}
h2{margin-top:32px}
dl{grid-template-columns:repeat(auto-fit,minmax(140px,1fr))}}
"""


class Markup(str):
    """HTML, escaped already."""


def tag(name: str, *inside: object, **attributes: object) -> Markup:
    """An element. Names are as in HTML, with _ for -, and at their end for Python's words: class_. Lengths of
    pictures are rounded; an attribute or a child that is None is left out.
    """
    given = "".join(
        f' {key.rstrip("_").replace("_", "-")}="{html.escape(_text(value))}"'
        for key, value in attributes.items()
        if value is not None
    )
    content = "".join(x if isinstance(x, Markup) else html.escape(_text(x)) for x in inside if x is not None)
    return Markup(f"<{name}{given}>{content}</{name}>")


def join(parts: Iterable[Markup]) -> Markup:
    return Markup("".join(parts))


def _text(value: object) -> str:
    return f"{value:.2f}".rstrip("0").rstrip(".") if isinstance(value, float) else str(value)
