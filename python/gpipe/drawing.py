"""Draws timelines as SVG."""

import json
import math
from typing import Any

_LEFT, _TOP, _PLOT, _ROW, _GAP, _BOTTOM = 72, 44, 880, 34, 6, 40  # pixels
_DIGIT = 8  # approximate width of a character, in pixels
_TICKS = 8  # approximate number of ticks on the time axis
# The name, color and letter of each kind of action. The palette of Okabe and Ito is distinguishable with color
# blindness. The letter tells apart what colors may not.
_LOOKS = {
    "F": ("forward", "#56b4e9", ""),
    "R": ("recompute", "#f0e442", ""),
    "B": ("backward", "#009e73", ""),
    "I": ("input gradient", "#cc79a7", "I"),
    "W": ("weight gradient", "#e69f00", "W"),
}


def to_svg(timeline: str) -> str:
    """Draws a timeline, given as the JSON of ``to_chrome_json``: a row per worker, a box per action with the number of
    its micro-batch, and a time axis. Hovering over a box shows its action and duration. Raises ValueError for other
    texts."""
    try:
        events = json.loads(timeline)["traceEvents"]
        workers = sum(each["ph"] == "M" for each in events)
        spans = [(each["tid"], each["ts"], each["dur"], each["args"]) for each in events if each["ph"] == "X"]
        stages = [sorted({args["stage"] for tid, _, _, args in spans if tid == worker}) for worker in range(workers)]
        kinds = {args["kind"]: _LOOKS[args["kind"]] for _, _, _, args in spans}
        micros = max((start + length for _, start, length, _ in spans), default=0)
        boxes = [_box(span, micros, stages[span[0]]) for span in spans if micros > 0]
    except (IndexError, KeyError, TypeError, ValueError) as error:
        raise ValueError("this is not the JSON of a timeline; write one with to_chrome_json()") from error
    width, height = _LEFT + _PLOT + 24, _TOP + (_ROW + _GAP) * workers + _BOTTOM
    size = f'viewBox="0 0 {width} {height}" width="{width}" height="{height}"'
    svg = [f'<svg xmlns="http://www.w3.org/2000/svg" {size} font-family="sans-serif" font-size="13">']
    svg.append('<rect width="100%" height="100%" fill="white"/>')
    if micros > 0:
        idle = max(0, 1 - sum(length for _, _, length, _ in spans) / (workers * micros))
        svg += _legend([look for kind, look in _LOOKS.items() if kind in kinds])
        svg.append(_text(_LEFT + _PLOT, 26, "end", f"{_time(micros)}, {100 * idle:.0f} % idle"))
        svg += _axis(micros, height - _BOTTOM)
    if any(len(of_worker) > 1 for of_worker in stages):
        svg.append(_text(_LEFT + _PLOT - 160, 26, "end", "paler: later stage"))
    svg += [_text(_LEFT - 10, _top(worker) + _ROW / 2 + 5, "end", f"worker {worker}") for worker in range(workers)]
    return "\n".join([*svg, *boxes, "</svg>\n"])


def _box(span: tuple[int, float, float, dict[str, Any]], micros: float, stages: list[int]) -> str:
    worker, start, length, args = span
    name, fill, letter = _LOOKS[args["kind"]]
    label, place = str(args["micro_batch"]), stages.index(args["stage"])
    x, width, y = _LEFT + _PLOT * start / micros, _PLOT * length / micros, _top(worker)
    tone = f' fill-opacity="{1 - 0.7 * place / len(stages):.2f}"' if place else ""
    svg = f"<g><title>{name} of micro-batch {label} on stage {args['stage']}: {_time(length)}</title>"
    svg += f'<rect x="{x:.2f}" y="{y:.1f}" width="{width:.2f}" height="{_ROW}" fill="{fill}"{tone} stroke="#444" '
    svg += 'stroke-width="0.5"/>'
    if width > _DIGIT * len(label) + 4:
        svg += _text(x + width / 2, y + 12, "middle", letter, 10) if letter else ""
        svg += _text(x + width / 2, y + _ROW / 2 + (11 if letter else 5), "middle", label)
    return svg + "</g>"


def _legend(looks: list[tuple[str, str, str]]) -> list[str]:
    svg, x = [], _LEFT
    for name, fill, letter in looks:
        svg.append(f'<rect x="{x}" y="14" width="14" height="14" fill="{fill}" stroke="#444"/>')
        svg += [_text(x + 7, 25, "middle", letter, 10)] * bool(letter)
        svg.append(_text(x + 20, 26, "start", name))
        x += 36 + _DIGIT * len(name)
    return svg


def _axis(micros: float, bottom: float) -> list[str]:
    rough = micros / _TICKS
    power = 10.0 ** math.floor(math.log10(rough))
    tick = power * next((factor for factor in (1, 2, 5) if factor * power >= rough), 10)
    svg = []
    for number in range(int(micros / tick + 1e-9) + 1):
        x = _LEFT + _PLOT * number * tick / micros
        svg.append(f'<line x1="{x:.1f}" y1="{_TOP}" x2="{x:.1f}" y2="{bottom + 4}" stroke="#ddd"/>')
        svg.append(_text(x, bottom + 20, "middle", _time(number * tick) if number else "0"))
    return svg


def _text(x: float, y: float, anchor: str, text: str, size: int = 13) -> str:
    font = f' font-size="{size}"' * (size != 13)
    return f'<text x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}"{font}>{text}</text>'


def _time(micros: float) -> str:
    for unit, factor in (("µs", 1), ("ms", 1e3)):
        if micros < 999.5 * factor:
            return f"{micros / factor:.3g} {unit}"
    return f"{micros / 1e6:.3g} s"


def _top(worker: int) -> float:
    return _TOP + _GAP / 2 + (_ROW + _GAP) * worker
