package store

import (
	"context"
	"net"
)

// Network connects the processes of a job where the system's TCP does not: over a tailnet, a relay, or any other
// transport of the program. TLS and the job's secret stay on top, so a Network need not know who connects.
//
// Connections must deliver bytes in order or fail, and Close must end reads and writes. Deadlines, addresses,
// half-closed connections and keep-alives are not needed. The methods are called by several goroutines at the same
// time.
//
// Without a launcher, rank 0 listens on MASTER_PORT, and the others dial MASTER_ADDR:MASTER_PORT. Ranks share no memory
// over a Network.
type Network interface {
	// Dial connects to an address where a process of the job listens. network is "tcp". Dial must end when ctx does.
	Dial(ctx context.Context, network, address string) (net.Conn, error)
	// Listen listens on an address, which is ":0" for any free one, or ":PORT". network is "tcp". Other processes pass
	// the listener's Addr to Dial. Connections outlive the listener.
	Listen(network, address string) (net.Listener, error)
}
