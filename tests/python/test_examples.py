"""The training programs in Python, compared with those in C++."""

import csv
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch

import programs
from gpipe import snapshot
from training import EXAMPLES, UNET, UNET_CUT, data, history, run  # noqa: F401

import resnet18_mnist
import unet_train
from common.history import History
from common.options import to_flag
from mnist.confusion import draw_confusion
from PIL import Image


MNIST = ["--samples", "60", "--batch-size", "20", "--chunks", "5", "--epochs", "1", "--balance", "40,31"]
# Sums are in another order, and LibTorch and Python compute Adam's formula differently.
NEAR = 2e-3


def assert_near(rows, expected):
    assert len(rows) == len(expected)
    for row, expected_row in zip(rows, expected, strict=True):
        assert row == pytest.approx(expected_row, rel=NEAR, abs=NEAR)


def test_any_model_learns():
    pytest.importorskip("transformers")
    done = subprocess.run(
        [sys.executable, EXAMPLES / "any_model.py"], capture_output=True, text=True, timeout=300, check=True
    )
    losses = [float(loss) for loss in re.findall(r"loss (\S+)", done.stdout)]
    assert len(losses) == 4 and losses[-1] < losses[0] / 1.5


def test_unet_writes_the_files_that_it_lists(tmp_path, capsys):
    trace = tmp_path / "trace.json"
    flags = ["--samples", "10", "--size", "64x48", "--classes", "3", "--epochs", "3", "--stages", "3", "--trace", trace]
    assert run(unet_train, *UNET, *flags, "--chunks", "1", "--amp", "--bilinear", "--output", tmp_path) == 0
    output = capsys.readouterr().out
    assert "at 16x12, 3 classes" in output and "model: U-Net, 24 layers" in output
    written = [Path(line.strip()) for line in output.partition("\nwrote\n")[2].splitlines()]
    assert {path.name for path in written if "tfevents" not in path.name} == {
        "synthetic_10_64x48_3",
        "history.csv",
        *(f"epoch_{epoch:03}.png" for epoch in (1, 2, 3)),
        "best.snapshot",
        "latest.snapshot",
        "trace.json",
    }
    assert all(path.exists() for path in written)
    assert '"traceEvents"' in trace.read_text()
    header, rows = history(tmp_path)
    assert header[2:7] == ["val_dice", "val_iou", "val_loss", "val_dice_1", "val_dice_2"]
    assert [row[0] for row in rows] == [1, 2, 3]
    (events,) = (path for path in written if "tfevents" in path.name)
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    read = EventAccumulator(str(events)).Reload()
    assert [point.value for point in read.Scalars("loss/train")] == pytest.approx([row[1] for row in rows], rel=1e-5)
    assert [point.value for point in read.Scalars("dice/val_2")] == pytest.approx([row[6] for row in rows], rel=1e-5)
    assert [point.step for point in read.Scalars("loss/train_step")] == list(range(1, 10))
    assert set(read.Tags()["scalars"]) == {
        *("loss/train", "loss/train_step", "loss/val", "dice/val", "dice/val_1", "dice/val_2", "iou/val"),
        *("training/learning_rate", "training/images_per_second"),
    }
    assert [picture.step for picture in read.Images("predictions/val")] == [1, 2, 3]
    with Image.open(tmp_path / "epoch_001.png") as picture:
        assert picture.width == 3 * 256 + 8


