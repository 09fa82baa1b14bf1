#!/usr/bin/env bash
# The MNIST program from end to end, on few and on damaged digits: mnist_test.sh PROGRAM FOLDER OTHER-PROGRAM
source "$(dirname "${BASH_SOURCE[0]}")/program.sh"
other=$1

common=(--epochs 2 --batch-size 10 --chunks 2)
cut=21,50
rate_column=5

for stages in 1 2 3; do
  run "stages$stages" --samples 60 --stages "$stages" --trace "trace$stages.json"
  written "stages$stages"
  rm "stages$stages"/*.snapshot
  grep -q '"traceEvents"' "trace$stages.json" || fail "trace of $stages stages"
  ! grep -q $'\r' "stages$stages.log" || fail "a progress bar in a file"
  [[ $(grep -c "^stage .* layers, .* parameters, on cpu" "stages$stages.log") == "$stages" ]] || fail "no plan"
  [[ $(column "stages$stages" 1) == $'1\n2' ]] || fail "history.csv of $stages stages"
  diff <(column "stages$stages" 1-5) <(column stages1 1-5) || fail "$stages stages train otherwise than 1"
done
grep -q '60 images to train, 10 to test' stages1.log || fail "--samples has no effect"

# The first 20 training images, for speed. The second number of an IDX file is its number of items.
data=few
cp -r stages1/digits "$data"
# first_20 FILE BYTES: BYTES follow that number.
first_20() {
  { head -c 4 "stages1/digits/$1" && printf '\0\0\0\x14' && tail -c +9 "stages1/digits/$1"; } >whole.idx
  head -c $((8 + $2)) whole.idx >"$data/$1"
}
first_20 train-images-idx3-ubyte $((8 + 20 * 28 * 28))
first_20 train-labels-idx1-ubyte 20

run base --data "$data"
check_terminal --data "$data"
check_training_flags base --data "$data"
try small --data "$data" --small-images --epochs 1 --stages 1
! near "$(column small 2)" "$(column base 2 | head -1)" 1e-4 || fail "--small-images has no effect"

refuse_value --samples 10 'at least 60'
refuse other-batch '--batch-size 10, not 5' --data "$data" --batch-size 5 --resume base/latest.snapshot
refuse other-model '--small-images 0, not 1' --data "$data" --small-images --resume base/latest.snapshot
refuse other-weights 'conv1.weight' --data "$data" --small-images --load base/best.snapshot
head -c 30000 base/latest.snapshot >damaged
refuse damaged-snapshot 'damaged' --data "$data" --resume damaged
"$other" --samples 4 --scale 0.25 --epochs 1 --depth 1 --channels 4 --output other >other.log || fail "the other program"
refuse other-program 'not a snapshot of this program' --data "$data" --resume other/latest.snapshot
refuse other-program-weights "'conv1.weight' is missing in the snapshot" --data "$data" --load other/latest.snapshot
check_overwriting base --data "$data"

# damage NAME TEXT COMMAND...: a copy of the digits with one defect.
damage() {
  local name=$1 text=$2
  shift 2
  cp -r "$data" "data-$name"
  (cd "data-$name" && "$@")
  refuse "$name" "$text" --data "data-$name"
}
damage images-missing 'train-images-idx3-ubyte: cannot be opened' rm train-images-idx3-ubyte
damage labels-missing 'train-labels-idx1-ubyte: cannot be opened' rm train-labels-idx1-ubyte
damage test-missing 't10k-images-idx3-ubyte: cannot be opened' rm t10k-images-idx3-ubyte
damage test-labels-missing 't10k-labels-idx1-ubyte: cannot be opened' rm t10k-labels-idx1-ubyte
damage compressed 'train-images-idx3-ubyte.gz exists; run gunzip' gzip train-images-idx3-ubyte
damage short 'train-images-idx3-ubyte: truncated' truncate -s 5000 train-images-idx3-ubyte
damage long 't10k-images-idx3-ubyte: too long' truncate -s 900000 t10k-images-idx3-ubyte
damage empty 'train-labels-idx1-ubyte: the file is empty' truncate -s 0 train-labels-idx1-ubyte
damage foreign-labels 't10k-labels-idx1-ubyte: not an IDX file of labels' cp ../stages1.log t10k-labels-idx1-ubyte
damage swapped 'train-images-idx3-ubyte: not an IDX file of images' cp train-labels-idx1-ubyte train-images-idx3-ubyte
damage other-count 'train-images-idx3-ubyte has 20 images' cp t10k-labels-idx1-ubyte train-labels-idx1-ubyte
too_high='printf "\x0b" | dd of=train-labels-idx1-ubyte bs=1 seek=20 conv=notrunc status=none'
damage too-high 'train-labels-idx1-ubyte: label 12 is 11' bash -c "$too_high"

check_help
echo "all passed"
