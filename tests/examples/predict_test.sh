#!/usr/bin/env bash
# Predicting and scoring from end to end: predict_test.sh TRAIN FOLDER PYTHON-with-Pillow PREDICT
source "$(dirname "${BASH_SOURCE[0]}")/program.sh"
predict=$1

flags=(--batch-size 4 --depth 2 --channels 6 --scale 0.5 --learning-rate 2e-2 --samples 16 --size 64x48)
run two "${flags[@]}" --epochs 30
run four "${flags[@]}" --classes 4 --depth 1 --learning-rate 5e-2 --epochs 8
data=two/synthetic_16_64x48_2
"$python" -c 'from PIL import Image; Image.open("two/synthetic_16_64x48_2/imgs/0003.png").resize((37, 51)).save("odd.png")'

# Masks do not depend on the cut, and have the size of their image.
program=$predict
common=(--model two/best)
run masks --input $data/imgs odd.png
run cut --input $data/imgs odd.png --balance 5,34 --chunks 3 --batch-size 5 --devices cpu
run scores --data $data --stages 2
run classes --model four/best --data four/synthetic_16_64x48_4
says scores '^\(all pixels\) +dice 0\.[0-9]*, IoU 0\.[0-9]*$'
"$python" - $data <<'END' || fail "other masks or scores"
import csv, os, sys
import numpy
from PIL import Image

def load(path):
    return numpy.asarray(Image.open(path).convert("RGB")).astype(int)

assert len(os.listdir("masks")) == 17
for name in os.listdir("cut"):
    assert (load(f"masks/{name}") != load(f"cut/{name}")).mean() < 2e-3, name
mask = load("masks/odd_mask.png")
assert mask.shape == (51, 37, 3) and set(numpy.unique(mask)) <= {0, 255}
colours = {tuple(c) for n in range(16) for c in load(f"classes/{n:04}_mask.png").reshape(-1, 3)}
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
assert set(table("classes")["0000"]) == {"dice", "iou"} | {f"{s}_{k}" for s in ("dice", "iou") for k in (1, 2, 3)}
END

# What it refuses.
cp -r two/best half
for file in half/*; do truncate -s 300 "$file"; done
refuse missing-model 'no-such-file' --data $data --model no-such-file
refuse damaged-model 'half' --data $data --model half
refuse cut 'sums to 3' --data $data --balance 1,2
refuse device 'cuda:63' --data $data --stages 2 --devices cpu,cuda:63
refuse unwritable 'two.log/output' --data $data --output two.log/output
refuse colours 'belongs to none of the 4 classes' --data $data --model four/best
refuse not-an-image 'two.log' --input odd.png two.log
echo "all passed"
