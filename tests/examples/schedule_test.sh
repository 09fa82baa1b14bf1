# gpipe-schedule: output of each verb, schedules from files, and errors.
source "$(dirname "$0")/tool.sh"

"$program" print 1f1b --workers 2 --chunks 3 >1f1b.txt
[[ $(<1f1b.txt) == $'0F0 0F1 0B0 0F2 0B1 0B2\n1F0 1B0 1F1 1B1 1F2 1B2' ]] || fail "print 1f1b"
"$program" print @1f1b.txt >again.txt
cmp 1f1b.txt again.txt || fail "a printed schedule is not read as it was"
"$program" print gpipe --chunks 1 --checkpoint always | grep -q '0F0 0R0 0B0' || fail "print --checkpoint"

"$program" verify interleaved_1f1b --workers 2 --stages 4 --chunks 8 --skip 0:3 >verify.log
grep -q '^The schedule runs: 64 actions, 2 workers, 4 stages, 8 micro-batches\.$' verify.log || fail "verify"
grep -q '^skip 0:3, stage 0 to 3: capacity ' verify.log || fail "verify does not list the skip"
echo "0F0 0B0
1B0 1F0" >wrong.txt
refuse "1B0 stands before 1F0" verify @wrong.txt
refuse "the schedule deadlocks" verify gpipe --chunks 4 --workers 2 --stages 4 --capacity 1

"$program" simulate 1f1b --workers 4 --chunks 8 --graph-bytes 100 --json >simulate.json
for text in '"makespan": 33.0' '"peak_bytes": [' '"least_capacity": '; do
  grep -qF "$text" simulate.json || fail "simulate --json lacks $text"
done
"$program" simulate 1f1b --workers 4 --chunks 8 --graph-bytes 100 >simulate.log
grep -qE '^ +0 +4 +400$' simulate.log || fail "simulate: worker 0 holds four cells of 100 bytes"
"$program" draw looped_bfs --workers 2 --stages 4 >drawing.svg
grep -q '</svg>' drawing.svg || fail "draw"

"$program" print gpipe --placement v --workers 2 --chunks 1 >v.txt
[[ $(<v.txt) == $'0F0 3F0 3B0 0B0\n1F0 2F0 2B0 1B0' ]] || fail "print --placement v"
"$program" print gpipe --placement 0,1,1,0 --chunks 1 | cmp - v.txt || fail "a list of workers"
refuse "--stages does not apply to a list of workers" print gpipe --placement 0,1 --stages 2
refuse "--stages is 3, but a V has two stages on each worker" print gpipe --placement v --stages 3
refuse "--placement 0,x: give looped, v, or" print gpipe --placement 0,x
refuse "worker 0 has no stage" print gpipe --placement 1,1
refuse "needs stage s on worker s mod" print looped_bfs --placement v

# A schedule in a V places its stages itself. I and W have costs of their own.
"$program" print zb_v --workers 2 --chunks 1 >zb_v.txt
[[ $(<zb_v.txt) == $'0F0 3F0 3I0 3W0 0I0 0W0\n1F0 2F0 2I0 2W0 1I0 1W0' ]] || fail "print zb_v"
"$program" print zb_v --workers 2 --stages 4 --placement v --chunks 1 | cmp - zb_v.txt || fail "zb_v with all flags"
"$program" simulate zb_h1 --workers 1 --chunks 2 | grep -q '^makespan 6 s' || fail "I and W take half of a backward"
"$program" simulate zb_h1 --workers 1 --chunks 2 --input-gradient 3 --weight-gradient 0.5 >simulate.log
grep -q '^makespan 9 s' simulate.log || fail "--input-gradient and --weight-gradient"
"$program" draw zb_v --workers 2 >drawing.svg
grep -q '>weight gradient<' drawing.svg || fail "draw zb_v"
refuse "--stages is 2, but a V has two stages on each worker, and --workers is 2" print zb_v --workers 2 --stages 2
refuse "schedule 'zb_v' needs stages s and 2p - 1 - s on worker s of p (the V placement)" print zb_v --placement looped
refuse "schedule 'zb_h1' needs stage s on worker s, one stage per worker" print zb_h1 --workers 2 --stages 4
refuse "--weight-gradient" simulate zb_h1 --weight-gradient 0

refuse "unknown schedule '1f1f'" print 1f1f
refuse "one stage per worker" print 1f1b --workers 2 --stages 4
refuse "cannot read the schedule 'missing.txt'" print @missing.txt
refuse "cannot read the schedule '.'" print @.
refuse "larger than 64 MiB" print @/dev/zero
refuse "--chunks does not apply to a schedule from a file" print @1f1b.txt --chunks 3
echo "0F0 0X0" >malformed.txt
refuse "malformed.txt: line 1, column 5: '0X0' is not an action" print @malformed.txt
refuse "--skip 1:0" verify gpipe --workers 2 --skip 1:0
refuse "--chunks" print gpipe --chunks 0
[[ $(wc -c <err.log) -lt 300 ]] || fail "the message for --chunks 0 is long"
if "$program" print gpipe --chunks 60000 >/dev/full 2>err.log; then fail "a full disk was ignored"; fi
