"""The training loop: snapshots, history, events, interrupts."""

from __future__ import annotations

import math
from argparse import Namespace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image
from torch import Tensor
from torch.utils._pytree import tree_map
from torch.utils.tensorboard import SummaryWriter

import gpipe
from common import learning_rate
from common.autocast import autocast
from common.events import cut_event_files
from common.files import writing
from common.history import History
from common.interrupt import Interrupt
from common.outputs import BEST, EVENT_SUFFIX, HISTORY, LATEST, event_files, remove_earlier_training
from common.processes import is_first, part_sizes
from common.progress import Progress
from common.step_record import StepRecord
from common.task import Task, history_columns
from gpipe import snapshot
from gpipe.balance import Prediction
from gpipe.snapshot import Snapshot

_STEP_LOSS = "loss/train_step"  # the tag of values by step; all other tags have values by epoch


class Trainer:
    """Trains a pipeline on a task. Writes into options.output: history.csv, a TensorBoard event file, latest.snapshot
    and best.snapshot. After SIGINT or SIGTERM it finishes the mini-batch, of training or validation, writes latest.snapshot
    and returns. A resumed run ends with the weights of an uninterrupted one. In several processes, all train, and the first
    writes.

    Args:
        start: the snapshot to resume; the pipeline has its weights already.
        prediction: of a step, to compare with the measured steps.
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
        # A process whose stages have no parameters has an empty group.
        self.optimizer = torch.optim.Adam([{"params": list(pipe.parameters())}], lr=options.learning_rate)
        self.columns = history_columns(task.scores)
        self.files: dict[Path, None] = {}  # written so far, in order

        # The position of the training, which snapshots store.
        self.epoch = 0  # completed epochs
        self.batch = 0  # completed mini-batches of the current epoch
        self.seen = 0  # images in them
        self.loss_sum = 0.0  # over those images
        self.history: dict[str, list[float]] = {column: [] for column in self.columns}

        self.writes = is_first(pipe.ranks)
        self.history_file: History | None = None  # this and the next: None if another process writes
        self.events: SummaryWriter | None = None
        self.signal = 0  # that a process has got
        self.record = StepRecord(options.trace)
        self.images_per_second = 0.0
        if start:
            self.resume(start)

    def run(self) -> int:
        """Returns the signal that ended it early, or 0."""
        self.check_smallest_micro_batch()
        self.open_files()
        replicas = f" on each of {self.options.replicas} replicas" if self.options.replicas > 1 else ""
        print(
            f"training: {self.options.epochs - self.epoch} epochs, mini-batches of {self.options.batch_size} as "
            f"{self.pipe.chunks} micro-batches{replicas}, schedule {self.pipe.schedule}, checkpoint {self.pipe.checkpoint}, "
            f"learning rate {self.options.learning_rate:g} ({self.options.learning_rate_schedule})",
            flush=True,
        )
        with Interrupt(second_ends=self.pipe.ranks is None) as interrupt:
            while self.epoch < self.options.epochs and not self.stops(interrupt):
                if not self.train(self.epoch + 1, interrupt) or not self.finish(self.epoch + 1, interrupt):
                    self.save(LATEST)
        if self.events:
            self.events.close()
        self.record.print(self.prediction)
        if self.record.wrote_trace:
            self.files[self.options.trace] = None
        if self.epoch == self.options.epochs:
            return 0
        latest = self.options.output / LATEST
        print(f"stopped; to continue, give the same flags and --resume {latest}", flush=True)
        return self.signal

    def stops(self, interrupt: Interrupt) -> bool:
        """Whether a process has got a signal. All processes ask at the same time."""
        self.signal = self.signal or self.pipe.largest(interrupt.signal)
        return self.signal != 0

    def resume(self, saved: Snapshot) -> None:
        snapshot.restore_optimizer(self.optimizer, self.pipe, snapshot.own_part(self.pipe, saved).optimizer)
        assert saved.random is not None  # restore_start() checks it
        torch.set_rng_state(saved.random)
        self.epoch, self.batch, self.seen = saved.epoch, saved.position["batch"], saved.position["images"]
        self.history = dict(saved.history)
        (self.loss_sum,) = self.history.pop("loss_sum")
        epochs = saved.options.get("--epochs")
        if self.options.learning_rate_schedule == "cosine" and epochs not in (None, str(self.options.epochs)):
            print(
                f"note: the learning rate now falls towards 0 after epoch {self.options.epochs}; the snapshot was made "
                f"with --epochs {epochs}"
            )

    def open_files(self) -> None:
        if not self.writes:
            return
        remove_earlier_training(self.options)
        rows = zip(*(self.history[column] for column in self.columns), strict=True)
        self.history_file = History(self.path(HISTORY), self.columns, rows)
        # A run that was killed may have logged more than its snapshot has.
        cut_event_files(self.options.output, lambda tag, step: step <= (self.steps if tag == _STEP_LOSS else self.epoch))
        earlier = event_files(self.options.output)
        self.events = SummaryWriter(str(self.options.output), flush_secs=10, filename_suffix=EVENT_SUFFIX)
        self.files.update(dict.fromkeys(set(event_files(self.options.output)).difference(earlier)))

    def train(self, epoch: int, interrupt: Interrupt) -> bool:
        """Trains an epoch from `batch` on. Returns false if a signal ended it."""
        self.pipe.train()
        scores = self.history[self.columns[2]]
        rate = self.options.learning_rate * learning_rate.factor(
            self.options.learning_rate_schedule, epoch, self.options.epochs, scores
        )
        for group in self.optimizer.param_groups:
            group["lr"] = rate
        with Progress(f"epoch {epoch}", max(1, self.task.training_images - self.seen)) as progress:
            for input, target in self.task.training(epoch, self.batch):
                images = min(self.options.batch_size, self.task.training_images - self.seen)
                loss = self.step(input, target, images)
                progress.add(images, loss)
                self.add_scalar(_STEP_LOSS, loss, self.steps)
                if self.stops(interrupt):
                    return False
                if self.options.snapshot_every and self.batch % self.options.snapshot_every == 0:
                    self.save(LATEST)
        self.images_per_second = progress.images_per_second
        return True

    def step(self, input: Any, target: Tensor, images: int) -> float:
        """Trains on a mini-batch of `images`, of which input and target are this replica's part."""
        last = self.epoch + 1 == self.options.epochs and self.seen + images == self.task.training_images
        whole = images == self.options.batch_size
        self.optimizer.zero_grad()
        with self.record.step(self.pipe, whole, last):
            with autocast(self.options.amp, self.pipe.devices):
                loss: Tensor = self.pipe.step(input, target, self.task.loss)
            value: float = loss.item()
            for device in self.pipe.devices:
                if device.type == "cuda":
                    torch.cuda.synchronize(device)
        if not math.isfinite(value):
            raise ValueError("the loss is not finite; try a lower --learning-rate")
        if self.options.clip > 0:
            self.pipe.clip_grad_norm_(self.options.clip)
        self.optimizer.step()
        self.loss_sum += value * images
        self.seen += images
        self.batch += 1
        return value

    def check_smallest_micro_batch(self) -> None:
        """Batch norm in training mode refuses a single value per channel. An epoch's last mini-batch can lead to that,
        so this is tried before anything is written."""
        rest = self.task.training_images % self.options.batch_size
        sizes = [part for images in (self.options.batch_size, rest) for part in part_sizes(self.pipe.ranks, images)]
        if all(len(torch.empty(size).chunk(self.pipe.chunks)[-1]) != 1 for size in sizes):
            return
        model, random = snapshot.capture_model(self.pipe), torch.get_rng_state()
        input, _ = next(iter(self.task.training(1, 0)))
        self.pipe.train()
        try:
            with torch.no_grad():
                self.pipe(tree_map(lambda tensor: tensor.new_zeros(1, *tensor.shape[1:]), input))
        except (RuntimeError, ValueError) as error:
            raise ValueError(
                f"a micro-batch would have a single image, which the model refuses: {error}; choose --batch-size and "
                "--chunks so that each has at least two"
            ) from error
        snapshot.restore_model(self.pipe, model)
        torch.set_rng_state(random)

    @torch.no_grad()
    def finish(self, epoch: int, interrupt: Interrupt) -> bool:
        """Validates an epoch and completes it. Returns false if a signal stopped the validation."""
        random = torch.get_rng_state()
        self.pipe.trace(None)
        self.pipe.eval()
        with autocast(self.options.amp, self.pipe.devices):
            scores = self.task.validate(self.pipe, epoch, self.show, lambda: self.stops(interrupt))
        if not scores:
            torch.set_rng_state(random)  # the resumed run validates from the start
            return False
        rate = self.optimizer.param_groups[0]["lr"]
        row = [float(epoch), self.loss_sum / self.seen, *scores, rate, self.images_per_second]
        for column, value in zip(self.columns, row, strict=True):
            self.history[column].append(value)
        tags = [score.tag for score in self.task.scores]
        tags = ["loss/train", *tags, "training/learning_rate", "training/images_per_second"]
        for tag, value in zip(tags, row[1:], strict=True):
            self.add_scalar(tag, value, epoch)
        self.epoch, self.batch, self.seen, self.loss_sum = epoch, 0, 0, 0.0

        # latest.snapshot is written last: a run that is killed before this repeats the epoch and all its files.
        if self.history_file:
            self.history_file.add(row)
        *before, score = self.history[self.columns[2]]
        if all(score > other for other in before):
            self.save(BEST)
        self.save(LATEST)
        values = [f"{column} {value:.4f}" for column, value in zip(self.columns[1:-2], row[1:-2], strict=True)]
        print(f"epoch {epoch}/{self.options.epochs}: {', '.join(values)}", flush=True)
        return True

    @property
    def steps(self) -> int:
        """The steps of all epochs so far."""
        per_epoch: int = -(-self.task.training_images // self.options.batch_size)
        return self.epoch * per_epoch + self.batch

    def add_scalar(self, tag: str, value: float, step: int) -> None:
        if self.events:
            self.events.add_scalar(tag, value, step)

    def show(self, picture: Image.Image, name: str, tag: str) -> None:
        if not self.events:
            return
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
        whole = snapshot.gather(self.pipe, saved)
        if self.events:
            self.events.flush()  # so that the events have no holes where a later run continues
        if self.writes:
            snapshot.write(self.path(name), whole)

    def path(self, name: str) -> Path:
        """The path of a file that is written now."""
        path: Path = self.options.output / name
        self.files[path] = None
        return path


def run_and_report(trainer: Trainer, drawn: Path | None) -> int:
    """Runs the trainer and lists the files that it wrote, after the folder of drawn data if there is one. Returns the
    program's exit code."""
    signal = trainer.run()
    print("wrote")
    for path in [*([f"{drawn}/"] if drawn else []), *trainer.files]:
        print(f"  {path}")
    return 128 + signal if signal else 0
