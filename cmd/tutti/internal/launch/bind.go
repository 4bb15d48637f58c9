package launch

import (
	"fmt"
	"os"
)

// findProcessors finds the processors that ranks are bound to, if they are to be.
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

// place is where a rank of this launcher is among those of the job on this machine, and how many these are. Launchers
// of several hosts that are one machine share its processors.
func (a *agent) place(local int) (index, ranks int) {
	if a.starter == nil {
		return local, a.Ranks
	}
	return a.starter.localFirst + local, a.starter.localSize
}

// share returns the processors of a rank of this launcher; nil if it is not bound.
func (a *agent) share(local int) []int {
	if a.processors == nil {
		return nil
	}
	index, ranks := a.place(local)
	return a.processors[index*len(a.processors)/ranks : (index+1)*len(a.processors)/ranks]
}

// threads is what a rank on a single processor has in its environment, unless the user has set it. A Go program would
// run one thread, and a rank that computes would hear the others only every 10 ms, when Go interrupts it.
func threads(processors []int) []string {
	if len(processors) != 1 || os.Getenv("GOMAXPROCS") != "" {
		return nil
	}
	return []string{"GOMAXPROCS=2"}
}
