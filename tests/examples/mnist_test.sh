#!/usr/bin/env bash
# The MNIST program from end to end, on few and on damaged digits: mnist_test.sh PROGRAM FOLDER PYTHON UNET_TRAIN
source "$(dirname "${BASH_SOURCE[0]}")/program.sh"
other=$1

common=(--epochs 1 --batch-size 20 --chunks 2)
run one --samples 60 --stages 1
says one '60 images to train, 10 to test'
says one '^reached: accuracy '
data=one/digits
common+=(--data $data)
run two --balance 21,50
same one two
rarely run resumed --learning-rate-schedule constant
rarely run resumed --learning-rate-schedule constant --epochs 2 --resume auto
rarely says resumed '^resume: resumed/latest.snapshot$'
rarely run whole --learning-rate-schedule constant --epochs 2
rarely same whole resumed

refuse other-batch '--batch-size 20, not 5' --batch-size 5 --resume one/latest.snapshot
# So the flag has an effect, too.
refuse other-weights 'conv1.weight' --small-images --load one/best.snapshot
"$other" --samples 4 --scale 0.25 -e 1 -b 4 --depth 1 --channels 4 --output other >other.log || fail "other"
refuse other-program 'not a snapshot of this program' --resume other/latest.snapshot

damage test-missing 't10k-labels-idx1-ubyte: cannot be opened' rm t10k-labels-idx1-ubyte
damage compressed 'train-images-idx3-ubyte.gz exists; run gunzip' gzip train-images-idx3-ubyte
echo "all passed"
