"""Models for the command line, python -m gpipe."""

import torch
from torch import nn


def model():
    return nn.Sequential(nn.Linear(16, 16), nn.ReLU(), nn.Linear(16, 16))


layer = nn.Linear(16, 16)


def three():
    return model(), torch.rand(8, 16), "more"


def model_and_batch():
    return model(), torch.rand(8, 16)