def test_unet_trains_as_in_cpp(data, tmp_path, capsys):
    flags = [*UNET_CUT, "--data", data, "--augment", "--clip", "1", "--learning-rate-schedule", "plateau", "-l", "0.0001"]
    cpp, python = tmp_path / "cpp", tmp_path / "python"
    programs.run("unet/unet_train", *flags, "--epochs", "1", "--output", cpp)
    assert run(unet_train, *flags, "--epochs", "1", "--output", python) == 0
    header, rows = history(cpp)
    assert history(python)[0] == header
    assert_near(history(python)[1], rows)
    ours, theirs = snapshot.read(python / "latest.snapshot"), snapshot.read(cpp / "latest.snapshot")
    assert ours.options == theirs.options
    assert torch.equal(ours.random, theirs.random)
    for name, tensor in theirs.model.items():
        torch.testing.assert_close(ours.model[name], tensor, rtol=NEAR, atol=NEAR)

    # Each program resumes the other's training.
    resumed = [*flags, "--epochs", "2", "--resume"]
    assert run(unet_train, *resumed, cpp / "latest.snapshot", "--output", tmp_path / "python_on", "--chunks", "2") == 0
    programs.run("unet/unet_train", *resumed, python / "latest.snapshot", "--output", tmp_path / "cpp_on")
    assert_near(history(tmp_path / "python_on")[1], history(tmp_path / "cpp_on")[1])
    assert len(history(tmp_path / "python_on")[1]) == 2

    capsys.readouterr()
    for other, message in [
        (["--channels", "5"], "was made with --channels 4, not 5; give the same value, or train without --resume"),
        (["--epochs", "1"], "has 1 epochs already, and --epochs is 1: nothing is left to train; give more --epochs"),
    ]:
        latest = cpp / "latest.snapshot"
        assert run(unet_train, *resumed, latest, "--output", tmp_path / "refused", *other) == 1
        assert message in capsys.readouterr().err

    # The C++ programs find the images that were kept for validation.
    best = python / "best.snapshot"
    part = ["--data", data, "--part", "validation", "--output", tmp_path / "scores"]
    assert "wrote" in programs.run("unet/unet_evaluate", "--model", best, *part)
    programs.run("unet/unet_predict", "--model", best, "--input", data / "imgs", "--output", tmp_path / "masks")
    assert len(list((tmp_path / "masks").glob("*_mask.png"))) == 12


def test_schedules_that_sum_in_the_same_order_train_the_same(data, tmp_path, capsys):
    lists = tmp_path / "lists"
    lists.write_text("".join(f"{s}F0 {s}F1 {s}F2 {s}B2 {s}B1 {s}B0\n" for s in range(4)))
    # 10 training images: mini-batches of 5, in micro-batches of 2, 2 and 1.
    flags = ["--data", data, *UNET, "--batch-size", "5", "--chunks", "3", "--epochs", "2", "--balance", "5,6,6,6", "--validation", "17"]
    runs = {
        "gpipe": [],
        "gpipe_2": ["--stages-per-worker", "2"],
        "looped_bfs": ["--schedule", "looped_bfs", "--stages-per-worker", "2", "--checkpoint", "always"],
        "file": ["--schedule", f"@{lists}"],
        "1f1b": ["--schedule", "1f1b", "--checkpoint", "never"],
        "zb_h1": ["--schedule", "zb_h1"],
        "zb_v": ["--schedule", "zb_v"],
        "interleaved_1f1b": ["--schedule", "interleaved_1f1b", "--stages-per-worker", "2"],
    }
    results = {}
    for name, more in runs.items():
        assert run(unet_train, *flags, *more, "--output", tmp_path / name) == 0
        weights = snapshot.read(tmp_path / name / "latest.snapshot").model
        results[name] = (history(tmp_path / name), {key: value.tolist() for key, value in weights.items()})
    assert results["gpipe"] == results["gpipe_2"] == results["looped_bfs"] == results["file"]
    assert results["1f1b"] == results["zb_h1"] == results["zb_v"] == results["interleaved_1f1b"] != results["gpipe"]
    output = capsys.readouterr().out
    assert "schedule interleaved_1f1b, checkpoint except_last" in output
    assert "stage 3: 6 layers" in output and "parameters, on worker 1, cpu; predicted: " in output
    assert re.search(r"^predicted memory per worker: [^,]*iB, [^,]*iB$", output, re.MULTILINE)


