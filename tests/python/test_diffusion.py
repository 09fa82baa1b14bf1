"""The training program for a model of another library: several inputs, and samples drawn after each epoch."""

import signal
import subprocess
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from PIL import Image

from gpipe import snapshot
from processes import launcher, on_cpu
from training import EXAMPLES, history, run

pytest.importorskip("diffusers")

import diffusion  # noqa: E402
from common.trainer import Trainer  # noqa: E402
from denoising.process import STEPS, add_noise, draw, make_scheduler  # noqa: E402
from mnist.digits import draw_digits  # noqa: E402

# 60 images: mini-batches of 24, 24 and 12.
SMALL = ["--samples", "60", "--size", "8", "--depth", "1", "--channels", "4", "--batch-size", "24"]
CUT = [*SMALL, "--balance", "30,58"]


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    """The output folder of two epochs."""
    folder = tmp_path_factory.mktemp("diffusion")
    assert run(diffusion, *CUT, "--epochs", "2", "--output", folder) == 0
    return folder


def test_diffusion_writes_its_outputs(trained):
    header, rows = history(trained)
    assert header[:5] == ["epoch", "train_loss", "explained", "recognized", "test_loss"]
    assert [row[0] for row in rows] == [1, 2] and rows[1][1] < rows[0][1] and rows[1][4] < rows[0][4]
    assert len(list(trained.glob("events.out.tfevents.*.gpipe"))) == 1
    pictures = [Image.open(trained / f"epoch_00{epoch}.png").convert("RGB") for epoch in (1, 2)]
    assert pictures[0].size == (10 * 84 - 4, 36 + 6 * 84 - 4) and pictures[0].tobytes() != pictures[1].tobytes()


def test_replicas_learn_as_one_pipeline_does(trained, tmp_path):
    flags = [*SMALL, "--stages", "1", "--chunks", "1", "--replicas", "2", "--epochs", "2", "--output", tmp_path]
    command = [*launcher(2), EXAMPLES / "diffusion.py", *flags]
    done = subprocess.run([str(part) for part in command], env=on_cpu(), capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    for row, expected in zip(history(tmp_path)[1], history(trained)[1], strict=True):
        assert row == pytest.approx(expected, rel=1e-3, abs=1e-4)
    pixels = [torch.tensor(np.asarray(Image.open(each / "epoch_002.png"))).int() for each in (tmp_path, trained)]
    assert pixels[0].shape == pixels[1].shape and (pixels[0] - pixels[1]).abs().max() <= 2


def test_diffusers_loads_the_trained_weights(trained, monkeypatch):
    monkeypatch.setattr("sys.argv", ["diffusion", *SMALL])
    unet = diffusion.make_unet(diffusion.parse_options())
    assert unet.load_state_dict(snapshot.read(trained / "best.snapshot").model).missing_keys == []


def test_diffusion_resumes_within_an_epoch(trained, tmp_path, monkeypatch):
    """With another cut, checkpoint mode and schedule that sums in the same order."""
    step, steps = Trainer.step, []

    def stop_after_four(self, input, target, images):
        steps.append(images)
        if len(steps) == 4:
            signal.raise_signal(signal.SIGTERM)
        return step(self, input, target, images)

    monkeypatch.setattr(Trainer, "step", stop_after_four)
    assert run(diffusion, *CUT, "--epochs", "2", "--output", tmp_path) == 128 + signal.SIGTERM
    assert steps == [24, 24, 12, 24] and len(history(tmp_path)[1]) == 1
    monkeypatch.undo()
    latest = tmp_path / "latest.snapshot"
    more = ["--balance", "50,38", "--checkpoint", "always", "--schedule", "looped_bfs", "--resume", latest]
    assert run(diffusion, *SMALL, *more, "--epochs", "2", "--output", tmp_path) == 0
    assert history(tmp_path) == history(trained)
    ours, theirs = snapshot.read(latest), snapshot.read(trained / "latest.snapshot")
    assert all(torch.equal(ours.model[name], tensor) for name, tensor in theirs.model.items())
    assert torch.equal(ours.random, theirs.random)


@pytest.mark.parametrize(
    "flags, message",
    [
        (["--size", "9"], "--size must be a multiple of 2, because --depth is 1, but is 9"),
        (["--size", "2"], "--size must be at least 4, but is 2"),
        (["--channels", "many"], "--channels must be a whole number, but is 'many'"),
        (["--stages", "1000"], "--stages is 1000, but the model has 88 layers"),
        (["--data", "no-such-folder"], "no-such-folder"),
        (["--resume", "no-such-file"], "'no-such-file'"),
    ],
)
def test_diffusion_refuses_wrong_flags(flags, message, tmp_path, capsys):
    try:
        code = run(diffusion, *SMALL, "--output", tmp_path / "new", *flags)
    except SystemExit as stop:
        code = stop.code
    captured = capsys.readouterr()
    assert code and message in captured.err and len(captured.err.splitlines()) == 1
    assert not (tmp_path / "new").exists()


def test_diffusion_keeps_an_earlier_training(trained, capsys):
    assert run(diffusion, *CUT, "--output", trained) == 1
    assert "holds an earlier training (latest.snapshot, best.snapshot, history.csv)" in capsys.readouterr().err
    more = ["--output", trained, "--resume", trained / "latest.snapshot"]
    assert run(diffusion, *CUT, "--size", "16", "--epochs", "3", *more) == 1
    assert "was made with --size 8, not 16" in capsys.readouterr().err


def test_a_model_that_knows_the_image_draws_it():
    """With noise = (noisy - a image) / b, the velocity is a noise - b image."""
    images = draw_digits(3, 0, 0, plain=True)[0].float() / 127.5 - 1
    shares = make_scheduler().alphas_cumprod.view(-1, 1, 1, 1)

    def predict(input):
        noisy, times, labels = input
        assert torch.equal(labels, torch.arange(3))
        a, b = shares[times].sqrt(), (1 - shares[times]).sqrt()
        return SimpleNamespace(sample=a * (noisy - a * images) / b - b * images)

    generator = torch.Generator().manual_seed(0)
    input, velocity = add_noise(images, torch.arange(3), torch.tensor([9, STEPS // 2, STEPS - 99]), generator)
    torch.testing.assert_close(predict(input).sample, velocity, atol=1e-4, rtol=1e-4)
    drawn = draw(predict, torch.randn(images.shape, generator=generator), torch.arange(3))
    torch.testing.assert_close(drawn, (images + 1) / 2, atol=1e-3, rtol=0)
