#!/usr/bin/env bash
# Disturbs trainings: limits their disk, files and memory. recovery_test.sh kills them.
#   soak.sh [MINUTES (default 5) [BUILD_FOLDER (default build/dev)]]
# After each event the snapshot must be whole. The training must resume from it and end with the history of an
# undisturbed one. A run that cannot continue must print one line and exit with an error code.
set -Eeuo pipefail
root=$(cd "$(dirname "${BASH_SOURCE[0]}")/../.." && pwd)
minutes=${1:-5}
program=$(realpath "${2:-$root/build/dev}")/examples/unet/unet_train
work=$(mktemp -d)
[[ -x $program ]] || { echo "$program does not exist; build it first" >&2; exit 2; }
export OMP_NUM_THREADS=1
cd "$work"

event="the undisturbed run"
trap 'cat err.log >&2; echo "FAILED in: $event; the files are in $work" >&2' ERR

# Prints a random number from 0 to $1 - 1.
random() { echo $(((RANDOM * 32768 + RANDOM) % $1)); }

train=("$program" --data data/synthetic_16_64x64_2 --scale 0.5 --batch-size 4 --chunks 2 --depth 2 --channels 16
  --balance 20,19 --learning-rate-schedule constant)

# Prints the columns of a history that do not depend on the clock.
history() { cut -d, -f1-6 "$1/history.csv"; }

# Sets `start` to the flags that continue the training in the folder "run": from a snapshot, or from the start.
resume() {
  local snapshot
  start=(--overwrite)
  for snapshot in run/best run/latest; do
    [[ ! -e $snapshot/snapshot.json ]] || start=(--resume $snapshot)
  done
}

# disturbed EVENT COMMAND...: the command gets a training as further arguments, and runs it. One in four is new, the
# others have run some epochs.
disturbed() {
  local status=0
  event=$1
  rm -rf run
  if (($(random 4) == 0)); then mkdir run; else cp -r begun run; fi
  resume
  "${@:2}" "${train[@]}" --epochs 8 --output run "${start[@]}" >out.log 2>err.log || status=$?
  ((status < 128)) # no signal
  if ((status > 0)); then # one short line
    [[ $(wc -l <err.log) == 1 && $(wc -c <err.log) -lt 500 ]]
    grep -qE '^error: |error while loading shared libraries' err.log
  fi
  resume
  "${train[@]}" --epochs 8 --output run "${start[@]}" >out.log 2>err.log || grep -q 'nothing is left to train' err.log
  diff <(history run) <(history whole)
  "${train[@]}" --epochs 1 --output loaded --overwrite --load run/best >out.log 2>err.log
}

limited() { disturbed "prlimit $1" prlimit --core=0 "$1"; }
file_size() { limited --fsize=$((1024 * ($(random $((snapshot_bytes / 1024 + 8))) + 1))); }
open_files() { limited --nofile=$(($(random 40) + 4)); }
memory() { limited --as=$((1024 * (needed_kib + $(random 400000)))); }
full_disk() {
  local free=$(random $((2 * snapshot_bytes / 1024)))
  disturbed "disk with $free KiB free" unshare -m bash -c '
    mount -t tmpfs -o size=$(($(du -sk run | cut -f1) + $1 + 16))k tmpfs /mnt && cp -r run/. /mnt || exit 200
    mount --move /mnt run || exit 200
    status=0
    "${@:2}" || status=$?
    cp -r run after && umount run && rm -rf run && mv after run
    exit $status' full "$free"
}

"$program" --samples 16 --size 64x64 --epochs 1 --depth 1 --channels 1 --output data >out.log
"${train[@]}" --epochs 8 --output whole >out.log
"${train[@]}" --epochs 2 --output begun >out.log
snapshot_bytes=$(du -sb whole/latest | cut -f1)
needed_kib=500000
until bash -c 'ulimit -v $0 -c 0 && "$1" --help; exit $?' $needed_kib "$program" >out.log 2>&1; do needed_kib=$((needed_kib + 100000)); done
kinds=(file_size open_files memory)
if unshare -m mount -t tmpfs tmpfs /mnt 2>/dev/null; then
  kinds+=(full_disk)
else
  echo "skipped: full disk, because this user may not mount one"
fi

SECONDS=0
events=0
while ((SECONDS < minutes * 60)); do
  ${kinds[$(random ${#kinds[@]})]}
  events=$((events + 1))
done
echo "$events trainings were disturbed; all resumed"
rm -rf "$work"