def test_unet_resumes_after_a_signal_to_all_processes(data, tmp_path):
    """With another number of stages, another checkpoint mode and other workers. The data loaders get the signal too."""
    # 8 images for training. 2 chunks and 3 chunks cut mini-batches of 4 alike, into 2 and 2.
    flags = [*UNET_CUT, "--data", data, "--validation", "33", "--augment", "--epochs", "20"]
    # The same number of threads per stage, whatever the number of stages.
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    environment["PYTHONPATH"] = os.pathsep.join(path for path in sys.path if path)
    command = [sys.executable, str(EXAMPLES / "unet_train.py")]

    def start(*more, output):
        handler = signal.signal(signal.SIGINT, signal.default_int_handler)  # a child inherits an ignored signal
        try:
            return subprocess.Popen(
                list(map(str, [*command, *flags, *more, "--output", output])),
                env=environment,
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                text=True,
                start_new_session=True,
            )
        finally:
            signal.signal(signal.SIGINT, handler)

    def finish(process, code):
        output = process.communicate(timeout=120)[0]
        assert process.returncode == code, output
        return output

    whole = tmp_path / "whole"
    finish(start(output=whole), 0)
    for number in (signal.SIGINT, signal.SIGTERM):
        halves = tmp_path / number.name
        stopped = start("--workers", "2", output=halves)
        csv_file = halves / "history.csv"
        while stopped.poll() is None and not (csv_file.exists() and len(csv_file.read_text().splitlines()) > 3):
            time.sleep(0.01)
        if stopped.poll() is None:
            os.killpg(stopped.pid, number)
        output = finish(stopped, 128 + number)
        latest = halves / "latest.snapshot"
        assert f"--resume {latest}" in output
        assert 3 <= len(history(halves)[1]) < 20
        more = ["--balance", "5,10,8", "--chunks", "3", "--checkpoint", "always", "--resume", latest]
        finish(start(*more, output=halves), 0)
        assert history(halves) == history(whole)
        ours, theirs = snapshot.read(latest), snapshot.read(whole / "latest.snapshot")
        assert ours.model.keys() == theirs.model.keys()
        assert all(torch.equal(ours.model[name], theirs.model[name]) for name in theirs.model)
        assert torch.equal(ours.random, theirs.random)


def test_unet_prints_the_profile_only_on_request(data, tmp_path, capsys):
    flags = [*UNET_CUT, "--data", data, "--epochs", "1", "--overwrite", "--output", tmp_path]
    assert run(unet_train, *flags) == 0
    output = capsys.readouterr().out
    assert "costs of each layer" not in output
    assert "plan: balance 5,18 (as given), 2 micro-batches, checkpoint except_last, schedule gpipe\n" in output
    assert re.search(r"^stage 1: 18 layers, .*; predicted: .*s per micro-batch, .*iB$", output, re.MULTILINE)
    assert re.search(r"^predicted step: .*s, bubble \d+ %$", output, re.MULTILINE)
    assert run(unet_train, *flags, "--profile") == 0
    assert re.search(r"^22 +head ", capsys.readouterr().out, re.MULTILINE)


def test_overwrite_removes_the_outputs_of_the_earlier_training_alone(data, tmp_path):
    flags = [*UNET_CUT, "--data", data, "--output", tmp_path]
    assert run(unet_train, *flags, "--epochs", "2") == 0
    others = [tmp_path / name for name in ("notes.txt", "epoch_mine.png", "events.out.tfevents.1.other")]
    for path in others:
        path.write_text("mine")
    (tmp_path / "history.csv.tmp").touch()
    assert run(unet_train, *flags, "--epochs", "1", "--overwrite") == 0
    assert [path.name for path in sorted(tmp_path.glob("epoch_0*.png"))] == ["epoch_001.png"]
    assert len(list(tmp_path.glob("events.out.tfevents.*.gpipe"))) == 1
    assert not (tmp_path / "history.csv.tmp").exists()
    assert all(path.read_text() == "mine" for path in others)


