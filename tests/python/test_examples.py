"""The programs of examples/python, beside those in C++."""

import csv
import errno
import os
import shutil
import signal
import struct
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch

import programs
from gpipe import snapshot

Image = pytest.importorskip("PIL.Image")
pytest.importorskip("tensorboard")
examples = Path(__file__).parents[2] / "examples" / "python"
sys.path.insert(0, str(examples))

import resnet18_mnist  # noqa: E402
import unet_train  # noqa: E402
from common.options import run_program, to_flag  # noqa: E402
from PIL import Image  # noqa: E402
from unet import carvana  # noqa: E402

UNET = ["--batch-size", "4", "--depth", "1", "--channels", "4", "--scale", "0.25", "--workers", "0"]
UNET_CUT = [*UNET, "--balance", "5,18"]
MNIST = ["--samples", "60", "--batch-size", "20", "--chunks", "5", "--epochs", "1", "--balance", "40,31"]
# Of the units that history.csv has: sums in another order, and Adam's formula as LibTorch and as Python compute it.
NEAR = 2e-3


def run(program, *flags):
    """The exit code."""
    arguments = sys.argv
    sys.argv = [program.__name__, *map(str, flags)]
    try:
        return run_program(program.train, program.parse_options())
    finally:
        sys.argv = arguments


def history(folder):
    with open(folder / "history.csv", newline="") as file:
        header, *rows = csv.reader(file)
    return header, [[float(cell) for cell in row[:-1]] for row in rows]  # but images/s


def assert_near(rows, expected):
    assert len(rows) == len(expected)
    for row, expected_row in zip(rows, expected, strict=True):
        assert row == pytest.approx(expected_row, rel=NEAR, abs=NEAR)


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    """Carvana-format files, as the example draws them."""
    folder = tmp_path_factory.mktemp("data")
    unet_train.write_synthetic(folder, 12, (96, 64), 0, 2)
    return folder


def test_unet_writes_what_it_names(tmp_path, capsys):
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
    assert [point.value for point in read.Scalars("train_loss")] == pytest.approx([row[1] for row in rows], rel=1e-5)
    assert [picture.step for picture in read.Images("validation")] == [1, 2, 3]


def test_unet_is_that_of_cpp(data, tmp_path, capsys):
    flags = [*UNET_CUT, "--data", data, "--augment", "--clip", "1", "--schedule", "plateau", "-l", "0.0001"]
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

    # Each goes on where the other has stopped.
    resumed = [*flags, "--epochs", "2", "--resume"]
    assert run(unet_train, *resumed, cpp / "latest.snapshot", "--output", tmp_path / "python_on", "--chunks", "2") == 0
    programs.run("unet/unet_train", *resumed, python / "latest.snapshot", "--output", tmp_path / "cpp_on")
    assert_near(history(tmp_path / "python_on")[1], history(tmp_path / "cpp_on")[1])
    assert len(history(tmp_path / "python_on")[1]) == 2

    capsys.readouterr()
    for other, message in [
        (["--channels", "5"], "was made with --channels 4, not 5; give the same, or start afresh"),
        (["--epochs", "1"], "has 1 epochs already, and --epochs is 1: nothing is left to train; give more --epochs"),
    ]:
        latest = cpp / "latest.snapshot"
        assert run(unet_train, *resumed, latest, "--output", tmp_path / "refused", *other) == 1
        assert message in capsys.readouterr().err

    # The share of the data that was kept for validation is known to both.
    best = python / "best.snapshot"
    part = ["--data", data, "--part", "validation", "--output", tmp_path / "scores"]
    assert "wrote" in programs.run("unet/unet_evaluate", "--model", best, *part)
    programs.run("unet/unet_predict", "--model", best, "--input", data / "imgs", "--output", tmp_path / "masks")
    assert len(list((tmp_path / "masks").glob("*_mask.png"))) == 12


