# gpipe-balance: output of each verb, profiles read from files, and errors.
source "$(dirname "$0")/tool.sh"
export OMP_NUM_THREADS=1
model=(--model unet --channels 4 --size 32x32 --batch-size 8 --stages 2 --seconds 0)

"$program" profile "${model[@]}" --output profile.json >profile.log
grep -q '^70 *head ' profile.log || fail "profile does not list the last layer"
[[ $(grep -cE '^[0-9]+ ' profile.log) == 71 ]] || fail "profile does not have one row per layer, 71 in all"
[[ $(wc -l <profile.log) == 75 ]] || fail "profile does not have 71 layers, a sum, a header and two lines of explanation"
"$program" profile "${model[@]}" --json >json.log
grep -q '"layers"' json.log || fail "profile --json"

"$program" cut "${model[@]}" --profile profile.json --by size >cut.log
grep -q '^balance [0-9]*,[0-9]*; 4 chunks, checkpoint except_last' cut.log || fail "cut does not print a balance"
diff cut.log <("$program" cut "${model[@]}" --profile profile.json --by size) || fail "two cuts of one profile differ"
! grep -q '^70 ' cut.log || fail "cut lists layers without --layers"
"$program" cut "${model[@]}" --profile profile.json --by size --layers >layers.log
[[ $(grep -cE '^[0-9]+ .* (us|ms|s) .* (us|ms|s) ' layers.log) == 71 ]] || fail "cut --layers does not list the layers"
[[ $(grep -cE '(B|-)  <- cut here$' layers.log) == 1 ]] || fail "cut --layers does not mark the cut"
"$program" cut "${model[@]}" --chunks 5 >five.log
grep -q '; 4 chunks' five.log || fail "5 chunks of 8 images are not 4 micro-batches"

"$program" suggest "${model[@]}" --schedule forward --chunks 2,4 --refine 1 >suggest.log
[[ $(grep -c '%' suggest.log) == 7 ]] || fail "suggest does not list 2 x 3 candidates and the unpartitioned model"
grep -qE '^71 +never +1 .* 1.00  one device$' suggest.log || fail "suggest does not list the unpartitioned model"
grep -qE '^gpipe::GPipe pipe\(model, \{[0-9]+, [0-9]+\},$' suggest.log || fail "suggest prints no code"
[[ $(tail -1 suggest.log) =~ devices\(.*\)\.chunks\([24]\)\.checkpoint\(gpipe::Checkpoint::k[A-Za-z]+\)\)\;$ ]] ||
  fail "suggest's code has no options"
grep -q '^measured .* per step: balance ' suggest.log || fail "suggest --refine measured nothing"
"$program" suggest "${model[@]}" --chunks 4 --seconds 1 --json >json.log
grep -q '"candidates".*"unpartitioned":{' json.log || fail "suggest --json"
grep -q '"schedule":"zb_v"' json.log || fail "suggest does not try every schedule"
"$program" suggest "${model[@]}" --schedule gpipe --chunks 4 --seconds 1 --save-schedule own.schedule >own.log
if grep -q '; own.schedule is not written$' own.log; then  # the measured times decide whether there is a faster one
  [[ ! -e own.schedule ]] || fail "suggest --save-schedule writes a file and denies it"
