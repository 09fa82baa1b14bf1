"""A small SVG writer for the figures of the documentation."""

from __future__ import annotations

from html import escape
from pathlib import Path

FOLDER = Path(__file__).parent / "figures"

# From the colour-blind-safe palette of Okabe and Ito, which the library's own drawings use too.
BLUE, DARK_BLUE, GREEN, ORANGE, RED = "#56b4e9", "#0072b2", "#009e73", "#e69f00", "#d55e00"
STAGES = ["#e3f1fa", "#fdf0d5", "#e0f3ec", "#f7e6ef"]
INK, FAINT = "#222", "#ddd"


class Picture:
    def __init__(self, width: int, height: int) -> None:
        self.width, self.height = width, height
        self.parts: list[str] = []

    def box(self, x: float, y: float, width: float, height: float, fill: str, text: str = "", round: int = 4) -> None:
        self.parts.append(
            f'<rect x="{x:g}" y="{y:g}" width="{width:g}" height="{height:g}" rx="{round}" fill="{fill}" '
            f'stroke="#444" stroke-width="0.8"/>'
        )
        lines = text.split("\n") if text else []
        for i, line in enumerate(lines):
            self.text(x + width / 2, y + height / 2 + 5 + 17 * (i - (len(lines) - 1) / 2), line)

    def text(self, x: float, y: float, text: str, anchor: str = "middle", color: str = INK, size: int = 14) -> None:
        self.parts.append(
            f'<text x="{x:g}" y="{y:g}" text-anchor="{anchor}" fill="{color}" font-size="{size}">{escape(text)}</text>'
        )

    def path(self, path: str, color: str = INK, width: float = 1.5, arrow: bool = False, dash: str = "") -> None:
        end = f' marker-end="url(#{color[1:]})"' if arrow else ""
        dashed = f' stroke-dasharray="{dash}"' if dash else ""
        self.parts.append(f'<path d="{path}" fill="none" stroke="{color}" stroke-width="{width:g}"{dashed}{end}/>')

    def arrow(self, x1: float, y1: float, x2: float, y2: float, color: str = INK) -> None:
        self.path(f"M{x1:g} {y1:g} L{x2:g} {y2:g}", color, arrow=True)

    def save(self, name: str) -> None:
        heads = "".join(
            f'<marker id="{color[1:]}" viewBox="0 0 10 10" refX="9" refY="5" markerWidth="7" markerHeight="7" '
            f'orient="auto"><path d="M0 0 L10 5 L0 10 z" fill="{color}"/></marker>\n'
            for color in (INK, BLUE, ORANGE)
        )
        size = f'viewBox="0 0 {self.width} {self.height}" width="{self.width}" height="{self.height}"'
        (FOLDER / name).write_text(
            f'<svg xmlns="http://www.w3.org/2000/svg" {size} font-family="sans-serif">\n<defs>\n{heads}</defs>\n'
            '<rect width="100%" height="100%" fill="white"/>\n' + "\n".join(self.parts) + "\n</svg>\n"
        )
