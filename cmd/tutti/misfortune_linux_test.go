package main

import (
	"cmp"
	"context"
	"crypto/sha256"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"strings"
	"sync/atomic"
	"testing"
	"time"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"
)

// misfortunes runs $FIRST and $SECOND on two machines, as twoMachines does, and $ACTION when they have started. It
// writes the exit codes, and remaining processes, ports and named memory, to files.
const misfortunes = `
mount -t tmpfs tutti /mnt
mount -t tmpfs tutti /dev/shm
mkdir tmp
touch /mnt/net
unshare --net=/mnt/net true
ip link add eth0 type veth peer name eth0 netns /mnt/net
up='ip link set lo up && ip link set eth0 up && ip address add dev eth0'
sh -c "$up 192.168.1.5/24"
there='nsenter --net=/mnt/net'
$there sh -c "$up 192.168.1.6/24"
strike() { : > struck; }
work() { until test -s rank0 && test -s rank1 && test -s rank2 || ! kill -0 $first 2> /dev/null; do sleep 0.05; done; }
serve() { "$@" > /dev/null 2>&1 & service=$!; until ss -Htln | grep -q .; do sleep 0.05; done; }
# survivors are all processes but this one and what it looks with. It pipes to nothing, as shells of pipes are processes.
survivors() {
	ps -e -o pid=,stat=,args= > now
	: > left
	while read -r pid state args; do
		case $pid/$state/$args in 1/* | */Z* | */ps\ -e\ -o*) ;; *) echo "$args" >> left ;; esac
	done < now
	test -s left
}
eval "$BEFORE"
test -z "$AMISS" || test -n "$SECOND" || strike
sh -c "exec $FIRST" > first 2> first.err & first=$!
if test -n "$SECOND"; then
	until grep -q -- --join first.err || ! kill -0 $first 2> /dev/null; do sleep 0.05; done
	test -z "$AMISS" || strike
	$there sh -c "exec $SECOND" > second 2> second.err & second=$!
fi
eval "$ACTION"
test -z "$SECOND" || { wait $second; echo $? > second.rc; }
wait $first; echo $? > first.rc
test -z "$service" || { kill $service; wait $service; }
tries=$PATIENCE
while survivors && test $tries -gt 0; do tries=$((tries - 1)); sleep 0.1; done
{ ss -Htuln; $there ss -Htuln; } > ports
find /dev/shm -mindepth 1 > shared
`

// misfortune is a failure and the expected end of the launchers.
type misfortune struct {
	first  string        // options of the first launcher, besides --machines 2 -n 2
	second string        // of the second launcher, besides --join 192.168.1.5:29400 -n 1; "none" if it does not come
	rival  bool          // the second launcher has another version
	ranks  string        // their command; "" works until a rank is lost
	before string        // commands before the launchers start
	action string        // commands after they have started
	killed bool          // a launcher is killed, and its ranks end a moment later
	amiss  bool          // the failure exists when the second launcher starts, or the first if it is alone
	early  string        // a regular expression for the line that names the culprit, if another one comes last
	within time.Duration // from the failure to that line; 0 for 5 s; untimed if the line may come later
	one    string        // a regular expression for the first launcher's last line, and its exit code
	code   int
	two    string            // the second launcher's last line; "" if like the first's
	other  int               // its exit code; 0 if like the first's
	said   map[string]string // by file, a regular expression that it matches
}

// untimed is for misfortunes that nobody needs to report in time, and for runs without one.
const untimed = -1

// promptly is the time within which every misfortune must be reported, unless the user has set a shorter time.
const promptly = 5 * time.Second

// remote begins the last lines about the second machine's rank.
const remote = `tutti: rank 2 on \S+ \(192\.168\.1\.6\): `

