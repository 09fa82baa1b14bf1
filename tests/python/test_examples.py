"""The programs of examples/python, as users run them."""

import csv
import functools
import importlib
import itertools
import os
import re
import runpy
import signal
import subprocess
import sys
import time
from pathlib import Path
from unittest import mock
from xml.etree import ElementTree

import pytest

import gpipe
from gpipe import snapshot
from conftest import long
from helpers import run_on_two_ranks

np = pytest.importorskip("numpy")
Image = pytest.importorskip("PIL.Image")
accumulator = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator")
pytest.importorskip("tqdm")
EXAMPLES = Path(__file__).parents[2] / "examples" / "python"
sys.path.insert(0, str(EXAMPLES))

# Three steps per epoch. The U-Net has 13 images to train and 1 to validate.
FLAGS = {
    "unet_train": "--samples 14 --batch-size 4 --depth 1 --channels 4 --scale 0.1 --augment --workers 0 --classes 3",
    "resnet18_mnist": "--samples 30 --batch-size 10 --chunks 2",
    "diffusion": "--samples 48 --batch-size 16 --size 8 --depth 1 --channels 4",
}
BALANCES = {"unet_train": ("5,18", "11,12"), "resnet18_mnist": ("40,31", "60,11"), "diffusion": ("8,10", "12,6")}
BALANCED = {name: [*FLAGS[name].split(), "--balance", balances[0]] for name, balances in BALANCES.items()}


@pytest.fixture(autouse=True)
def signals(one_thread):
    """The programs replace the handlers of signals."""
    handlers = {each: signal.getsignal(each) for each in (signal.SIGINT, signal.SIGTERM)}
    yield
    for each, handler in handlers.items():
        signal.signal(each, handler)


def run(name, *flags):
    """Runs a program in this process and returns its exit code."""
    if name == "diffusion":
        pytest.importorskip("diffusers")
    with mock.patch.object(sys, "argv", [name, *map(str, flags)]):
        try:
            return importlib.import_module(name).main()
        except SystemExit as stop:  # of argparse
            return stop.code


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    """Returns the output folder of two epochs of a program."""

    @functools.cache
    def train(name):
        folder = tmp_path_factory.mktemp(name)
        assert run(name, *BALANCED[name], "--epochs", 2, "--output", folder) == 0
        return folder

    return train


def rows(folder):
    with open(folder / "history.csv", newline="") as file:
        return [{name: float(value) for name, value in row.items()} for row in csv.DictReader(file)]


def steps(folder):
    """The losses of all steps that TensorBoard has."""
    losses = {}
    for path in folder.glob("events.out.tfevents.*"):
        events = accumulator.EventAccumulator(str(path)).Reload()
        if "loss/train_step" in events.Tags()["scalars"]:
            losses |= {point.step: point.value for point in events.Scalars("loss/train_step")}
    return losses


def assert_same(folder, other):
    assert (folder / "history.csv").read_text() == (other / "history.csv").read_text()
    assert steps(folder) == steps(other)
    for name in ("latest.snapshot", "best.snapshot"):
        assert (folder / name).read_bytes() == (other / name).read_bytes()


@pytest.mark.parametrize("name", FLAGS)
def test_a_program_learns_and_writes_its_results(name, trained):
    folder = trained(name)
    history = rows(folder)
    assert [row["epoch"] for row in history] == [1, 2]
    assert history[1]["train_loss"] < history[0]["train_loss"]
    score = {"unet_train": "val_dice", "resnet18_mnist": "accuracy", "diffusion": "recognized"}[name]
    assert all(0 <= row[score] <= 1 for row in history)
    assert list(steps(folder)) == list(range(1, 7))
    best = max(range(2), key=lambda epoch: (history[epoch][score], epoch))
    assert snapshot.read(folder / "best.snapshot").epoch == best + 1
    if name != "resnet18_mnist":
        sizes = {Image.open(folder / f"epoch_{epoch:03}.png").size for epoch in (1, 2)}
        assert sizes == {(3 * 23, 17) if name == "unet_train" else (4 * 80, 4 * 48)}


