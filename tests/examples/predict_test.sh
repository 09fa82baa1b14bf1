#!/usr/bin/env bash
# Predicting and evaluating from end to end: predict_test.sh TRAIN FOLDER PYTHON-with-Pillow PREDICT EVALUATE
source "$(dirname "${BASH_SOURCE[0]}")/program.sh"
predict=$1
evaluate=$2

flags=(--batch-size 4 --depth 2 --channels 6 --scale 0.5 --learning-rate 2e-2 --samples 16 --size 64x48)
run two "${flags[@]}" --epochs 30
run four "${flags[@]}" --classes 4 --epochs 2
data=two/synthetic_16_64x48_2
mkdir empty
cp -r $data fewer
rm fewer/imgs/0000.png fewer/masks/0000_mask.png
# The formats of the Carvana data set.
cp -r $data photos
"$python" - <<'END'
from PIL import Image
Image.open("photos/imgs/0003.png").save("photos/imgs/0003.jpg", quality=100, subsampling=0)
Image.open("photos/masks/0003_mask.png").convert("1").save("photos/masks/0003_mask.gif")
Image.open("photos/imgs/0003.png").resize((37, 51)).save("odd.png")
END
rm photos/imgs/0003.png photos/masks/0003_mask.png

# Masks do not depend on the cut, and have the size of their image.
program=$predict
common=(--model two/best)
run masks --input $data/imgs odd.png --overlay
run cut --input $data/imgs odd.png --balance 5,34 --chunks 3 --batch-size 5 --devices cpu
run measured --input $data/imgs --stages 3
run fine -i $data/imgs -s 1
run coloured --model four/best --input $data/imgs
program=$evaluate
run scores --data $data --stages 2
# At this scale, the decoder does not shrink the photo.
run photos-scores --data photos --scale 1
run fine-scores --data $data --scale 1
run validation --data $data --part validation --batch-size 1
run training --data $data --part training
run classes --model four/best --data four/synthetic_16_64x48_4
says scores '^\(all pixels\) +dice 0\.[0-9]*, IoU 0\.[0-9]*$'
"$python" - $data <<'END' || fail "other masks or scores"
import csv, os, sys
import numpy
from PIL import Image

def load(path):
    return numpy.asarray(Image.open(path).convert("RGB")).astype(int)

assert len(os.listdir("masks")) == 2 * 17
for folder in ("cut", "measured"):
    for name in os.listdir(folder):
        assert (load(f"masks/{name}") != load(f"{folder}/{name}")).mean() < 2e-3, (folder, name)
mask, image, overlay = load("masks/odd_mask.png"), load("odd.png"), load("masks/odd_overlay.png")
assert mask.shape == image.shape == overlay.shape == (51, 37, 3) and set(numpy.unique(mask)) <= {0, 255}
assert ((overlay == image) | (mask == 255)).all() and (overlay != image).any()
assert any((load(f"fine/{n:04}_mask.png") != load(f"masks/{n:04}_mask.png")).any() for n in range(16)), "--scale"
colours = {tuple(c) for n in range(16) for c in load(f"coloured/{n:04}_mask.png").reshape(-1, 3)}
assert colours <= {(0, 0, 0), (128, 0, 0), (0, 128, 0), (128, 128, 0)} and len(colours) > 1, colours

def table(name):
    with open(f"{name}/scores.csv") as file:
        return {row.pop("image"): {key: float(value) for key, value in row.items()} for row in csv.DictReader(file)}

scores = table("scores")
both = total = 0
for n in range(16):
    a = load(f"masks/{n:04}_mask.png") > 127
    b = load(f"{sys.argv[1]}/masks/{n:04}_mask.png") > 127
    both, total = both + (a & b).sum(), total + a.sum() + b.sum()
    assert abs(scores[f"{n:04}"]["dice"] - 2 * (a & b).sum() / (a.sum() + b.sum())) < 2e-3, n
    assert abs(scores[f"{n:04}"]["iou"] - (a & b).sum() / (a | b).sum()) < 2e-3, n
assert abs(scores["(mean of images)"]["dice"] - sum(scores[f"{n:04}"]["dice"] for n in range(16)) / 16) < 1e-5
assert abs(scores["(all pixels)"]["dice"] - 2 * both / total) < 2e-3 and scores["(all pixels)"]["dice"] > 0.5, scores
assert abs(table("photos-scores")["0003"]["dice"] - table("fine-scores")["0003"]["dice"]) < 0.05
validation, training = table("validation"), table("training")
assert len(validation) == 2 + 2 and len(training) == 14 + 2 and len(set(validation) & set(training)) == 2
assert set(table("classes")["0000"]) == {"dice", "iou"} | {f"{s}_{k}" for s in ("dice", "iou") for k in (1, 2, 3)}
END

# What both programs refuse; their code is the same.
"$python" - <<'END'
import os, re, shutil, zlib
shutil.copytree("two/best", "other-program")
data = open("two/best/snapshot.json", "rb").read().replace(b"--classes", b"--clasXes")
data = re.sub(rb'"crc32":"[0-9a-f]{8}","extra"', b'"crc32":"","extra"', data)
data = data.replace(b'"crc32":"","extra"', b'"crc32":"%08x","extra"' % zlib.crc32(data))
open("other-program/snapshot.json", "wb").write(data)
shutil.copytree("two/best", "half")
for name in os.listdir("half"):
    os.truncate(f"half/{name}", 300)
END
refuse missing-model 'no-such-file' --data $data --model no-such-file
refuse damaged-model 'half' --data $data --model half
refuse other-program 'does not store --classes' --data $data --model other-program
refuse cut 'sums to 3' --data $data --balance 1,2
refuse stages 'layers' --data $data --stages 99
refuse device 'cuda:63' --data $data --stages 2 --devices cpu,cuda:63
refuse scale "--scale: must be a number from 0.001 to 1, but is 'nan'" --data $data --scale nan
refuse unwritable 'two.log/output' --data $data --output two.log/output
"$program" --help | grep -q -- '--batch-size INT.*=4' || fail "--help lists no defaults"
refuse other-data 'give --part all' --data fewer --part validation
refuse colours 'belongs to none of the 4 classes' --data $data --model four/best
program=$predict
refuse missing-model 'no-such-file' --input $data/imgs --model no-such-file
refuse input-missing '--input is required'
refuse not-an-image 'two.log' --input odd.png two.log
head -c 600 photos/imgs/0003.jpg >short.jpg
refuse truncated 'short.jpg' --input short.jpg
echo "all passed"
