# Sourced by the tests of programs with their own arguments: PROGRAM FOLDER [argument...]. Empties the folder and changes
# into it. The tests call:
#   fail TEXT...               ends the test
#   run NAME FLAG...           runs the program with `common` and these flags; it must succeed. Its output is NAME.log
#   try NAME FLAG...           the same, then removes the snapshots, which can be large
#   refuse NAME TEXT FLAG...   the program must fail with one line of error that contains TEXT, before any training, and
#                              leave no empty folder
#   refuse_value FLAG VALUE TEXT
#                              it must fail with the line "FLAG must be TEXT, but is VALUE", before it writes anything
#   written NAME               checks that all files listed in NAME.log exist
#   column NAME LIST           prints columns of NAME/history.csv, such as 2 or 1-5, without their names
#   near A B TOLERANCE         compares two columns of numbers, one per line
#   equal_weights A B          compares the final weights of two runs, if `python` names a Python with torch
set -euo pipefail
export OMP_NUM_THREADS=1 # the same number of threads at any number of stages, so that sums are the same
program=$1
work=$2
shift 2
rm -rf "$work"
mkdir -p "$work"
cd "$work"
common=()
python=

fail() {
  echo "FAILED: $*" >&2
  exit 1
}

run() {
  local name=$1
  shift
  "$program" "${common[@]}" --output "$name" "$@" >"$name.log" 2>&1 || { cat "$name.log" >&2; fail "$name"; }
}

