#!/usr/bin/env bash
# The training programs with --replicas: replicas_test.sh PROGRAM FOLDER MNIST_PROGRAM PYTHON
here=$(dirname "$(realpath "${BASH_SOURCE[0]}")")
source "$here/program.sh"
mnist=$1
python=$2
source "$here/processes.sh"

# The mini-batch of a run with one pipeline has as many micro-batches as those of all replicas together. 29 images for training
# and 5 for validation: the last mini-batch has one image, so that a replica has none.
common=(--samples 34 --validation 16 --epochs 4 --learning-rate 0.02 --batch-size 4 --depth 1 --channels 4 --scale 0.25 --clip 0.5
  --learning-rate-schedule plateau)
run one --stages 1 --chunks 2
together two 2 --stages 1 --chunks 1 --replicas 2
close one two
# The picture has the first images, of all replicas. A PNG begins with its size.
for picture in one/epoch_*.png; do
  cmp <(head -c 24 "$picture") <(head -c 24 "two/${picture#one/}") || fail "another picture"
done
together four 4 --stages 2 --chunks 1 --replicas 2 --trace four/trace.json
close one four
written four
grep -q '^training: 4 epochs, mini-batches of 4 as 1 micro-batches on each of 2 replicas' four.log ||
  { cat four.log >&2; fail "the replicas are not told"; }
"$python" - four/trace.json <<'END' || fail "the trace lacks a replica"
import json, sys
slices = [event for event in json.load(open(sys.argv[1]))["traceEvents"] if event["ph"] == "X"]
assert {event["tid"] for event in slices} == {0, 1, 2, 3}
END
# Equal in each run, bit by bit.
together again 4 --stages 2 --chunks 1 --replicas 2
equal_files four again

# A snapshot is continued by any number of replicas, and by none.
together other 2 --stages 1 --chunks 1 --replicas 2 --epochs 2
run other --stages 1 --chunks 2 --resume auto
close one other

# Stopped by a signal to one rank, mostly during a validation.
common+=(--samples 32 --validation 75 --epochs 12)
together whole 2 --stages 1 --chunks 1 --replicas 2
(torchrun 2 "$program" "${common[@]}" --output parts --stages 1 --chunks 1 --replicas 2) >parts.log 2>&1 &
launcher=$!
until [[ -e parts/history.csv && $(wc -l <parts/history.csv) -ge 4 ]]; do
  kill -0 $launcher || { cat parts.log >&2; fail "it ended before it was stopped"; }
  sleep 0.01
done
pkill -TERM -o -P $launcher
! wait $launcher || fail "a stopped training succeeds"
grep -q -- '--resume parts/latest.snapshot' parts.log || { cat parts.log >&2; fail "it does not say how to continue"; }
together parts 2 --stages 1 --chunks 1 --replicas 2 --resume auto
equal_files whole parts

if ("$program" "${common[@]}" --output alone --replicas 2) >error.log 2>&1; then fail "replicas in one process are accepted"; fi
grep -q 'error: --replicas is 2, but there is one process' error.log || fail "one process is not told"
if (torchrun 3 "$program" "${common[@]}" --output odd --replicas 2) >error.log 2>&1; then fail "3 processes make 2 replicas"; fi
grep -q 'must divide the number of ranks, 3' error.log || { cat error.log >&2; fail "a wrong number of processes is not told"; }

program=$mnist
common=(--samples 60 --epochs 2 --batch-size 10)
run one_mnist --stages 1 --chunks 2
together two_mnist 2 --stages 1 --chunks 1 --replicas 2
close one_mnist two_mnist
echo "all passed"
