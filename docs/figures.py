"""Draws the figures of the documentation into docs/figures. Run `python docs/figures.py` where gpipe is installed.

The library simulates and draws the timelines, from a profile whose times are set here, and counts the bytes.
`--trace` also draws a real step, which differs between machines and runs. schedule_pages.py draws the schedules.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence

import torch
from torch import nn

import gpipe
from gpipe.balance import Profile, predict, profile
from picture import BLUE, DARK_BLUE, FAINT, FOLDER, GREEN, INK, ORANGE, RED, STAGES, Picture


def timed(blocks: Sequence[float], rows: int = 32, width: int = 256) -> Profile:
    """Profile of blocks of (linear, tanh). Block i takes `blocks[i]` times 10 ms forward and 20 ms backward; its bytes
    are counted."""
    layers: list[nn.Module] = []
    for _ in blocks:
        layers += [nn.Linear(width, width), nn.Tanh()]
    measured = json.loads(profile(nn.Sequential(*layers), torch.randn(rows, width), repeats=1, seconds=0).to_json())
    for i, layer in enumerate(measured["layers"]):
        for key in ("forward", "stored", "recompute"):
            layer[key] = 0.005 * blocks[i // 2]
        layer["backward"] = 0.010 * blocks[i // 2]
    return Profile.from_json(json.dumps(measured))


def draw_schedules() -> None:
    for name, of_one, chunks, checkpoint in (
        ("one_micro_batch", 4, 1, "never"),
        ("four_micro_batches", 1, 4, "never"),
        ("recompute", 1, 4, "always"),
    ):
        step = predict(timed([of_one] * 4), [2, 2, 2, 2], chunks, checkpoint)
        (FOLDER / f"{name}.svg").write_text(step.timeline.to_svg())
    unequal = predict(timed([1, 2, 1]), [2, 2, 2], 6, "never")
    (FOLDER / "unbalanced.svg").write_text(unequal.timeline.to_svg())


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


def draw_program() -> None:
    picture = Picture(900, 330)
    picture.box(20, 20, 210, 56, STAGES[0], "stages, micro-batches,\ncheckpoint mode", 8)
    picture.box(20, 110, 210, 56, STAGES[0], "balance and skips", 8)
    picture.box(290, 20, 150, 56, "white", "generator", 8)
    picture.box(290, 110, 150, 56, "white", "edges", 8)
    picture.box(500, 65, 150, 56, "white", "verifier", 8)
    picture.box(710, 65, 170, 56, STAGES[1], "program", 8)
    picture.arrow(230, 48, 288, 48)
    picture.arrow(230, 138, 288, 138)
    picture.path("M440 48 L470 48 L470 84 L498 84", arrow=True)
    picture.text(444, 38, "schedule", "start", size=12)
    picture.path("M440 138 L470 138 L470 102 L498 102", arrow=True)
    picture.arrow(650, 93, 708, 93)
    picture.text(575, 146, "refuses deadlocks and", size=12, color="#555")
    picture.text(575, 162, "incomplete schedules", size=12, color="#555")
    picture.path("M795 121 L795 216 L652 216", arrow=True)
    picture.path("M795 216 L795 286 L652 286", arrow=True)
    picture.box(430, 190, 220, 52, STAGES[2], "simulator: predicts the step", 8)
    picture.box(430, 260, 220, 52, STAGES[2], "executor: runs the cells", 8)
    picture.path("M430 216 L290 216 L290 244", arrow=True)
    picture.path("M430 286 L360 286 L360 264 L312 264", arrow=True)
    picture.box(180, 246, 130, 44, STAGES[1], "timeline", 8)
    picture.arrow(180, 268, 122, 268)
    picture.box(20, 240, 100, 56, "white", "drawing,\nPerfetto", 8)
    picture.save("program.svg")


def draw_memory() -> None:
    deep = timed([0.25] * 16, rows=512, width=512)
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


def draw_trace() -> None:
    torch.manual_seed(0)
    model = gpipe.models.unet(depth=3, base_channels=16)
    batch = torch.randn(16, 3, 96, 96)
    balance = gpipe.balance.balance_by_time(2, model, batch[:2])
    pipe = gpipe.GPipe(model, balance, devices=["cpu", "cpu"], chunks=8, checkpoint="never")
    for _ in range(3):
        pipe(batch).sum().backward()
    timeline = gpipe.Timeline()
    pipe.trace(timeline)
    pipe(batch).sum().backward()
    pipe.trace(None)
    (FOLDER / "trace.svg").write_text(timeline.to_svg())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--trace", action="store_true", help="also draw a real step")
    options = parser.parse_args()
    FOLDER.mkdir(exist_ok=True)
    draw_schedules()
    draw_overview()
    draw_cut()
    draw_skips()
    draw_program()
    draw_memory()
    if options.trace:
        draw_trace()


if __name__ == "__main__":
    main()