// happenings are the misfortunes by name.
var happenings = map[string]misfortune{
	"a rank is killed": {
		action: `work; strike; kill -9 $(cat rank2)`,
		one:    remote + `signal: killed \(out of memory\? .*dmesg\)`, code: 137,
	},
	"a rank of the first machine is killed": {
		action: `work; strike; kill -9 $(cat rank0)`,
		one:    `tutti: rank 0 on \S+ \(192\.168\.1\.5\): signal: killed \(out of memory\? .*dmesg\)`, code: 137,
	},
	"a rank is killed behind a shell": {
		ranks: `sh -c "$WORK; exit \$?"`, action: `work; strike; kill -9 $(cat rank2)`,
		one: remote + `exit status 137 \(out of memory\? .*dmesg\)`, code: 137,
	},
	"a rank crashes": {
		action: `work; strike; kill -ABRT $(cat rank2)`, one: remote + `exit status 2`, code: 2,
	},
	"a rank is stopped": {
		within: 2*time.Second + promptly, // --tcp-silence
		first:  "--tcp-silence 2s", second: "--tcp-silence 2s", action: `work; strike; kill -STOP $(cat rank2)`,
		one: remote + `process \d+ is stopped: nothing has come from it for \S+, says rank . on .*; --tcp-silence has others wait longer for it`, code: 1,
	},
	"a rank ends early": {
		action: `work; strike; touch leave.2`, one: `tutti: rank . on .*: exit status 1; rank 2 had ended with success before`, code: 1,
	},
	"a rank fails": {
		ranks: `sh -c "test \$TUTTI_RANK = 2 && touch struck && exit 7; sleep 100"`, one: remote + `exit status 7`, code: 7,
	},
	"a rank fails and others ignore the signal": {
		first: "--grace 500ms", second: "--grace 500ms", ranks: `sh -c "trap '' TERM; test \$TUTTI_RANK = 2 && touch struck && exit 7; while :; do sleep 0.1; done"`,
		one: remote + `exit status 7`, code: 7,
	},
	"a rank leaves processes in the background": {
		ranks: `sh -c "sleep 1000 & setsid sleep 1000 & test \$TUTTI_RANK = 2 && touch struck && exit 7; sleep 100"`, one: remote + `exit status 7`, code: 7,
	},
	"a rank fails each time": {
		first: "--restarts 1", ranks: `sh -c "sleep 1000 & test \$TUTTI_RANK = 2 && touch struck && exit 7; sleep 100"`, one: remote + `exit status 7`, code: 7,
	},
	"the cable is pulled": {
		within: 2*time.Second + promptly, // --tcp-silence
		first:  "--tcp-silence 2s", second: "--tcp-silence 2s", action: `work; strike; ip link set eth0 down`,
		one: remote + `nothing has come from it for \S+, says rank . on .*; its launcher does not answer: is the machine down, or the network to it cut\?`, code: 1,
		two: `tutti: the launcher of the first machine does not answer at 192\.168\.1\.5:29400: is it down, or the network to it cut\? Here, rank 2 on .*`,
	},
	"the second launcher is killed": {
		killed: true,
		action: `work; strike; kill -9 $(pgrep -f 'tutti launch --join')`,
		one:    `(` + remote + `.*|tutti: )(its )?(the )?launcher.* has ended, or its machine cannot be reached`, code: 1, two: `.*`, other: 137,
	},
	"the first launcher is killed": {
		killed: true,
		action: `work; strike; kill -9 $(pgrep -f 'tutti launch --machines')`, one: `.*`, code: 137,
		two: `tutti: launch: the launcher of the first machine: .*`, other: 1,
	},
	"the first launcher is terminated": {
		action: `work; strike; kill $(pgrep -f 'tutti launch --machines')`, one: `tutti: terminated`, code: 143, two: `tutti: terminated on \S+`,
	},
	"the second launcher is interrupted": {
		action: `work; strike; kill -INT $(pgrep -f 'tutti launch --join')`, one: `tutti: interrupted on \S+`, code: 130, two: `tutti: interrupted`,
	},
	"the second machine does not come": {
		amiss: true, within: 3*time.Second + promptly, // --wait
		first: "--wait 3s", second: "none", one: `.*1 of 2 machines came \(\S+\): timed out: .*`, code: 1,
	},
	"another secret": {
		amiss: true, early: `it knows another secret`,
		first: "--wait 15s", second: "--wait 8s --secret-file other", before: `(umask 077; head -c 24 /dev/urandom | base64 > other)`,
		one: `.*1 of 2 machines came .*; refused: 192\.168\.1\.6: it knows another secret: .* not the same everywhere`, code: 1,
		two: `.*what listens on 192\.168\.1\.5:29400 is not the store of this job: it knows another secret.*`,
	},
	"a secret of five letters": {
		amiss:  true,
		second: "none", before: `(umask 077; echo short > bad)`, first: "--secret-file bad",
		one: `.*5 bytes; a secret has 16 to 4096: \(umask 077; head -c 24 /dev/urandom \| base64 > bad\) makes one`, code: 1,
	},
	"a secret that is a pipe": {
		amiss:  true,
		second: "none", before: `mkfifo -m 600 bad`, first: "--secret-file bad", one: `.*bad is no file, and so not one with a secret`, code: 1,
	},
	"a secret that others can read": {
		amiss:  true,
		second: "none", before: `head -c 24 /dev/urandom | base64 > bad; chmod 644 bad`, first: "--secret-file bad", one: `.*chmod 600 it`, code: 1,
	},
	"no secret": {
		amiss: true, early: `copy the file from the first machine`,
		first: "--wait 3s", second: "--secret-file none", one: `.*1 of 2 machines came .*`, code: 1, two: `.*copy the file from the first machine, and pass it with --secret-file`,
	},
	"the port is taken": {
		amiss:  true,
		second: "none", before: `serve python3 -m http.server 29400`,
		one: `.*address already in use; --listen takes another address`, code: 1,
	},
	"no such program": {
		amiss:  true,
		second: "none", ranks: "./nowhere",
		one: `Run 'tutti launch --help' for usage\.`, code: 2,
	},
	"a firewall drops what ranks send": {
		within: 2*time.Second + promptly, // --tcp-silence
		first:  "--tcp-silence 2s --tcp-listen :29500", second: "--tcp-silence 2s --tcp-listen :29500",
		action: `work; strike; nft 'add table inet f; add chain inet f i { type filter hook input priority 0; }'
			nft 'add rule inet f i iifname eth0 tcp dport 29500-29599 drop'
			nft 'add rule inet f i iifname eth0 tcp sport 29500-29599 drop'`,
		one: `tutti: rank . on .*: nothing has come from it for .*; (its process is there: )?does a firewall let the machines reach each other\?`, code: 1,
	},
	"both launchers are killed": {
		within: untimed,
		killed: true,
		action: `work; kill -9 $(pgrep -f 'tutti launch --')`, one: `.*`, code: 137, two: `.*`,
	},
	"all processes of the launchers are killed": {
		within: untimed,
		killed: true,
		ranks:  `sh -c "$WORK; exit \$?"`,
		action: `work; kill -9 $(pgrep -f 'tutti launch --') $(pgrep 'rank-keeper|orphan-guard')`, one: `.*`, code: 137, two: `.*`,
	},
	"a keeper is killed": {
		action: `work; strike; kill -9 $(ps -o ppid= -p $(cat rank2))`, code: 137,
		one: remote + `its keeper \(rank-keeper, process \d+\) has ended: signal: killed \(out of memory\? .*dmesg\)`,
	},
	"a rank is killed once": {
		first: "--restarts 1", action: `work; p=$(cat rank2); rm rank?; strike; kill -9 $p; work; touch end`,
		one: remote + `signal: killed .*; restart 1 of 1.*`, code: 0, two: `tutti: .*`,
	},
	"a user signal": {
		within: untimed,
		before: "export TUTTI_RECORD=10",
		action: `work; until test -s tutti-record-0.json -a -s tutti-record-1.json -a -s tutti-record-2.json; do kill -USR1 $first; sleep 0.1; done
			touch end`, one: `\[.\] .*wrote the flight record.*`,
	},
	"the output is full": {
		amiss:  true,
		second: "none", first: "--machines 1", ranks: `sh -c "while :; do echo x; sleep 0.1; done" > /dev/full`,
		one: `tutti: writing the output: .*no space left on device`, code: 1,
	},
	"another port": {
		amiss: true, early: `192\.168\.1\.5:29401: .*connection refused`,
		first: "--wait 4s", second: "--join 192.168.1.5:29401 --wait 2s", one: `.*1 of 2 machines came .*`, code: 1, two: `.*192.168.1.5:29401: .*connection refused; does the first machine's launcher run.*`,
	},
	"the port of another service": {
		amiss: true, early: `does not speak this protocol`,
		before: "serve python3 -m http.server 8000",
		first:  "--wait 4s", second: "--join 192.168.1.5:8000 --wait 3s", one: `.*1 of 2 machines came .*`, code: 1, two: `.*does not speak this protocol.*`,
	},
	"an address that leads nowhere": {
		amiss: true, early: `192\.168\.1\.77:29400: `,
		first: "--wait 4s", second: "--join 192.168.1.77:29400 --wait 2s", one: `.*1 of 2 machines came .*`, code: 1, two: `.*192.168.1.77:29400: .*`,
	},
	"no number of ranks": {
		amiss:  true,
		second: "none", first: "-n 0", one: `Run 'tutti launch --help' for usage\.`, code: 2,
	},
	"ranks of the first machine only fail": {
		ranks: `sh -c "test \$TUTTI_LOCAL_RANK = 1 && touch struck && exit 9; sleep 100"`, one: `tutti: rank 1 on \S+ \(192\.168\.1\.5\): exit status 9`, code: 9,
	},
	"an elastic job's rank fails for good": {
		first: "--machines 1 --min 1", second: "none", ranks: `sh -c "sleep 1000 & touch struck; exit 5"`, one: `tutti: rank [01] on \S+: exit status 5`, code: 5,
	},
	"another version of tutti": {
		amiss: true, early: `does not take part: .*this is tutti 0\.1\.0`,
		rival: true, first: "--wait 15s",
		one: `.*1 of 2 machines came .*; refused: the launcher of \S+ \(192\.168\.1\.6\): .*this is tutti 0\.1\.0, .* use one build of tutti .*`, code: 1,
		two:  `.*this is tutti 0\.1\.0, and the first machine has tutti .*`,
		said: map[string]string{"first.err": `the launcher of \S+ \(192\.168\.1\.6\) does not take part: .*this is tutti 0\.1\.0`},
	},
	"another job": {
		amiss: true, early: `the launcher of .* looks for the job`,
		first: "--wait 15s --job one", second: "--job two",
		one: `.*1 of 2 machines came .*; refused: 192\.168\.1\.6: the launcher of .* looks for the job "two", .* one "one": .*--job.*`, code: 1,
		two:  `tutti: launch: refused by .*: the launcher of .* looks for the job "two", and this store, .*, has one "one": .*--job.*`,
		said: map[string]string{"first.err": `the launcher of .* looks for the job .*two.*, and this store, .*, has one .*one`},
	},
	"another command": {
		amiss: true, early: `does not take part: .*this launcher starts sh`,
		first: "--wait 15s", second: "--no-prefix sh",
		one: `.*1 of 2 machines came .*; refused: the launcher of \S+ \(192\.168\.1\.6\): .*this launcher starts sh .*--job.*`, code: 1,
		two:  `.*this launcher starts sh .*, and the job at 192\.168\.1\.5:29400 is \S+: .*--job.*`,
		said: map[string]string{"first.err": `the launcher of \S+ \(192\.168\.1\.6\) does not take part: .*this launcher starts sh`},
	},
	"a third machine": {
		within: untimed,
		action: `work; "$TUTTI" launch --join 192.168.1.5:29400 $WORK > third 2> third.err; touch end`,
		one:    `.*`, code: 0, // a slow machine: the others report which ones are here
		said: map[string]string{"third.err": `the job at 192\.168\.1\.5:29400 has its 2 machines already`},
	},
	"machines come in another order": {
		within: untimed,
		first:  "--machines 3", ranks: `sh -c "echo this is rank \$TUTTI_RANK"`,
		action: `until grep -q joined second.err; do sleep 0.05; done
			"$TUTTI" launch --join 192.168.1.5:29400 -n 1 sh -c 'echo this is rank $TUTTI_RANK' > third 2> third.err`,
		one:  `.*`, // ranks follow the order of arrival, not hosts or addresses
		said: map[string]string{"first": `this is rank [01].*this is rank [01]`, "second": `this is rank 2`, "third": `this is rank 3`},
	},
	"a rank ends before the others have come": {
		within: 3*time.Second + promptly, // TUTTI_CONNECT_TIMEOUT
		before: `export TUTTI_CONNECT_TIMEOUT=3s; touch gone.2`,
		one:    `tutti: rank . on \S+ \(192\.168\.1\.5\): exit status 1; rank 2 had ended with success before`, code: 1,
	},
	"a rank alone on its machine ends before the others have come": {
		early:  `waiting for ranks that have not come.*rank 2 \(ended with success\)`,
		before: `touch gone.2`,
		action: `until grep -q 'tutti: rank 2 on .* has ended with success; ranks 0, 1 on .* still running' first.err &&
				grep -q 'waiting for ranks that have not come.*rank 2 (ended with success)' first.err; do sleep 0.05; done
			kill $first`,
		one: `tutti: terminated`, code: 143, two: `tutti: terminated on \S+`,
	},
	"rank 0 ends before the others have come": {
		early:  `waiting for rank 0 \(ended with success\)`,
		before: `touch gone.0`,
		action: `until grep -q 'waiting for rank 0 (ended with success)' second.err; do sleep 0.05; done; kill $first`,
		one:    `tutti: terminated`, code: 143, two: `tutti: terminated on \S+`,
	},
	"a rank reduces another number of elements": {
		early:  `rank . called allreduce of . f32.*rank . called allreduce of . f32`,
		action: `work; strike; touch count.2`, one: `tutti: rank . on .*: exit status 1`, code: 1,
		said: map[string]string{"first.err": `rank . called allreduce of . f32.*rank . called allreduce of . f32`},
	},
	"a rank does not call": {
		within: untimed, // no limit was set
		before: "export TUTTI_RECORD=10",
		action: `work; touch sleep.2
			until grep -q 'rank 2 has not called allreduce .*work_test.go' diagnosis; do
				kill -USR1 $first; sleep 0.1; "$TUTTI" diagnose . > diagnosis 2>&1
			done; touch end`,
		one: `\[.\] .*wrote the flight record.*`,
	},
	"a firewall was closed from the start": {
		amiss: true, early: `waiting for other ranks.*192\.168\.1\.5:2950`,
		first: "--tcp-listen :29500", second: "--tcp-listen :29500",
		before: `export TUTTI_CONNECT_TIMEOUT=12s; nft 'add table inet f; add chain inet f i { type filter hook input priority 0; }'
			nft 'add rule inet f i iifname eth0 tcp dport 29500-29599 drop'`,
		one: `tutti: rank 2 on \S+ \(192\.168\.1\.6\) reports that rank [01] on \S+ \(192\.168\.1\.5\) cannot be reached at \[192\.168\.1\.5:2950.* i/o timeout; does a firewall let the machines reach each other\?`, code: 1,
		said: map[string]string{"first.err": `rank 2: it reports that this rank cannot be reached at \[192\.168\.1\.5:2950.* i/o timeout`},
	},
	"a terminal is closed": {
		action: `work; strike; kill -HUP $(pgrep -f 'tutti launch --machines')`, one: `tutti: hung up`, code: 129, two: `tutti: hung up on \S+`,
	},
	"the disk is full": {
		amiss:  true,
		second: "none",
		before: `mkdir full; mount -t tmpfs -o size=4k tutti full; head -c 4096 /dev/zero > full/other; export HOME=$PWD/full`,
		one:    `.*no space left on device.*`, code: 1,
	},
	"nobody reads": {
		first: "--machines 1 --grace 500ms", ranks: "yes > other", second: "none",
		before: `mkfifo other; exec 3<>other`,
		action: `until pgrep -x yes > /dev/null; do sleep 0.05; done; strike; kill $first`, one: `tutti: terminated`, code: 143,
	},
}

