#!/usr/bin/env bash
# Disturbs trainings: limits their disk, files, threads and memory. recovery_test.sh kills them.
#   soak.sh [MINUTES (default 5) [BUILD_FOLDER (default build/dev) [WORK_FOLDER (default: a new one in /tmp)]]]
# After each event the snapshot must be whole. The training must resume from it and end with the history of an
# undisturbed one. A run that cannot continue must print one line and exit with an error code. Events that need
# privileges this user lacks, such as mounting a small disk, are skipped with a message.
set -euo pipefail
root=$(cd "$(dirname "${BASH_SOURCE[0]}")/../.." && pwd)
minutes=${1:-5}
program=$(realpath "${2:-$root/build/dev}")/examples/unet/unet_train
work=${3:-$(mktemp -d)}
[[ -x $program ]] || { echo "$program does not exist; build it first" >&2; exit 2; }
export OMP_NUM_THREADS=1
mkdir -p "$work"
cd "$work"

declare -A tried failed
event="the undisturbed run"
keep=1
trap '((keep == 0)) || echo "FAILED in: $event; the files are in $work" >&2' EXIT

fail() {
  echo "$*" >&2
  exit 1
}

# Prints a random number from 0 to $1 - 1.
random() { echo $(((RANDOM * 32768 + RANDOM) % $1)); }

train=("$program" --data data/synthetic_16_64x64_2 --scale 0.5 --batch-size 4 --chunks 2 --depth 2 --channels 16
  --balance 20,19 --learning-rate-schedule constant)
begun=2 epochs=8

# Prints the columns of a history that do not depend on the clock.
history() { cut -d, -f1-6 "$1/history.csv"; }

# Checks how a disturbed run ended: its exit code $1 must not be a signal's, and an error must be one short line.
check_end() {
  (($1 < 128)) || { cat err.log >&2; fail "signal $(($1 - 128)) ended the run"; }
  (($1 == 0)) && return
  failed[$kind]=$((${failed[$kind]:-0} + 1))
  [[ $(wc -l <err.log) == 1 && $(wc -c <err.log) -lt 500 ]] || { cat err.log >&2; fail "the run printed more than one short line"; }
  grep -qE '^error: |error while loading shared libraries' err.log || { cat err.log >&2; fail "the run did not print an error"; }
}

# Sets `start` to the flags that continue the training in the folder "run": from a snapshot, or from the start.
resume() {
  local snapshot
  start=(--overwrite)
  for snapshot in run/best.snapshot run/latest.snapshot; do
    [[ ! -e $snapshot ]] || start=(--resume $snapshot)
  done
}

# Checks that the history is a prefix of the undisturbed one, and that the training resumes and ends like that one.
check_recovery() {
  local lines
  if [[ -e run/history.csv && $event != *disk* ]]; then
    lines=$(wc -l <run/history.csv)
    diff <(history run) <(history whole | head -n "$lines") || fail "the history is damaged"
  fi
  resume
  if ! "${train[@]}" --epochs $epochs --output run "${start[@]}" >out.log 2>err.log; then
    grep -q 'nothing is left to train' err.log || { cat err.log >&2; fail "the training does not resume"; }
  fi
  diff <(history run) <(history whole) || fail "the history differs from the undisturbed one"
  "${train[@]}" --epochs $epochs --output loaded --overwrite --resume run/best.snapshot >out.log 2>err.log ||
    { cat err.log >&2; fail "the best snapshot cannot be read"; }
}

# Prepares a training to disturb: one in four is new, the others have run some epochs.
prepare() {
  rm -rf run
  if (($(random 4) == 0)); then mkdir run; else cp -r begun run; fi
  chmod -R a+rwX . # for another user
  resume
}

# disturbed EVENT COMMAND...: the command gets the training as further arguments, and runs it.
disturbed() {
  local status=0
  event=$1
  prepare
  "${@:2}" "${train[@]}" --epochs $epochs --output run "${start[@]}" >out.log 2>err.log || status=$?
  check_end $status
}

limited() { disturbed "prlimit $1" prlimit --core=unlimited "$1"; }
file_size() { limited --fsize=$((1024 * ($(random $((snapshot_bytes / 1024 + 8))) + 1))); }
open_files() { limited --nofile=$(($(random 40) + 4)); }
memory() { limited --as=$((1024 * (needed_kib + $(random 400000)))); }

# Limits the number of threads. Root has no such limit, so it runs the training as a user without other threads.
threads() {
  local count=$(($(random 6) + 1))
  if ((EUID != 0)); then
    limited --nproc=$(($(ps -L -u "$USER" --no-headers | wc -l) + count))
  else
    disturbed "$count threads" setpriv --reuid=$other --regid=$other --clear-groups prlimit --nproc=$count
  fi
}

full_disk() {
  local free=$(random $((2 * snapshot_bytes / 1024)))
  disturbed "disk with $free KiB free" unshare -m bash -c '
    mount -t tmpfs -o size=$(($(du -sk run | cut -f1) + $1 + 16))k tmpfs /mnt && cp -r run/. /mnt && mount --move /mnt run || exit 99
    shift
    status=0
    "$@" || status=$?
    mkdir -p after && rm -rf after/* && cp -r run/. after
    exit $status' full "$free"
  rm -rf run && mv after run
}

# --- The undisturbed run.

"$program" --samples 16 --size 64x64 --epochs 1 --depth 1 --channels 1 --output data >out.log
rm -f data/*.snapshot
"${train[@]}" --epochs $epochs --output whole >out.log
"${train[@]}" --epochs $begun --output begun >out.log
snapshot_bytes=$(stat -c %s whole/latest.snapshot)
needed_kib=500000
until bash -c 'ulimit -v $0 -c 0 && "$1" --help; exit $?' $needed_kib "$program" >out.log 2>&1; do needed_kib=$((needed_kib + 100000)); done

kinds=(file_size open_files memory)
if unshare -m mount -t tmpfs tmpfs /mnt 2>/dev/null; then
  kinds+=(full_disk)
else
  echo "skipped: full disk, because this user may not mount one"
fi
other=47123
if ((EUID != 0)); then
  kinds+=(threads)
elif chmod a+rx "$work" && setpriv --reuid=$other --regid=$other --clear-groups "$program" --help >out.log 2>&1; then
  kinds+=(threads)
else
  echo "skipped: limit on threads, because no other user can run $program"
fi

# --- The events.

SECONDS=0
while ((SECONDS < minutes * 60)); do
  kind=${kinds[$(random ${#kinds[@]})]}
  $kind
  tried[$kind]=$((${tried[$kind]:-0} + 1))
  check_recovery
  if compgen -G 'core*' >/dev/null; then fail "a core dump"; fi
done
event="none"
keep=0
echo "in $SECONDS s:"
for kind in "${!tried[@]}"; do echo "  $kind: ${tried[$kind]}; ${failed[$kind]:-0} ended the run with an error"; done
echo "all trainings resumed"
[[ -n ${3:-} ]] || rm -rf "$work"
