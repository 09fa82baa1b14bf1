#!/usr/bin/env bash
# The MNIST program from end to end, on few and on damaged images: mnist_test.sh PROGRAM FOLDER PYTHON UNET_TRAIN
source "$(dirname "${BASH_SOURCE[0]}")/program.sh"
other=$1

# The files of MNIST, with few images.
data=digits
mkdir $data
"$python" - <<'END'
import random, struct
for part, count in ("train", 60), ("t10k", 10):
    header = struct.pack(">4B3I", 0, 0, 8, 3, count, 28, 28)
    open(f"digits/{part}-images-idx3-ubyte", "wb").write(header + random.Random(1).randbytes(count * 784))
    labels = bytes(i % 10 for i in range(count))
    open(f"digits/{part}-labels-idx1-ubyte", "wb").write(struct.pack(">4BI", 0, 0, 8, 1, count) + labels)
END
common=(--data $data --epochs 1 --batch-size 20 --chunks 2)
run two --balance 21,50
says two '60 images to train, 10 to test'
says two '^reached: accuracy '

refuse other-batch '--batch-size 20, not 5' --batch-size 5 --resume two/latest
"$other" --samples 4 --scale 0.25 -e 1 -b 4 --depth 1 --channels 4 --output other >other.log || fail "other"
refuse other-program 'not a snapshot of this program' --resume other/latest

damage test-missing 't10k-labels-idx1-ubyte: cannot be opened' rm t10k-labels-idx1-ubyte
damage compressed 'train-images-idx3-ubyte: missing, but there is a .gz file; run gunzip' gzip train-images-idx3-ubyte
echo "all passed"
