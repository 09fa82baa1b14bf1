"""The meaning of a U-Net's output. With two classes it has one channel, the logit of class 1; with more classes, one
channel per class.

    logits         (N, 1 or classes, H, W)
    probabilities  (N, classes, H, W); they sum to 1 over the classes
    labels         (N, 1, H, W), uint8: the class of each pixel
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from unet.classes import class_color


def output_channels(classes: int) -> int:
    return 1 if classes == 2 else classes


def segmentation_loss(logits: Tensor, labels: Tensor) -> Tensor:
    """Cross-entropy plus 1 - Dice. Dice is the overlap of the probabilities with the labels, as the mean over images and
    all classes except 0. Each count is one pixel higher, so that a class that is absent can have a Dice of 1."""
    logits = logits.float()
    channels = logits.shape[1]
    if channels == 1:
        truth = labels.float()
        cross_entropy = F.binary_cross_entropy_with_logits(logits, truth)
        predicted = logits.sigmoid()
    else:
        truth = one_hot(labels, channels)[:, 1:]
        cross_entropy = F.cross_entropy(logits, labels.squeeze(1).long())
        predicted = logits.softmax(1)[:, 1:]
    both = (predicted * truth).sum((2, 3))
    total = predicted.sum((2, 3)) + truth.sum((2, 3))
    return cross_entropy + 1 - ((2 * both + 1) / (total + 1)).mean()


def to_probabilities(logits: Tensor) -> Tensor:
    logits = logits.float()
    if logits.shape[1] > 1:
        return logits.softmax(1)
    thing = logits.sigmoid()
    return torch.cat([1 - thing, thing], dim=1)


def to_labels(probabilities: Tensor) -> Tensor:
    """The most probable class of each pixel."""
    return probabilities.argmax(1, keepdim=True).byte()


def one_hot(labels: Tensor, classes: int) -> Tensor:
    """Labels as probabilities of 0 and 1."""
    return (labels == torch.arange(classes, device=labels.device).view(1, -1, 1, 1)).float()


def paint(probabilities: Tensor) -> Tensor:
    """Colours of shape (N, 3, H, W) with values 0 to 1: the mean of the classes' colours, weighted by their probability.
    Class 1 of two is white."""
    classes = probabilities.shape[1]
    colors = [(0, 0, 0), (255, 255, 255)] if classes == 2 else [class_color(label) for label in range(classes)]
    return torch.einsum("nkhw,kc->nchw", probabilities, torch.tensor(colors) / 255)


class Metrics:
    """Dice and IoU of all classes except 0, over the pixels of all images together. Both are 1 for a class that is
    neither in the masks nor predicted.

    Attributes:
        pairs: the number of pixels for each predicted and each true class. Those of several parts of the images add up.
    """

    def __init__(self, classes: int) -> None:
        self.pairs = torch.zeros(classes, classes, dtype=torch.long)

    def add(self, predicted: Tensor, truth: Tensor) -> None:
        classes = len(self.pairs)
        pairs = predicted.flatten().long() * classes + truth.flatten()
        self.pairs += torch.bincount(pairs, minlength=classes**2).view(classes, classes)

    def dice_and_iou(self) -> tuple[list[float], list[float]]:
        both = self.pairs.diagonal()[1:].double()
        total = (self.pairs.sum(0) + self.pairs.sum(1))[1:].double()
        nowhere = total == 0
        dice = torch.where(nowhere, 1.0, 2 * both / total)
        iou = torch.where(nowhere, 1.0, both / (total - both))
        return dice.tolist(), iou.tolist()