// launched are rows of a review by newcomers that are misfortunes here. [situations] has the others.
var launched = map[string]string{
	"wrong secret":                   "another secret",
	"file missing":                   "no secret",
	"file of mode 0644":              "a secret that others can read",
	"port taken":                     "the port is taken",
	"other version":                  "another version of tutti",
	"other flags":                    "another command",
	"machines in another order":      "machines come in another order",
	"kill -9":                        "a rank is killed",
	"a rank stopped":                 "a rank is stopped",
	"another shape on one rank":      "a rank reduces another number of elements",
	"firewall closes during the run": "a firewall drops what ranks send",
	"firewall closed from the start": "a firewall was closed from the start",
	"a rank sleeps in its code":      "a rank does not call",
	"a link is cut":                  "the cable is pulled",
}

// Each row of the review is a misfortune here.
func TestNewcomersLaunched(t *testing.T) {
	for row, name := range launched {
		assert.Contains(t, happenings, name, row)
	}
}

// scaffold matches the files that a misfortune itself needs. All others were left by launchers and ranks.
var scaffold = regexp.MustCompile(`^((first|second|third)(\.err|\.rc)?|rank\d|\w+\.\d|end|now|left|ports|shared|struck|bad|other|secret|diagnosis|tutti-record-\d\.json|` +
	`\.config/tutti/secret)$`)

