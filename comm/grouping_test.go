package comm_test

import (
	"errors"
	"testing"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"github.com/tutti-go/tutti/comm"
)

func TestGroupingFinishesTheOutermostGroupOnce(t *testing.T) {
	var g comm.Grouping
	finished := 0
	finish := func(err error) error { finished++; return err }
	err := g.Run(func() error {
		require.True(t, g.Enter())
		require.NoError(t, g.Run(func() error {
			require.True(t, g.Enter())
			return nil
		}, finish))
		require.Zero(t, finished)
		return nil
	}, finish)
	assert.NoError(t, err)
	assert.Equal(t, 1, finished)
	assert.False(t, g.Enter())
}

func TestGroupingKeepsTheFirstError(t *testing.T) {
	first, second, mine := errors.New("first"), errors.New("second"), errors.New("of finish")
	for name, test := range map[string]struct {
		submit func(g *comm.Grouping) error
		want   error
	}{
		"of submit": {func(*comm.Grouping) error { return first }, first},
		"of a call that submit ignores": {func(g *comm.Grouping) error {
			_ = g.Refuse(first)
			_ = g.Refuse(second)
			return nil
		}, first},
		"of an inner group that submit ignores": {func(g *comm.Grouping) error {
			_ = g.Run(func() error { return first }, nil)
			return nil
		}, first},
		"of finish": {func(*comm.Grouping) error { return nil }, mine},
	} {
		t.Run(name, func(t *testing.T) {
			var g comm.Grouping
			err := g.Run(func() error { return test.submit(&g) }, func(err error) error {
				if test.want == mine {
					assert.NoError(t, err)
					return mine
				}
				assert.Equal(t, test.want, err)
				return nil
			})
			assert.Equal(t, test.want, err)
			assert.NoError(t, g.Run(func() error { return nil }, func(err error) error { return err }), "the next group starts anew")
		})
	}
}

func TestGroupingKeepsOthersOut(t *testing.T) {
	var g comm.Grouping
	entered := make(chan bool)
	ended := false
	require.NoError(t, g.Run(func() error {
		started := make(chan struct{})
		go func() {
			close(started)
			inside := g.Enter()
			assert.True(t, ended, "entered while the group was open")
			entered <- inside
		}()
		<-started
		return nil
	}, func(error) error { ended = true; return nil }))
	assert.False(t, <-entered)
}

func TestGroupingSurvivesAPanic(t *testing.T) {
	var g comm.Grouping
	var given error
	assert.PanicsWithValue(t, "oops", func() {
		_ = g.Run(func() error { panic("oops") }, func(err error) error { given = err; return nil })
	})
	assert.Error(t, given)
	assert.False(t, g.Enter())
	assert.NoError(t, g.Refuse(nil))
}

// An inner group that panics gives up the outer one, also if that recovers.
func TestGroupingDoesNotForgetAPanic(t *testing.T) {
	var g comm.Grouping
	assert.Error(t, g.Run(func() error {
		assert.Panics(t, func() { _ = g.Run(func() error { panic("oops") }, nil) })
		return nil
	}, func(err error) error {
		assert.Error(t, err)
		return nil
	}))
}

func TestGroupingKnowsWhereWaitingIsInVain(t *testing.T) {
	var g comm.Grouping
	assert.NoError(t, g.Outside())
	require.NoError(t, g.Run(func() error {
		assert.ErrorIs(t, g.Outside(), comm.ErrArgument)
		other := make(chan error)
		go func() { other <- g.Outside() }()
		assert.NoError(t, <-other)
		return nil
	}, func(error) error { return nil }))
}
