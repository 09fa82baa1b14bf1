"""Drawings of timelines."""

import json
from xml.etree import ElementTree

import gpipe
import pytest
from gpipe.drawing import to_svg


def timeline(workers, *spans):
    """The JSON of actions, such as (worker, kind, stage, micro-batch, start, seconds)."""
    events = [{"ph": "M"}] * workers + [{"ph": "s"}]
    for worker, kind, stage, micro_batch, start, seconds in spans:
        args = {"stage": stage, "micro_batch": micro_batch, "kind": kind, "step": 0}
        events.append({"ph": "X", "tid": worker, "ts": start * 1e6, "dur": seconds * 1e6, "args": args})
    return json.dumps({"traceEvents": events})


def test_there_is_a_box_per_action_a_row_per_worker_and_a_legend():
    first, second = [(0, "F", 0, 12, 0, 0.5), (0, "B", 0, 12, 2, 1)], [(1, "F", 1, 12, 0.5, 0.5), (1, "B", 1, 12, 1.25, 0.75)]
    svg = to_svg(timeline(2, *first, *second, (1, "R", 1, 12, 1, 0.002)))
    ElementTree.fromstring(svg)
    assert svg.count("<title>") == 5 and svg.count(">worker ") == 2
    assert svg.count(">12</text>") == 4  # a narrow box has no label
    assert "<title>recompute of micro-batch 12 on stage 1: 2 ms</title>" in svg and "3 s, 54 % idle" in svg
    assert all(f">{kind}<" in svg for kind in ("forward", "recompute", "backward")) and ">weight gradient<" not in svg
    assert 'x="72.00" y="47.0" width="146.67"' in svg  # the first action takes a sixth of the time
    assert [f">{tick}<" in svg for tick in ("0", "500 ms", "2.5 s", "3 s", "3.5 s")] == [True, True, True, True, False]


def test_letters_mark_the_parts_of_a_split_backward_and_later_stages_are_paler():
    svg = to_svg(timeline(1, (0, "F", 0, 0, 0, 1), (0, "I", 0, 0, 1, 1), (0, "W", 0, 0, 2, 1)))
    assert svg.count(">I</text>") == svg.count(">W</text>") == 2  # one in the legend, one in the box
    assert "<title>weight gradient of micro-batch 0 on stage 0: 1 s</title>" in svg
    spans = [(0, "F", 0, 0, 0, 1), (0, "F", 1, 0, 1, 1)]
    assert 'fill-opacity="0.65"' in to_svg(timeline(1, *spans)) and "paler: later stage" in to_svg(timeline(1, *spans))
    assert "paler" not in to_svg(timeline(1, spans[0])) and "opacity" not in to_svg(timeline(1, spans[0]))


def test_timelines_without_actions_or_time_are_drawn():
    for text in (gpipe.Timeline().to_svg(), to_svg(timeline(1, (0, "F", 0, 0, 0, 0)))):
        ElementTree.fromstring(text)
        assert "nan" not in text


@pytest.mark.parametrize("text", ["", "[]", "{}", '{"traceEvents": [{}]}', timeline(1, (3, "F", 0, 0, 0, 1))])
def test_other_texts_are_refused(text):
    with pytest.raises(ValueError, match="not the JSON of a timeline"):
        to_svg(text)
