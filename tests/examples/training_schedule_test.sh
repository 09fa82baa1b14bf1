#!/usr/bin/env bash
# Schedules that sum gradients in the same order train the same weights:
# training_schedule_test.sh PROGRAM FOLDER [PYTHON with torch]
source "$(dirname "${BASH_SOURCE[0]}")/program.sh"
python=${1:-}

# 15 images for training: mini-batches of 8 and 7 images, in micro-batches of 2, 2, 2 and 2, and of 2, 2, 2 and 1.
common=(--samples 20 --validation 25 --epochs 2 --batch-size 8 --chunks 4 --depth 1 --channels 4 --scale 0.25)
common+=(--balance 5,6,6,6 --learning-rate-schedule plateau)

# equal A B: compares the histories, except images/s, and the weights of two runs.
equal() {
  [[ $(wc -l <"$1/history.csv") == 3 ]] || fail "history.csv of $1"
  diff <(column "$1" 1-6) <(column "$2" 1-6) || fail "$1 and $2 have other losses or scores"
  equal_weights "$@"
}

# These sum from the last micro-batch to the first.
run gpipe
run gpipe-2 --stages-per-worker 2 --balance by-time --stages 4
run looped --schedule looped_bfs --stages-per-worker 2
for stage in 0 1 2 3; do echo "$stage"F{0,1,2,3} "$stage"B{3,2,1,0}; done >lists
run listed --schedule @lists --epochs 1
run listed --schedule looped_bfs --stages-per-worker 2 --resume listed/latest.snapshot
for other in gpipe-2 looped listed; do equal gpipe $other; done

# These sum from the first to the last.
run 1f1b --schedule 1f1b
run interleaved --schedule interleaved_1f1b --stages-per-worker 2 --checkpoint always
equal 1f1b interleaved
[[ -z $python ]] || ! (equal_weights gpipe 1f1b) 2>/dev/null || fail "--schedule has no effect"

# A schedule from a file has one number of stages and of micro-batches.
refuse stages "'lists' has 4 stages, but balance has 2" --schedule @lists --balance 11,12
refuse placed '--stages-per-worker must be 1 with a schedule from a file, which places the stages, but is 2' \
  --schedule @lists --stages-per-worker 2
refuse chunks "'lists' has 4 micro-batches, but the mini-batch is cut into 2" --schedule @lists --chunks 2
[[ ! -s chunks.log ]] || fail "a schedule for other micro-batches is refused late"
refuse rest "the last mini-batch of an epoch has 1 of 8 images: " --schedule @lists --validation 15
! grep -q '^plan' rest.log || fail "a schedule that does not fit the last mini-batch is refused late"

# What is printed.
grep -q '^stage 3: 6 layers, .* parameters, on cpu; predicted: ' gpipe.log || fail "stage 3 of 4 workers"
grep -q '^training: .*, schedule gpipe, ' gpipe.log || fail "the schedule is not printed"
for stage in 0 1 2 3; do
  grep -q "^stage $stage: [56] layers, .* parameters, on worker $((stage % 2)), cpu; predicted: .*s per micro-batch$" \
    looped.log || fail "stage $stage is not on worker $((stage % 2))"
done
grep -q '^plan: balance .* (by-time), ' gpipe-2.log || fail "--balance by-time with 2 stages per worker"
for name in gpipe-2 looped listed 1f1b interleaved; do
  grep -q '^predicted step: .*, bubble ' $name.log || fail "no prediction for $name"
done
grep -qE '^predicted memory per worker: [^,]*iB, [^,]*iB$' looped.log || fail "no prediction of the memory of 2 workers"
! grep -q '^predicted memory per worker' 1f1b.log || fail "two predictions of the memory of a stage"
grep -qE '^peak memory per worker, [^:]*: [^,]*iB, [^,]*iB; predicted: [^,]*iB, [^,]*iB$' looped.log ||
  fail "peak memory of 2 workers"
try auto --balance auto --schedule interleaved_1f1b --stages-per-worker 2 --stages 4 --epochs 1
grep -q '^plan: .* (auto: the fastest of [0-9]* plans)' auto.log || fail "--balance auto with 2 stages per worker"
echo "all passed"
