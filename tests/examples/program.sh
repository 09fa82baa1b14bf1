# Sourced by the tests of programs: PROGRAM FOLDER PYTHON [argument...]. Empties the folder and changes into it. The tests call:
#   fail TEXT...               ends the test
#   run NAME FLAG...           runs the program with `common` and these flags; it must succeed. Its output is NAME.log
#   says NAME TEXT             NAME.log must have a line with this extended regular expression
#   refuse NAME TEXT FLAG...   the program must fail with one line of error that contains TEXT, before any training
#   await_history NAME LINES PROCESS LOG
#                              waits until the process has written so many lines of NAME/history.csv
#   column NAME LIST           prints columns of NAME/history.csv, such as 2 or 1-5, without their names
#   same NAME NAME             two runs must have the same histories, except images/s, and the same bits in the latest snapshot
#   damage NAME TEXT COMMAND...
#                              a copy of the folder $data, changed by the command, must be refused
#   torchrun PROCESSES FLAG... becomes torchrun, which runs the program
#   together NAME PROCESSES FLAG...
#                              as run, in several processes, with what torchrun sets
set -euo pipefail
export OMP_NUM_THREADS=1 # the same number of threads at any number of stages, so that sums are the same
program=$1
work=$2
python=$3
shift 3
rm -rf "$work"
mkdir -p "$work"
cd "$work"
common=()

fail() {
  echo "FAILED: $*" >&2
  exit 1
}

run() {
  local name=$1
  shift
  "$program" "${common[@]}" --output "$name" "$@" >"$name.log" 2>&1 || { cat "$name.log" >&2; fail "$name"; }
}

says() { grep -qE -- "$2" "$1.log" || { cat "$1.log" >&2; fail "$1 does not say '$2'"; }; }

refuse() {
  local name=$1 text=$2
  shift 2
  if "$program" "${common[@]}" --output "$name" "$@" >"$name.log" 2>"$name.err"; then fail "$name was accepted"; fi
  grep -qF -- "$text" "$name.err" || { cat "$name.err" >&2; fail "$name does not say '$text'"; }
  [[ $(wc -l <"$name.err") == 1 ]] || { cat "$name.err" >&2; fail "$name says more than a line"; }
  ! grep -q '^epoch 1/' "$name.log" || fail "$name trained before it failed"
}

await_history() {
  until [[ -e $1/history.csv && $(wc -l <"$1/history.csv") -ge $2 ]]; do
    kill -0 "$3" || { cat "$4" >&2; fail "it ended before it was stopped"; }
    sleep 0.01
  done
}

column() { tail -n +2 "$1/history.csv" | cut -d, -f"$2"; }

same() {
  diff <(sed 's/,[^,]*$//' "$1/history.csv") <(sed 's/,[^,]*$//' "$2/history.csv") || fail "$* have other losses or scores"
  "$python" - "$@" <<'END' || fail "other snapshots: $*"
import json, sys

def entries(folder):
    content = json.load(open(f"{folder}/snapshot.json"))
    del content["crc32"]
    lines = content["extra"]["history"].splitlines()
    content["extra"]["history"] = [line.rpartition(",")[0] for line in lines]  # without images/s
    content["random"] = content["random"][0]
    for group in content["optimizer"]["param_groups"]:
        group["params"].sort()
    for file in content.pop("files"):
        data = open(f"{folder}/{file}", "rb").read()
        end = 8 + int.from_bytes(data[:8], "little")
        for name, tensor in json.loads(data[8:end]).items():
            begin, stop = tensor.get("data_offsets", (0, 0))
            content[name] = data[end + begin : end + stop]
    return content

one, other = (entries(f"{run}/latest") for run in sys.argv[1:])
assert one.keys() == other.keys() and len(one) > 20, (one.keys(), other.keys())
for name in one:
    assert one[name] == other[name], name
END
}

damage() {
  local name=$1 text=$2
  shift 2
  cp -r "$data" "data-$name"
  (cd "data-$name" && "$@")
  refuse "$name" "$text" --data "data-$name"
}

free_port() { "$python" -c 'import socket; s = socket.socket(); s.bind(("127.0.0.1", 0)); print(s.getsockname()[1])'; }

torchrun() {
  local processes=$1
  shift
  exec "$python" -m torch.distributed.run --no-python --nproc-per-node "$processes" --master-addr 127.0.0.1 \
    --master-port "$(free_port)" ${restarts:+--max-restarts "$restarts"} "$program" "${common[@]}" "$@"
}

together() {
  local name=$1 processes=$2 port rank ranks=()
  shift 2
  port=$(free_port)
  for ((rank = 0; rank < processes; ++rank)); do
    TORCHELASTIC_RUN_ID=none MASTER_ADDR=127.0.0.1 MASTER_PORT=$port WORLD_SIZE=$processes RANK=$rank LOCAL_RANK=$rank \
      "$program" "${common[@]}" --output "$name" "$@" >>"$name.log" 2>&1 &
    ranks+=($!)
  done
  for rank in "${ranks[@]}"; do wait "$rank" || { cat "$name.log" >&2; fail "$name"; }; done
}
