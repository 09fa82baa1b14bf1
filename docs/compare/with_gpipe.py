"""Trains a ResNet-18 in a pipeline. Started again with more epochs, it continues from its checkpoint."""

import argparse
import os

import torch
from torch import nn
from torch.optim.lr_scheduler import CosineAnnealingLR
from torch.utils.data import DataLoader
from torchvision.datasets import FakeData
from torchvision.models import resnet18
from torchvision.transforms import ToTensor

import gpipe

parser = argparse.ArgumentParser()
parser.add_argument("--epochs", type=int, default=4)
parser.add_argument("--samples", type=int, default=512)
parser.add_argument("--size", type=int, default=64)
parser.add_argument("--batch-size", type=int, default=32)
args = parser.parse_args()

torch.manual_seed(0)
device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
data = FakeData(args.samples, (3, args.size, args.size), 10, ToTensor())
validation = FakeData(args.samples // 4, (3, args.size, args.size), 10, ToTensor(), random_offset=args.samples)
model = gpipe.GPipe.from_module(resnet18(num_classes=10), torch.randn(args.batch_size, 3, args.size, args.size))
optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)
scheduler = CosineAnnealingLR(optimizer, 10)
first = 0
if os.path.exists("checkpoint.pt"):
    saved = torch.load("checkpoint.pt")
    model.load_state_dict(saved["model"])
    optimizer.load_state_dict(saved["optimizer"])
    scheduler.load_state_dict(saved["scheduler"])
    first = saved["epoch"]

for epoch in range(first, args.epochs):
    order = torch.Generator().manual_seed(epoch)
    model.train()
    total = count = 0
    for images, labels in DataLoader(data, args.batch_size, shuffle=True, generator=order, drop_last=True):
        optimizer.zero_grad()
        with torch.autocast(device.type, torch.bfloat16):
            loss = model.step(images, labels, nn.functional.cross_entropy)
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        total, count = total + loss.item(), count + 1
    scheduler.step()

    model.eval()
    correct = 0
    with torch.no_grad(), torch.autocast(device.type, torch.bfloat16):
        for images, labels in DataLoader(validation, args.batch_size):
            correct += (model(images).argmax(1).cpu() == labels).sum().item()
    print(f"epoch {epoch + 1}: loss {total / count:.4f}, accuracy {correct / len(validation):.3f}", flush=True)

    torch.save(
        {
            "model": model.state_dict(),
            "optimizer": optimizer.state_dict(),
            "scheduler": scheduler.state_dict(),
            "epoch": epoch + 1,
        },
        "checkpoint.pt",
    )