@pytest.mark.parametrize("name", ["unet_train", long("resnet18_mnist"), long("diffusion")])
def test_a_stopped_training_continues_exactly(name, trained, tmp_path, monkeypatch, capsys):
    """Ctrl-C within the second epoch. The rest has another cut, checkpoint mode and schedule of the same order of sums."""
    calls, step = itertools.count(1), gpipe.GPipe.step

    def interrupted(*arguments, **options):
        if next(calls) == 5:
            signal.raise_signal(signal.SIGINT)
        return step(*arguments, **options)

    monkeypatch.setattr(gpipe.GPipe, "step", interrupted)
    assert run(name, *BALANCED[name], "--epochs", 2, "--output", tmp_path) == 128 + signal.SIGINT
    latest = tmp_path / "latest.snapshot"
    assert f"--resume {latest}" in capsys.readouterr().out
    saved = snapshot.read(latest)
    assert (saved.epoch, saved.position) == (1, {"batch": 2})
    more = ["--balance", BALANCES[name][1], "--checkpoint", "always", "--schedule", "looped_bfs", "--resume", latest]
    assert run(name, *FLAGS[name].split(), *more, "--epochs", 2, "--output", tmp_path) == 0
    assert_same(tmp_path, trained(name))


@pytest.mark.parametrize("flags, message", [
    ("--epochs 0", "argument --epochs: must be at least 1, but is 0"),
    ("--stages 3", "argument --stages: not allowed with argument --balance"),
    ("--scale nan", "--scale must be above 0 and at most 1, but is nan"),
    ("--balance 1,2", "balance [1, 2] sums to 3, but the model has 23 layers"),
    ("--devices gpu", "device type at start of device string: gpu"),
    ("--schedule never", "unknown schedule 'never'; choose one of gpipe"),
    ("--learning-rate 1e30", "the loss is not finite; try a lower --learning-rate"),
    ("--data no-such-folder", "No such file or directory: 'no-such-folder/imgs'"),
    (f"--resume {__file__}", "or not a safetensors file"),
    ("--output /proc/output", "'/proc/output'"),
])  # fmt: skip
def test_wrong_flags_are_refused_in_one_line(flags, message, tmp_path, capsys):
    assert run("unet_train", *BALANCED["unet_train"], "--epochs", 2, "--output", tmp_path, *flags.split()) in (1, 2)
    error = capsys.readouterr().err
    assert message in error and len(error.replace("usage: unet_train [options]\n", "").splitlines()) == 1


def test_an_earlier_training_is_kept(trained, tmp_path, capsys):
    latest = trained("unet_train") / "latest.snapshot"
    before = latest.read_bytes()
    assert run("unet_train", *BALANCED["unet_train"], "--output", latest.parent) == 1
    assert f"{latest} exists; give --resume {latest} to continue" in capsys.readouterr().err
    assert run("unet_train", *BALANCED["unet_train"], "--seed", 2, "--resume", latest, "--output", tmp_path) == 1
    assert f"{latest} was made with --seed 1, not 2" in capsys.readouterr().err
    assert latest.read_bytes() == before


@pytest.fixture
def carvana(tmp_path):
    """A folder in the layout of the Carvana data set, with masks in black and white."""
    for folder in ("imgs", "masks"):
        (tmp_path / "data" / folder).mkdir(parents=True)
    for index in range(6):
        pixels = np.zeros((32, 48), np.uint8)
        pixels[8:24, 6 * index : 6 * index + 16] = 255
        Image.fromarray(np.stack([pixels, 255 - pixels, pixels], 2)).save(tmp_path / "data" / "imgs" / f"{index}.jpg")
        Image.fromarray(pixels).convert("1").save(tmp_path / "data" / "masks" / f"{index}_mask.gif")
        (tmp_path / "data" / folder / "ignored.txt").touch()
        (tmp_path / "data" / folder / "._0.png").touch()
    return tmp_path / "data"


