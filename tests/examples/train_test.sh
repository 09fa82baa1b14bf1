#!/usr/bin/env bash
# The U-Net training program from end to end, on tiny and on damaged data: train_test.sh PROGRAM FOLDER
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

tiny=(--epochs 2 --batch-size 4 --chunks 2 --depth 1 --channels 4)

# train NAME FLAG...: must succeed.
train() {
  local name=$1
  shift
  "$program" "${tiny[@]}" --output "$name" "$@" >"$name.log" 2>&1 || { cat "$name.log" >&2 && fail "$name"; }
}

# refuse NAME TEXT FLAG...: must end with an error that contains TEXT, before any training.
refuse() {
  local name=$1 text=$2
  shift 2
  if "$program" "${tiny[@]}" --output "$name" "$@" >"$name.log" 2>"$name.err"; then fail "$name was accepted"; fi
  grep -qF -- "$text" "$name.err" || { cat "$name.err" >&2 && fail "$name does not say '$text'"; }
  ! grep -q '^epoch 1/' "$name.log" || fail "$name trained before it failed"
}

# The same training whatever the number of stages; each file that it names is there.
for stages in 1 2 3; do
  train "stages$stages" --data synthetic --samples 12 --scale 0.25 --stages "$stages" --trace "trace$stages.json"
  for file in $(sed -n '/^wrote$/,$p' "stages$stages.log" | tail -n +2); do
    [[ -e $file ]] || fail "$file was named but not written"
  done
  [[ $(wc -l <"stages$stages/history.csv") == 3 ]] || fail "history.csv of $stages stages"
  grep -q '"traceEvents"' "trace$stages.json" || fail "trace of $stages stages"
  ! grep -q $'\r' "stages$stages.log" || fail "a progress bar in a file"
  awk -F, '{printf "%s %.4f %.4f\n", $1, $2, $3}' "stages$stages/history.csv" >"losses$stages"
done
for stages in 2 3; do
  paste losses1 "losses$stages" | awk '{for (i = 2; i <= 3; ++i) {d = $i - $(i + 3); if (d * d > 1e-4) exit 1}}' ||
    fail "$stages stages train otherwise than 1"
done

# Files that were already there, PNG instead of JPEG and GIF, every checkpoint mode, a given cut, uneven batches.
data=stages1/synthetic_12_192x128_2
train again --data "$data" --scale 0.25 --checkpoint always --balance 5,18 --chunks 3 --validation 25
train plain --data "$data" --scale 0.25 --checkpoint never --devices cpu,cpu --workers 3 --seed 5 --batch-size 5

refuse no-data 'no-such-folder' --data no-such-folder
refuse cut 'sums to 3' --data "$data" --balance 1,2
refuse cut-zero '--balance' --data "$data" --balance 0,23
refuse stages-and-cut '--stages is 3' --data "$data" --balance 5,18 --stages 3
refuse too-many-stages "23 layers" --data "$data" --stages 24
refuse device "'gpu' is no device" --data "$data" --devices gpu
refuse device-missing 'cuda:63' --data "$data" --devices cpu,cuda:63
refuse device-few '--devices: has 2 for 3 stages' --data "$data" --stages 3 --devices cpu,cpu
refuse trace-folder 'is a directory' --data "$data" --trace .
refuse mode '--checkpoint' --data "$data" --checkpoint sometimes
refuse scale '--scale' --data "$data" --scale 2
refuse flag '--no-such-flag' --data "$data" --no-such-flag
touch file
if "$program" "${tiny[@]}" --data "$data" --output file/output >unwritable.log 2>&1; then fail "unwritable output"; fi
grep -q 'file' unwritable.log || fail "unwritable output is not named"

# damage NAME TEXT COMMAND...: the data set with one thing wrong.
damage() {
  local name=$1 text=$2
  shift 2
  cp -r "$data" "data-$name"
  (cd "data-$name" && "$@")
  refuse "$name" "$text" --data "data-$name" --scale 0.25
}
damage mask-missing '0003' rm masks/0003_mask.gif
damage image-missing '0004' rm imgs/0004.jpg
damage not-an-image '0005.jpg' bash -c 'echo hello >imgs/0005.jpg'
damage empty-file '0006_mask.gif' bash -c ': >masks/0006_mask.gif'
damage no-folder 'masks' rm -r masks
damage other-size '0007' cp ../stages1/epoch_001.png imgs/0007.jpg

# A file cut short behind its header shows when it is decoded.
cp -r "$data" data-short
head -c 1500 "$data/imgs/0008.jpg" >data-short/imgs/0008.jpg
if "$program" "${tiny[@]}" --data data-short --scale 0.25 --output short >short.log 2>&1; then fail "a truncated JPEG"; fi
grep -q 'error: .*0008.jpg' short.log || { cat short.log >&2 && fail "a truncated JPEG is not named"; }

# Defaults are listed.
"$program" --help | grep -q -- '--chunks INT.*=2' || fail "--help lists no defaults"
echo "all passed"
