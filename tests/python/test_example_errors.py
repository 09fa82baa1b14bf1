"""Wrong flags, snapshots, files and folders given to the training programs."""

import dataclasses
import errno
import os
import shutil

import pytest

from gpipe import snapshot
from training import UNET, UNET_CUT, data, run  # noqa: F401

import unet_train
from PIL import Image


@pytest.mark.parametrize(
    "flags, message",
    [
        (["--balance", "1,2"], "--balance sums to 3, but the model has 23 layers"),
        (["--balance", "half,23"], "--balance must be auto, by-time, by-size or layers per stage such as 20,35, but has 'half'"),
        (["--balance", "5,18", "--stages", "3"], "--stages is 3"),
        (["--stages", "24"], "--stages is 24, but the model has 23 layers"),
        (["--devices", "gpu"], "--devices must be cpu, cuda or cuda:N, but has 'gpu'"),
        (["--devices", "cpu,cuda:63"], "device cuda:63 does not exist"),
        (["--stages", "3", "--devices", "cpu,cpu"], "--devices must be one per stage, or one for all, but there are 2 for 3 stages"),
        (["--schedule", "never"], "--schedule must be auto, @FILE or one of gpipe, "),
        (["--schedule", "@missing"], "cannot read the schedule 'missing'"),
        (["--schedule", "1f1b", "--stages", "4", "--stages-per-worker", "2"], "one stage per worker"),
        (["--stages-per-worker", "3", "--stages", "4"], "--stages-per-worker must divide the number of stages, which is 4, but is 3"),
        (["--schedule", "@lists", "--stages-per-worker", "2"], "--stages-per-worker must be 1 with a schedule from a file"),
        (["--schedule", "@lists", "--balance", "auto"], "--balance must not be auto with a schedule from a file"),
        (["--trace", "."], "cannot write: Is a directory: '.'"),
        (["--trace", "a" * 300], "File name too long"),
        (["--output", "/proc/output"], "'/proc/output'"),
        (["--epoch", "3"], "unrecognized arguments: --epoch"),
        (["--data", "no-such-folder"], "'no-such-folder/imgs'"),
        (["--resume", "no-such-file"], "'no-such-file'"),
        (["--load", __file__], "the file is not a zip archive"),
        (["--batch-size", "2", "--chunks", "2", "--scale", "0.02"], "choose --batch-size and --chunks"),
    ],
)
def test_unet_refuses_wrong_flags(flags, message, data, tmp_path, capsys):
    code = 0
    try:
        code = run(unet_train, *UNET, "--data", data, "--output", tmp_path, *flags)
    except SystemExit as stop:
        code = stop.code
    captured = capsys.readouterr()
    assert code and message in captured.err and len(captured.err.splitlines()) == 1
    assert "epoch 1" not in captured.out


@pytest.mark.parametrize(
    "flag, values, requirement",
    [
        ("--epochs", ["0", "-1"], "at least 1"),
        ("--epochs", ["99999999999999999999", "9" * 5000], "at most 1000000"),
        ("--epochs", ["1e3", "+1", "x"], "a whole number"),
        ("--batch-size", ["0"], "at least 1"),
        ("--chunks", ["0"], "at least 1"),
        ("--stages", ["0"], "at least 1"),
        ("--stages", ["1025"], "at most 1024"),
        ("--seed", ["-1"], "at least 0"),
        ("--snapshot-every", ["-1"], "at least 0"),
        ("--seed", ["18446744073709551616"], "at most 18446744073709551615"),
        ("--learning-rate", ["0"], "above 0"),
        ("--learning-rate", ["nan", "inf", "1e999", " 1"], "a finite number"),
        ("--clip", ["-1"], "at least 0"),
        ("--scale", ["2"], "at most 1"),
        ("--scale", ["0"], "at least 0.001"),
        ("--validation", ["100"], "at most 99"),
        ("--samples", ["1"], "at least 2"),
        ("--size", ["big"], "a size such as 192x128"),
        ("--resume", [""], "a path"),
    ],
)
def test_unet_refuses_wrong_values(flag, values, requirement, tmp_path, capsys):
    """With the messages of the C++ program, before it writes anything."""
    quoted = requirement.startswith("a ")
    for value in values:
        with pytest.raises(SystemExit) as stop:
            run(unet_train, "--output", tmp_path / "output", flag, value)
        assert stop.value.code
        shown = f"'{value}'" if quoted else value
        assert capsys.readouterr().err == f"error: {flag} must be {requirement}, but is {shown}\n"
    assert not (tmp_path / "output").exists()


