"""Trainings that are killed, stopped or finished, and --resume auto."""

import dataclasses
import os
import re
import signal
import subprocess
import sys
import time

import pytest
import torch
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from gpipe import snapshot
from processes import launcher, on_cpu
from training import EXAMPLES, UNET, UNET_CUT, data, history, run  # noqa: F401

import unet_train
from common.events import cut_event_files
from common.trainer import Trainer
from torch.utils.tensorboard import SummaryWriter

CUT = UNET_CUT[len(UNET) :]
NEW = "has no snapshot, so a new training begins"


class Killed(BaseException):
    pass


@pytest.fixture
def auto(data, tmp_path):  # noqa: F811
    """Runs the U-Net program with --resume auto."""

    def train(*more, output=tmp_path / "out"):
        # 11 training images: three steps per epoch
        flags = [*UNET_CUT, "--data", data, "--augment", "--epochs", "3", "--snapshot-every", "2", "--resume", "auto"]
        return run(unet_train, *flags, "--output", output, *more)

    return train


def values(folder):
    """All values that TensorBoard has, by tag: their steps and numbers. Files of one second have any order."""
    read = EventAccumulator(str(folder), size_guidance={"scalars": 0, "images": 0}).Reload()
    tags = set(read.Tags()["scalars"]) - {"training/images_per_second"}
    scalars = {tag: sorted((point.step, point.value) for point in read.Scalars(tag)) for tag in tags}
    return scalars, sorted(picture.step for picture in read.Images("predictions/val"))


def assert_equal(folder, other):
    assert history(folder) == history(other)
    ours, theirs = (snapshot.read(each / "latest.snapshot") for each in (folder, other))
    assert all(torch.equal(ours.model[name], tensor) for name, tensor in theirs.model.items())
    assert torch.equal(ours.random, theirs.random)
    for saved in (ours, theirs):
        del saved.history["images_per_second"]
    assert ours.history == theirs.history and ours.position == theirs.position
    assert values(folder) == values(other)


def test_auto_begins_and_continues_and_finishes(auto, tmp_path, capsys):
    out = tmp_path / "out"
    assert auto("--epochs", "1", "--learning-rate-schedule", "plateau") == 0
    assert f"resume: {out} {NEW}" in capsys.readouterr().out
    assert auto("--epochs", "2", "--learning-rate-schedule", "plateau") == 0
    assert f"resume: {out / 'latest.snapshot'}\n" in capsys.readouterr().out
    assert [row[0] for row in history(out)[1]] == [1, 2]
    before = {path.name: path.read_bytes() for path in out.iterdir()}
    assert auto("--epochs", "2", "--learning-rate-schedule", "plateau") == 0
    assert "nothing is left to train" in capsys.readouterr().out
    assert {path.name: path.read_bytes() for path in out.iterdir()} == before


def test_auto_takes_the_best_snapshot_if_there_is_no_other(auto, tmp_path, capsys):
    assert auto("--epochs", "1", "--learning-rate-schedule", "plateau") == 0
    (tmp_path / "out" / "latest.snapshot").unlink()
    assert auto("--epochs", "2", "--learning-rate-schedule", "plateau") == 0
    assert f"resume: {tmp_path / 'out' / 'best.snapshot'}\n" in capsys.readouterr().out
    assert len(history(tmp_path / "out")[1]) == 2


def test_auto_replaces_the_history_of_one_epoch_alone(auto, tmp_path, capsys):
    out = tmp_path / "out"
    out.mkdir()
    (out / "history.csv").write_text("epoch\n1\n2\n")
    assert auto() == 1
    assert "holds an earlier training (history.csv)" in capsys.readouterr().err
    (out / "history.csv").write_text("epoch\n1\n")  # the run was killed before it wrote a snapshot
    assert auto() == 0
    assert NEW in capsys.readouterr().out and len(history(out)[1]) == 3


def test_auto_skips_no_snapshot(auto, tmp_path, capsys):
    assert auto("--epochs", "2", "--learning-rate-schedule", "plateau") == 0
    latest = tmp_path / "out" / "latest.snapshot"
    saved = snapshot.read(latest)
    flags = ["--epochs", "3", "--learning-rate-schedule", "plateau"]
    assert auto(*flags, "--channels", "5") == 1
    assert f"{latest} was made with --channels 4, not 5" in capsys.readouterr().err
    snapshot.write(latest, dataclasses.replace(saved, model={}))
    assert auto(*flags) == 1
    assert "down1_conv1" in capsys.readouterr().err
    latest.write_bytes(latest.read_bytes()[:1000])
    assert auto(*flags) == 1
    error = capsys.readouterr().err
    assert str(latest) in error and "damaged" in error and "--resume auto does not skip it" in error


