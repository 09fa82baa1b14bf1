#!/usr/bin/env bash
# Predicting and evaluating from end to end: predict_test.sh TRAIN FOLDER PREDICT EVALUATE PYTHON with torchvision
source "$(dirname "${BASH_SOURCE[0]}")/program.sh"
train=$program
predict=$1
evaluate=$2
python=$3

flags=(--epochs 30 --batch-size 4 --depth 2 --channels 6 --scale 0.5 --learning-rate 2e-2 --samples 16 --size 64x48)
program=$train
run two "${flags[@]}"
run four "${flags[@]}" --classes 4 --epochs 2
data=two/synthetic_16_64x48_2
cp $data/imgs/0003.jpg odd.jpg
"$python" - <<'END'
from PIL import Image
Image.open("odd.jpg").resize((37, 51)).save("odd.png")
END
mkdir empty
cp -r $data fewer
rm fewer/imgs/0000.jpg fewer/masks/0000_mask.gif

# What TensorBoard reads from the events of the training.
"$python" - <<'END' || fail "TensorBoard reads something else"
import csv, sys
try:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
except ImportError:
    sys.exit(0)
events = EventAccumulator("two").Reload()
with open("two/history.csv") as file:
    rows = list(csv.DictReader(file))
tags = {"train_loss": "loss/train", "val_loss": "loss/val", "val_dice": "dice/val", "val_iou": "iou/val"}
tags |= {column: f"training/{column}" for column in ("learning_rate", "images_per_second")}
assert tags.keys() == rows[0].keys() - {"epoch"} and set(events.Tags()["scalars"]) == {*tags.values(), "loss/train_step"}
for column, tag in tags.items():
    scalars = events.Scalars(tag)
    assert [scalar.step for scalar in scalars] == list(range(1, 31)), column
    for scalar, row in zip(scalars, rows):
        assert abs(scalar.value - float(row[column])) <= 1e-5 * abs(scalar.value), (column, scalar, row)
steps = EventAccumulator("two", size_guidance={"scalars": 0}).Reload().Scalars("loss/train_step")
assert [step.step for step in steps] == list(range(1, 30 * 4 + 1))  # 14 images in mini-batches of 4
image = events.Images("predictions/val")[-1]
assert image.encoded_image_string == open("two/epoch_030.png", "rb").read() and image.width == 3 * 256 + 8
END

# Masks do not depend on the cut, and have the size of their image.
program=$predict
common=(--model two/best.snapshot)
for stages in 1 2 3; do
  run "masks$stages" --input $data/imgs odd.png --stages "$stages" --probabilities --overlay
  [[ $(ls "masks$stages" | wc -l) == 51 ]] || fail "not three files per image"
  ! grep -q $'\r' "masks$stages.log" || fail "a progress bar in a file"
done
run cut --input $data/imgs odd.png --balance 5,34 --chunks 3 --batch-size 5 --workers 0 --devices cpu
run high -i $data/imgs -t 0.99
run low -i $data/imgs -t 0.01
run fine -i $data/imgs -s 1
run coloured --model four/best.snapshot --input $data/imgs --probabilities
"$python" - <<'END' || fail "other masks"
import os
import numpy
from PIL import Image

def load(path):
    return numpy.asarray(Image.open(path)).astype(int)

def share(folder):
    return numpy.mean([load(f"{folder}/{name:04}_mask.png").mean() / 255 for name in range(16)])

for name in sorted(os.listdir("masks1")):
    for other in ("masks2", "masks3", "cut"):
        if other == "cut" and not name.endswith("_mask.png"):
            continue
        assert (abs(load(f"masks1/{name}") - load(f"{other}/{name}")) > 1).mean() < 2e-3, (name, other)
mask, probability = load("masks1/odd_mask.png"), load("masks1/odd_probability_1.png")
assert mask.shape == (51, 37), mask.shape
assert set(numpy.unique(mask)) <= {0, 255} and ((probability > 128) <= (mask == 255)).all()
image, overlay = load("odd.png"), load("masks1/odd_overlay.png")
colours = {tuple(colour) for colour in overlay.reshape(-1, 3)}
assert overlay.shape == image.shape and (overlay != image).any() and {(0, 0, 0), (255, 255, 255)} <= colours
assert share("high") < share("masks1") < share("low"), "--threshold"
assert any((load(f"fine/{n:04}_mask.png") != load(f"masks1/{n:04}_mask.png")).any() for n in range(16)), "--scale"
palette = {(0, 0, 0), (128, 0, 0), (0, 128, 0), (128, 128, 0)}
colours = {tuple(c) for n in range(16) for c in load(f"coloured/{n:04}_mask.png").reshape(-1, 3)}
assert colours <= palette and len(colours) > 1, colours
three = [load(f"coloured/0000_probability_{k}.png") for k in (1, 2, 3)]
assert 0 < sum(three).max() <= 257 and not os.path.exists("coloured/0000_probability_0.png")
END

# The scores match the masks.
program=$evaluate
for stages in 1 2 3; do
  run "scores$stages" --data $data --stages "$stages"
