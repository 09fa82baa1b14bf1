# Sourced by the tests of programs in several processes, after program.sh. `python` names a Python with torch. The tests call:
#   free_port                          prints a free port
#   torchrun PROCESSES [FLAG...] PROGRAM FLAG...
#                                      becomes torchrun
#   together NAME PROCESSES FLAG...    as run, in several processes
#   equal_files A B                    compares the final snapshots of two runs
#   close A B                          compares the losses and scores of two runs, up to rounding

free_port() {
  "$python" -c 'import socket; s = socket.socket(); s.bind(("127.0.0.1", 0)); print(s.getsockname()[1])'
}

torchrun() {
  local processes=$1
  shift
  exec "$python" -m torch.distributed.run --no-python --nproc-per-node "$processes" \
    --master-addr 127.0.0.1 --master-port "$(free_port)" "$@"
}

together() {
  local name=$1 processes=$2
  shift 2
  (torchrun "$processes" "$program" "${common[@]}" --output "$name" "$@") >"$name.log" 2>&1 ||
    { cat "$name.log" >&2; fail "$name"; }
}

# The same bytes, except for the measured images per second.
equal_files() {
  "$python" - "$@" <<'END_OF_PYTHON' || fail "other files: $*"
import json, sys

def records(path):
    data = open(path, "rb").read()
    end = 8 + int.from_bytes(data[:8], "little")
    header = json.loads(data[8:end])
    del header[".history.images_per_second"]
    del header["__metadata__"]["checksum"]
    tensors = {name: at.pop("data_offsets") for name, at in header.items() if name != "__metadata__"}
    return header, {name: data[end + begin : end + stop] for name, (begin, stop) in tensors.items()}

one, other = (records(f"{run}/latest.snapshot") for run in sys.argv[1:])
assert one[0] == other[0] and len(one[0]) > 20
for name, data in one[1].items():
    assert data == other[1][name], name
END_OF_PYTHON
}

close() {
  "$python" - "$1/history.csv" "$2/history.csv" <<'END_OF_PYTHON' || fail "other losses or scores: $*"
import csv, sys
one, other = ([row for row in csv.reader(open(path))] for path in sys.argv[1:])
assert one[0] == other[0] and len(one) == len(other) > 2
for a, b in zip(one[1:], other[1:]):
    for column, x, y in zip(one[0][:-1], a, b):  # without images/s
        pixels = 0 if "loss" in column else 5e-3  # rounding can change the class of a few pixels
        assert abs(float(x) - float(y)) <= 1e-3 * abs(float(x)) + pixels, (column, x, y)
END_OF_PYTHON
}
