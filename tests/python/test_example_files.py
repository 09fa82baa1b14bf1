"""Images and digits as the training programs read them."""

import os
import struct

import pytest
import torch

from training import EXAMPLES  # noqa: F401

from mnist.digits import write_digits
from mnist.idx import read_idx
from PIL import Image
from unet import carvana


def test_drawn_digits_are_read_back(tmp_path):
    write_digits(tmp_path, 30, 5, seed=1)
    images, labels = read_idx(tmp_path, "train")
    assert images.shape == (30, 1, 28, 28) and images.dtype == torch.uint8
    assert len(set(labels.tolist())) > 5
    assert (images.flatten(1).max(1).values > 120).all()
    assert len(read_idx(tmp_path, "t10k")[0]) == 5


IMAGES, LABELS = "train-images-idx3-ubyte", "train-labels-idx1-ubyte"


@pytest.mark.parametrize(
    "name, change, message",
    [
        (IMAGES, lambda whole: whole[:500], "truncated: 484 bytes after the header, which announces 3920"),
        (IMAGES, lambda whole: whole + b"x", "too long: 3921 bytes"),
        (IMAGES, lambda whole: whole[:7], "truncated: 7 bytes, but the header alone has 16"),
        (IMAGES, lambda whole: b"", "the file is empty"),
        (IMAGES, lambda whole: b"\x1f\x8b" + whole, "compressed; run gunzip on it"),
        (IMAGES, lambda whole: b"\0\0\x08\x01" + whole[4:], "not an IDX file of images: it starts with 0x00000801"),
        (IMAGES, lambda whole: whole[:4] + b"\xff" * 12 + whole[16:], "images of 4294967295 rows and 4294967295"),
        (IMAGES, lambda whole: whole[:4] + b"\xff" * 4 + whole[8:], "3920 bytes after the header, which announces 3367"),
        (IMAGES, lambda whole: whole[:4] + b"\0" * 4 + whole[8:16], "the file has no items"),
        (LABELS, lambda whole: whole[:7] + b"\4" + whole[8:12], "4 labels"),
        (LABELS, lambda whole: whole[:11] + b"\x0b" + whole[12:], "label 3 is 11; it must be below 10"),
    ],
)
def test_broken_digit_files_are_refused(name, change, message, tmp_path):
    write_digits(tmp_path, 5, 1, seed=0)
    path = tmp_path / name
    path.write_bytes(change(path.read_bytes()))
    with pytest.raises(ValueError, match=f"{tmp_path / name}.*{message}"):
        read_idx(tmp_path, "train")


def test_digit_files_of_the_wrong_length_are_not_read(tmp_path):
    write_digits(tmp_path, 5, 1, seed=0)
    os.truncate(tmp_path / IMAGES, 1 << 42)  # a sparse file, longer than any memory
    with pytest.raises(ValueError, match="too long: 4398046511088 bytes"):
        read_idx(tmp_path, "train")
    os.remove(tmp_path / IMAGES)
    os.symlink("/dev/zero", tmp_path / IMAGES)
    with pytest.raises(ValueError, match="the file is empty"):
        read_idx(tmp_path, "train")


def gif(width, height):
    """A GIF file of 35 bytes with a frame of two pixels."""
    canvas = b"GIF89a" + struct.pack("<HH", width, height) + b"\x80\0\0" + b"\0\0\0\xff\xff\xff"
    return canvas + b"," + struct.pack("<HHHHB", 0, 0, 2, 1, 0) + b"\x02\x02\x4c\x0a\0;"


@pytest.mark.parametrize(
    "content, message",
    [
        (gif(65535, 65535), "could be decompression bomb"),
        (gif(8192, 8192), "damaged: 8192x8192 pixels do not fit into 35 bytes"),
        (gif(1024, 1025), "do not fit"),
        (b"\xff\xd8\xff\xe0", "not a JPEG, PNG or GIF file, or damaged"),
        (b"", "the file is empty"),
    ],
)
def test_hostile_images_are_refused(content, message, tmp_path):
    path = tmp_path / "0.gif"
    path.write_bytes(content)
    for read in (carvana.image_size, carvana.read_pixels):
        with pytest.raises(ValueError, match=f"^{path}: .*{message}"):
            read(path)


def test_flat_images_are_accepted(tmp_path):
    for form, mode in (("GIF", "1"), ("PNG", "1"), ("JPEG", "L"), ("JPEG", "RGB")):
        Image.new(mode, (4000, 4000)).save(tmp_path / "0", form, **({"progressive": True} if form == "JPEG" else {}))
        assert carvana.read_image(tmp_path / "0", (8, 8)).shape == (8, 8, 3)
    (tmp_path / "0").write_bytes(gif(1024, 1024))
    assert carvana.read_image(tmp_path / "0", (8, 8)).shape == (8, 8, 3)


def test_alpha_channel_is_ignored(tmp_path):
    """As in C++: transparent pixels keep their colour."""
    image = Image.new("RGBA", (3, 1))
    image.putdata([(10, 20, 30, 255), (200, 100, 50, 0), (200, 100, 50, 128)])
    image.save(tmp_path / "0.png")
    assert carvana.read_pixels(tmp_path / "0.png").tolist() == [[[10, 20, 30], [200, 100, 50], [200, 100, 50]]]
