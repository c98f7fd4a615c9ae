"""What `kernel.report()` shows: text on a terminal, a table in a notebook."""

from __future__ import annotations

import html
from collections.abc import Sequence
from dataclasses import dataclass, field


def seconds(s: float) -> str:
    """A time with three digits and a unit."""
    for unit, scale in (("s", 1.0), ("ms", 1e-3), ("µs", 1e-6)):
        if s >= scale or unit == "µs":
            return f"{s / scale:.3g} {unit}"
    raise AssertionError


@dataclass
class Section:
    title: str
    rows: Sequence[tuple[str, ...]] = ()


@dataclass
class Report:
    """Sections of rows of text."""

    title: str
    sections: list[Section] = field(default_factory=list)

    def __str__(self) -> str:
        out = [self.title, "=" * len(self.title)]
        for s in self.sections:
            out += ["", s.title] if s.title else [""]
            n = max((len(r) for r in s.rows), default=0)
            widths = [max((len(r[i]) for r in s.rows if len(r) > i + 1), default=0) for i in range(n)]
            for r in s.rows:
                cells = [c.ljust(w) if i + 1 < len(r) else c for i, (c, w) in enumerate(zip(r, widths))]
                out.append("  " + "  ".join(cells).rstrip())
        return "\n".join(out)

    __repr__ = __str__

    def _repr_html_(self) -> str:
        parts = [f"<h4>{html.escape(self.title)}</h4>"]
        for s in self.sections:
            rows = "".join(
                "<tr>" + "".join(f'<td style="text-align:left">{html.escape(c)}</td>' for c in r) + "</tr>" for r in s.rows
            )
            title = f"<b>{html.escape(s.title)}</b>" if s.title else ""
            parts.append(f"{title}<table>{rows}</table>")
        return "".join(parts)
