#!/usr/bin/env bash
# A training that is stopped and resumed at another balance and checkpoint mode ends with the weights of an uninterrupted
# one: resume_test.sh PROGRAM FOLDER PYTHON
source "$(dirname "${BASH_SOURCE[0]}")/program.sh"

# 28 images for training and 4 for validation.
common=(--samples 32 --validation 12.5 --epochs 10 --batch-size 4 --chunks 2 --depth 1 --channels 4 --scale 0.25 --clip 1
  --augment --size 96x64)
run whole

"$program" "${common[@]}" --output halves >first.log &
pid=$!
until [[ -e halves/history.csv && $(wc -l <halves/history.csv) -ge 3 ]]; do
  kill -0 $pid || fail "it ended before it was stopped"
  sleep 0.01
done
kill -TERM $pid
status=0
wait $pid || status=$?
((status == 128 + 15)) || fail "exit code $status after SIGTERM"
says first '--resume halves/latest'
run halves --stages 3 --checkpoint always --resume halves/latest
[[ $(wc -l <halves/history.csv) == 11 ]] || fail "the history has holes"
same whole halves

# Snapshots that do not fit.
run new --epochs 1 --resume auto
says new '^resume: new has no snapshot, so a new training begins$'
refuse model '--channels 4, not 5' --channels 5 --resume whole/latest
refuse missing 'no-such-file' --resume no-such-file
cp -r whole/latest half
for file in half/model-*; do truncate -s 900 "$file"; done
refuse half 'half' --resume half
rm -r halves/latest halves/best
cp -r half halves/latest
refuse halves 'halves/latest' --resume auto
echo "all passed"
