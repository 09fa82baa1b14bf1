"""Trains a ResNet-18 in two stages. Started again with more epochs, it continues from its checkpoints.

    torchrun --nproc-per-node 2 with_distributed.py
"""

import argparse
import os
from collections import OrderedDict

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.pipelining import PipelineStage, Schedule1F1B
from torch.optim.lr_scheduler import CosineAnnealingLR
from torch.utils.data import DataLoader
from torchvision.datasets import FakeData
from torchvision.models import resnet18
from torchvision.transforms import ToTensor

parser = argparse.ArgumentParser()
parser.add_argument("--epochs", type=int, default=4)
parser.add_argument("--samples", type=int, default=512)
parser.add_argument("--size", type=int, default=64)
parser.add_argument("--batch-size", type=int, default=32)
args = parser.parse_args()

rank = int(os.environ["RANK"])
device = torch.device(f"cuda:{rank}" if torch.cuda.is_available() else "cpu")
dist.init_process_group("nccl" if device.type == "cuda" else "gloo")
torch.manual_seed(0)
data = FakeData(args.samples, (3, args.size, args.size), 10, ToTensor())
validation = FakeData(args.samples // 4, (3, args.size, args.size), 10, ToTensor(), random_offset=args.samples)
layers = [*resnet18(num_classes=10).named_children()]
layers.insert(-1, ("flatten", nn.Flatten()))  # before fc
model = nn.Sequential(OrderedDict(layers[:6] if rank == 0 else layers[6:])).to(device)  # cuts after layer2
stage = PipelineStage(model, rank, 2, device)
schedule = Schedule1F1B(stage, n_microbatches=4, loss_fn=nn.functional.cross_entropy)
optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)
scheduler = CosineAnnealingLR(optimizer, 10)
first = 0
path = f"checkpoint{rank}.pt"
if os.path.exists(path):
    saved = torch.load(path)
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
        losses = []
        with torch.autocast(device.type, torch.bfloat16):
            if rank == 0:
                schedule.step(images.to(device), return_outputs=False)
            else:
                schedule.step(target=labels.to(device), losses=losses, return_outputs=False)
        # The norm of the whole model needs the gradients of both stages.
        norm = nn.utils.get_total_norm([parameter.grad for parameter in model.parameters()])
        square = norm**2
        dist.all_reduce(square)
        nn.utils.clip_grads_with_norm_(model.parameters(), 1.0, square.sqrt())
        optimizer.step()
        total, count = total + sum(loss.item() for loss in losses) / 4, count + 1
    scheduler.step()

    model.eval()
    correct = 0
    with torch.no_grad(), torch.autocast(device.type, torch.bfloat16):
        for images, labels in DataLoader(validation, args.batch_size, drop_last=True):
            if rank == 0:
                schedule.eval(images.to(device))
            else:
                output = schedule.eval(target=labels.to(device))
                correct += (output.argmax(1).cpu() == labels).sum().item()
    if rank == 1:
        print(f"epoch {epoch + 1}: loss {total / count:.4f}, accuracy {correct / len(validation):.3f}", flush=True)

    torch.save(
        {
            "model": model.state_dict(),
            "optimizer": optimizer.state_dict(),
            "scheduler": scheduler.state_dict(),
            "epoch": epoch + 1,
        },
        path,
    )
dist.destroy_process_group()