else
  [[ $(tail -1 own.log) =~ schedule\(\"@own.schedule\"\) && $(grep -c '0F0' own.schedule) == 1 ]] || fail "suggest --save-schedule"
fi
four=(--stages 4 --schedule)
"$program" suggest "${model[@]}" "${four[@]}" looped_bfs --stages-per-worker 2 --refine 1 >looped.log
[[ $(tail -1 looped.log) =~ \.schedule\(\"looped_bfs\"\)\.stages_per_worker\(2\)\)\;$ ]] || fail "suggest --schedule"
"$program" cut "${model[@]}" "${four[@]}" interleaved_1f1b --stages-per-worker 2 --profile profile.json --json |
  grep -qF '"placement":[0,1,0,1]' || fail "cut --stages-per-worker"
refuse "unknown schedule 'auto'" cut "${model[@]}" "${four[@]}" auto
refuse "unknown schedule '1f1f'" sweep "${model[@]}" "${four[@]}" 1f1f
refuse "one stage per worker" cut "${model[@]}" "${four[@]}" 1f1b --stages-per-worker 2
refuse "which stages_per_worker = 3 does not divide" cut "${model[@]}" "${four[@]}" gpipe --stages-per-worker 3

refuse 'nothing fits into 1.00 KiB per device' suggest "${model[@]}" --chunks 2 --memory-limit 1KiB

[[ $("$program" sweep "${model[@]}" --chunks 2 --near 2 | grep -c '%') == 15 ]] || fail "sweep does not list 3 x 5 balances"

[[ $("$program" sweep "${model[@]}" --chunks 4,5 --near 0 | grep -c '%') == 3 ]] || fail "sweep lists 4 micro-batches twice"
several=("${model[@]}" --chunks 4 --near 1)
"$program" sweep "${several[@]}" --schedule gpipe,zb_v,forward >several.log
[[ $(grep -cE '^(forward|gpipe|gpipe, 2 per worker|gpipe, V|zb_v)  +[0-9,]+ ' several.log) == 5 && $(grep -c '%' several.log) == 5 ]] ||
  fail "sweep of three schedules does not list their placements"
"$program" sweep "${several[@]}" --schedule auto --json | grep -oE '"(schedule|seconds)":[^,]*' >auto.log
for name in 1f1b interleaved_zb dualpipe_v greedy; do grep -q "\"$name\"" auto.log || fail "sweep leaves out $name"; done
grep seconds auto.log | cut -d: -f2 | sort -gc || fail "sweep does not sort its candidates by time"
refuse 'error: --schedule 1f1b is none of the schedules' sweep "${several[@]}" --schedule 1f1b,zb_v --stages-per-worker 2
refuse 'own.schedule is none of the schedules' sweep "${model[@]}" --schedule gpipe,@own.schedule

head -c 100 profile.json >damaged.json
refuse 'not a profile' cut "${model[@]}" --profile damaged.json
refuse 'error: /dev/zero has more than 16777216 bytes' cut "${model[@]}" --profile /dev/zero
refuse 'was measured with micro-batches of 2, but --batch-size and --chunks make micro-batches of 4' \
  cut "${model[@]}" --profile profile.json --chunks 2
refuse 'is not a profile of resnet18' cut --model resnet18 --batch-size 8 --stages 2 --profile profile.json
refuse 'no-such-file' cut "${model[@]}" --profile no-such-file
refuse '--model' profile --model vgg
refuse '--stages is 1000, but unet has 71 layers' cut "${model[@]}" --stages 1000 --batch-size 2
refuse "error: --size must be a size such as 192x128, but is '0x0'" profile --size 0x0
refuse 'subcommand' --json
refuse "error: --chunks must be at least 1, but is 0" cut --chunks 0
refuse "error: --chunks must be at least 1, but is 0" sweep --chunks 2,0
refuse "error: --channels must be at least 1, but is -1" profile --channels -1
refuse "error: --seconds must be a finite number, but is 'nan'" profile --seconds nan
refuse "error: --bandwidth must be a finite number, but is 'inf'" cut --bandwidth inf
refuse "error: --param-scale must be a finite number, but is 'nan'" profile --param-scale nan
refuse "error: --refine must be at most 100, but is 101" suggest --refine 101
refuse "error: --near must be at least 0, but is -1" sweep --near -1
refuse "error: --memory-limit must be a size such as 6GB or 6GiB, but is '-5GB'" sweep --memory-limit -5GB
refuse "error: --memory-limit must be a size such as 6GB or 6GiB, but is 'nan'" sweep --memory-limit nan
[[ $(wc -l <err.log) == 1 && $(wc -c <err.log) -lt 200 ]] || fail "the error is too long"

# A file that cannot be written is an error before anything is measured.
refuse 'error: cannot write .: Is a directory' profile --seconds 1000 --output .
refuse 'profile.json: Not a directory' profile --seconds 1000 --output profile.json/profile.json
refuse 'error: cannot write /dev/full: No space left on device' profile "${model[@]}" --output /dev/full
if "$program" profile "${model[@]}" --json >/dev/full 2>err.log; then fail "a full standard output was accepted"; fi
grep -qx 'error: cannot write to standard output' err.log || fail "the error of standard output is not reported"

link='{"bandwidth": 1e9, "latency": 1e-5}'
echo "{\"hosts\": 2, \"devices_per_host\": 2, \"memory\": 0, \"inside\": $link, \"between\": $link}" >cluster.json
small=(--model unet --channels 4 --size 32x32 --seconds 1)
"$program" profile "${small[@]}" --batch-size 2 --chunks 1 --stages 1 --output two.json >two.log
planned=(suggest --cluster cluster.json --batch-size 16)
"$program" "${planned[@]}" --profile two.json >plan.log
[[ $(grep -cE '^[124]  .* [0-9.]+ (us|ms|s) ' plan.log) == 3 ]] || fail "suggest --cluster does not list 1, 2 and 4 replicas"
grep -q 'All figures are predicted' plan.log || fail "suggest --cluster does not say that it predicts"
grep -qE '^balance of the first: [0-9,]+$' plan.log || fail "suggest --cluster prints no balance"
"$program" "${planned[@]}" --profile two.json --json | grep -q '"replicas":4,"reduction":' || fail "suggest --cluster --json"
"$program" "${planned[@]}" "${small[@]}" --micro-batch 2,4 --schedule forward >measured.log
[[ $(grep -c '^[124]  *forward ' measured.log) == 3 ]] || fail "suggest --cluster does not measure"
refuse 'no number of replicas suits 4 devices and 15 samples' "${planned[@]}" --batch-size 15 --profile two.json
refuse "unknown schedule '1f1f'" "${planned[@]}" --profile two.json --schedule 1f1f
refuse '--memory-limit excludes --cluster' "${planned[@]}" --profile two.json --memory-limit 1GB
refuse '--model excludes --profile' "${planned[@]}" --profile two.json --model resnet18
refuse '--micro-batch requires --cluster' suggest --micro-batch 2
sed -i 's/"memory": 0/"memory": 1024/' cluster.json
refuse 'nothing fits into 1.00 KiB per device' "${planned[@]}" --profile two.json
sed -i 's/1e9/0/' cluster.json
refuse '/inside/bandwidth is 0, but must be' "${planned[@]}" --profile two.json