// TestMisfortunes checks that after any misfortune the last line names the culprit and nothing is left of the job.
func TestMisfortunes(t *testing.T) {
	if testing.Short() {
		t.Skip("takes a minute")
	}
	unshare := []string{"unshare", "--mount", "--net", "--pid", "--fork", "--kill-child", "--mount-proc"}
	if os.Geteuid() != 0 {
		unshare = append(unshare, "--user", "--map-root-user")
	}
	probe := append(unshare[1:len(unshare):len(unshare)], "sh", "-c",
		"mount -t tmpfs tutti /mnt && ip link add eth0 type veth peer name eth1 && nsenter --version && nft -v && ss -h && python3 -V && pgrep -V")
	if out, err := exec.Command(unshare[0], probe...).CombinedOutput(); err != nil {
		t.Skipf("needs namespaces, iproute2, nftables, procps, python3 and util-linux: %v: %s", err, out)
	}
	tutti := build(t)
	// They mostly wait, so more of them run in parallel than parallel tests on few processors would.
	slots := make(chan struct{}, 8)
	type outcome struct {
		dir  string        // where it has happened
		told time.Duration // from the failure to the line that names it
		err  error         // of the script
	}
	clockwork, stop := context.WithCancel(t.Context())
	defer stop()
	go runClock(clockwork)
	outcomes := map[string]chan outcome{}
	for name, m := range happenings {
		done := make(chan outcome, 1)
		outcomes[name] = done
		dir := t.TempDir()
		go func() {
			slots <- struct{}{}
			defer func() { <-slots }()
			told, err := m.run(t.Context(), dir, tutti, unshare)
			done <- outcome{dir, told, err}
		}()
	}
	for name, m := range happenings {
		t.Run(name, func(t *testing.T) {
			o := <-outcomes[name]
			require.NoError(t, o.err)
			m.judge(t, o.dir)
			t.Logf("told within %v", o.told)
			if m.within != untimed {
				assert.LessOrEqual(t, o.told, allowance(cmp.Or(m.within, promptly)), "from what goes wrong to the line that names it")
			}
		})
	}
}

