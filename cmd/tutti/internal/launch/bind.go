package launch

import (
	"fmt"
	"os"
)

// findProcessors finds the processors to bind ranks to, if --bind is set.
func (a *agent) findProcessors() (err error) {
	if !a.Bind {
		return nil
	}
	if a.processors, err = usableProcessors(); err != nil {
		return fmt.Errorf("--bind: %w", err)
	}
	if _, ranks := a.place(0); ranks > len(a.processors) {
		const remedy = "start fewer ranks, or leave out --bind"
		return fmt.Errorf("--bind: %d ranks on %s, but processors for %d: %s", ranks, a.host, len(a.processors), remedy)
	}
	return nil
}

// place returns a rank's index among the job's ranks on this machine, and the number of these ranks. Launchers of
// several hosts that are one machine share its processors.
func (a *agent) place(local int) (index, ranks int) {
	if a.starter == nil {
		return local, a.Ranks
	}
	return a.starter.localFirst + local, a.starter.localSize
}

// share returns the processors of one of this launcher's ranks, nil if ranks are not bound.
func (a *agent) share(local int) []int {
	if a.processors == nil {
		return nil
	}
	index, ranks := a.place(local)
	return a.processors[index*len(a.processors)/ranks : (index+1)*len(a.processors)/ranks]
}

// threads returns a setting for a rank on a single processor, unless the user has set GOMAXPROCS. With one thread, a Go
// rank that computes would hear the others only every 10 ms, when Go interrupts it.
func threads(processors []int) []string {
	if len(processors) != 1 || os.Getenv("GOMAXPROCS") != "" {
		return nil
	}
	return []string{"GOMAXPROCS=2"}
}
