"""The training loop: snapshots, history, events, interrupts."""

from __future__ import annotations

import math
from argparse import Namespace
from pathlib import Path

import numpy as np
import torch
from PIL import Image
from torch import Tensor
from torch.utils.tensorboard import SummaryWriter

import gpipe
from common import learning_rate
from common.autocast import autocast
from common.files import writing
from common.history import History
from common.interrupt import Interrupt
from common.outputs import BEST, HISTORY, LATEST, remove_earlier_training
from common.progress import Progress
from common.start import check_identity
from common.step_record import StepRecord
from common.task import Task
from gpipe import snapshot
from gpipe.balance import Prediction
from gpipe.snapshot import Snapshot


class Trainer:
    """Trains a pipeline on a task and leaves in options.output: history.csv, TensorBoard's events, latest.snapshot and
    best.snapshot. After SIGINT or SIGTERM it ends the step, or the validation, writes latest.snapshot and returns. A
    run that goes on from a snapshot ends with the weights of one that never stopped.

    Args:
        start: the snapshot to go on from, whose weights the pipeline has already.
    """

    def __init__(
        self,
        pipe: gpipe.GPipe,
        task: Task,
        options: Namespace,
        identity: dict[str, str],
        start: Snapshot | None,
        prediction: Prediction | None,
    ) -> None:
        self.pipe = pipe
        self.task = task
        self.options = options
        self.identity = identity
        self.prediction = prediction
        self.optimizer = torch.optim.Adam(pipe.parameters(), lr=options.learning_rate)
        self.columns = ["epoch", "train_loss", *task.score_names, "learning_rate", "images_per_second"]
        self.files: dict[Path, None] = {}  # written so far, in order

        # Where the training is; all of it goes into a snapshot.
        self.epoch = 0  # completed
        self.batch = 0  # done of the next one
        self.seen = 0  # images of the next one
        self.loss_sum = 0.0  # over those images
        self.history: dict[str, list[float]] = {column: [] for column in self.columns}

        self.record = StepRecord(options.trace)
        self.images_per_second = 0.0
        if start:
            self.resume(start)

    def run(self) -> int:
        """Returns the signal that ended it early, or 0."""
        self.try_smallest()
        remove_earlier_training(self.options)
        rows = zip(*(self.history[column] for column in self.columns), strict=True)
        self.history_file = History(self.path(HISTORY), self.columns, rows)
        self.events = SummaryWriter(str(self.options.output))
        self.files[max(self.options.output.glob("events.out.tfevents.*"), key=lambda path: path.stat().st_mtime)] = None
        print(
            f"training: {self.options.epochs - self.epoch} epochs, mini-batches of {self.options.batch_size} as "
            f"{self.pipe.chunks} micro-batches, checkpoint {self.pipe.checkpoint}, learning rate "
            f"{self.options.learning_rate:g} ({self.options.schedule})",
            flush=True,
        )
        with Interrupt() as interrupt:
            while self.epoch < self.options.epochs and not interrupt.signal:
                if self.train(self.epoch + 1, interrupt):
                    self.finish(self.epoch + 1)
                else:
                    self.save(LATEST)
        self.events.close()
        self.record.print_beside(self.prediction)
        if self.options.trace and self.record.traced:
            self.files[self.options.trace] = None
        if self.epoch == self.options.epochs:
            return 0
        latest = self.options.output / LATEST
        print(f"stopped; to go on, give the same flags and --resume {latest}", flush=True)
        return interrupt.signal

    def resume(self, saved: Snapshot) -> None:
        check_identity(self.identity, saved, self.options.resume)
        for column in self.columns:
            if column not in saved.history or len(saved.history[column]) != saved.epoch:
                raise ValueError(f"{self.options.resume} is not of this program: its history has no {column}")
        loss_sum = saved.history.pop("loss_sum", [])
        if saved.random is None or len(loss_sum) != 1 or not {"batch", "images"} <= saved.position.keys():
            raise ValueError(f"{self.options.resume} does not say where in an epoch it was made")
        snapshot.restore_optimizer(self.optimizer, self.pipe, saved.optimizer)
        torch.set_rng_state(saved.random)
        self.batch, self.seen, self.loss_sum = saved.position["batch"], saved.position["images"], loss_sum[0]
        self.epoch = saved.epoch
        self.history = saved.history
        epochs = saved.options.get("--epochs")
        if self.options.schedule == "cosine" and epochs not in (None, str(self.options.epochs)):
            print(
                f"note: the learning rate now falls towards 0 after epoch {self.options.epochs}; the snapshot was made "
                f"with --epochs {epochs}"
            )

    def train(self, epoch: int, interrupt: Interrupt) -> bool:
        """One epoch from `batch` on; false when a signal ended it."""
        self.pipe.train()
        scores = self.history[self.columns[2]]
        rate = self.options.learning_rate * learning_rate.factor(
            self.options.schedule, epoch, self.options.epochs, scores
        )
        for group in self.optimizer.param_groups:
            group["lr"] = rate
        with Progress(f"epoch {epoch}", max(1, self.task.training_images - self.seen)) as progress:
            for input, target in self.task.training(epoch, self.batch):
                loss = self.step(input, target)
                progress.add(len(input), loss)
                if interrupt.signal:
                    return False
        self.images_per_second = progress.images_per_second
        return True

    def step(self, input: Tensor, target: Tensor) -> float:
        last = self.epoch + 1 == self.options.epochs and self.seen + len(input) == self.task.training_images
        whole = len(input) == self.options.batch_size
        self.optimizer.zero_grad()
        with self.record.step(self.pipe, whole, last):
            with autocast(self.options.amp, self.pipe.devices):
                output = self.pipe(input)
                loss = self.task.loss(output, target.to(output.device))
            loss.backward()  # type: ignore[no-untyped-call]
            value = loss.item()
            if loss.is_cuda:
                torch.cuda.synchronize()
        if not math.isfinite(value):
            raise ValueError("the loss is not finite; try a lower --learning-rate")
        if self.options.clip > 0:
            torch.nn.utils.clip_grad_norm_(self.pipe.parameters(), self.options.clip)
        self.optimizer.step()
        self.loss_sum += value * len(input)
        self.seen += len(input)
        self.batch += 1
        return value

    def try_smallest(self) -> None:
        """Batch norm in training mode refuses one value a channel, which an epoch's last mini-batch may bring about;
        better to know before anything is written than after an epoch."""
        rest = self.task.training_images % self.options.batch_size
        batches = [self.options.batch_size] + [rest] * (rest > 0)
        if all(len(torch.empty(batch).chunk(self.pipe.chunks)[-1]) > 1 for batch in batches):
            return
        model, random = snapshot.capture_model(self.pipe), torch.get_rng_state()
        input, _ = next(iter(self.task.training(1, 0)))
        self.pipe.train()
        try:
            with torch.no_grad():
                self.pipe(input[:1])
        except (RuntimeError, ValueError) as error:
            advice = "choose --batch-size and --chunks so that all have more"
            raise ValueError(f"some micro-batch would be a single image, and {error}; {advice}") from error
        snapshot.restore_model(self.pipe, model)
        torch.set_rng_state(random)

    @torch.no_grad()
    def finish(self, epoch: int) -> None:
        self.pipe.trace(None)
        self.pipe.eval()
        with autocast(self.options.amp, self.pipe.devices):
            scores = self.task.validate(self.pipe, epoch, self.show)
        rate = self.optimizer.param_groups[0]["lr"]
        row = [float(epoch), self.loss_sum / self.seen, *scores, rate, self.images_per_second]
        for column, value in zip(self.columns, row, strict=True):
            self.history[column].append(value)
            if column != "epoch":
                self.events.add_scalar(column, value, epoch)
        self.events.flush()
        self.epoch, self.batch, self.seen, self.loss_sum = epoch, 0, 0, 0.0

        # The latest snapshot is the last: a run that is killed before it repeats the epoch, with all that it writes.
        self.history_file.add(row)
        *before, score = self.history[self.columns[2]]
        if all(score > other for other in before):
            self.save(BEST)
        self.save(LATEST)
        values = [f"{column} {value:.4f}" for column, value in zip(self.columns[1:-2], row[1:-2], strict=True)]
        print(f"epoch {epoch}/{self.options.epochs}: {', '.join(values)}", flush=True)

    def show(self, picture: Image.Image, name: str, tag: str) -> None:
        path = self.path(name)
        with writing(path):
            picture.save(path)
        pixels = np.asarray(picture)
        form = "HW" if pixels.ndim == 2 else "HWC"
        self.events.add_image(tag, pixels, self.epoch + 1, dataformats=form)

    def save(self, name: str) -> None:
        saved = Snapshot(
            model=self.pipe.state_dict(),
            optimizer=snapshot.capture_optimizer(self.optimizer, self.pipe),
            epoch=self.epoch,
            position={"batch": self.batch, "images": self.seen},
            random=torch.get_rng_state(),
            options=self.identity,
            history=self.history | {"loss_sum": [self.loss_sum]},
        )
        snapshot.write(self.path(name), saved)

    def path(self, name: str) -> Path:
        """Of a file that is written now."""
        path: Path = self.options.output / name
        self.files[path] = None
        return path


def run_and_report(trainer: Trainer, drawn: Path | None) -> int:
    """Runs it, names what it wrote, after the directory of drawn data if any, and returns the program's exit code."""
    signal = trainer.run()
    print("wrote")
    for path in [*([f"{drawn}/"] if drawn else []), *trainer.files]:
        print(f"  {path}")
    return 128 + signal if signal else 0
