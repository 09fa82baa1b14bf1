#!/usr/bin/env bash
# The MNIST program from end to end, on few and on damaged digits: mnist_test.sh PROGRAM FOLDER
source "$(dirname "${BASH_SOURCE[0]}")/program.sh"

common=(--epochs 2 --batch-size 20 --chunks 2)
cut=21,50
rate_column=5
plateau_epochs=12
data=stages1/digits

for stages in 1 2 3; do
  run "stages$stages" --samples 60 --stages "$stages" --trace "trace$stages.json"
  written "stages$stages"
  grep -q '"traceEvents"' "trace$stages.json" || fail "trace of $stages stages"
  ! grep -q $'\r' "stages$stages.log" || fail "a progress bar in a file"
  [[ $(grep -c "^stage .* layers, .* parameters, on cpu" "stages$stages.log") == "$stages" ]] || fail "no plan"
  near "$(column "stages$stages" 2)" "$(column stages1 2)" 5e-2 || fail "$stages stages train otherwise than 1"
done
grep -q '60 images to train, 10 to test' stages1.log || fail "--samples has no effect"
check_terminal --data "$data"
check_training_flags stages2 --data "$data"
run small --data "$data" --small-images --epochs 1 --batch-size 60
! near "$(column small 2)" "$(column stages2 2 | head -1)" 1e-4 || fail "--small-images has no effect"

refuse_training_flags "$data" "$(sed -n 's/^model: ResNet-18, \([0-9]*\) layers.*/\1/p' stages1.log)"
refuse samples '--samples' --samples 10
refuse other-batch '--batch-size 20, not 5' --data "$data" --batch-size 5 --resume stages2/latest.snapshot
refuse other-model '--small-images 0, not 1' --data "$data" --small-images --resume stages2/latest.snapshot
refuse other-weights 'conv1.weight' --data "$data" --small-images --load stages2/best.snapshot
head -c 30000 stages2/latest.snapshot >damaged
refuse damaged-snapshot 'damaged' --data "$data" --resume damaged

# damage NAME TEXT COMMAND...: the digits with one thing wrong.
damage() {
  local name=$1 text=$2
  shift 2
  cp -r "$data" "data-$name"
  (cd "data-$name" && "$@")
  refuse "$name" "$text" --data "data-$name"
}
damage images-missing 'train-images-idx3-ubyte' rm train-images-idx3-ubyte
damage labels-missing 'train-labels-idx1-ubyte' rm train-labels-idx1-ubyte
damage test-missing 't10k-images-idx3-ubyte' rm t10k-images-idx3-ubyte
damage short 'train-images-idx3-ubyte' truncate -s 5000 train-images-idx3-ubyte
damage long 't10k-images-idx3-ubyte' truncate -s 900000 t10k-images-idx3-ubyte
damage empty 'train-labels-idx1-ubyte' truncate -s 0 train-labels-idx1-ubyte
damage foreign-labels 't10k-labels-idx1-ubyte' cp ../stages1.log t10k-labels-idx1-ubyte
damage swapped 'train-images-idx3-ubyte' cp train-labels-idx1-ubyte train-images-idx3-ubyte
damage too-high 'label' bash -c "printf '\\x0b' | dd of=train-labels-idx1-ubyte bs=1 seek=20 conv=notrunc status=none"

"$program" --help | grep -q -- '--samples INT.*=6000' || fail "--help lists no defaults"
echo "all passed"