def test_resume_after_an_interrupt(data, tmp_path):
    """At another number of stages, in another checkpoint mode, with other workers."""
    # 8 images to train: mini-batches of 4, which 2 chunks and 3 chunks cut alike, into 2 and 2.
    flags = [*UNET_CUT, "--data", data, "--validation", "33", "--augment", "--epochs", "20"]
    # The same number of threads for each stage, whatever their number.
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    environment["PYTHONPATH"] = os.pathsep.join(path for path in sys.path if path)
    command = [sys.executable, str(examples / "unet_train.py")]

    def start(*more, output):
        handler = signal.signal(signal.SIGINT, signal.default_int_handler)  # who ignores it hands that down
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

    whole, halves = tmp_path / "whole", tmp_path / "halves"
    undisturbed = start(output=whole)
    stopped = start("--workers", "2", output=halves)
    csv_file = halves / "history.csv"
    while stopped.poll() is None and not (csv_file.exists() and len(csv_file.read_text().splitlines()) > 3):
        time.sleep(0.01)
    if stopped.poll() is None:
        os.killpg(stopped.pid, signal.SIGINT)  # as a terminal does: its loaders get it too
    output = finish(stopped, 130)
    latest = halves / "latest.snapshot"
    assert f"--resume {latest}" in output
    assert 3 <= len(history(halves)[1]) < 20
    more = ["--balance", "5,10,8", "--chunks", "3", "--checkpoint", "always", "--resume", latest]
    finish(start(*more, output=halves), 0)
    finish(undisturbed, 0)
    assert history(halves) == history(whole)
    ours, theirs = snapshot.read(latest), snapshot.read(whole / "latest.snapshot")
    assert ours.model.keys() == theirs.model.keys()
    assert all(torch.equal(ours.model[name], theirs.model[name]) for name in theirs.model)
    assert torch.equal(ours.random, theirs.random)


@pytest.fixture(scope="module")
def resnet(tmp_path_factory):
    """What a run of the example has left."""
    folder = tmp_path_factory.mktemp("resnet")
    assert run(resnet18_mnist, *MNIST, "--output", folder) == 0
    yield folder
    for path in folder.glob("*.snapshot"):  # which are large
        path.unlink()


def test_resnet(resnet):
    header, rows = history(resnet)
    assert header[:4] == ["epoch", "train_loss", "accuracy", "test_loss"] and len(rows) == 1
    assert (resnet / "best.snapshot").exists() and (resnet / "confusion_001.png").stat().st_size > 1000
    saved = snapshot.read(resnet / "latest.snapshot")
    assert saved.options["images"] == "60" and saved.optimizer["state"]["conv1.weight"]["step"] == 3


def test_resnet_is_that_of_cpp(resnet, tmp_path):
    programs.run("resnet18_mnist/resnet18_mnist", *MNIST, "--data", resnet / "digits", "--output", tmp_path)
    header, rows = history(tmp_path)
    assert history(resnet)[0] == header
    # At so high a rate, those of the test are no longer alike after three steps.
    assert history(resnet)[1][0][:2] == pytest.approx(rows[0][:2], rel=0.02)
    ours, theirs = (snapshot.read(folder / "latest.snapshot") for folder in (resnet, tmp_path))
    assert ours.options == theirs.options and ours.model.keys() == theirs.model.keys()
    for path in tmp_path.glob("*.snapshot"):
        path.unlink()


def test_digits(tmp_path):
    resnet18_mnist.write_digits(tmp_path, 30, 5, seed=1)
    images, labels = resnet18_mnist.read_idx(tmp_path, "train")
    assert images.shape == (30, 1, 28, 28) and images.dtype == torch.uint8
    assert len(set(labels.tolist())) > 5
    assert (images.flatten(1).max(1).values > 120).all()
    assert len(resnet18_mnist.read_idx(tmp_path, "t10k")[0]) == 5


IMAGES, LABELS = "train-images-idx3-ubyte", "train-labels-idx1-ubyte"


