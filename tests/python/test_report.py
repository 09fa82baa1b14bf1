"""Reports: what steps waited for, and where their time went, in words, as JSON, as a page and in a terminal."""

import io
import json
import re
import shutil
import subprocess
from pathlib import Path

import gpipe
import pytest
import torch
from gpipe import _C
from gpipe.__main__ import main
from gpipe.report import Report, watch
from helpers import results_of
from torch import nn


def make_pipe(**options):
    model = nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 8))
    return gpipe.GPipe(model, [1, 2], chunks=4, schedule="1f1b", **options)


@pytest.fixture
def pipe():
    return make_pipe(devices=["cpu", "cpu"])


def train(pipe, steps=2):
    for _ in range(steps):
        pipe.step(torch.ones(16, 8), torch.ones(16, 8), nn.functional.mse_loss)


def simulated(seconds=(1, 1, 2, 1, 1), chunks=2, schedule="1f1b", workers=2, checkpoint="never"):
    return _C.Schedule(schedule, [*range(workers)], chunks, checkpoint).simulate(seconds).timeline


def assert_filled(step, rel=None):
    """The parts of a step fill it, and the work and waits of each of two workers do."""
    wall = step["end"] - step["start"]
    assert sum(step["parts"].values()) == pytest.approx(wall)
    filled = sum(end - start for _, start, end, _ in step["waits"])
    filled += sum(end - start + lead for _, _, _, _, start, end, lead, *_ in step["spans"])
    assert filled == pytest.approx(2 * wall, rel=rel)


def test_a_report_says_where_the_time_of_traced_steps_went(pipe):
    with pytest.raises(RuntimeError, match="nothing has been traced"):
        pipe.report()
    pipe.trace(gpipe.Timeline())
    train(pipe, 3)
    pipe.trace(None)
    train(pipe)
    report = pipe.report()
    assert len(report.steps) == 3 and len(report.steps[0]["spans"]) == 2 * 2 * 4 + 2 * 3  # all but the last recompute
    for step in report.steps:
        assert_filled(step)
    pipe.trace(pipe._timeline)  # goes on
    train(pipe)
    assert [step["step"] for step in pipe.report().steps] == [0, 1, 2, 3, 4]
    pipe.trace(None)
    for limits, room in ((4096, [4096 - 3 * 4 * 72] * 2), (["4kB", 900], [4000 - 3 * 4 * 72, 900 - 3 * 4 * 72])):
        assert [step["room"] for step in pipe.report(limits).steps] == [room] * 5
    with pytest.raises(ValueError, match="memory has 3 sizes, but there are 2 workers"):
        pipe.report([1, 2, 3])
    text = str(report)
    assert text.startswith("3 steps, median ") and "\n  work " in text and "\nworker  waits  for\n     0 " in text
    assert next(iter(report.parts)) == "work" and report.first in set(report.parts) - {"work"}


def report_and_watch(ranks):
    pipe = make_pipe(group=ranks)
    pipe.trace(gpipe.Timeline())
    train(pipe)
    pipe.trace(None)
    report, log = pipe.report(), io.StringIO()
    with watch(pipe, out=log):
        train(pipe)
    return report.steps, log.getvalue()


def test_over_ranks_rank_0_reports_and_shows():
    (steps, log), others = results_of(2, report_and_watch)
    assert others == ([], "") and log.count("\n") == 2
    for step in steps:
        assert_filled(step, 0.005)
    assert len(steps) == 2


def test_a_report_in_words():
    text = str(Report(simulated((1, 1, 3, 1, 1), chunks=1).to_json_lines()))
    assert "1 step, median 8 s, 8 s to 8 s" in text and "  schedule        4 s   50%   50% to 50%  workers fill" in text
    assert "     0    50%  backward on stage 1 75%, forward on stage 1 25%\n" in text
    assert "A tenth less backward on stage 0 saves 300 ms (3.7%).\n" in text
    assert Report("").first == "" and "No complete step" in str(Report(""))
    recomputed = Report(simulated(chunks=8, checkpoint="always").to_json_lines())
    assert recomputed.first == "recompute" and recomputed.busiest in (0, 1)
    (change, (seconds, low, high)), *_ = recomputed.advice.items()
    assert change == "checkpoint='never'" and 0 < low <= seconds <= high
    assert "checkpoint='never' would save 8 s of a step (22.9% to 22.9%), if its bytes fit.\n" in str(recomputed)
    assert "checkpoint='always' would cost 1 s of a step (12.5%), and save memory.\n" in text
    assert "chunks=2 would save 2 s of a step (25.0% to 25.0%), if the mini-batch has as many samples, its bytes" in text