def test_unet_finds_a_wrong_snapshot_before_anything_slow(data, tmp_path, capsys):
    flags = [*UNET_CUT, "--data", data, "--output", tmp_path / "good"]
    assert run(unet_train, *flags, "--epochs", "1") == 0
    good = snapshot.read(tmp_path / "good" / "latest.snapshot")
    broken = {
        "history": dataclasses.replace(good, history={}),
        "position": dataclasses.replace(good, position={}),
        "options": dataclasses.replace(good, options={}),
        "weights": dataclasses.replace(good, model={}),
        "optimizer": dataclasses.replace(good, optimizer={**good.optimizer, "type": "SGD"}),
    }
    for name, saved in broken.items():
        snapshot.write(tmp_path / name, saved)
    (tmp_path / "text").write_text("hello")
    capsys.readouterr()
    for name in (*broken, "text", "no-such-file"):
        output = ["--output", tmp_path / "new", "--resume", tmp_path / name]
        assert run(unet_train, *UNET_CUT, "--epochs", "2", *output) == 1, name
        assert not capsys.readouterr().out
        assert not (tmp_path / "new").exists()
    assert run(unet_train, *UNET, "--load", tmp_path / "no-such-file", "--output", tmp_path / "new") == 1
    assert not (tmp_path / "new").exists()


def test_failed_run_removes_only_empty_folders_that_it_created(tmp_path):
    flags = [*UNET_CUT, "--data", tmp_path / "no-such-folder"]
    (tmp_path / "older").mkdir()
    assert run(unet_train, *flags, "--output", tmp_path / "older" / "a" / "b") == 1
    assert list(tmp_path.iterdir()) == [tmp_path / "older"] and not list((tmp_path / "older").iterdir())
    assert run(unet_train, *flags, "--output", tmp_path / "older") == 1
    assert (tmp_path / "older").exists()


def test_unet_names_unwritable_files(data, tmp_path, capsys, monkeypatch):
    flags = [*UNET_CUT, "--data", data, "--epochs", "1"]
    if os.path.exists("/dev/full"):
        assert run(unet_train, *flags, "--output", tmp_path / "trace", "--trace", "/dev/full") == 1
        captured = capsys.readouterr()
        assert captured.err == "error: cannot write: No space left on device: '/dev/full'\n"
        assert "\nwrote\n" not in captured.out

    def fail(image, path):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(Image.Image, "save", fail)
    assert run(unet_train, *flags, "--output", tmp_path / "picture") == 1
    path = tmp_path / "picture" / "epoch_001.png"
    assert capsys.readouterr().err == f"error: cannot write: No space left on device: '{path}'\n"


@pytest.mark.parametrize(
    "change, message",
    [
        (lambda data: (data / "masks" / "0003_mask.gif").unlink(), "no mask (<image>_mask.gif or .png) for: 0003"),
        (lambda data: (data / "imgs" / "0004.jpg").unlink(), "no image for the masks of: 0004"),
        (lambda data: (data / "imgs" / "0005.jpg").write_text("hello"), "0005.jpg: not a JPEG, PNG or GIF file"),
        (lambda data: cut_short(data / "imgs" / "0006.jpg"), "0006.jpg: image file is truncated"),
        (lambda data: (data / "masks" / "7.gif").write_bytes(b""), "7.gif: the name of a mask must be"),
        (lambda data: (data / "imgs" / "0001.png").touch(), "two files have the same stem"),
    ],
)
def test_unet_names_broken_files(change, message, data, tmp_path, capsys):
    shutil.copytree(data, tmp_path / "data")
    change(tmp_path / "data")
    flags = [*UNET_CUT, "--data", tmp_path / "data", "--output", tmp_path, "--epochs", "1", "--workers", "1"]
    assert run(unet_train, *flags) == 1
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("error: ") and message in line


def cut_short(path):
    path.write_bytes(path.read_bytes()[:900])


def test_unet_refuses_colours_that_are_not_of_classes(tmp_path, capsys):
    unet_train.write_synthetic(tmp_path, 2, (32, 32), 0, 4)
    assert run(unet_train, *UNET_CUT, "--classes", "3", "--data", tmp_path, "--output", tmp_path / "out") == 1
    assert "_mask.png: the colour 128,128,0 is not that of any of 3 classes" in capsys.readouterr().err
