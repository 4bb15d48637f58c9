package launch

import (
	"context"
	"fmt"
	"os"
	"path/filepath"
	"regexp"
	"slices"
	"strconv"
	"strings"
	"testing"
	"time"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"
)

// allowed reads the processors of a process, such as 0-3,7.
func allowed(t *testing.T, status string) (list []int) {
	t.Helper()
	found := regexp.MustCompile(`(?m)^Cpus_allowed_list:\s*(\S+)$`).FindStringSubmatch(status)
	require.Len(t, found, 2, status)
	for _, part := range strings.Split(found[1], ",") {
		first, last, isRange := strings.Cut(part, "-")
		if !isRange {
			last = first
		}
		from, err := strconv.Atoi(first)
		require.NoError(t, err)
		to, err := strconv.Atoi(last)
		require.NoError(t, err)
		for p := from; p <= to; p++ {
			list = append(list, p)
		}
	}
	return list
}

// ours returns the processors of this process.
func ours(t *testing.T) []int {
	t.Helper()
	status, err := os.ReadFile("/proc/self/status")
	require.NoError(t, err)
	return allowed(t, string(status))
}

// runBound runs a job of bound ranks that fail until they have been started before times. It returns each rank's
// processors, as the rank sees them, and its GOMAXPROCS.
func runBound(t *testing.T, cfg Config, before int) (shares [][]int, threads []string) {
	t.Helper()
	ctx, cancel := context.WithTimeout(t.Context(), time.Minute)
	defer cancel()
	const script = `[ "$TUTTI_RESTART" = %d ] || exit 1; printf '%%s\n' "$TUTTI_RANK=$GOMAXPROCS=$(grep Cpus_allowed_list /proc/self/status)"`
	out := new(buffer)
	cfg.Command = []string{"sh", "-c", fmt.Sprintf(script, before)}
	cfg.Machines = 1
	cfg.Restarts = before
	cfg.Wait = time.Minute
	cfg.Bind = true
	cfg.NoPrefix = true
	cfg.Out = out
	cfg.Err = new(buffer)
	require.NoError(t, Run(ctx, cfg), cfg.Err)
	shares = make([][]int, cfg.Ranks)
	threads = make([]string, cfg.Ranks)
	lines := strings.Split(strings.TrimSpace(out.String()), "\n")
	require.Len(t, lines, cfg.Ranks)
	for _, line := range lines {
		words := strings.SplitN(line, "=", 3)
		rank, err := strconv.Atoi(words[0])
		require.NoError(t, err)
		threads[rank] = words[1]
		shares[rank] = allowed(t, words[2])
	}
	return shares, threads
}

// Ranks share all of this process's processors, in shares whose sizes differ by one at most. A restart keeps the
// shares. A rank on one processor has two threads. Afterwards all threads of this process may use all of its
// processors.
func TestBoundRanks(t *testing.T) {
	t.Setenv("GOMAXPROCS", "")
	before := ours(t)
	for _, ranks := range []int{1, 2, len(before)} {
		if ranks > len(before) {
			continue
		}
		for name, cfg := range map[string]Config{"all ranks": {}, "elastic": {Min: 1}} {
			for restarts := range 2 {
				cfg.Ranks = ranks
				shares, threads := runBound(t, cfg, restarts)
				assert.Equal(t, before, slices.Concat(shares...), "%s, %d ranks", name, ranks)
				for rank, share := range shares {
					assert.InDelta(t, float64(len(before))/float64(ranks), len(share), 0.99, "%s, rank %d of %d", name, rank, ranks)
					want := ""
					if len(share) == 1 {
						want = "2"
					}
					assert.Equal(t, want, threads[rank], "%s, rank %d of %d", name, rank, ranks)
				}
			}
		}
	}
	threads, err := filepath.Glob("/proc/self/task/*/status")
	require.NoError(t, err)
	require.NotEmpty(t, threads)
	for _, thread := range threads {
		status, err := os.ReadFile(thread)
		if err == nil { // if not, the thread has ended
			assert.Equal(t, before, allowed(t, string(status)), thread)
		}
	}
}

// A number of threads that the user has chosen stays.
func TestBoundRanksKeepTheirThreads(t *testing.T) {
	t.Setenv("GOMAXPROCS", "1")
	ranks := len(ours(t))
	_, threads := runBound(t, Config{Ranks: ranks}, 0)
	assert.Equal(t, slices.Repeat([]string{"1"}, ranks), threads)
}

func TestMoreRanksThanProcessors(t *testing.T) {
	processors := len(ours(t))
	err := Run(t.Context(), Config{
		Command:  []string{"true"},
		Ranks:    processors + 1,
		Machines: 1,
		Wait:     time.Minute,
		Bind:     true,
		Out:      new(buffer),
		Err:      new(buffer),
	})
	host, _ := os.Hostname()
	const want = "launch: --bind: %d ranks on %s, but processors for %d: start fewer ranks, or leave out --bind"
	require.EqualError(t, err, fmt.Sprintf(want, processors+1, host, processors))
}

// Launchers of hosts that are one machine share its processors.
func TestSharesOfProcessors(t *testing.T) {
	processors := []int{1, 2, 3, 5, 8, 13, 21}
	for name, c := range map[string]struct {
		ranks   int
		starter *starter // nil: a user has started the launcher
		want    [][]int
	}{
		"one":             {ranks: 1, want: [][]int{processors}},
		"three":           {ranks: 3, want: [][]int{{1, 2}, {3, 5}, {8, 13, 21}}},
		"as many":         {ranks: 7, want: [][]int{{1}, {2}, {3}, {5}, {8}, {13}, {21}}},
		"the second host": {ranks: 2, starter: &starter{localFirst: 1, localSize: 3}, want: [][]int{{3, 5}, {8, 13, 21}}},
	} {
		a := &agent{Config: Config{Ranks: c.ranks, starter: c.starter}, processors: processors}
		var got [][]int
		for local := range c.ranks {
			got = append(got, a.share(local))
		}
		assert.Equal(t, c.want, got, name)
	}
	assert.Nil(t, new(agent).share(0), "not bound")
}