CARVANA = "--depth 1 --channels 4 --scale 0.5 --batch-size 4 --balance 5,18 --learning-rate 0.02 --workers 0".split()


def test_unet_learns_from_carvanas_files(carvana, tmp_path):
    assert run("unet_train", *CARVANA, "--data", carvana, "--epochs", 20, "--amp", "--output", tmp_path / "out") == 0
    assert rows(tmp_path / "out")[-1]["val_dice"] > 0.9
    assert Image.open(tmp_path / "out" / "epoch_020.png").size == (3 * 28, 20)


@pytest.mark.parametrize("change, message", [
    (lambda data: (data / "masks" / "3_mask.gif").unlink(), "3.jpg has no mask"),
    (lambda data: (data / "imgs" / "3.jpg").unlink(), "3_mask.gif has no image"),
    (lambda data: (data / "imgs" / "3.png").touch(), "two files have the same name"),
    (lambda data: (data / "masks" / "3.png").touch(), "3.png: the name of a mask must be NAME_mask.png"),
    (lambda data: (data / "masks" / "5_mask.gif").write_bytes(b""), "5_mask.gif: cannot identify image file"),
    (lambda data: os.truncate(data / "imgs" / "2.jpg", 700), "2.jpg: image file is truncated"),
    (lambda data: Image.new("RGB", (48, 32)).save(data / "imgs" / "2.jpg", "BMP"), "2.jpg: cannot identify image file"),
    (lambda data: [Image.new("1", (48, 32)).save(data / "masks" / f"{i}_mask.gif") for i in range(6)], "all pixels of all masks"),
    (lambda data: Image.new("1", (8, 8)).save(data / "masks" / "1_mask.gif"), "has the size (48, 32), but its mask has (8, 8)"),
])  # fmt: skip
def test_broken_images_are_named_in_one_line(change, message, carvana, tmp_path, capsys):
    change(carvana)
    assert run("unet_train", *CARVANA, "--data", carvana, "--epochs", 1, "--output", tmp_path / "out") == 1
    error = capsys.readouterr().err
    assert message in error and len(error.splitlines()) == 1


MASKS = Path(__file__).parents[1] / "examples" / "masks"


# A line has a file of two pixels, the number of classes, and the classes of the pixels or an error. C++ has the same test.
@pytest.mark.parametrize("line", (MASKS / "table.txt").read_text().splitlines())
def test_masks_hold_classes(line):
    name, classes, expected = line.split(maxsplit=2)
    read_labels = importlib.import_module("unet_train").read_labels
    if expected[0].isdigit():
        assert np.asarray(read_labels(MASKS / name, int(classes))).tolist() == [[*map(int, expected.split())]]
    else:
        with pytest.raises(ValueError, match=f"{name}: {expected}"):
            read_labels(MASKS / name, int(classes))


@pytest.mark.parametrize("suffix", ["jpg", "png"])
def test_images_and_masks_are_turned_as_their_orientation_says(suffix, tmp_path):
    exif = Image.Exif()
    exif[0x112] = 6  # the stored top is the right
    pixels = np.zeros((8, 16), np.uint8)
    pixels[:, :8] = 255
    Image.fromarray(pixels).save(path := tmp_path / f"mask.{suffix}", quality=95, exif=exif)
    unet_train = importlib.import_module("unet_train")
    labels = np.asarray(unet_train.read_labels(path, 2))
    assert unet_train.image_size(path) == (8, 16)
    assert labels.shape == (16, 8) and labels[:8].all() and not labels[8:].any()


