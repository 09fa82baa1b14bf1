"""Trains a U-Net to segment images, as a pipeline: unet_train.py DIR --epochs 20

DIR has the layout of the Carvana data set: see examples/README.md. docs/start.md shows what else a training needs, such
as snapshots.
"""

import argparse
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from PIL import ExifTags, Image, ImageOps
from torch import Tensor
from torch.utils.data import DataLoader, Dataset, random_split

import gpipe
import networks

MAX_CLASSES = 64
SUFFIXES = ".jpg", ".jpeg", ".png", ".gif", ".tif", ".tiff"


def files_by_name(folder: Path, ending: str = "") -> dict[str, Path]:
    """The images in a folder, by their names without `ending`."""
    files: dict[str, Path] = {}
    for path in folder.iterdir():
        if path.suffix.lower() not in SUFFIXES or path.name.startswith("."):  # hidden, such as ._a.png of macOS
            continue
        if not path.stem.endswith(ending):
            raise ValueError(f"{path}: the name of a mask must be NAME{ending}{path.suffix}")
        other = files.setdefault(path.stem.removesuffix(ending), path)
        if other != path:
            raise ValueError(f"two files have the same name: {other} and {path}")
    return files


def list_files(folder: Path) -> list[tuple[Path, Path]]:
    """The paths of all images, each with its mask's."""
    images, masks = files_by_name(folder / "imgs"), files_by_name(folder / "masks", "_mask")
    for name in sorted(images.keys() ^ masks.keys()):
        raise ValueError(f"{images[name]} has no mask" if name in images else f"{masks[name]} has no image")
    files = [(images[name], masks[name]) for name in sorted(images)]
    for image, mask in files:
        if image_size(image) != image_size(mask):
            raise ValueError(f"{image} has the size {image_size(image)}, but its mask has {image_size(mask)}")
    return files


@contextmanager
def open_image(path: Path) -> Iterator[Image.Image]:
    try:
        with Image.open(path, formats=["JPEG", "PNG", "GIF", "TIFF"]) as image:
            if ";16" in str(image.tile) and image.mode[0] != "I":
                raise ValueError("Pillow cannot read colours of 16 bits; write 8, or levels of grey")
            yield image
    except Exception as error:  # Pillow has no common class for damaged files
        raise ValueError(f"{path}: {error}") from None


def image_size(path: Path) -> tuple[int, int]:
    """Reads only the header."""
    with open_image(path) as image:
        is_turned = "exif" in image.info and image.getexif().get(ExifTags.Base.Orientation) in (5, 6, 7, 8)
        return image.size[::-1] if is_turned else image.size


def read_numbers(path: Path) -> np.ndarray[Any, np.dtype[np.int64]]:
    """What the file says of red, green and blue, of shape (H, W, 3): up to 65535 with 16 bits."""
    with open_image(path) as image:
        image = ImageOps.exif_transpose(image) if "exif" in image.info else image
        if image.mode[0] != "I":
            return np.asarray(image.convert("RGB"), np.int64)
        levels = np.asarray(image, np.int64)[..., None].repeat(3, 2)
        return levels if (levels % 257).any() else levels // 257


def read_labels(path: Path, classes: int) -> Image.Image:
    """The class of each pixel of a mask."""
    numbers = read_numbers(path)
    colors = numbers @ [1 << 32, 1 << 16, 1]
    grey = (1 << 32) + (1 << 16) + 1
    if classes == 2:
        light, things = numbers.max(2), colors[colors > 0]
        greys = light.max() >= MAX_CLASSES and (colors == light * grey).all()
        if not greys and (things != things[:1]).any():
            raise ValueError(f"{path}: a mask of two classes has one colour beside black, or greys up to white")
        return Image.fromarray((2 * light > light.max()).astype(np.uint8))
    labels = np.full(colors.shape, classes, np.uint8)
    for label in range(classes):
        of_voc = sum((label >> i + 3 * j & 1) << 39 - 16 * i - j for i in range(3) for j in range(2))
        labels[(colors == of_voc) | (colors == label * grey)] = label
    if labels.max() == classes:
        color = ",".join(map(str, numbers[labels == classes][0]))
        raise ValueError(f"{path}: the colour {color} belongs to none of the {classes} classes")
    return Image.fromarray(labels)


