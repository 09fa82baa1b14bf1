#!/usr/bin/env bash
# A training that is stopped and goes on at another balance, checkpoint mode and chunk count ends with the weights of
# one that was not: resume_test.sh PROGRAM FOLDER [PYTHON with torch]
source "$(dirname "${BASH_SOURCE[0]}")/program.sh"
python=${1:-}

# 28 images to train and 4 to validate: mini-batches of 4, which 2 chunks and 3 chunks cut alike, into 2 and 2.
common=(--samples 32 --validation 12.5 --epochs 40 --batch-size 4 --chunks 2 --depth 1 --channels 4 --scale 0.25 --clip 1 --augment)
run whole

for signal in TERM INT; do
  rm -rf halves
  # A job in the background of a script ignores SIGINT from its start, and Ctrl-C would be no test.
  (trap - INT && exec "$program" "${common[@]}" --output halves) >first.log &
  pid=$!
  until [[ -e halves/history.csv && $(wc -l <halves/history.csv) -ge 4 ]]; do
    kill -0 $pid || fail "it ended before it was stopped"
    sleep 0.01
  done
  kill -$signal $pid
  status=0
  wait $pid || status=$?
  ((status == 128 + $(kill -l $signal))) || fail "exit code $status after SIG$signal"
  grep -q -- '--resume halves/latest.snapshot' first.log || fail "it does not say how to go on"

  run halves --stages 3 --chunks 3 --checkpoint always --resume halves/latest.snapshot
  [[ $(wc -l <halves/history.csv) == 41 ]] || fail "the history has holes"
  diff <(cut -d, -f1-5 whole/history.csv) <(cut -d, -f1-5 halves/history.csv) || fail "other losses or scores"
  [[ -z $python ]] || "$python" - <<'END' || fail "other weights"
import torch
whole, halves = (torch.load(f"{run}/latest.snapshot", weights_only=True)["model"] for run in ("whole", "halves"))
assert whole.keys() == halves.keys() and len(whole) > 20
for key in whole:
    assert torch.equal(whole[key], halves[key]), key
END
done
echo "all passed"