def test_resnet_reads_mnists_files(tmp_path, capsys):
    labels = (np.arange(40) % 10).astype(np.uint8)
    images = np.broadcast_to(labels[:, None, None] * 25, (40, 28, 28))
    for part in ("train", "t10k"):
        for name, items in (("images-idx3-ubyte", images), ("labels-idx1-ubyte", labels)):
            header = np.array([0x800 + items.ndim, *items.shape], ">u4")
            (tmp_path / f"{part}-{name}").write_bytes(header.tobytes() + items.tobytes())
    flags = ["--data", tmp_path, "--batch-size", 20, "--balance", "40,31", "--epochs", 1, "--output", tmp_path / "out"]
    assert run("resnet18_mnist", *flags) == 0
    matrix = [list(map(int, line.split())) for line in capsys.readouterr().out.splitlines()[-11:-1]]
    assert [row[0] for row in matrix] == list(range(10)) and all(sum(row[1:]) == 4 for row in matrix)
    path = tmp_path / "train-images-idx3-ubyte"
    path.write_bytes(path.read_bytes()[:9])
    assert run("resnet18_mnist", *flags, "--overwrite") == 1
    assert f"{path}" in (error := capsys.readouterr().err) and "not a file of MNIST" in error


@pytest.mark.long
def test_a_job_whose_process_is_killed_ends_as_one_process_does(trained, tmp_path):
    flags = [*BALANCED["unet_train"], "--epochs", 2, "--snapshot-every", 1, "--resume", "auto", "--output", tmp_path]
    launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", 2, "--max-restarts", 1]
    command = map(str, [*launcher, EXAMPLES / "unet_train.py", *flags])
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}
    job = subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    while not (tmp_path / "latest.snapshot").exists() and job.poll() is None:
        time.sleep(0.01)
    ranks = subprocess.run(["pgrep", "-P", str(job.pid)], capture_output=True, text=True, check=True).stdout.split()
    os.kill(int(ranks[1]), signal.SIGKILL)
    output = job.communicate(timeout=120)[0]
    assert job.returncode == 0 and "done: 2 epochs" in output, output
    assert_same(tmp_path, trained("unet_train"))


def test_hello(capsys):
    runpy.run_path(str(EXAMPLES / "hello.py"))
    assert re.fullmatch(r"loss \d\.\d{3}\n", capsys.readouterr().out)


@pytest.mark.parametrize("ranks", [1, 2])
def test_models_with_and_without_attention_residuals_learn(ranks, tmp_path, capsys):
    flags = "--layers 4 --block 2 --width 8 --length 16 --batch-size 32 --steps 40 --learning-rate 0.01 --seconds 0.2"
    flags = [*flags.split(), "--output", tmp_path / "curves.svg"]
    if ranks == 1:
        assert run("attention_residuals", *flags) == 0
        output = capsys.readouterr().out
    else:
        program = (EXAMPLES / "attention_residuals.py").read_text()
        output = run_on_two_ranks(program, tmp_path, *map(str, flags), "--ranks")
    lines = [list(map(float, line.split())) for line in output.splitlines() if re.match(" *[0-9]", line)]
    assert [line[0] for line in lines] == list(range(2, 41, 2))
    assert all(last < 0.75 * first for first, last in list(zip(lines[0], lines[-1], strict=True))[1:])
    curves = ElementTree.parse(tmp_path / "curves.svg").findall("{*}polyline[@stroke-width]")
    assert [len(curve.get("points").split()) for curve in curves] == [20, 20]


@pytest.mark.long
def test_any_model_learns(capsys):
    pytest.importorskip("transformers")
    runpy.run_path(str(EXAMPLES / "any_model.py"))
    losses = [float(loss) for loss in re.findall(r"loss (\S+)", capsys.readouterr().out)]
    assert len(losses) == 4 and losses[-1] < losses[0] / 1.5


@pytest.mark.long
def test_the_resnet50_study_draws_three_figures(tmp_path):
    flags = "--batch-size 4 --image 33 --splits 1,2 --batches 1 --runs 2 --seconds 0.1"
    study = EXAMPLES.parents[1] / "bench" / "resnet50_study.py"
    subprocess.run([sys.executable, study, *flags.split(), "--output", tmp_path], check=True)
    assert all(Image.open(tmp_path / f"{name}.png").size > (300, 200) for name in ("model_parallel", "pipeline", "split_sizes"))
    variants = re.findall(r"(?m)^\| ([a-z0-9 ]+) \| \d", (tmp_path / "README.md").read_text())
    assert variants == ["single", "model parallel", "split 1", "split 2", "data parallel"]
