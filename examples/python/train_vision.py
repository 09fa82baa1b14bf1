"""Trains a ResNet-18 as a pipeline, and continues from its snapshot when it is started again: see docs/start.md."""

from pathlib import Path

import torch
import torchvision
from torch import nn
from torch.utils.data import DataLoader, TensorDataset, random_split
from torch.utils.tensorboard import SummaryWriter
from tqdm import tqdm

import gpipe
from gpipe import snapshot

EPOCHS, BATCH = 3, 32
folder = Path("run")  # of TensorBoard's events and the snapshot; delete it to start from the beginning
latest = folder / "latest"

# Put your data set here. This one has ten patterns with noise.
torch.manual_seed(0)
patterns, labels = torch.randn(10, 3, 32, 32), torch.randint(10, (320,))
data = TensorDataset(patterns[labels] + torch.randn(320, 3, 32, 32), labels)
training, validation = random_split(data, [256, 64])
train_loader = DataLoader(training, BATCH, shuffle=True, drop_last=True)
validation_loader = DataLoader(validation, BATCH)

saved = snapshot.load(latest) if (latest / "snapshot.json").exists() else None
plan = saved.plan if saved else {}  # nothing: from_module() measures the model and chooses
model = torchvision.models.resnet18(num_classes=10)
pipe = gpipe.GPipe.from_module(model, torch.randn(BATCH, 3, 32, 32), **plan)
optimizer = torch.optim.SGD(pipe.parameters(), lr=0.05, momentum=0.9, weight_decay=1e-4)
scheduler = torch.optim.lr_scheduler.OneCycleLR(optimizer, 0.05, total_steps=EPOCHS * len(train_loader))
loss_function = nn.CrossEntropyLoss(label_smoothing=0.1)
autocast = torch.autocast(pipe.devices[0].type, torch.bfloat16)


def right(output, classes):
    return (output.argmax(1) == classes).sum()


if saved:
    snapshot.load(latest, pipe, optimizer=optimizer, scheduler=scheduler)  # and the random generators

steps = saved.step if saved else 0
with SummaryWriter(folder, purge_step=steps) as board:
    for epoch in range(steps // len(train_loader), EPOCHS):
        progress = tqdm(train_loader, f"epoch {epoch + 1}")
        for images, classes in progress:
            optimizer.zero_grad()
            with autocast:
                loss = pipe.step(images, classes, loss_function).item()  # forward and backward
            norm = pipe.clip_grad_norm_(1.0)
            optimizer.step()
            scheduler.step()
            progress.set_postfix(loss=f"{loss:.3f}")
            board.add_scalar("loss", loss, steps)
            board.add_scalar("gradient norm", norm, steps)
            steps += 1

        with autocast:  # evaluate() needs no eval() and no_grad()
            accuracy = sum(pipe.evaluate(*batch, right).item() for batch in validation_loader) / len(validation)
        board.add_scalar("accuracy", accuracy, steps)
        print(f"epoch {epoch + 1}: loss {loss:.3f}, accuracy {accuracy:.3f}")

        snapshot.save(latest, pipe, optimizer=optimizer, scheduler=scheduler, step=steps)