@pytest.mark.parametrize(
    "name, change, message",
    [
        (IMAGES, lambda whole: whole[:500], "cut short: 484 bytes after the header, which says 3920"),
        (IMAGES, lambda whole: whole + b"x", "too long: 3921 bytes"),
        (IMAGES, lambda whole: whole[:7], "cut short: 7 bytes, but the header alone has 16"),
        (IMAGES, lambda whole: b"", "the file is empty"),
        (IMAGES, lambda whole: b"\x1f\x8b" + whole, "compressed; run gunzip on it"),
        (IMAGES, lambda whole: b"\0\0\x08\x01" + whole[4:], "no IDX file of images: it starts with 0x00000801"),
        (IMAGES, lambda whole: whole[:4] + b"\xff" * 12 + whole[16:], "images of 4294967295 rows and 4294967295"),
        (IMAGES, lambda whole: whole[:4] + b"\xff" * 4 + whole[8:], "3920 bytes after the header, which says 3367"),
        (IMAGES, lambda whole: whole[:4] + b"\0" * 4 + whole[8:16], "it holds no items"),
        (LABELS, lambda whole: whole[:7] + b"\4" + whole[8:12], "4 labels"),
        (LABELS, lambda whole: whole[:11] + b"\x0b" + whole[12:], "label 3 is 11; it must be below 10"),
    ],
)
def test_broken_digits(name, change, message, tmp_path):
    resnet18_mnist.write_digits(tmp_path, 5, 1, seed=0)
    path = tmp_path / name
    path.write_bytes(change(path.read_bytes()))
    with pytest.raises(ValueError, match=f"{tmp_path / name}.*{message}"):
        resnet18_mnist.read_idx(tmp_path, "train")


def test_digits_are_read_only_where_their_length_is_right(tmp_path):
    resnet18_mnist.write_digits(tmp_path, 5, 1, seed=0)
    os.truncate(tmp_path / IMAGES, 1 << 42)  # a sparse file, longer than any memory
    with pytest.raises(ValueError, match="too long: 4398046511088 bytes"):
        resnet18_mnist.read_idx(tmp_path, "train")
    os.remove(tmp_path / IMAGES)
    os.symlink("/dev/zero", tmp_path / IMAGES)
    with pytest.raises(ValueError, match="the file is empty"):
        resnet18_mnist.read_idx(tmp_path, "train")


def gif(width, height):
    """35 bytes; the frame has two pixels."""
    canvas = b"GIF89a" + struct.pack("<HH", width, height) + b"\x80\0\0" + b"\0\0\0\xff\xff\xff"
    return canvas + b"," + struct.pack("<HHHHB", 0, 0, 2, 1, 0) + b"\x02\x02\x4c\x0a\0;"


@pytest.mark.parametrize(
    "content, message",
    [
        (gif(65535, 65535), "could be decompression bomb"),
        (gif(8192, 8192), "damaged: 8192x8192 pixels do not fit into 35 bytes"),
        (gif(1024, 1025), "do not fit"),
        (b"\xff\xd8\xff\xe0", "not a JPEG, PNG or GIF file, or damaged"),
        (b"", "the file is empty"),
    ],
)
def test_hostile_pictures(content, message, tmp_path):
    path = tmp_path / "0.gif"
    path.write_bytes(content)
    for read in (carvana.image_size, carvana.read_pixels):
        with pytest.raises(ValueError, match=f"^{path}: .*{message}"):
            read(path)


def test_plain_pictures_are_within_the_bounds(tmp_path):
    for form, mode in (("GIF", "1"), ("PNG", "1"), ("JPEG", "L"), ("JPEG", "RGB")):
        Image.new(mode, (4000, 4000)).save(tmp_path / "0", form, **({"progressive": True} if form == "JPEG" else {}))
        assert carvana.read_image(tmp_path / "0", (8, 8)).shape == (8, 8, 3)
    (tmp_path / "0").write_bytes(gif(1024, 1024))
    assert carvana.read_image(tmp_path / "0", (8, 8)).shape == (8, 8, 3)