def test_unet_keeps_an_earlier_training(data, tmp_path, capsys):
    flags = [*UNET_CUT, "--data", data, "--learning-rate-schedule", "plateau", "--output", tmp_path]
    assert run(unet_train, *flags, "--epochs", "2") == 0

    def contents():
        return {path.name: path.read_bytes() for path in tmp_path.iterdir()}

    before = contents()
    capsys.readouterr()
    assert run(unet_train, *flags, "--epochs", "2") == 1
    error = capsys.readouterr().err
    assert "holds an earlier training (latest.snapshot, best.snapshot, history.csv)" in error
    assert f"--resume {tmp_path / 'latest.snapshot'}" in error and "--overwrite" in error
    assert run(unet_train, *flags, "--epochs", "2", "--resume", tmp_path / "latest.snapshot") == 1
    assert "has 2 epochs already, and --epochs is 2: nothing is left to train" in capsys.readouterr().err
    assert contents() == before

    assert run(unet_train, *flags, "--epochs", "1", "--overwrite") == 0
    assert [row[0] for row in history(tmp_path)[1]] == [1]
    # A run that is resumed with more epochs ends as one run of all epochs.
    assert run(unet_train, *flags, "--epochs", "2", "--resume", tmp_path / "latest.snapshot") == 0
    (tmp_path / "whole.csv").write_bytes(before["history.csv"])
    with open(tmp_path / "whole.csv", newline="") as file:
        whole = [row[:-1] for row in csv.reader(file)]
    with open(tmp_path / "history.csv", newline="") as file:
        assert [row[:-1] for row in csv.reader(file)] == whole


@pytest.fixture(scope="module")
def resnet(tmp_path_factory):
    """The output folder of a run."""
    folder = tmp_path_factory.mktemp("resnet")
    assert run(resnet18_mnist, *MNIST, "--output", folder) == 0
    yield folder
    for path in folder.glob("*.snapshot"):  # they are large
        path.unlink()


def test_resnet_writes_its_outputs(resnet):
    header, rows = history(resnet)
    assert header[:4] == ["epoch", "train_loss", "accuracy", "test_loss"] and len(rows) == 1
    assert (resnet / "best.snapshot").exists() and (resnet / "confusion_001.png").stat().st_size > 1000
    saved = snapshot.read(resnet / "latest.snapshot")
    assert saved.options["images"] == "60" and saved.optimizer["state"]["conv1.weight"]["step"] == 3


def test_resnet_trains_as_in_cpp(resnet, tmp_path):
    programs.run("resnet18_mnist/resnet18_mnist", *MNIST, "--data", resnet / "digits", "--output", tmp_path)
    header, rows = history(tmp_path)
    assert history(resnet)[0] == header
    # At this learning rate, the scores differ after three steps.
    assert history(resnet)[1][0][:2] == pytest.approx(rows[0][:2], rel=0.02)
    ours, theirs = (snapshot.read(folder / "latest.snapshot") for folder in (resnet, tmp_path))
    assert ours.options == theirs.options and ours.model.keys() == theirs.model.keys()
    for path in tmp_path.glob("*.snapshot"):
        path.unlink()


def test_failed_history_leaves_no_temporary_file(tmp_path):
    (tmp_path / "history.csv").write_text("older")
    with pytest.raises(TypeError):
        History(tmp_path / "history.csv", ["epoch"], [None])
    assert [path.name for path in tmp_path.iterdir()] == ["history.csv"]
    assert (tmp_path / "history.csv").read_text() == "older"


def test_confusion_shows_accuracy_and_axes():
    half, whole = draw_confusion(torch.tensor([[5, 5], [5, 5]])), draw_confusion(torch.tensor([[5, 0], [0, 5]]))
    assert half.size == whole.size
    title = (0, 0, half.width, 36)
    assert half.crop(title).tobytes() != whole.crop(title).tobytes()
    for names in ((96, 36, half.width, 60), (0, 88, 60, half.height)):
        assert half.crop(names).getextrema()[1] > 200


def test_numbers_are_stored_as_in_cpp():
    numbers = [0.0, 10.0, 0.005, 1e-3, 1e-4, 1e-05, 12.5, 100000.0, 1 / 3, 2.5e-7]
    expected = ["0", "10", "0.005", "0.001", "1e-04", "1e-05", "12.5", "1e+05", "0.3333333333333333", "2.5e-07"]
    assert [to_flag(number) for number in numbers] == expected
