//go:build simulated

package simulation

import (
	"context"
	"fmt"
	"slices"
	"time"

	"github.com/tutti-go/tutti/comm/store"
	"github.com/tutti-go/tutti/internal/sim"
)

// front is a host with a proxy of the store. Each client's session is a session of the store over the network. It
// lasts for Silence after the proxy is lost.
type front struct {
	node  *sim.Node
	proxy *store.Proxy
	lost  bool
}

func (f *front) address() string { return f.node.Host() + ":29500" }

// serveFronts makes two hosts serve the store.
func (j *job) serveFronts() {
	for range 2 {
		f := &front{node: j.NewNode(fmt.Sprint("front", len(j.fronts)))}
		j.fronts = append(j.fronts, f)
		j.together([]*sim.Node{f.node}, func(int) {
			sessions := 0
			f.proxy = store.NewProxy(j.silence, func(ctx context.Context, _ string) (store.Backend, error) {
				sessions++
				name := fmt.Sprint(f.node.Host(), " ", sessions)
				kv, err := store.Dialer{Addresses: []string{storeAt}, TLS: secret2, Name: name}.Dial(ctx)
				if err != nil {
					return nil, err
				}
				return kv, nil
			})
			l, err := sim.Listen("tcp", f.address())
			if err != nil {
				j.fail("%v", err)
			}
			f.proxy.Serve(l, secret2)
		})
	}
}

// addresses returns the addresses of the store. Members prefer different ones.
func (j *job) addresses(member int) (list []string) {
	if len(j.fronts) == 0 {
		return []string{storeAt}
	}
	for i := range j.fronts {
		list = append(list, j.fronts[(member+i)%len(j.fronts)].address())
	}
	return list
}

// loseFront stops a proxy for a while or kills its host, unless it is the only one.
func (j *job) loseFront() {
	f := j.fronts[j.IntN(len(j.fronts))]
	whole := !slices.ContainsFunc(j.fronts, func(f *front) bool { return f.lost })
	away := j.away(4)
	switch {
	case f.lost:
	case whole && j.Chance(2):
		j.Event("%s is killed", f.node.Host())
		f.lost = true
		j.Kill(f.node, j.Chance(2))
	default:
		f.node.Freeze()
		sim.AfterFunc(away, f.node.Thaw)
	}
}

// closeFronts ends the proxies.
func (j *job) closeFronts() {
	for _, f := range j.fronts {
		if f.lost {
			j.Bury(f.node)
		}
		j.within(20*time.Second, "Close of a proxy", func() { _ = f.proxy.Close() })
	}
}