done
run validation --data $data --part validation --batch-size 1
run training --data $data --part training
run classes --model four/best.snapshot --data four/synthetic_16_64x48_4
"$python" - $data <<'END' || fail "other scores"
import csv, sys
import numpy
from PIL import Image

def table(name):
    with open(f"{name}/scores.csv") as file:
        return {row.pop("image"): {key: float(value) for key, value in row.items()} for row in csv.DictReader(file)}

scores = table("scores1")
both = total = 0
for n in range(16):
    a = numpy.asarray(Image.open(f"masks1/{n:04}_mask.png")) > 127
    b = numpy.asarray(Image.open(f"{sys.argv[1]}/masks/{n:04}_mask.gif").convert("L")) > 127
    both, total = both + (a & b).sum(), total + a.sum() + b.sum()
    assert abs(scores[f"{n:04}"]["dice"] - 2 * (a & b).sum() / (a.sum() + b.sum())) < 1e-5, n
    assert abs(scores[f"{n:04}"]["iou"] - (a & b).sum() / (a | b).sum()) < 1e-5, n
images = [scores[f"{n:04}"]["dice"] for n in range(16)]
assert abs(scores["(mean of images)"]["dice"] - sum(images) / 16) < 1e-5
assert abs(scores["(all pixels)"]["dice"] - 2 * both / total) < 1e-5
assert scores["(all pixels)"]["dice"] > 0.5, scores["(all pixels)"]
for other in ("scores2", "scores3"):
    for name, row in table(other).items():
        assert abs(row["dice"] - scores[name]["dice"]) < 2e-3, (other, name)
validation, training = table("validation"), table("training")
assert len(validation) == 2 + 2 and len(training) == 14 + 2 and len(set(validation) & set(training)) == 2
assert set(next(iter(table("classes").values()))) == {"dice", "iou"} | {f"{s}_{k}" for s in ("dice", "iou") for k in (1, 2, 3)}
END
grep -q '^(all pixels)' scores1.log || fail "no table"
terminal() {
  script -qec "$2 -m two/best.snapshot -o terminal" terminal.log >/dev/null || fail "in a terminal"
  grep -q $'\r'"$1  \[" terminal.log || fail "no progress bar in a terminal"
}
terminal evaluate "'$evaluate' --data $data"
terminal predict "'$predict' -i $data/imgs"

# What both programs refuse. $1: a name, the rest: their input.
refuse_both() {
  refuse "$1-missing-model" 'no-such-file' "${@:2}" --model no-such-file
  refuse "$1-foreign-model" 'two.log' "${@:2}" --model two.log
  head -c 5000 two/best.snapshot >damaged
  refuse "$1-damaged-model" 'damaged' "${@:2}" --model damaged
  refuse "$1-cut" 'sums to 3' "${@:2}" --balance 1,2
  refuse "$1-stages" 'layers' "${@:2}" --stages 99
  refuse "$1-device" 'cuda:63' "${@:2}" --stages 2 --devices cpu,cuda:63
  refuse "$1-scale" "--scale must be a finite number, but is 'nan'" "${@:2}" --scale nan
  refuse "$1-workers" "--workers must be at least 0, but is -1" "${@:2}" --workers -1
  refuse "$1-chunks" "--chunks must be at least 1, but is 0" "${@:2}" --chunks 0
  refuse "$1-unwritable" 'two.log/output' "${@:2}" --output two.log/output
}
"$python" - <<'END'
import re, zlib
data = open("two/best.snapshot", "rb").read().replace(b"--classes", b"--klasses")
data = re.sub(rb'("checksum":")[0-9a-f]{8}', rb"\g<1>00000000", data)
open("other-program", "wb").write(data.replace(b'"checksum":"00000000', b'"checksum":"%08x' % zlib.crc32(data)))
END
program=$evaluate
refuse_both evaluate --data $data
refuse evaluate-no-data 'no-such-folder' --data no-such-folder
refuse evaluate-data-missing '--data is required'
refuse evaluate-part '--part' --data $data --part half
refuse evaluate-other-data 'give --part all' --data fewer --part validation
refuse evaluate-classes 'is not that of any of 4 classes' --data $data --model four/best.snapshot
program=$predict
refuse_both predict --input $data/imgs
refuse predict-other-program 'does not store --classes' --input odd.jpg --model other-program
refuse predict-no-input 'no-such-image' --input no-such-image
refuse predict-input-missing '--input is required'
refuse predict-empty 'empty: no .jpg' --input empty
refuse predict-not-an-image 'two.log' --input odd.jpg two.log
refuse predict-same-name 'two images have the same name' --input odd.jpg odd.png
refuse predict-onto-itself 'give another folder' --input odd.jpg --output .
refuse predict-threshold "--threshold must be a finite number, but is 'nan'" --input odd.jpg --threshold nan
refuse predict-threshold "--threshold must be at most 1, but is 2" --input odd.jpg --threshold 2
refuse predict-threshold "--threshold must be at least 0, but is -1" --input odd.jpg --threshold -1
head -c 600 $data/imgs/0003.jpg >short.jpg
refuse predict-truncated 'short.jpg' --input short.jpg
for program in "$predict" "$evaluate"; do
  "$program" --help | grep -q -- '--batch-size INT.*=4' || fail "--help lists no defaults"
done
echo "all passed"
