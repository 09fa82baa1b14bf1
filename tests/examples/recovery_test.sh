#!/usr/bin/env bash
# A job whose ranks are killed comes back by itself, and ends with the files of one that was never disturbed:
# recovery_test.sh PROGRAM FOLDER PYTHON [KILLS (default 2)]
# Each round kills two random ranks and sends SIGTERM to a third, at random moments. torchrun brings the job back three times.
# Then torchrun gets SIGTERM, and a job of another number of processes and stages continues the training to its end.
source "$(dirname "${BASH_SOURCE[0]}")/program.sh"
wanted=${1:-2}

# 28 images for training and 4 for validation.
common=(--samples 32 --validation 12.5 --epochs 12 --batch-size 4 --chunks 2 --depth 1 --channels 4 --scale 0.25
  --size 96x64)
launcher=
trap '[[ -z $launcher ]] || kill $launcher 2>/dev/null || true' EXIT

# Prints a random number from 0 to $1 - 1.
random() { echo $(((RANDOM * 32768 + RANDOM) % $1)); }

# launch PROCESSES RESTARTS FLAG...: starts a job in the folder "run". Sets `launcher` to the process of torchrun.
launch() {
  processes=$1
  restarts=$2
  torchrun "$processes" --output run --resume auto --snapshot-every 3 "${@:3}" >>run.log 2>&1 &
  launcher=$!
}

# training: waits until the job writes a snapshot. Fails if the job ends before.
training() {
  touch mark
  until [[ run/latest/snapshot.json -nt mark ]]; do
    kill -0 "$launcher" 2>/dev/null || return 1
    sleep 0.01
  done
}

# disturb SIGNAL: sends it to a random rank, within half a second, and waits until that has ended. Fails if the job ends before.
disturb() {
  local ranks victim
  sleep "$(printf '0.%03d' "$(random 500)")"
  until mapfile -t ranks < <(pgrep -P "$launcher") && ((${#ranks[@]} == processes)); do
    kill -0 "$launcher" 2>/dev/null || return 1
    sleep 0.01
  done
  victim=${ranks[$(random "$processes")]}
  kill "-$1" "$victim" 2>/dev/null || return 1
  while [[ -e /proc/$victim ]]; do sleep 0.01; done
}

run whole --stages 3
kills=0
for ((round = 1; kills < wanted; ++round)); do
  rm -rf run run.log
  launch 3 3 --stages 3
  if training && disturb KILL; then kills=$((kills + 1)); fi
  if disturb KILL; then kills=$((kills + 1)); fi # often while it starts
  if training; then disturb TERM || true; fi
  stopped=false
  if training && kill -TERM "$launcher" 2>/dev/null; then stopped=true; fi
  if ! wait "$launcher"; then
    $stopped || { cat run.log >&2; fail "round $round: the job does not come back"; }
    launch 2 0 --stages 4
    wait "$launcher" || { cat run.log >&2; fail "round $round: another job does not continue"; }
  fi
  launcher=
  same whole run
  echo "round $round: $kills kills, stopped: $stopped"
done

run run --stages 4 --resume auto
says run '^nothing is left to train: run/latest has 12 epochs'
echo "all passed"