try() {
  run "$@"
  rm "$1"/*.snapshot
}

refuse() {
  local name=$1 text=$2
  shift 2
  if "$program" "${common[@]}" --output "$name" "$@" >"$name.log" 2>"$name.err"; then fail "$name was accepted"; fi
  grep -qF -- "$text" "$name.err" || { cat "$name.err" >&2; fail "$name does not say '$text'"; }
  [[ $(wc -l <"$name.err") == 1 ]] || { cat "$name.err" >&2; fail "$name says more than a line"; }
  [[ ! -d $name || -n $(find "$name" -type f -print -quit) ]] || fail "$name leaves an empty folder"
  ! grep -q '^epoch 1/' "$name.log" || fail "$name trained before it failed"
}

refuse_value() {
  local value=$2
  [[ $value != \'*\' ]] || value=${value:1:-1} # the program prints the quotes
  refuse refused "error: $1 must be $3, but is $2" "$1" "$value"
  [[ ! -e refused ]] || fail "$1 $2 is refused after something was written"
}

written() {
  local file
  for file in $(sed -n '/^wrote$/,$p' "$1.log" | tail -n +2); do
    [[ -e $file ]] || fail "$file was named but not written"
  done
}

column() {
  tail -n +2 "$1/history.csv" | cut -d, -f"$2"
}

near() {
  paste <(echo "$1") <(echo "$2") |
    awk -v tolerance="$3" 'NF != 2 {exit 1} {d = $1 - $2; if (d > tolerance || -d > tolerance) exit 1}'
}

equal_weights() {
  [[ -z $python ]] || "$python" - "$@" <<'END' || fail "other weights: $*"
import json, sys

def weights(path):
    data = open(path, "rb").read()
    end = 8 + int.from_bytes(data[:8], "little")
    header = json.loads(data[8:end])
    places = {name: at["data_offsets"] for name, at in header.items() if name[0] not in "._"}
    return {name: data[end + begin : end + stop] for name, (begin, stop) in places.items()}

a, b = (weights(f"{run}/latest.snapshot") for run in sys.argv[1:])
assert a.keys() == b.keys() and len(a) > 20
for key in a:
    assert a[key] == b[key], key
END
}

# What every training program refuses. $1: its data, $2: the number of its layers.
refuse_training_flags() {
  local data=$1 layers=$2 flag value
  refuse no-data 'no-such-folder' --data no-such-folder
  refuse cut 'sums to 3' --data "$data" --balance 1,2
  refuse cut-zero "--balance must be auto, by-time, by-size or layers per stage such as 20,35, but has '0'" --balance 0,23
  refuse cut-huge "but has '9223372036854775807'" --balance 9223372036854775807,9223372036854775807,41
  refuse cut-text "but has 'half'" --data "$data" --balance half,23
  refuse stages-and-cut '--stages is 3' --data "$data" --balance 5,18 --stages 3
  refuse too-many-stages "$layers layers" --data "$data" --stages $((layers + 1))
  refuse device "--devices must be cpu, cuda or cuda:N, but has 'gpu'" --data "$data" --devices gpu
  refuse device-missing 'cuda:63' --data "$data" --devices cpu,cuda:63
  refuse device-few '--devices must be one per stage, or one for all, but there are 2 for 3 stages' --data "$data" --stages 3 --devices cpu,cpu
  refuse trace-folder 'cannot write .: Is a directory' --data "$data" --trace .
  refuse trace-unwritable '/proc/trace' --data "$data" --trace /proc/trace/1.json
  refuse mode '--checkpoint' --data "$data" --checkpoint sometimes
  refuse rate-schedule '--learning-rate-schedule' --data "$data" --learning-rate-schedule never
  refuse schedule "--schedule must be auto, @FILE or one of gpipe, " --data "$data" --schedule never
  grep -qF ", but is 'never'" schedule.err || fail "the unknown schedule is not printed"
  refuse schedule-file "cannot read the schedule 'no-such-file'" --data "$data" --schedule @no-such-file
  refuse schedule-misfit "schedule '1f1b' needs stage s on worker s, one stage per worker" \
    --data "$data" --schedule 1f1b --stages 4 --stages-per-worker 2
  refuse stages-per-worker '--stages-per-worker must divide the number of stages, which is 3, but is 2' \
    --data "$data" --stages 3 --stages-per-worker 2
  refuse worker-devices '--devices must be one per worker, or one for all, but there are 4 for 2 workers' \
    --data "$data" --stages 4 --stages-per-worker 2 --devices cpu,cpu,cpu,cpu
  refuse auto-file '--balance must not be auto with a schedule from a file' --data "$data" --balance auto --schedule @lists
  refuse trace-long 'too long' --data "$data" --trace "$(printf '%0300d' 0)"
  for flag in --epochs --batch-size --chunks --stages --stages-per-worker; do
    for value in 0 -1; do refuse_value $flag $value 'at least 1'; done
    refuse_value $flag "'1e3'" 'a whole number'
  done
  value=99999999999999999999
  refuse_value --epochs $value 'at most 1000000'
  refuse_value --batch-size $value 'at most 1048576'
  refuse_value --chunks $value 'at most 1048576'
  refuse_value --stages $value 'at most 1024'
  refuse_value --seed -1 'at least 0'
  refuse_value --snapshot-every -1 'at least 0'
  refuse_value --seed 18446744073709551616 'at most 18446744073709551615'
  refuse_value --seed "'nan'" 'a whole number'
  for value in "'nan'" "'inf'" "'x'"; do
    refuse_value --clip $value 'a finite number'
    refuse_value --learning-rate $value 'a finite number'
  done
  refuse_value --clip -1 'at least 0'
  for value in -1 0; do refuse_value --learning-rate $value 'above 0'; done
  for flag in --output --resume --load --trace; do refuse_value $flag "''" 'a path'; done
  refuse flag '--no-such-flag' --data "$data" --no-such-flag
  refuse value '--chunks' --data "$data" --chunks
  echo 'no snapshot' >foreign
  refuse foreign-resume 'foreign' --data "$data" --resume foreign
  refuse foreign-load 'foreign' --data "$data" --load foreign
  for flag in --resume --load; do
    for value in no-such-file foreign; do
      refuse bad-snapshot "$value" $flag $value
      [[ ! -e bad-snapshot && ! -s bad-snapshot.log ]] || fail "$flag $value is found after something slow"
    done
  done
  refuse late-failure 'no-such-folder' --output late-failure/a/b --data no-such-folder
  [[ ! -e late-failure ]] || fail "folders of a failed run stay"
  mkdir -p existing/kept
  refuse late-failure 'no-such-folder' --output existing/kept/new --data no-such-folder
  [[ -d existing/kept && ! -e existing/kept/new ]] || fail "a failed run removes a folder that it did not create"
  rm -r existing
  refuse output-below-file 'foreign/output' --data "$data" --output foreign/output
  refuse unwritable '/proc/output' --data "$data" --output /proc/output
}

# The effects of the flags that every training program has. $1: the name of a run of 2 epochs with seed 0; the other
# arguments are flags that all runs need.
check_training_flags() {
  local base=$1 losses first
  shift
  losses=$(column "$base" 2)
  first=$(head -1 <<<"$losses")
  try seed "$@" --seed 5 -e 1
  ! near "$(column seed 2)" "$first" 1e-4 || fail "--seed has no effect"
  try clip "$@" --clip 0.01
  ! near "$(column clip 2)" "$losses" 1e-4 || fail "--clip has no effect"
  try amp "$@" --amp -e 1
  ! near "$(column amp 2)" "$first" 1e-6 || fail "--amp has no effect"
  near "$(column amp 2)" "$first" 0.3 || fail "--amp has too much of an effect"
  try cut "$@" --balance "$cut" --devices cpu,cpu --checkpoint never
  grep -q "^stage 0: ${cut%%,*} layers" cut.log || fail "--balance has no effect"
  grep -q 'checkpoint never' cut.log || fail "--checkpoint has no effect"
  diff <(column cut "2-$rate_column") <(column "$base" "2-$rate_column") || fail "the cut changes what is learnt"
  try chunks "$@" --chunks 1 --devices cpu -e 1
  ! near "$(column chunks 2)" "$first" 1e-4 || fail "--chunks has no effect"
  try loaded "$@" -f "$base/latest.snapshot" -e 1
  ! near "$(column loaded 2)" "$first" 1e-3 || fail "--load has no effect"
  # Unlike a cosine, this rate does not depend on the number of epochs.
  try whole "$@" --learning-rate-schedule plateau
  run part "$@" --learning-rate-schedule plateau -e 1
  try resumed "$@" --learning-rate-schedule plateau --resume part/latest.snapshot
  rm part/*.snapshot
  diff <(column resumed "1-$rate_column") <(column whole "1-$rate_column") || fail "--resume goes another way"
}

# The rate falls when the score stays the same for 5 epochs. $1: epochs; the other arguments are flags that all runs need.
check_plateau() {
  local epochs=$1
  shift
  # The rate is so low that only the statistics of batch norm change, and soon not even those.
  try flat "$@" --learning-rate-schedule plateau -l 1e-9 -e "$epochs"
  paste <(column flat 3) <(column flat "$rate_column") | awk '
    BEGIN {rate = 1e-9; best = -1}
    {
      if ($2 / rate < 0.99 || $2 / rate > 1.01) exit 1
      waited = $1 > best ? 0 : waited + 1
      if ($1 > best) best = $1
      if (waited == 5) {rate /= 10; waited = 0; ++drops}
    }
    END {if (drops < 1) exit 1}' || fail "--learning-rate-schedule plateau does not follow the score"
}

# An earlier training, the run $1, is only overwritten with --overwrite. The other arguments are flags that all runs need.
check_overwriting() {
  local base=$1 before all="latest.snapshot, best.snapshot, history.csv"
  shift
  before=$(find "$base" -type f -printf '%p %s %T@\n' | sort)
  refuse "$base" "$base holds an earlier training ($all); give --resume $base/latest.snapshot to continue it" "$@"
  grep -qF -- '--overwrite to replace it' "$base.err" || fail "--overwrite is not suggested"
  mkdir elsewhere
  cp "$base/latest.snapshot" elsewhere
  refuse "$base" 'holds an earlier training' "$@" -e 3 --resume elsewhere/latest.snapshot
  rm -r elsewhere
  refuse "$base" 'epochs already, and --epochs is 1: nothing is left to train' "$@" -e 1 --resume "$base/latest.snapshot"
  [[ $(find "$base" -type f -printf '%p %s %T@\n' | sort) == "$before" ]] || fail "a refused run changes $base"
  echo mine | tee "$base/notes.txt" "$base/epoch_mine.png" "$base/events.out.tfevents.1.other" >/dev/null
  touch "$base/history.csv.tmp"
  run "$base" "$@" -e 1 --overwrite
  [[ $(column "$base" 1) == 1 ]] || fail "--overwrite leaves the earlier history"
  [[ $(ls "$base"/events.out.tfevents.*.gpipe | wc -l) == 1 ]] || fail "--overwrite leaves earlier event files"
  [[ $(ls "$base"/*_[0-9]*.png | wc -l) == 1 ]] || fail "--overwrite leaves earlier pictures"
  [[ ! -e $base/history.csv.tmp ]] || fail "--overwrite leaves history.csv.tmp"
  [[ $(cat "$base"/{notes.txt,epoch_mine.png,events.out.tfevents.1.other}) == $'mine\nmine\nmine' ]] ||
    fail "--overwrite removes other files"
  rm "$base/latest.snapshot"
  refuse "$base" "(best.snapshot, history.csv); give --resume $base/best.snapshot to continue it" "$@"
  rm "$base/best.snapshot"
  refuse "$base" "$base holds an earlier training (history.csv); give --overwrite" "$@"
}

# A file that cannot be written is named, and the exit code is not 0. $@: flags that all runs need.
check_write_errors() {
  local status
  if "$program" "${common[@]}" --output full "$@" --trace /dev/full >full.log 2>full.err; then fail "a full disk"; fi
  grep -qx 'error: cannot write /dev/full: No space left on device' full.err || fail "the error of the trace is not printed"
  ! grep -q '^wrote' full.log || fail "a trace that was not written is listed"
  status=0
  (ulimit -f 2 -c 0 && exec "$program" "${common[@]}" --output limited "$@" >/dev/null 2>limited.err) || status=$?
  ((status == 1)) || fail "exit code $status with a limit of the file size"
  grep -qE "^error: cannot write .*limited/.*: File too large$" limited.err || fail "the limit of the file size is not printed"
  if "$program" "${common[@]}" --output said "$@" -e 1 >/dev/full 2>said.err; then fail "a full standard output"; fi
  grep -qx 'error: cannot write to standard output' said.err || fail "the error of the standard output is not printed"
  rm -rf full limited said
}

# A terminal gets a progress bar, and the same list of files as a pipe. $@: flags.
check_terminal() {
  script -qec "'$program' ${common[*]} -e 1 --output terminal $*" terminal.log >/dev/null || fail "in a terminal"
  rm terminal/*.snapshot
  grep -q $'\repoch 1  \[' terminal.log || fail "no progress bar in a terminal"
  grep -q '  terminal/history.csv' terminal.log || fail "a terminal gets no list of files"
}

# Every option with a value shows its default, except those that do nothing by default.
check_help() {
  "$program" --help >help.log
  ! grep -E '^  (-[a-z],)?--[a-z-]+ [A-Z]+' help.log | grep -vE -- '--(resume|load|trace|balance|devices) ' |
    grep -vE '^ +[^ ]+ [A-Z]+(:[^=]*)?=' || fail "--help lists no default"
  grep -q -- '--epochs INT.*=[1-9]' help.log || fail "--help lists no options"
}
