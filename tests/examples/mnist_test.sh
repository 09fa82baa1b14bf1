#!/usr/bin/env bash
# The MNIST program from end to end, on few and on damaged images: mnist_test.sh PROGRAM FOLDER PYTHON
source "$(dirname "${BASH_SOURCE[0]}")/program.sh"

# The files of MNIST, with few images.
data=digits
mkdir $data
"$python" - <<'END'
import random, struct
for part, count in ("train", 20), ("t10k", 10):
    header = struct.pack(">4B3I", 0, 0, 8, 3, count, 28, 28)
    open(f"digits/{part}-images-idx3-ubyte", "wb").write(header + random.Random(1).randbytes(count * 784))
    labels = bytes(i % 10 for i in range(count))
    open(f"digits/{part}-labels-idx1-ubyte", "wb").write(struct.pack(">4BI", 0, 0, 8, 1, count) + labels)
END
common=(--data $data --epochs 1 --batch-size 10 --chunks 2)
run two --balance 21,50
says two '20 images to train, 10 to test'
says two '^reached: accuracy '
run watched --balance 21,50 --watch
says watched '^step 2: .*, loss .* samples/s, idle .*%, at most .* MB'
damage compressed 'train-images-idx3-ubyte: missing, but there is a .gz file; run gunzip' gzip train-images-idx3-ubyte
echo "all passed"
