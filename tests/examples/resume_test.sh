#!/usr/bin/env bash
# A training that is stopped and goes on at another balance ends with the weights of one that was not:
# resume_test.sh PROGRAM FOLDER [PYTHON with torch]
set -euo pipefail
program=$1
work=$2
python=${3:-}
rm -rf "$work"
mkdir -p "$work"
cd "$work"
export OMP_NUM_THREADS=1 # as many threads at any number of stages

fail() {
  echo "FAILED: $*" >&2
  exit 1
}

flags=(--samples 30 --epochs 40 --batch-size 4 --chunks 2 --depth 1 --channels 4 --scale 0.25 --clip 1)
"$program" "${flags[@]}" --output whole >whole.log || fail "the uninterrupted run"

for signal in TERM INT; do
  rm -rf halves
  # A job in the background of a script ignores SIGINT from its start, and Ctrl-C would be no test.
  (trap - INT && exec "$program" "${flags[@]}" --output halves) >first.log &
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

  "$program" "${flags[@]}" --output halves --stages 3 --checkpoint always --resume halves/latest.snapshot >second.log ||
    fail "going on after SIG$signal"
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

# Weights alone; another batch size is another training; a text file is no snapshot.
"$program" "${flags[@]}" --output loaded --epochs 1 --load whole/best.snapshot >loaded.log || fail "--load"
awk -F, 'NR == 2 && $3 < 0.5 {exit 1}' loaded/history.csv || fail "--load has no effect"
refuse() {
  if "$program" "${flags[@]}" --output refused "${@:2}" >refused.log 2>&1; then fail "${*:2}"; fi
  grep -qF -- "$1" refused.log || { cat refused.log >&2 && fail "${*:2} does not say '$1'"; }
}
refuse '--batch-size 4, not 5' --batch-size 5 --resume whole/latest.snapshot
refuse 'whole.log' --resume whole.log
refuse 'no-such-file' --load no-such-file
refuse 'down1_conv1.weight' --channels 5 --load whole/best.snapshot
echo "all passed"
