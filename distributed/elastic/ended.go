package elastic

import (
	"context"
	"slices"

	"github.com/tutti-go/tutti/comm/store"
)

// Ended reports whether the job of a store has made its last step, so that a process that joins would get [ErrEnded].
func Ended(ctx context.Context, kv *store.Client) (bool, error) {
	all, err := kv.List(ctx, keys)
	if err != nil {
		return false, err
	}
	world := "" // of the last epoch, which is random
	for _, e := range all {
		if e.Key != epochKey {
			continue
		}
		epoch, err := read(store.Event{Entry: e})
		if err == nil && epoch.record != nil {
			world = epoch.record.World
		}
	}
	// The members of the epoch with the last step write its World to another key.
	final := func(e store.Entry) bool {
		return e.Key != epochKey && string(e.Value) == world
	}
	return world != "" && slices.ContainsFunc(all, final), nil
}
