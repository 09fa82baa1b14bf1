"""The programs of examples/python, as users run them."""

import base64
import importlib
import os
import re
import runpy
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from helpers import run_on_two_ranks

np = pytest.importorskip("numpy")
Image = pytest.importorskip("PIL.Image")
EXAMPLES = Path(__file__).parents[2] / "examples" / "python"
sys.path.insert(0, str(EXAMPLES))


def run(name, *flags):
    """Runs a program in this process."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sys, "argv", [name, *map(str, flags)])
        torch.manual_seed(1)
        runpy.run_path(str(EXAMPLES / f"{name}.py"), run_name="__main__")


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


def test_unet_learns_from_carvanas_files(carvana, tmp_path, monkeypatch, capsys):
    plan = {"balance": [5, 18], "chunks": 2, "checkpoint": "never", "schedule": "1f1b", "placement": [0, 1]}
    monkeypatch.setattr("gpipe.pipeline.choose_plan", lambda *arguments, **options: plan)
    flags = "--depth 1 --channels 4 --scale 0.5 --batch-size 4 --workers 0 --epochs 60"
    run("unet_train", carvana, *flags.split(), "--watch", "--output", tmp_path / "unet.pt")
    shown = capsys.readouterr()
    scores = [float(score) for score in re.findall(r"validation Dice (\S+)", shown.out)]
    assert shown.err.count("step 1: ") == 60
    assert len(scores) == 60 and scores[-1] > 0.9
    assert "head.weight" in torch.load(tmp_path / "unet.pt")


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
def test_broken_images_are_named(change, message, carvana):
    change(carvana)
    with pytest.raises(ValueError, match=re.escape(message)):
        pictures = importlib.import_module("unet_train").Pictures(carvana, 2, 0.5)
        for _ in map(pictures.__getitem__, range(len(pictures))):
            pass


# A line has the bytes of a file of two pixels in base64, its name, the number of classes, and the classes of the pixels or
# an error. C++ has the same test.
MASKS = [line.split(maxsplit=3) for line in (Path(__file__).parents[1] / "examples/masks.txt").read_text().splitlines()]


@pytest.mark.parametrize("data, name, classes, expected", MASKS, ids=[name for _, name, _, _ in MASKS])
def test_masks_hold_classes(data, name, classes, expected, tmp_path):
    (tmp_path / name).write_bytes(base64.b64decode(data))
    read_labels = importlib.import_module("unet_train").read_labels
    if expected[0].isdigit():
        assert np.asarray(read_labels(tmp_path / name, int(classes))).tolist() == [[*map(int, expected.split())]]
    else:
        with pytest.raises(ValueError, match=f"{name}: {expected}"):
            read_labels(tmp_path / name, int(classes))


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


@pytest.mark.parametrize("ranks", [1, 2])
def test_models_with_and_without_attention_residuals_learn(ranks, tmp_path, capsys):
    flags = "--layers 4 --block 2 --width 8 --length 16 --batch-size 32 --steps 40 --learning-rate 0.01 --seconds 0.2"
    if ranks == 1:
        run("attention_residuals", *flags.split())
        output = capsys.readouterr().out
    else:
        program = (EXAMPLES / "attention_residuals.py").read_text()
        output = run_on_two_ranks(program, tmp_path, *flags.split(), "--ranks")
    lines = [list(map(float, line.split())) for line in output.splitlines() if re.match(" *[0-9]", line)]
    assert [line[0] for line in lines] == list(range(2, 41, 2))
    assert all(last < 0.75 * first for first, last in list(zip(lines[0], lines[-1], strict=True))[1:])


@pytest.mark.long
def test_diffusion_learns(tmp_path, capsys):
    pytest.importorskip("diffusers")
    run("diffusion", *"--samples 48 --batch-size 16 --size 8 --channels 4 --epochs 2".split(), "--output", tmp_path)
    losses = [float(loss) for loss in re.findall(r"loss (\S+),", capsys.readouterr().out)]
    assert len(losses) == 2 and losses[1] < losses[0]
    assert Image.open(tmp_path / "epoch_002.png").size == (80, 48)


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
