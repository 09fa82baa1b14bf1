#!/usr/bin/env bash
# The U-Net training program from end to end, on tiny and on damaged data: unet_test.sh PROGRAM FOLDER PYTHON
source "$(dirname "${BASH_SOURCE[0]}")/program.sh"

common=(-e 2 -b 4 --chunks 2 --depth 1 --channels 4 -s 0.25)

# Training does not depend on how the model is run.
run one --samples 12 --stages 1
data=one/synthetic_12_192x128_2
says one "^reached: val_dice .*, the best in epoch [12]$"
for file in history.csv epoch_001.png latest best; do
  [[ -s one/$file ]] || fail "no $file"
done
common+=(--data $data)
run three --stages 3
run cut --balance 5,18 --devices cpu,cpu --checkpoint never
for other in three cut; do same one $other; done
run brief -e 1
run auto --schedule auto -e 1

# What is printed.
says three '^plan: balance [0-9]*,[0-9]*,[0-9]*, 2 micro-batches, checkpoint except_last, schedule gpipe$'
says three '^stage 2: [0-9]* layers on worker 2, cpu$'
says three '^step: .*, bubble '
says three '^measured step: .*, peak memory per worker .*iB, .*iB, .*iB, without model and optimizer$'
says three '^predicted: .*, peak memory per worker .*iB, .*iB, .*iB$'
says cut '^stage 0: 5 layers'
"$python" - three.log <<'END' || fail "a wrong prediction without a reason"
import re, sys
log, units = open(sys.argv[1]).read(), {"s": 1, "ms": 1e-3, "µs": 1e-6, "us": 1e-6}
times = re.findall(r"(?m)^(?:measured step|predicted): (\S+) (\S+),", log)
measured, predicted = (float(number) * units[unit] for number, unit in times)
off = abs(measured / predicted - 1)
assert 0.04 < off < 0.06 or (off > 0.05) == ("\nthey differ: " in log), log
END

# Schedules that sum gradients in the same order train the same weights. 9 images for training: mini-batches of 8 and 1.
schedules=(-b 8 --chunks 4 -v 25 --balance 5,6,6,6)
run gpipe "${schedules[@]}"
run 1f1b "${schedules[@]}" --schedule 1f1b
run interleaved "${schedules[@]}" --schedule interleaved_1f1b --devices cpu,cpu --checkpoint always
same 1f1b interleaved
! (same gpipe 1f1b) >/dev/null 2>&1 || fail "--schedule has no effect"
says interleaved 'stage 3: 6 layers on worker 1, cpu$'
for stage in 0 1 2 3; do echo "$stage"F{0,1,2,3} "$stage"B{3,2,1,0}; done >lists
run listed "${schedules[@]}" --schedule @lists -v 33 -e 1

# Each flag has an effect on the one epoch of brief.
differs() { [[ $(column "$1" 2) != $(column brief 2) ]] || fail "$1 has no effect"; }
flag_has_effect() { run "${1// /-}" -e 1 --$1 && differs "${1// /-}"; }
for flag in augment amp; do flag_has_effect "$flag"; done
run clip --clip 0.01 # Adam hides it in the first steps
[[ $(column clip 2) != $(column one 2) ]] || fail "--clip has no effect"
run classes --data synthetic --samples 4 --size 80x48 -c 4
says classes 'at 20x12, 4 classes'
head -1 classes/history.csv | grep -q 'val_dice_3' || fail "no Dice for each class"

# An earlier training is only overwritten with --overwrite.
refuse one 'one holds an earlier training; give --resume one/latest'
echo mine | tee one/notes.txt >one/epoch_mine.png
run one -e 1 --overwrite
[[ $(column one 1) == 1 && ! -e one/epoch_002.png ]] || fail "--overwrite leaves the earlier training"
[[ $(cat one/{notes.txt,epoch_mine.png}) == $'mine\nmine' ]] || fail "--overwrite removes other files"

# Wrong flags.
refuse text "but is 'half'" --balance half,23
refuse both 'excludes' --balance 5,18 --stages 3
refuse device 'gpu' --devices gpu
refuse schedule 'never' --schedule never
"$program" --help | grep -q -- '--epochs INT.*=24' || fail "--help lists no defaults"

# Files that cannot be written.
status=0
(ulimit -f 2 -c 0 && exec "$program" "${common[@]}" --output limited >/dev/null 2>limited.err) || status=$?
((status == 1)) || fail "exit code $status with a limit of the file size"
grep -qE '^error: cannot write .*limited/.*File too large$' limited.err || { cat limited.err; fail "the limit is not named"; }
if "$program" "${common[@]}" --output said -e 1 >/dev/full 2>said.err; then fail "a full standard output"; fi
grep -qx 'error: cannot write to standard output' said.err || fail "the full standard output is not named"

# Damaged data.
damage not-an-image '0005.png: not a JPEG, PNG, GIF or TIFF' bash -c 'echo hello >imgs/0005.png'
damage other-size '0007' cp ../gpipe/epoch_001.png imgs/0007.png
refuse colour 'the colour 128,128,0 belongs to none of the 3 classes' --data classes/synthetic_4_80x48_4 --classes 3 -b 2
cp -r "$data" short
head -c 1500 "$data/imgs/0008.png" >short/imgs/0008.png
if "$program" "${common[@]}" --data short --output cut-short >short.log 2>&1; then fail "a truncated file is accepted"; fi
says short 'error: .*0008.png: '
echo "all passed"
