# gpipe-balance: its commands, what it refuses, that a profile in a file is as good as one just made.
program=$1
work=$2
rm -rf "$work"
mkdir -p "$work"
cd "$work"
set -euo pipefail
export OMP_NUM_THREADS=1
model=(--model unet --channels 4 --size 32x32 --batch-size 8 --stages 2 --seconds 0)

fail() {
  echo "FAILED: $*" >&2
  exit 1
}

refuse() {
  local text=$1
  shift
  if "$program" "$@" >out.log 2>err.log; then fail "$* was accepted"; fi
  grep -qF -- "$text" err.log || { cat err.log >&2; fail "$* does not say '$text'"; }
}

"$program" profile "${model[@]}" --output profile.json >profile.log
grep -q '^70 *head ' profile.log || fail "profile names no last layer"
[[ $(wc -l <profile.log) == 73 ]] || fail "profile has not a line for each of 71 layers"
"$program" profile "${model[@]}" --json >json.log
grep -q '"layers"' json.log || fail "profile --json"

"$program" cut "${model[@]}" --profile profile.json --by size >cut.log
grep -q '^balance [0-9]*,[0-9]*; 4 chunks, checkpoint except_last' cut.log || fail "cut names no balance"
diff cut.log <("$program" cut "${model[@]}" --profile profile.json --by size) || fail "cut is not the same twice"
"$program" cut "${model[@]}" --chunks 5 >five.log
grep -q '; 4 chunks' five.log || fail "8 images are cut into 4 pairs, not 5"

"$program" suggest "${model[@]}" --chunks 2,4 --refine 1 >suggest.log
[[ $(grep -c '%' suggest.log) == 6 ]] || fail "suggest has not 2 x 3 candidates"
grep -q '^measured .*: balance ' suggest.log || fail "suggest --refine measured nothing"
"$program" suggest "${model[@]}" --json >json.log
grep -q '"candidates"' json.log || fail "suggest --json"
refuse 'nothing fits into 1.00 KiB a device' suggest "${model[@]}" --chunks 2 --memory-limit 1KiB

[[ $("$program" sweep "${model[@]}" --chunks 2 --near 2 | grep -c '%') == 15 ]] || fail "sweep is not of 3 x 5 balances"

[[ $("$program" sweep "${model[@]}" --chunks 4,5 --near 0 | grep -c '%') == 3 ]] || fail "4 micro-batches are swept twice"

head -c 100 profile.json >damaged.json
refuse 'not a profile' cut "${model[@]}" --profile damaged.json
refuse 'is of micro-batches of 2, but --batch-size and --chunks make micro-batches of 4' \
  cut "${model[@]}" --profile profile.json --chunks 2
refuse 'is not of resnet18' cut --model resnet18 --batch-size 8 --stages 2 --profile profile.json
refuse 'no-such-file' cut "${model[@]}" --profile no-such-file
refuse '--model' profile --model vgg
refuse '--stages is 1000, but unet has 71 layers' cut "${model[@]}" --stages 1000 --batch-size 2
refuse "'0x0' is not a size" profile --size 0x0
refuse 'subcommand' --json
refuse "error: --chunks: '0' is not a whole number from 1 to 1048576" cut --chunks 0
refuse "error: --chunks: '0' is not a whole number from 1 to 1048576" sweep --chunks 2,0
refuse "error: --channels: '-1' is not a whole number from 1 to 4096" profile --channels -1
refuse "error: --seconds: 'nan' is not a finite number of at least 0" profile --seconds nan
refuse "error: --bandwidth: 'inf' is not a finite number of at least 0" cut --bandwidth inf
refuse "error: --param-scale: 'nan' is not a number from 2 to 100" profile --param-scale nan
refuse "error: --refine: '101' is not a whole number from 0 to 100" suggest --refine 101
refuse "error: --near: '-1' is not a whole number from 0 to 1000" sweep --near -1
refuse 'error: --memory-limit: ' sweep --memory-limit -5GB
refuse 'error: --memory-limit: ' sweep --memory-limit nan
[[ $(wc -l <err.log) == 1 && $(wc -c <err.log) -lt 200 ]] || fail "the line is too long"

# A file that cannot be written is told before anything is measured.
refuse 'error: cannot write .: Is a directory' profile --seconds 1000 --output .
refuse 'profile.json: Not a directory' profile --seconds 1000 --output profile.json/profile.json
refuse 'error: cannot write /dev/full: No space left on device' profile "${model[@]}" --output /dev/full
if "$program" profile "${model[@]}" --json >/dev/full 2>err.log; then fail "a full standard output"; fi
grep -qx 'error: cannot write to standard output' err.log || fail "the standard output's error is not told"
