"""Draws the figures of the pages. Run `python docs/figures.py` where gpipe is installed.

git has those in docs/figures. docs/build draws those in docs/figures/web, which only the web pages show. The library
simulates and draws the timelines.
"""

from __future__ import annotations

import json
from html import escape
from pathlib import Path

import torch
from torch import nn

from gpipe.balance import Profile, predict, profile
from profiles import Layer, make_profile
from tables import ROWS, file_of, step

FOLDER = Path(__file__).parent / "figures"

# From the colour-blind-safe palette of Okabe and Ito, which the library's own drawings use too.
BLUE, DARK_BLUE, GREEN, ORANGE, RED = "#56b4e9", "#0072b2", "#009e73", "#e69f00", "#d55e00"
STAGES = ["#e3f1fa", "#fdf0d5", "#e0f3ec"]
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
        if text:
            self.text(x + width / 2, y + height / 2 + 5, text)

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


def draw_timelines() -> None:
    for name, part, chunks, checkpoint in (
        ("web/one_micro_batch", 4, 1, "never"),
        ("four_micro_batches", 1, 4, "never"),
        ("web/recompute", 1, 4, "always"),
    ):
        stages = make_profile([Layer("stage", 0.01 * part, 0.02 * part, 0)] * 4, [])
        (FOLDER / f"{name}.svg").write_text(predict(stages, [1] * 4, chunks, checkpoint).timeline.to_svg())
    for row in ROWS:
        (FOLDER / "web" / file_of(row)).write_text(step(row).timeline.to_svg())


def draw_overview() -> None:
    picture = Picture(900, 378)
    stages = [("stage 0, device 0", ["conv", "encode", "down"]), ("stage 1, device 1", ["up", "decode", "head"])]
    picture.text(28, 110, "input", "start")
    picture.arrow(66, 106, 92, 106)
    x = 96.0
    ends: list[float] = []
    for stage, (title, names) in enumerate(stages):
        picture.box(x, 50, 330, 100, STAGES[stage], round=8)
        picture.text(x + 165, 142, title, size=13)
        for i, name in enumerate(names):
            picture.box(x + 18 + 104 * i, 84, 86, 44, "white", name)
            if i:
                picture.arrow(x + 104 * i, 106, x + 16 + 104 * i, 106)
        ends.append(x + 18 + 104 + 43)
        picture.arrow(x + 330, 106, x + 366, 106, BLUE if stage == 0 else INK)
        x += 370
    picture.text(848, 110, "output", "start")
    picture.path(f"M{ends[0]:g} 84 C{ends[0] + 60:g} 10 {ends[1] - 60:g} 10 {ends[1]:g} 82", ORANGE, 2, arrow=True)
    picture.text((ends[0] + ends[1]) / 2, 20, "skip connection", size=13)

    unit, left, micro_batches = 52.0, 96.0, 4
    picture.text(left, 188, "one step: four micro-batches", "start", size=13)
    for i, (color, text) in enumerate([(BLUE, "forward"), (GREEN, "backward")]):
        picture.box(660 + 100 * i, 176, 14, 14, color, round=0)
        picture.text(680 + 100 * i, 188, text, "start", size=13)
    filled = micro_batches + 1  # when stage 1 has finished the forwards
    for stage in (0, 1):
        y = 204 + 62 * stage
        picture.text(left - 8, y + 30, f"device {stage}", "end")
        for i in range(micro_batches):
            picture.box(left + unit * (stage + i), y, unit, 50, BLUE, str(i), round=2)
            begin = filled + 2 * i + (0 if stage == 1 else 2)
            picture.box(left + unit * begin, y, 2 * unit, 50, GREEN, str(micro_batches - 1 - i), round=2)
    picture.arrow(left, 340, left + 15 * unit, 340)
    picture.text(left + 15 * unit, 362, "time", "end", size=13)
    caption = "Both devices work at the same time, except while the pipeline fills and drains."
    picture.text(left, 362, caption, "start", size=13)
    picture.save("overview.svg")


def draw_cut() -> None:
    picture = Picture(900, 250)
    for i in range(4):
        picture.box(20, 70 + 30 * i, 62, 26, BLUE, f"{3 - i}")
    picture.text(51, 50, "mini-batch")
    picture.text(6, 215, "4 micro-batches", "start", size=13)
    picture.arrow(90, 128, 126, 128)
    names = ["linear", "relu", "linear", "relu", "linear", "relu", "linear"]
    x, first = 132.0, 0
    for stage, layers in enumerate([3, 2, 2]):
        width = 76 * layers + 10
        picture.box(x, 70, width, 116, STAGES[stage], round=8)
        picture.text(x + width / 2, 50, f"stage {stage}")
        for i in range(layers):
            picture.box(x + 10 + 76 * i, 100, 66, 56, "white", names[first + i])
            picture.text(x + 43 + 76 * i, 176, str(first + i), size=12, color="#555")
            if i:
                picture.arrow(x + 76 * i, 128, x + 10 + 76 * i, 128)
        picture.text(x + width / 2, 92, f"worker {stage}, device {stage}" if layers > 2 else f"device {stage}", size=12)
        picture.arrow(x + width, 128, x + width + 30, 128)
        x += width + 32
        first += layers
    picture.box(x + 2, 70, 62, 116, BLUE, "output")
    picture.text(450, 232, "layers 0 to 6, cut by the balance [3, 2, 2]", size=13)
    picture.save("cut.svg")