@pytest.mark.parametrize(
    "flags, message",
    [
        (["--balance", "1,2"], "--balance sums to 3, but the model has 23 layers"),
        (["--balance", "half,23"], "'half' is neither auto"),
        (["--balance", "5,18", "--stages", "3"], "--stages is 3"),
        (["--stages", "24"], "--stages is 24, but the model has 23 layers"),
        (["--devices", "gpu"], "'gpu' is not a device"),
        (["--devices", "cpu,cuda:63"], "device cuda:63 is not there"),
        (["--stages", "3", "--devices", "cpu,cpu"], "--devices: has 2 for 3 stages"),
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
def test_unet_refuses(flags, message, data, tmp_path, capsys):
    code = 0
    try:
        code = run(unet_train, *UNET, "--data", data, "--output", tmp_path, *flags)
    except SystemExit as stop:
        code = stop.code
    captured = capsys.readouterr()
    assert code and message in captured.err and len(captured.err.splitlines()) == 1
    assert "epoch 1" not in captured.out


@pytest.mark.parametrize(
    "flag, values, allowed",
    [
        ("--epochs", ["0", "-1", "1e3", "99999999999999999999"], "a whole number from 1 to 1000000"),
        ("--batch-size", ["0"], "a whole number from 1 to 1048576"),
        ("--chunks", ["0"], "a whole number from 1 to 1048576"),
        ("--stages", ["0"], "a whole number from 1 to 1024"),
        ("--seed", ["-1", "18446744073709551616"], "a whole number from 0 to 18446744073709551615"),
        ("--learning-rate", ["0", "nan", "inf"], "a finite number above 0"),
        ("--clip", ["-1", "nan", "inf"], "a finite number of at least 0"),
        ("--scale", ["2", "nan"], "a number from 0.001 to 1"),
        ("--validation", ["100", "nan"], "a number from 0.01 to 99"),
        ("--samples", ["1"], "a whole number from 2 to 9999"),
        ("--size", ["big"], "a size; give it as 192x128"),
        ("--resume", [""], "a path"),
    ],
)
def test_unet_refuses_a_value(flag, values, allowed, tmp_path, capsys):
    """In the words of the C++ program, before it writes anything."""
    for value in values:
        with pytest.raises(SystemExit) as stop:
            run(unet_train, "--output", tmp_path / "output", flag, value)
        assert stop.value.code
        assert capsys.readouterr().err == f"error: {flag}: '{value}' is not {allowed}\n"
    assert not (tmp_path / "output").exists()


def test_unet_finds_a_missing_snapshot_before_it_draws(tmp_path, capsys):
    for flag in ("--resume", "--load"):
        assert run(unet_train, *UNET, flag, "no-such-file", "--output", tmp_path / "output") == 1
        assert "'no-such-file'" in capsys.readouterr().err
    assert not (tmp_path / "output").exists()


def test_unet_does_not_overwrite_unasked(data, tmp_path, capsys):
    flags = [*UNET_CUT, "--data", data, "--schedule", "plateau", "--output", tmp_path]
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
    # Further epochs than the run was to have end where one run of them all did.
    assert run(unet_train, *flags, "--epochs", "2", "--resume", tmp_path / "latest.snapshot") == 0
    (tmp_path / "whole.csv").write_bytes(before["history.csv"])
    with open(tmp_path / "whole.csv", newline="") as file:
        whole = [row[:-1] for row in csv.reader(file)]
    with open(tmp_path / "history.csv", newline="") as file:
        assert [row[:-1] for row in csv.reader(file)] == whole


def test_unet_names_what_cannot_be_written(data, tmp_path, capsys, monkeypatch):
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
        (lambda data: (data / "imgs" / "0001.png").touch(), "two files have one stem"),
    ],
)
def test_unet_names_the_broken_file(change, message, data, tmp_path, capsys):
    shutil.copytree(data, tmp_path / "data")
    change(tmp_path / "data")
    flags = [*UNET_CUT, "--data", tmp_path / "data", "--output", tmp_path, "--epochs", "1", "--workers", "1"]
    assert run(unet_train, *flags) == 1
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("error: ") and message in line


def cut_short(path):
    path.write_bytes(path.read_bytes()[:900])


def test_colours_of_no_class(tmp_path, capsys):
    unet_train.write_synthetic(tmp_path, 2, (32, 32), 0, 4)
    assert run(unet_train, *UNET_CUT, "--classes", "3", "--data", tmp_path, "--output", tmp_path / "out") == 1
    assert "_mask.png: the colour 128,128,0 is none of 3 classes" in capsys.readouterr().err


def test_flags_are_kept_as_cpp_writes_them():
    numbers = [0.0, 10.0, 0.005, 1e-3, 1e-4, 1e-05, 12.5, 100000.0, 1 / 3, 2.5e-7]
    expected = ["0", "10", "0.005", "0.001", "1e-04", "1e-05", "12.5", "1e+05", "0.3333333333333333", "2.5e-07"]
    assert [to_flag(number) for number in numbers] == expected