def test_a_report_is_written_and_read(tmp_path, capsys):
    lines = simulated().to_json_lines()
    for text in ("0", "{}", "[]", '{"parts": {}}', "step"):
        with pytest.raises(ValueError, match="not the lines of a report"):
            Report(text)
    Report(lines).write(tmp_path / "run.jsonl")
    assert Report.read(tmp_path / "run.jsonl").steps == Report(lines).steps
    assert main(["report", f"{tmp_path}/run.jsonl", "-o", f"{tmp_path}/report.html"]) == 0
    assert capsys.readouterr().out == str(Report(lines))
    assert (tmp_path / "report.html").read_text() == Report(lines).to_html() == simulated().to_html()
    assert main(["report", f"{tmp_path}/run.jsonl", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["schedule"] == pytest.approx(3)


def test_a_step_is_watched_in_a_log_and_in_a_terminal(pipe):
    log, terminal = io.StringIO(), io.StringIO()
    terminal.isatty = lambda: True
    with watch(pipe, out=log, memory="3MB"):
        train(pipe)
    for number, line in enumerate(log.getvalue().splitlines(), start=1):
        assert re.match(rf"step {number}: \S+ .?s, loss \S+, \S+ samples/s, idle \d+%, at most \S+ of (2\.\d+|3) MB, \w+ \d+%", line)
    assert log.getvalue().count("\n") == 2 and "\033" not in log.getvalue()
    with pytest.raises(KeyboardInterrupt), watch(pipe, out=terminal):
        train(pipe)
        raise KeyboardInterrupt
    assert terminal.getvalue().count("\033[3F\033[J") == 1 and terminal.getvalue().count("\033[44;30mF") >= 2
    train(pipe)
    assert "step" not in vars(pipe) and terminal.getvalue().count("\n") == 6


# Runs in the page, and writes what it finds into the page's title.
CHECKS = """
(() => {
const found = {};
const keydown = key => window.dispatchEvent(new KeyboardEvent("keydown", { key }));
const lines = () => $("note").textContent.split("\\n");
found.title = $("title").textContent;
found.parts = [...document.querySelectorAll("#parts tr")].map(row => row.textContent);
found.replayed = planned.end; found.complete = planned.complete;
keydown("j"); keydown("j"); keydown("j"); found.wait = lines();
keydown("ArrowDown"); found.other = chosen.worker;
keydown("c"); found.path = lines();
keydown("+"); found.zoomed = (view[1] - view[0]) / (step.end - step.start); keydown("0");
const box = $("lanes").getBoundingClientRect();
const point = (time, w) => $("lanes").dispatchEvent(new PointerEvent("pointermove",
  { clientX: box.left + place(time, box.width), clientY: box.top + GAP + w * height() + 5 }));
point(0.5, 0); found.action = lines()[0];
const input = document.querySelector("#change input"); input.value = 200; input.dispatchEvent(new Event("input"));
found.slower = planned.end;
keydown("n"); found.next = step.step;
draw();
document.title = JSON.stringify(found);
})();
"""


def opened(tmp_path: Path, page: str) -> dict:
    """Opens a page in Chromium, or skips the test if there is none."""
    browser = shutil.which("chromium") or shutil.which("google-chrome") or pytest.skip("needs Chromium")
    (tmp_path / "page.html").write_text(page.replace("</html>", f"<script>{CHECKS}</script></html>"))
    flags = ["--headless=new", "--no-sandbox", "--disable-gpu", f"--user-data-dir={tmp_path}/profile", "--dump-dom"]
    command = [browser, *flags, f"file://{tmp_path}/page.html"]
    dumped = subprocess.run(command, capture_output=True, text=True, timeout=120)
    title = re.search(r"<title>(.*?)</title>", dumped.stdout, re.DOTALL)
    assert title and title[1].startswith("{"), dumped.stdout[-2000:] + dumped.stderr[-2000:]
    return json.loads(title[1].replace("&lt;", "<").replace("&gt;", ">").replace("&amp;", "&"))


def test_the_page_tells_what_an_action_waited_for(tmp_path):
    found = opened(tmp_path, simulated((1, 1, 3, 1, 1), chunks=2).to_html())
    assert found["title"] == "Step 0: 12 s, 2 workers, idle 33 %"
    assert "schedule 4 s33.3 %" in found["parts"][2] and found["complete"] and found["replayed"] == 12
    assert found["wait"] == ["Worker 0 waited 3 s for:", "3 s  work of backward on stage 1, worker 1"]
    assert found["action"] == "Worker 0: forward of micro-batch 0 on stage 0, 1 s, from 0 s"
    assert found["path"][0] == "The critical path, back from the end of the step:"
    assert found["path"][1] == "6 s  work of backward on stage 1, worker 1"
    assert found["other"] == 1 and found["zoomed"] == pytest.approx(0.7) and found["slower"] > 12 and found["next"] == 0