class Pictures(Dataset[tuple[Tensor, Tensor]]):
    """Images, float of shape (3, H, W) from 0 to 1, and the class of each pixel, of shape (H, W)."""

    def __init__(self, folder: Path, classes: int, scale: float) -> None:
        self.files, self.classes = list_files(folder), classes
        found = set().union(*(np.unique(np.asarray(read_labels(mask, classes))).tolist() for _, mask in self.files))
        if len(found) < 2:
            what = f"all pixels of all masks are of class {found.pop()}" if found else "no image"
            raise ValueError(f"{folder}/masks: {what}; masks need black and the classes' colours")
        self.size = [max(1, round(side * scale)) for side in image_size(self.files[0][0])]

    def __len__(self) -> int:
        return len(self.files)

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        image, mask = self.files[index]
        numbers = read_numbers(image)
        pixels = Image.fromarray((numbers if numbers.max() < 256 else (numbers + 128) // 257).astype(np.uint8))
        x = np.asarray(pixels.resize(self.size, Image.Resampling.BILINEAR), np.float32) / 255
        y = np.asarray(read_labels(mask, self.classes).resize(self.size, Image.Resampling.NEAREST)).astype(np.int64)
        return torch.tensor(x.transpose(2, 0, 1)), torch.tensor(y)


def segmentation_loss(logits: Tensor, labels: Tensor) -> Tensor:
    """Cross-entropy plus 1 - Dice, where Dice is the mean over images and all classes but the background."""
    predicted = logits.float().softmax(1)[:, 1:]
    truth = F.one_hot(labels, logits.shape[1]).permute(0, 3, 1, 2)[:, 1:]
    both, total = (predicted * truth).sum((2, 3)), (predicted + truth).sum((2, 3))
    return F.cross_entropy(logits.float(), labels) + 1 - ((2 * both + 1) / (total + 1)).mean()


def count_pairs(logits: Tensor, labels: Tensor) -> Tensor:
    """The number of pixels by their predicted and true class."""
    classes = logits.shape[1]
    pairs = (logits.argmax(1) * classes + labels).flatten()
    return torch.bincount(pairs, minlength=classes**2).view(classes, classes).cpu()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.ArgumentDefaultsHelpFormatter)
    parser.add_argument("data", type=Path, help="folder with imgs/ and masks/")
    parser.add_argument("--classes", type=int, default=2, help="number of classes, with the background")
    parser.add_argument("--scale", type=float, default=0.5, help="size of the training images, relative to the first")
    parser.add_argument("--depth", type=int, default=3, help="how often the U-Net halves the resolution")
    parser.add_argument("--channels", type=int, default=8, help="channels of the U-Net at full resolution")
    parser.add_argument("--epochs", type=int, default=24)
    parser.add_argument("--batch-size", type=int, default=8)
    parser.add_argument("--workers", type=int, default=2, help="processes that load images in advance")
    parser.add_argument("--output", type=Path, default=Path("unet.pt"), help="file for the model's state")
    parser.add_argument("--watch", action="store_true", help="show what the workers do in each step")
    args = parser.parse_args()
    torch.manual_seed(1)
    pictures = Pictures(args.data, args.classes, args.scale)
    kept = max(1, len(pictures) // 10)
    training, validation = random_split(pictures, [len(pictures) - kept, kept])
    loading = {"batch_size": args.batch_size, "num_workers": args.workers}
    model = networks.unet(out_channels=args.classes, depth=args.depth, base_channels=args.channels)
    images = torch.rand(args.batch_size, 3, *pictures.size[::-1])
    pipe = gpipe.GPipe.from_module(model, images, deferred_batch_norm=True)
    print(pipe.plan)
    optimizer = torch.optim.Adam(pipe.parameters(), lr=5e-3)
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, args.epochs)
    for epoch in range(1, args.epochs + 1):
        losses = []
        with gpipe.report.watch(pipe) if args.watch else nullcontext():
            for images, labels in DataLoader(training, shuffle=True, drop_last=True, **loading):
                optimizer.zero_grad()
                losses.append(pipe.step(images, labels, segmentation_loss).item())
                optimizer.step()
        scheduler.step()
        counts = [pipe.evaluate(images, labels, count_pairs) for images, labels in DataLoader(validation, **loading)]
        pairs = torch.stack(counts).sum(0).double()
        both, total = pairs.diagonal()[1:], (pairs.sum(0) + pairs.sum(1))[1:]
        dice = torch.where(total > 0, 2 * both / total, 1.0).mean()  # 1 for a class that is nowhere
        print(f"epoch {epoch}: loss {sum(losses) / max(1, len(losses)):.4f}, validation Dice {dice:.4f}", flush=True)
        torch.save(pipe.state_dict(), args.output)


if __name__ == "__main__":
    main()
