#!/usr/bin/env bash
# The U-Net training program in several processes, which torchrun starts, writes what it writes in one:
# ranks_test.sh PROGRAM FOLDER PYTHON
source "$(dirname "${BASH_SOURCE[0]}")/program.sh"

# 29 images for training and 5 for validation: the last mini-batch has one image.
common=(--samples 34 --validation 16 --size 96x64 --epochs 2 --batch-size 4 --depth 1 --channels 4 --scale 0.25)
# Variables that torchrun also sets, but without torchrun, count for nothing.
WORLD_SIZE=2 RANK=1 run one --chunks 2 --schedule 1f1b
together two 2 --chunks 2 --schedule 1f1b
same one two
cmp one/epoch_002.png two/epoch_002.png
[[ $(grep -c '^epoch 1/2' two.log) == 1 ]] || fail "progress is printed twice"

# Stopped by the terminal, which signals to all processes.
common+=(--chunks 2 --epochs 8 --stages 3)
run whole
# A group of processes of its own. A background job of a script starts with SIGINT ignored; `trap - INT` undoes that.
(trap - INT && torchrun 2 --output parts) >parts.log 2>&1 &
launcher=$!
await_history parts 3 $launcher parts.log
kill -INT $launcher $(pgrep -P $launcher)
! wait $launcher || fail "a stopped training succeeds"
says parts '--resume parts/latest'
run parts --stages 4 --resume auto
same whole parts

# An error of one rank ends all.
if (torchrun 2 --output /proc/output) >error.log 2>&1; then fail "an error is no error"; fi
says error 'error: cannot create the folder /proc/output'
says error 'error: .* rank 0 '
if (torchrun 2 --output few --stages 1) >error.log 2>&1; then fail "too few stages are accepted"; fi
says error 'the pipeline has 1 workers, but there are 2 processes'
[[ ! -e few ]] || fail "a refused run writes"
echo "all passed"
