"""Reads the files of write_events with TensorBoard's own package: run.py WRITE_EVENTS FOLDER

Exit status 77 means that this Python does not have the package.
"""

import io
import math
import pathlib
import shutil
import subprocess
import sys
import time

try:
    from PIL import Image
    from tensorboard.backend.event_processing import event_accumulator
except ImportError as error:
    print("skipped:", error)
    sys.exit(77)

program, folder = sys.argv[1], pathlib.Path(sys.argv[2])
shutil.rmtree(folder, ignore_errors=True)
started = time.time()
subprocess.run([program, folder], check=True)

everything = {"scalars": 0, "images": 0}
events = event_accumulator.EventAccumulator(str(folder), size_guidance=everything)
events.Reload()
assert events.file_version == 2, events.file_version
tags = events.Tags()
assert sorted(tags["scalars"]) == ["Dice", "loss/train"], tags
assert tags["images"] == ["samples"], tags

losses = events.Scalars("loss/train")
assert [loss.step for loss in losses] == list(range(1, 201)), losses
assert all(math.isclose(loss.value, 1 / loss.step, rel_tol=1e-7) for loss in losses), losses
assert all(started - 1 < loss.wall_time < time.time() + 1 for loss in losses), losses
(dice,) = events.Scalars("Dice")
assert (dice.step, dice.value) == (1 << 40, -0.5), dice

images = events.Images("samples")
assert [image.step for image in images] == [0, 300], [image.step for image in images]
for image in images:
    assert (image.width, image.height) == (300, 20), (image.width, image.height)
    assert image.encoded_image_string == (folder / "samples.png").read_bytes()
    pixels = Image.open(io.BytesIO(image.encoded_image_string))
    assert (pixels.mode, pixels.size) == ("RGB", (300, 20)), pixels
    for x, y in ((0, 0), (299, 19), (40, 7)):
        assert pixels.getpixel((x, y)) == (x % 256, 10 * y, x * y % 256), (x, y, pixels.getpixel((x, y)))

# A record with changed bytes fails its checksum.
(path,) = folder.glob("*tfevents*")
data = bytearray(path.read_bytes())
data[60] ^= 1
path.write_bytes(data)
damaged = event_accumulator.EventAccumulator(str(folder), size_guidance=everything)
damaged.Reload()
assert damaged.Tags()["scalars"] == [], damaged.Tags()
print("all passed")
