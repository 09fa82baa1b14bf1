#!/usr/bin/env bash
# The U-Net training program from end to end, on tiny and on damaged data: train_test.sh PROGRAM FOLDER
source "$(dirname "${BASH_SOURCE[0]}")/program.sh"

common=(-e 2 -b 4 --chunks 2 --depth 1 --channels 4)
cut=5,18
rate_column=6
tiny=(--data synthetic --samples 12 -s 0.25)

# Training does not depend on the number of stages. All listed files exist.
for stages in 1 2 3; do
  run "stages$stages" "${tiny[@]}" --stages "$stages" --trace "trace$stages.json"
  written "stages$stages"
  [[ $(column "stages$stages" 1) == $'1\n2' ]] || fail "history.csv of $stages stages"
  grep -q '"traceEvents"' "trace$stages.json" || fail "trace of $stages stages"
  ! grep -q $'\r' "stages$stages.log" || fail "a progress bar in a file"
  [[ $(grep -c "^stage .* layers, .* parameters, on cpu" "stages$stages.log") == "$stages" ]] || fail "no plan"
  diff <(column "stages$stages" 1-6) <(column stages1 1-6) || fail "$stages stages train otherwise than 1"
done
check_terminal "${tiny[@]}"
run reuse "${tiny[@]}" --reuse-memory
diff <(column reuse 1-6) <(column stages1 1-6) || fail "--reuse-memory changes what is learnt"

! grep -q '^22 *head ' stages2.log || fail "a profile without --profile"
grep -q '^plan: balance [0-9]*,[0-9]* (by-time), 2 micro-batches, checkpoint except_last, schedule gpipe$' stages2.log || fail "no plan"
grep -q '^stage 1: .*; predicted: .*s per micro-batch, .*iB$' stages2.log || fail "no prediction per stage"
grep -q '^predicted step: .*, bubble ' stages2.log || fail "no prediction"
grep -q '^measured step, forward and backward: .*; predicted: ' stages2.log || fail "no comparison of times"
grep -q '^peak memory per worker, .*iB, .*iB; predicted: .*iB, .*iB$' stages2.log || fail "no comparison of bytes"
try profile "${tiny[@]}" --epochs 1 --profile
grep -q '^22 *head ' profile.log || fail "--profile prints no profile"
for how in by-size auto; do
  try $how "${tiny[@]}" --balance $how --profile
  [[ $(grep -c "^stage .* layers, .* parameters, on cpu" $how.log) == 2 ]] || fail "--balance $how"
done
grep -q '^plans compared' auto.log || fail "--balance auto does not print the plans that it compared"
grep -q '^plan: .* (auto: the fastest of [0-9]* plans)' auto.log || fail "--balance auto does not print its choice"
diff <(column by-size 1-6) <(column stages1 1-6) || fail "--balance by-size changes what is learnt"

# Existing files, another checkpoint mode, uneven batches.
data=stages1/synthetic_12_192x128_2
run again --data "$data" --scale 0.25 --checkpoint always --balance 5,18 --chunks 3 -v 25
grep -q '9 images to train, 3 to validate, at 48x32, 2 classes' again.log || fail "--validation or --scale"
run uneven --data "$data" --scale 0.25 --batch-size 5
check_training_flags stages2 --data "$data" --scale 0.25
check_plateau 40 --data "$data" --scale 0.25

run one-stage --data "$data" --scale 0.25 --stages 1
run by-itself --data "$data" --scale 0.25 --stages 1 --workers 0
diff <(column one-stage 2-5) <(column by-itself 2-5) || fail "--workers changes what is learnt"
run augment --data "$data" --scale 0.25 --augment
! near "$(column augment 2)" "$(column stages2 2)" 1e-4 || fail "--augment has no effect"
run bilinear --data "$data" --scale 0.25 --bilinear
grep -q '24 layers' bilinear.log || fail "--bilinear has no effect"
run sizes --samples 4 --size 80x48 --scale 1 --depth 2 --channels 3
grep -q 'at 80x48' sizes.log || fail "--size has no effect"
run whole-size --samples 3 --size 1918x1280 -s 0.05 --augment -e 1 -b 2
grep -q 'at 96x64' whole-size.log || fail "files of 1918x1280"
run classes "${tiny[@]}" -c 4
head -1 classes/history.csv | grep -q 'val_dice_3' || fail "no Dice for each class"
grep -q '4 classes' classes.log || fail "--classes has no effect"

refuse_training_flags "$data" 23
refuse single-image 'choose --batch-size and --chunks' --samples 4 --size 16x16 --scale 0.125 -b 2 --chunks 2
refuse_value --scale 2 'at most 1'
refuse_value --scale 0 'at least 0.001'
refuse_value --validation 100 'at most 99'
refuse_value --validation 0 'at least 0.01'
for flag in --scale --validation; do refuse_value $flag "'nan'" 'a finite number'; done
refuse_value --classes 1 'at least 2'
refuse_value --workers -1 'at least 0'
refuse_value --samples 1 'at least 2'
refuse_value --depth 17 'at most 16'
refuse_value --channels 0 'at least 1'
refuse_value --size "'big'" 'a size such as 192x128'
refuse size-small '8x8' --size 8x8
refuse scene-classes '2 to 4 classes' --classes 5
refuse other-batch '--batch-size 4, not 5' --data "$data" --scale 0.25 --batch-size 5 --resume stages2/latest.snapshot
refuse other-model '--channels 4, not 5' --data "$data" --scale 0.25 --channels 5 --resume stages2/latest.snapshot
refuse other-weights 'down1_conv1.weight' --data "$data" --scale 0.25 --channels 5 --load stages2/best.snapshot
head -c 3000 stages2/latest.snapshot >damaged
refuse damaged-snapshot 'damaged' --data "$data" --scale 0.25 --resume damaged
refuse ended 'has 2 epochs already, and --epochs is 2: nothing is left to train' \
  --data "$data" --scale 0.25 --resume stages2/latest.snapshot

# With more epochs, the learning rate follows the curve of all of them.
run further --data "$data" --scale 0.25 --epochs 3 --resume stages2/latest.snapshot
grep -q '^note: the learning rate now falls towards 0 after epoch 3; .* --epochs 2$' further.log || fail "no note"
diff <(column further 1-6 | head -2) <(column stages2 1-6) || fail "--resume changes the history"
[[ $(column further 6 | tail -1) == 0.00125 ]] || fail "not the rate of epoch 3 of 3"

check_write_errors --data "$data" --scale 0.25
check_overwriting stages2 --data "$data" --scale 0.25

# damage NAME TEXT COMMAND...: a copy of the data with one defect.
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

# A file that is truncated after its header fails when it is decoded.
cp -r "$data" data-short
head -c 1500 "$data/imgs/0008.jpg" >data-short/imgs/0008.jpg
if "$program" "${common[@]}" --data data-short --scale 0.25 --output short >short.log 2>&1; then fail "a truncated JPEG is accepted"; fi
grep -q 'error: .*0008.jpg' short.log || { cat short.log >&2; fail "a truncated JPEG is not named"; }

# A mask with colours that are not those of classes.
if "$program" "${common[@]}" --data classes/synthetic_12_192x128_4 --classes 3 --output colour >colour.log 2>&1; then
  fail "a mask with too many colours is accepted"
fi
grep -q 'error: .*_mask.png: the colour 128,128,0 is not that of any of 3 classes' colour.log || fail "the colour is not named"

check_help
echo "all passed"
