#!/usr/bin/env bash
# The training programs in several processes, which torchrun starts, write what they write in one:
# ranks_test.sh PROGRAM FOLDER MNIST_PROGRAM PYTHON
here=$(dirname "$(realpath "${BASH_SOURCE[0]}")")
source "$here/program.sh"
mnist=$1
python=$2
source "$here/processes.sh"

# 28 images for training and 4 for validation.
common=(--samples 32 --validation 12.5 --epochs 2 --batch-size 4 --chunks 2 --depth 1 --channels 4 --scale 0.25 --clip 0.5)
run one --schedule 1f1b
together two 2 --schedule 1f1b --trace two/trace.json
equal_files one two
diff <(column one 1-5) <(column two 1-5) || fail "other losses or scores"
written two
[[ $(grep -c '^epoch 1/2' two.log) == 1 ]] || fail "progress is printed twice"
grep -q '^stage 1: .* on rank 1' two.log || fail "the stages do not show their ranks"
[[ $(ls two/events.out.tfevents.*.gpipe | wc -l) == 1 ]] || fail "there are several event files"
for picture in one/epoch_*.png; do cmp "$picture" "two/${picture#one/}"; done
# All ranks are in the trace, one after the other: each runs 5 actions.
"$python" - two/trace.json <<'END' || fail "the trace lacks a rank"
import json, sys
slices = [event for event in json.load(open(sys.argv[1]))["traceEvents"] if event["ph"] == "X"]
slices.sort(key=lambda event: event["ts"])
assert len(slices) == 10 and {event["tid"] for event in slices} == {0, 1}
assert slices[0]["args"]["stage"] == slices[-1]["args"]["stage"] == 0
END

# The same program elsewhere: with variables that torchrun also sets, but without torchrun.
WORLD_SIZE=2 RANK=1 run stray --schedule 1f1b
equal_files one stray

# Stopped by the terminal, which signals to all processes, and resumed in one process; by a signal to torchrun, which passes it
# on, or to one rank, and resumed in three.
common+=(--epochs 12)
run whole --stages 3
for how in terminal launcher rank; do
  rm -rf parts
  # A group of processes of its own. A background job of a script starts with SIGINT ignored; `trap - INT` undoes that.
  (trap - INT && exec setsid "$python" -m torch.distributed.run --no-python --nproc-per-node 2 \
    --master-addr 127.0.0.1 --master-port "$(free_port)" "$program" "${common[@]}" --stages 3 --output parts) \
    >parts.log 2>&1 &
  group=$!
  until [[ -e parts/history.csv && $(wc -l <parts/history.csv) -ge 4 ]]; do
    kill -0 $group || { cat parts.log >&2; fail "it ended before it was stopped"; }
    sleep 0.01
  done
  case $how in
    terminal) kill -INT -- -$group ;;
    launcher) kill -TERM $group ;;
    rank)
      for process in $(pgrep -P $group); do
        ! tr '\0' '\n' <"/proc/$process/environ" | grep -qx RANK=1 || kill -TERM "$process"
      done
      ;;
  esac
  ! wait $group || fail "a stopped training succeeds"
  grep -q -- '--resume parts/latest.snapshot' parts.log || { cat parts.log >&2; fail "it does not say how to continue"; }
  if [[ $how == terminal ]]; then
    run parts --stages 3 --resume auto
  else
    [[ $how == launcher ]] || grep -q 'exitcode *: 143' parts.log || { cat parts.log >&2; fail "another exit code than that of SIGTERM"; }
    together parts 3 --stages 3 --resume auto
  fi
  [[ $(wc -l <parts/history.csv) == 13 ]] || fail "the history has holes"
  equal_files whole parts
done

# An error of one rank ends all.
if (torchrun 2 "$program" "${common[@]}" --output /proc/output) >error.log 2>&1; then fail "an error is no error"; fi
grep -q 'error: cannot create the folder /proc/output' error.log || fail "the error of rank 0 is not printed"
grep -q 'error: .* rank 0 ' error.log || { cat error.log >&2; fail "rank 1 does not name the error"; }
if (torchrun 3 "$program" "${common[@]}" --output few) >error.log 2>&1; then fail "too few stages are accepted"; fi
grep -q 'the pipeline has 2 workers, but there are 3 processes' error.log || fail "too few stages are not told"
[[ ! -e few ]] || fail "a refused run writes"

program=$mnist
common=(--samples 60 --epochs 1 --batch-size 10 --chunks 2)
run one_mnist
together two_mnist 2
equal_files one_mnist two_mnist
echo "all passed"
