package elastic

import (
	"context"
	"slices"
	"sync"
	"testing"
	"time"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"github.com/tutti-go/tutti/comm"
	"github.com/tutti-go/tutti/comm/store"
)

type former = func(context.Context, store.Store, Place) (comm.Communicator, error)

// TestComeAndGo: members join one that trains alone, leave in order and are killed in the middle of a step, the first one
// included; those who are left have the values of the members that made each step.
func TestComeAndGo(t *testing.T) {
	over(t, func(t *testing.T, form former) {
		ctx, cancel := context.WithTimeout(t.Context(), 60*time.Second)
		defer cancel()
		log, dial := newReplay(), keepStore(t)
		var all sync.WaitGroup
		var list []*trainee
		reached := make(chan int, 16)
		start := func(i int) {
			a := newTrainee(t, log, Config{Name: name(i), Form: form, Dial: dial})
			list = append(list, a)
			all.Go(func() {
				most := 0
				err := a.run(ctx, t, func(e *Epoch, made int) bool {
					size, with := len(e.Members), func(i int) bool { return slices.Contains(e.Members, name(i)) }
					if i == 0 && made == 3 && size > most {
						most = size
						reached <- size
					}
					if i == 0 && size == 4 && made == 9 {
						a.kill()
					}
					if i == 2 && size == 3 && !with(0) && made == 5 {
						a.Leave()
					}
					return size == 2 && with(1) && with(3) && made == 20
				})
				if i != 0 {
					assert.NoError(t, err, a.cfg.Name)
				}
			})
		}
		for i := range 4 {
			start(i)
			select {
			case size := <-reached:
				require.Equal(t, i+1, size)
			case <-ctx.Done():
				require.NoError(t, ctx.Err())
			}
		}
		all.Wait()
		require.NoError(t, ctx.Err())
		assert.Equal(t, list[1].steps, list[3].steps)
		log.repeat(t, list[1].steps, []*trainee{list[1], list[3]})
		assert.ElementsMatch(t, []string{name(1), name(3)}, log.steps[list[1].steps-1].members)
		for _, a := range list {
			_ = a.Close()
		}
	})
}
