#!/usr/bin/env bash
# A training that is stopped and resumed at another balance, checkpoint mode and number of chunks ends with the weights
# of an uninterrupted one: resume_test.sh PROGRAM FOLDER [PYTHON with torch]
source "$(dirname "${BASH_SOURCE[0]}")/program.sh"
python=${1:-}

# 28 images for training and 4 for validation. 2 chunks and 3 chunks cut mini-batches of 4 alike, into 2 and 2.
common=(--samples 32 --validation 12.5 --epochs 40 --batch-size 4 --chunks 2 --depth 1 --channels 4 --scale 0.25 --clip 1 --augment)
run whole

for signal in TERM INT; do
  rm -rf halves
  # A background job of a script starts with SIGINT ignored; `trap - INT` undoes that.
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
  grep -q -- '--resume halves/latest.snapshot' first.log || fail "it does not say how to continue"

  run halves --stages 3 --chunks 3 --checkpoint always --resume halves/latest.snapshot
  [[ $(wc -l <halves/history.csv) == 41 ]] || fail "the history has holes"
  diff <(cut -d, -f1-5 whole/history.csv) <(cut -d, -f1-5 halves/history.csv) || fail "other losses or scores"
  equal_weights whole halves
done

# More epochs than the first run had.
run five --learning-rate-schedule plateau --epochs 5
run three --learning-rate-schedule plateau --epochs 3
run three --learning-rate-schedule plateau --epochs 5 --resume three/latest.snapshot
diff <(column three 1-5) <(column five 1-5) || fail "further epochs have other losses or scores"
equal_weights three five
echo "all passed"