// allowance is the allowed time for a line that is due within a time: four times that unless TUTTI_EXTENDED is set,
// because a crowded machine may delay the launchers more than the clock.
func allowance(within time.Duration) time.Duration {
	if os.Getenv("TUTTI_EXTENDED") != "" {
		return within
	}
	return 4 * within
}

// alone reports whether there is no second launcher.
func (m misfortune) alone() bool { return m.second == "none" }

// run makes it happen in a directory.
func (m misfortune) run(ctx context.Context, dir, tutti string, unshare []string) (told time.Duration, err error) {
	ctx, cancel := context.WithTimeout(ctx, 2*time.Minute) // ends hangs
	defer cancel()
	ranks := cmp.Or(m.ranks, "$WORK")
	first := fmt.Sprintf("%s launch --machines 2 -n 2 %s %s", tutti, m.first, ranks)
	second := fmt.Sprintf("%s launch --join 192.168.1.5:29400 -n 1 %s %s", tutti, m.second, ranks)
	switch {
	case m.alone():
		second = ""
	case m.rival:
		second = fmt.Sprintf("env %s=rival %s 192.168.1.5:29400", roleVariable, os.Args[0])
	}
	amiss := ""
	if m.amiss {
		amiss = "yes"
	}
	patience := "0"
	if m.killed {
		patience = "600"
	}
	cmd := exec.CommandContext(ctx, unshare[0], append(unshare[1:len(unshare):len(unshare)], "sh", "-c", misfortunes)...)
	cmd.Dir = dir
	cmd.Env = append(os.Environ(), "FIRST="+first, "SECOND="+second, "AMISS="+amiss, "ACTION="+m.action, "BEFORE="+m.before, "PATIENCE="+patience,
		"HOME="+dir, "TMPDIR="+filepath.Join(dir, "tmp"), "TUTTI="+tutti, "WORK="+os.Args[0], roleVariable+"=works",
		"XDG_CONFIG_HOME=", "TUTTI_MPI_LIB=/nowhere", "TUTTI_SECRET=", "TUTTI_SECRET_FILE=")
	cmd.WaitDelay = 5 * time.Second
	times := make(chan time.Duration, 1)
	over, end := context.WithCancel(ctx)
	go func() { times <- m.time(over, dir) }()
	out, err := cmd.CombinedOutput()
	end()
	if err != nil {
		return 0, fmt.Errorf("%w: %s", err, out)
	}
	return <-times, nil
}

