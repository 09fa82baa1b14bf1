#!/usr/bin/env bash
# The U-Net training program from end to end, on tiny and on damaged data: unet_test.sh PROGRAM FOLDER PYTHON
source "$(dirname "${BASH_SOURCE[0]}")/program.sh"

common=(-e 2 -b 4 --chunks 2 --depth 1 --channels 4 -s 0.25)

# Training does not depend on how the model is run.
run one --samples 12 --stages 1
data=one/synthetic_12_192x128_2
says one "^reached: val_dice .*, the best in epoch [12]$"
for file in history.csv epoch_001.png latest best; do
  [[ -s one/$file ]] || fail "no $file"
done
common+=(--data $data)
run cut --balance 5,18 --devices cpu,cpu --checkpoint never
same one cut

# What is printed.
says cut '^plan: balance 5,18, 2 micro-batches, checkpoint never, schedule gpipe$'
says cut '^step: .*, bubble '
says cut '^measured step: .*, peak memory per worker .*iB, .*iB, without model and optimizer$'
says cut '^predicted: .*, peak memory per worker .*iB, .*iB$'
"$python" - cut.log <<'END' || fail "a wrong prediction without a reason"
import re, sys
log, units = open(sys.argv[1]).read(), {"s": 1, "ms": 1e-3, "µs": 1e-6, "us": 1e-6}
times = re.findall(r"(?m)^(?:measured step|predicted): (\S+) (\S+),", log)
measured, predicted = (float(number) * units[unit] for number, unit in times)
off = abs(measured / predicted - 1)
assert 0.04 < off < 0.06 or (off > 0.05) == ("\nthey differ: " in log), log
END

# Each flag has an effect on the loss.
differs() { [[ $(column "$1" 2) != $(column "$2" 2) ]] || fail "$1 has no effect"; }
run brief -e 1
run amp -e 1 --amp
differs amp brief
for stage in 0 1 2 3; do echo "$stage"F{0,1,2,3} "$stage"B{3,2,1,0}; done >lists
run listed -b 8 --chunks 4 --balance 5,6,6,6 --schedule @lists -v 33 -e 1
run classes --data synthetic --samples 4 --size 80x48 -c 4
says classes 'at 20x12, 4 classes'
head -1 classes/history.csv | grep -q 'val_dice_3' || fail "no Dice for each class"

# Stopped and resumed at another balance and checkpoint mode, it ends with the weights of an uninterrupted training.
run whole -e 12
"$program" "${common[@]}" -e 12 --output halves >first.log &
pid=$!
await_history halves 3 $pid first.log
kill -TERM $pid
status=0
wait $pid || status=$?
((status == 128 + 15)) || fail "exit code $status after SIGTERM"
says first '--resume halves/latest'
run halves -e 12 --stages 3 --checkpoint always --resume halves/latest
[[ $(wc -l <halves/history.csv) == 13 ]] || fail "the history has holes"
same whole halves

# A second signal ends it at once. The program gets both together, however fast it is. `trap - INT` as in ranks_test.sh.
(trap - INT && exec "$program" "${common[@]}" -e 100000 --output ended >ended.log) &
pid=$!
await_history ended 2 $pid ended.log
kill -STOP $pid
kill -INT $pid
kill -TERM $pid
kill -CONT $pid
status=0
wait $pid || status=$?
((status == 128 + 2 || status == 128 + 15)) || fail "exit code $status after two signals"
! grep -q '^stopped' ended.log || fail "a second signal does not end it"

# Limits of the process and of the disk: one line of error. The snapshot before is whole, and the training goes on from it.
limited() {
  local name=$1 text=$2
  rm -rf limited && cp -r one limited
  if "${@:3}" "$program" "${common[@]}" -e 3 --output limited --resume limited/latest >out.log 2>"$name.err"; then
    fail "$name: no limit"
  fi
  grep -qE "^error: .*$text" "$name.err" && [[ $(wc -l <"$name.err") == 1 ]] || { cat "$name.err" >&2; fail "$name"; }
  cmp one/latest/snapshot.json limited/latest/snapshot.json
}
if unshare -m mount -t tmpfs tmpfs /mnt 2>/dev/null; then
  limited disk 'No space left' unshare -m bash -c '
    mount -t tmpfs -o size=$(($(du -sk limited | cut -f1) + 16))k tmpfs /mnt && cp -r limited/. /mnt || exit 0
    mount --move /mnt limited || exit 0
    status=0
    "$@" || status=$?
    cp -r limited after && umount limited && rm -rf limited && mv after limited
    exit $status' disk
fi
limited files 'Too many open files' bash -c 'ulimit -n 5; exec "$@"' files
limited size 'cannot write .*limited/.*File too large' bash -c 'ulimit -f 2 -c 0; exec "$@"' size
run limited -e 3 --resume limited/latest
run three -e 3 --stages 1 --resume one/latest
same three limited
if "$program" "${common[@]}" --output said -e 1 >/dev/full 2>said.err; then fail "a full standard output"; fi
grep -qx 'error: cannot write to standard output' said.err || fail "the full standard output is not named"

# Snapshots that do not fit.
run new --epochs 1 --resume auto
says new '^resume: new has no snapshot, so a new training begins$'
refuse model '--channels 4, not 5' --channels 5 --resume one/latest
cp -r whole/latest half
for file in half/model-*; do truncate -s 900 "$file"; done
refuse half 'half' --resume half

refuse one 'one holds an earlier training; give --resume one/latest'

# Wrong flags, and damaged data.
refuse text "but is 'half'" --balance half,23
refuse both 'excludes' --balance 5,18 --stages 3
refuse device 'gpu' --devices gpu
"$program" --help | grep -q -- '--epochs INT.*=24' || fail "--help lists no defaults"
damage not-an-image '0005.png: not a JPEG, PNG, GIF or TIFF' bash -c 'echo hello >imgs/0005.png'
refuse colour 'the colour 128,128,0 belongs to none of the 3 classes' --data classes/synthetic_4_80x48_4 --classes 3 -b 2
echo "all passed"
