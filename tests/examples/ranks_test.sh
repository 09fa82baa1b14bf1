#!/usr/bin/env bash
# The training programs in several processes, which torchrun starts, write what they write in one:
# ranks_test.sh PROGRAM FOLDER MNIST_PROGRAM PYTHON
source "$(dirname "${BASH_SOURCE[0]}")/program.sh"
mnist=$1
python=$2
export MKL_CBWR=AUTO,STRICT # the bits of products must not depend on the alignment of memory

free_port() {
  "$python" -c 'import socket; s = socket.socket(); s.bind(("127.0.0.1", 0)); print(s.getsockname()[1])'
}

# torchrun PROCESSES PROGRAM FLAG...
torchrun() {
  local processes=$1
  shift
  exec timeout 120 "$python" -m torch.distributed.run --no-python --nproc-per-node "$processes" \
    --master-addr 127.0.0.1 --master-port "$(free_port)" "$@"
}

# together NAME PROCESSES FLAG...: as run, in several processes.
together() {
  local name=$1 processes=$2
  shift 2
  (torchrun "$processes" "$program" "${common[@]}" --output "$name" "$@") >"$name.log" 2>&1 ||
    { cat "$name.log" >&2; fail "$name"; }
}

# The snapshots must have the same bytes, except for the measured images per second.
equal_files() {
  "$python" - "$@" <<'END_OF_PYTHON' || fail "other files: $*"
import io, pickle, struct, sys, zipfile

class WithoutTensors(pickle.Unpickler):
    def persistent_load(self, _):
        return None

    def find_class(self, *_):
        return lambda *_: None

def records(path):
    with zipfile.ZipFile(path) as file:
        records = {name.split("/", 1)[1]: file.read(name) for name in file.namelist()}
    del records[".data/serialization_id"]  # follows from the others
    for time in WithoutTensors(io.BytesIO(records["data.pkl"])).load()["history"]["images_per_second"]:
        records["data.pkl"] = records["data.pkl"].replace(struct.pack(">d", time), bytes(8))
    return records

one, other = (records(f"{run}/latest.snapshot") for run in sys.argv[1:])
assert list(one) == list(other) and len(one) > 20
for name in one:
    assert one[name] == other[name], name
END_OF_PYTHON
}

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

# Stopped by the terminal, which signals to all processes, and resumed in one process; by a signal to one rank, and resumed
# in three.
common+=(--epochs 12)
run whole --stages 3
for how in terminal rank; do
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
  if [[ $how == terminal ]]; then
    kill -INT -- -$group
  else
    for process in $(pgrep -P $group); do
      ! tr '\0' '\n' <"/proc/$process/environ" | grep -qx RANK=1 || kill -TERM "$process"
    done
  fi
  ! wait $group || fail "a stopped training succeeds"
  grep -q -- '--resume parts/latest.snapshot' parts.log || { cat parts.log >&2; fail "it does not say how to continue"; }
  if [[ $how == terminal ]]; then
    run parts --stages 3 --resume parts/latest.snapshot
  else
    grep -q 'exitcode *: 143' parts.log || { cat parts.log >&2; fail "another exit code than that of SIGTERM"; }
    together parts 3 --stages 3 --resume parts/latest.snapshot
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