// never is the time of a failure that has not happened or was not reported.
const never = time.Hour

// time returns the time from the failure to the line that names the culprit, by the clock.
func (m misfortune) time(over context.Context, dir string) time.Duration {
	line := cmp.Or(m.early, strings.TrimPrefix(m.one, ".*"), m.two)
	culprit := regexp.MustCompile(line)
	struck := time.Duration(-1)
	for {
		now := clock.Load()
		ended := over.Err() != nil
		if _, err := os.Stat(filepath.Join(dir, "struck")); err == nil && struck < 0 {
			struck = time.Duration(now)
		}
		for _, name := range []string{"first.err", "second.err"} {
			text, _ := os.ReadFile(filepath.Join(dir, name)) // it may be written later
			if struck >= 0 && culprit.MatchString(strings.ReplaceAll(string(text), "\n", " ")) {
				return time.Duration(now) - struck
			}
		}
		if ended {
			return never
		}
		select {
		case <-over.Done():
		case <-time.After(tickTime / 2):
		}
	}
}

// tickTime is the length of a tick on an idle machine.
const tickTime = 250 * time.Millisecond

// clock counts ticks. A tick is a pause with one process and some work. On a crowded machine it runs as slowly as the
// launchers, so it measures how long they wait, not how busy the machine is.
var clock atomic.Int64