def test_a_killed_training_goes_on_from_the_latest_snapshot(auto, tmp_path, monkeypatch):
    """An exception leaves the files as a kill does."""
    assert auto(output=tmp_path / "whole") == 0
    step = Trainer.step
    for moment in (1, 3, 4, 8):
        steps = []

        def kill(self, input, target, images):
            steps.append(images)
            if len(steps) == moment:
                raise Killed
            return step(self, input, target, images)

        monkeypatch.setattr(Trainer, "step", kill)
        with pytest.raises(Killed):
            auto(output=tmp_path / str(moment))
        monkeypatch.undo()
        assert auto(output=tmp_path / str(moment)) == 0
        assert_equal(tmp_path / str(moment), tmp_path / "whole")


def test_a_signal_stops_a_validation(auto, tmp_path, monkeypatch):
    flags = ["--validation", "50"]  # two mini-batches, and two for training
    assert auto(*flags, output=tmp_path / "whole") == 0
    show = Trainer.show

    def stop(self, picture, name, tag):
        show(self, picture, name, tag)
        if name == "epoch_002.png":
            signal.raise_signal(signal.SIGTERM)

    monkeypatch.setattr(Trainer, "show", stop)
    assert auto(*flags) == 128 + signal.SIGTERM
    saved = snapshot.read(tmp_path / "out" / "latest.snapshot")
    assert saved.epoch == 1 and saved.position == {"batch": 2, "images": 6}
    monkeypatch.undo()
    assert auto(*flags) == 0
    assert_equal(tmp_path / "out", tmp_path / "whole")


def test_event_files_are_cut_before_what_is_refused_or_not_whole(tmp_path):
    def write():
        with SummaryWriter(str(tmp_path), filename_suffix=".gpipe") as events:
            for step in (1, 2, 3):
                events.add_scalar("loss", 0.5, step)
        (path,) = tmp_path.glob("events*.gpipe")
        return path

    def cut(last):
        seen = []
        cut_event_files(tmp_path, lambda tag, step: seen.append((tag, step)) or step <= last)
        return seen

    path = write()
    whole = path.read_bytes()
    assert cut(3) == [("loss", 1), ("loss", 2), ("loss", 3)] and path.read_bytes() == whole
    cut(2)
    shorter = path.read_bytes()
    assert len(shorter) < len(whole) and whole.startswith(shorter)
    for size in range(len(shorter), len(whole)):
        path.write_bytes(whole[:size])
        assert cut(3) == [("loss", 1), ("loss", 2)]
        assert path.read_bytes() == shorter
    (tmp_path / "events.out.tfevents.1.other").touch()
    cut(0)
    assert [path.name for path in tmp_path.iterdir()] == ["events.out.tfevents.1.other"]


def start(command, data, output, *more):  # noqa: F811
    flags = ["--data", data, "--epochs", "8", "--snapshot-every", "2", "--resume", "auto", "--output", output, *more]
    return subprocess.Popen(
        [str(part) for part in [*command, EXAMPLES / "unet_train.py", *UNET, *flags]],
        env=on_cpu(),
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )


def kill_second_rank(job, output):
    """Kills it when there is a snapshot."""
    while not (output / "latest.snapshot").exists() and job.poll() is None:
        time.sleep(0.01)
    ranks = subprocess.run(["pgrep", "-P", str(job.pid)], capture_output=True, text=True, check=True).stdout.split()
    assert len(ranks) == 2
    os.kill(int(ranks[1]), signal.SIGKILL)


def finish(process):
    output = process.communicate(timeout=120)[0]
    assert process.returncode == 0, output
    return output


def test_a_killed_job_comes_back_by_itself(data, tmp_path):  # noqa: F811
    out = tmp_path / "out"
    job = start([*launcher(2), "--max-restarts", "1"], data, out, *CUT)
    kill_second_rank(job, out)
    resumed = re.findall("^resume: .*", finish(job), re.MULTILINE)
    assert resumed == [f"resume: {out} {NEW}", f"resume: {out / 'latest.snapshot'}"]
    finish(start([sys.executable], data, tmp_path / "whole", *CUT))
    assert_equal(out, tmp_path / "whole")


def test_a_killed_job_goes_on_with_another_number_of_replicas(data, tmp_path):  # noqa: F811
    # 8 images for training, 4 for validation. Mini-batches of 4 become two micro-batches.
    flags = ["--validation", "33", "--stages", "1"]
    out = tmp_path / "out"
    job = start(launcher(2), data, out, *flags, "--chunks", "1", "--replicas", "2")
    kill_second_rank(job, out)
    assert job.communicate(timeout=120) and job.returncode != 0
    assert f"resume: {out / 'latest.snapshot'}" in finish(start([sys.executable], data, out, *flags, "--chunks", "2"))
    finish(start([sys.executable], data, tmp_path / "whole", *flags, "--chunks", "2"))
    for row, expected in zip(history(out)[1], history(tmp_path / "whole")[1], strict=True):
        assert row == pytest.approx(expected, rel=1e-3)
