//go:build simulated

package simulation

import (
	"fmt"
	"log/slog"
	"maps"
	"os"
	"runtime"
	"slices"
	"strconv"
	"strings"
	"testing"
	"testing/synctest"
	"time"

	"github.com/tutti-go/tutti/internal/sim"
)

// subjects are the subjects of simulations. Each function plays one seed.
var subjects = map[string]func(*play){
	"schedule":   playSchedule,
	"segment":    playSegment,
	"tcp":        playTCP,
	"store":      playStore,
	"local":      playLocal,
	"checked":    playChecked,
	"sparse":     playSparse,
	"elastic":    playElastic,
	"membership": playMembership,
	"ddp":        playDDP,
	"outer":      playOuter,
	"rendezvous": playRendezvous,
	"trees":      playTrees,
}

// play is one seed of one subject.
type play struct {
	*sim.Simulation
	sim.Random
	t       *testing.T
	subject string
	store   *sim.Node // set by serve
	hears   bool      // idle ranks hear of aborts
}

// points counts the points of earlier seeds, and events the events of members of elastic jobs.
var points, events int

// fail ends the process with the report of a failure.
func (p *play) fail(format string, args ...any) {
	_, now := p.Trace()
	fmt.Printf("%s\n\nFAILED: subject %s, seed %d, %d points: %s\nThe events are its last. To repeat it:\n\tTUTTI_SIM_SUBJECT=%s TUTTI_SIM_SEED=%d go test -v -run TestSimulation ./comm/internal/simulation\n",
		p.Report(), p.subject, p.Seed, points+now, fmt.Sprintf(format, args...), p.subject, p.Seed)
	os.Exit(1)
}

// within fails if f takes longer than d of virtual time.
func (p *play) within(d time.Duration, what string, f func()) {
	began := time.Now()
	f()
	if took := time.Since(began); took > d {
		p.fail("%s took %v, at most %v", what, took, d)
	}
}

// limit is the longest time that everything may take: a longer wait has been forgotten.
const limit = 150 * time.Second

// together runs f for each rank, on a goroutine of the rank's node, and waits for all.
func (p *play) together(nodes []*sim.Node, f func(rank int)) {
	done := make(chan int)
	running := map[int]bool{}
	for rank, n := range nodes {
		running[rank] = true
		sim.GoOn(n, func() {
			defer func() {
				if v := recover(); v != nil {
					p.fail("rank %d panicked: %v", rank, v)
				}
			}()
			f(rank)
			done <- rank
		})
	}
	late := time.After(limit)
	for len(running) > 0 {
		select {
		case rank := <-done:
			delete(running, rank)
		case <-late:
			p.fail("ranks %v have not ended after %v", slices.Sorted(maps.Keys(running)), limit)
		}
	}
	sim.Point()
}

// run plays a seed and returns its trace.
func run(t *testing.T, subject string, seed uint64) (trace uint64, points int) {
	var p *play
	defer func() {
		if v := recover(); v != nil {
			stacks := make([]byte, 1<<20)
			for _, one := range strings.Split(string(stacks[:runtime.Stack(stacks, true)]), "\n\n") {
				if header, _, _ := strings.Cut(one, "\n"); strings.Contains(header, "bubble") {
					p.Event("%s", one)
				}
			}
			p.fail("%v", v)
		}
	}()
	over := make(chan bool)
	defer close(over)
	go func() { // in real time
		for before := -1; ; {
			select {
			case <-over:
				return
			case <-time.After(time.Minute):
			}
			_, now := p.Trace()
			if now == before {
				p.fail("virtual time stands still: a goroutine waits for a lock that is not the simulation's")
			}
			before = now
		}
	}()
	synctest.Test(t, func(t *testing.T) {
		p = &play{sim.Begin(seed), sim.Random(sim.Mix(seed, 7)), t, subject, nil, seed%3 == 0 && subject != "checked"}
		defer p.End()
		subjects[subject](p)
		sim.Sleep(time.Second) // later events do not wait for a bubble whose first goroutine has ended
		trace, points = p.Trace()
	})
	return trace, points
}

// chosen returns the subjects in TUTTI_SIM_SUBJECT, or all.
func chosen() []string {
	if names := os.Getenv("TUTTI_SIM_SUBJECT"); names != "" {
		return strings.Split(names, ",")
	}
	if number("TUTTI_SIM_EVENTS", 0) > 0 {
		return []string{"membership"}
	}
	return slices.DeleteFunc(slices.Sorted(maps.Keys(subjects)), func(name string) bool { return name == "membership" }) // it is long
}

func number(name string, otherwise uint64) uint64 {
	if n, err := strconv.ParseUint(os.Getenv(name), 10, 64); err == nil {
		return n
	}
	return otherwise
}

// TestSeeds plays seeds of all subjects, alternately.
func TestSeeds(t *testing.T) {
	slog.SetDefault(slog.New(slog.DiscardHandler))
	names := chosen()
	if seed := number("TUTTI_SIM_SEED", 0); seed > 0 {
		for _, name := range names {
			trace, points := run(t, name, seed)
			fmt.Printf("%s, seed %d: %d points, trace %x\n", name, seed, points, trace)
		}
		return
	}
	began := time.Now()
	first, runs, least, most := uint64(1), number("TUTTI_SIM_RUNS", 0), time.Duration(number("TUTTI_SIM_SECONDS", 0))*time.Second, int(number("TUTTI_SIM_EVENTS", 0))
	switch {
	case runs > 0 || least > 0 || most > 0:
		first = number("TUTTI_SIM_FIRST", uint64(began.UnixNano())>>10<<10)
	default:
		runs = uint64(len(names))
	}
	played := map[string]int{}
	seed := first
	for ; seed < first+runs || time.Since(began) < least || events < most; seed++ {
		name := names[seed%uint64(len(names))]
		_, n := run(t, name, seed)
		played[name]++
		points += n
		if played[name]%100 == 0 && most > 0 {
			fmt.Printf("seed %d: %d of %d events\n", seed, events, most)
		}
	}
	fmt.Printf("seeds %d to %d: %v, %d events of members, %d points in %v\n", first, seed-1, played, events, points, time.Since(began).Round(time.Millisecond))
}

// TestTraces prints the order of maps and the traces of seeds.
func TestTraces(t *testing.T) {
	slog.SetDefault(slog.New(slog.DiscardHandler))
	synctest.Test(t, func(*testing.T) {
		numbers := map[uint64]bool{}
		texts := map[string]bool{}
		for i := range 200 {
			numbers[uint64(i)] = true
			texts[strconv.Itoa(i)] = true
		}
		fmt.Println("trace numbers:", slices.Collect(maps.Keys(numbers)))
		fmt.Println("trace texts:", slices.Collect(maps.Keys(texts)))
		fmt.Println("trace subjects:", slices.Collect(maps.Keys(subjects))) // made before the simulation
	})
	for _, name := range chosen() {
		for seed := range uint64(20) {
			trace, points := run(t, name, seed+1)
			fmt.Printf("trace %s %d: %x %d\n", name, seed+1, trace, points)
		}
	}
}
