#!/usr/bin/env bash
# The MNIST program from end to end, on few and on damaged digits: mnist_test.sh PROGRAM FOLDER
set -euo pipefail
program=$1
work=$2
rm -rf "$work"
mkdir -p "$work"
cd "$work"

fail() {
  echo "FAILED: $*" >&2
  exit 1
}

tiny=(--epochs 1 --batch-size 20 --chunks 2)
for stages in 1 2 3; do
  "$program" "${tiny[@]}" --samples 120 --stages "$stages" --output "stages$stages" >"stages$stages.log" 2>&1 ||
    { cat "stages$stages.log" >&2 && fail "$stages stages"; }
  for file in $(sed -n '/^wrote$/,$p' "stages$stages.log" | tail -n +2); do
    [[ -e $file ]] || fail "$file was named but not written"
  done
  grep -q 'accuracy' "stages$stages/history.csv" || fail "no accuracy"
done
"$program" "${tiny[@]}" --data stages1/digits --small-images --schedule plateau --output small >small.log || fail "flags"

refuse() {
  if "$program" "${tiny[@]}" --output refused "${@:2}" >refused.log 2>&1; then fail "${*:2}"; fi
  grep -qF -- "$1" refused.log || { cat refused.log >&2 && fail "${*:2} does not say '$1'"; }
}
refuse 'nowhere' --data nowhere
refuse 'sums to' --data stages1/digits --balance 1,2
cp -r stages1/digits short
truncate -s 5000 short/train-images-idx3-ubyte
refuse 'train-images-idx3-ubyte' --data short
cp -r stages1/digits other
cp stages1.log other/t10k-labels-idx1-ubyte
refuse 't10k-labels-idx1-ubyte' --data other
"$program" --help | grep -q -- '--samples INT.*=6000' || fail "--help lists no defaults"
echo "all passed"