def draw_skips() -> None:
    picture = Picture(900, 290)
    stages = [["stash a", "down"], ["stash b", "middle", "pop b"], ["up", "pop a"]]
    x = 40.0
    ends: dict[str, float] = {}
    for stage, names in enumerate(stages):
        width = 92 * len(names) + 12
        picture.box(x, 120, width, 110, STAGES[stage], round=8)
        picture.text(x + width / 2, 252, f"stage {stage}")
        for i, name in enumerate(names):
            picture.box(x + 12 + 92 * i, 155, 80, 44, "white", name)
            ends[name] = x + 52 + 92 * i
            if i:
                picture.arrow(x + 92 * i, 177, x + 12 + 92 * i, 177)
        if stage < 2:
            picture.arrow(x + width, 177, x + width + 48, 177, BLUE)
            picture.text(x + width + 25, 110, "activation", size=12, color=DARK_BLUE)
        x += width + 50
    a, b = (ends["stash a"], ends["pop a"]), (ends["stash b"], ends["pop b"])
    picture.path(f"M{a[0]:g} 155 C{a[0] + 40:g} 30 {a[1] - 40:g} 30 {a[1]:g} 153", ORANGE, 2, arrow=True)
    picture.text((a[0] + a[1]) / 2, 40, "skip a: an edge from stage 0 to stage 2; stage 1 never sees it")
    picture.path(f"M{b[0]:g} 155 C{b[0] + 20:g} 116 {b[1] - 20:g} 116 {b[1]:g} 153", INK, 1.2, arrow=True, dash="4 3")
    picture.text((b[0] + b[1]) / 2, 112, "skip b: inside the stage, no edge", size=13)
    picture.text(450, 280, "gradients run back along every edge", size=13)
    picture.save("skips.svg")


def counted_layers() -> Profile:
    """Returns a profile of 16 linear layers, each followed by a tanh: bytes are counted, times are set."""
    layers = [layer for _ in range(16) for layer in (nn.Linear(512, 512), nn.Tanh())]
    measured = json.loads(profile(nn.Sequential(*layers), torch.randn(512, 512), repeats=1, seconds=0).to_json())
    for layer in measured["layers"]:
        layer |= dict.fromkeys(("forward", "stored", "recompute"), 0.00125) | {"backward": 0.0025}
    return Profile.from_json(json.dumps(measured))


def draw_memory() -> None:
    deep = counted_layers()
    modes = (("never", RED, 2), ("except_last", DARK_BLUE, 6), ("always", ORANGE, 2))  # the last two mostly coincide
    curves: dict[str, list[tuple[float, float]]] = {}
    for mode, _, _ in modes:
        events = json.loads(predict(deep, [16, 16], 8, mode).timeline.to_chrome_json())["traceEvents"]
        named = [event for event in events if event["name"] == "bytes of worker 0"]
        curves[mode] = [(event["ts"] / 1e3, event["args"]["bytes"] / 2**20) for event in named]
    end = max(points[-1][0] for points in curves.values())
    most = max(size for points in curves.values() for _, size in points)
    left, top, width, height = 80, 50, 790, 230
    picture = Picture(900, 340)
    step = 20
    for level in range(0, int(most) + 1, step):
        y = top + height * (1 - level / most)
        picture.path(f"M{left} {y:g} L{left + width} {y:g}", FAINT, 1)
        picture.text(left - 8, y + 5, f"{level} MiB", "end", size=13)
    for tick in range(0, int(end) + 1, 100):
        x = left + width * tick / end
        picture.path(f"M{x:g} {top + height} L{x:g} {top + height + 5}", INK, 1)
        picture.text(x, top + height + 22, f"{tick} ms" if tick else "0", size=13)
    for i, (mode, color, line) in enumerate(modes):
        before = 0.0
        path = f"M{left} {top + height}"
        for time, size in curves[mode]:
            x = left + width * time / end
            heights = [top + height * (1 - each / most) for each in (before, size)]
            path += "".join(f" L{x:.1f} {y:.1f}" for y in heights)
            before = size
        picture.path(path, color, line)
        picture.path(f"M{left + 20 + 150 * i} 26 L{left + 50 + 150 * i} 26", color, line)
        picture.text(left + 58 + 150 * i, 31, mode, "start")
    caption = "bytes that worker 0 has in use for its cells, in one step"
    picture.text(left + width / 2, top + height + 48, caption, size=13)
    picture.save("memory.svg")


def main() -> None:
    (FOLDER / "web").mkdir(exist_ok=True)
    draw_timelines()
    draw_overview()
    draw_cut()
    draw_skips()
    draw_memory()


if __name__ == "__main__":
    main()