// runClock advances the clock until ctx ends.
func runClock(ctx context.Context) {
	work := make([]byte, 16<<20)
	for ctx.Err() == nil {
		_ = exec.CommandContext(ctx, "sleep", fmt.Sprint(tickTime.Seconds())).Run()
		sha256.Sum256(work)
		clock.Add(int64(tickTime))
	}
}

// judge checks the launchers' output, and what is left of them.
func (m misfortune) judge(t *testing.T, dir string) {
	read := func(name string) string {
		text, err := os.ReadFile(filepath.Join(dir, name))
		if !errors.Is(err, os.ErrNotExist) {
			require.NoError(t, err)
		}
		return strings.TrimSpace(string(text))
	}
	ends := func(name, want string, code int) {
		lines := strings.Split(read(name+".err"), "\n")
		last := lines[len(lines)-1]
		if i := strings.LastIndex("\n"+read(name+".err"), "\ntutti: "); code == 1 && i >= 0 { // long lines are wrapped
			last = strings.ReplaceAll(read(name + ".err")[i:], "\n", " ")
		}
		assert.Regexp(t, regexp.MustCompile(`^`+want+`$`), last, "%s of %s", name, read(name+".err"))
		assert.Equal(t, fmt.Sprint(code), read(name+".rc"), name)
	}
	ends("first", m.one, m.code)
	if !m.alone() {
		ends("second", cmp.Or(m.two, m.one), cmp.Or(m.other, m.code))
	}
	for name, want := range m.said {
		assert.Regexp(t, want, strings.ReplaceAll(read(name), "\n", " "), name)
	}
	assert.Empty(t, read("left"), "processes")
	assert.Empty(t, read("ports"), "ports")
	assert.Empty(t, read("shared"), "memory")
	err := filepath.WalkDir(dir, func(path string, entry fs.DirEntry, err error) error {
		require.NoError(t, err)
		name, err := filepath.Rel(dir, path)
		require.NoError(t, err)
		assert.True(t, entry.IsDir() || scaffold.MatchString(name), "the file %s is left", name)
		return nil
	})
	require.NoError(t, err)
}
