// Package tailnet connects the ranks of a job over a tailnet (tailscale.com/tsnet): on machines behind routers, in
// several clouds, at home. The program itself is a node of the tailnet. Nothing is installed on its machine.
package tailnet

import (
	"context"
	"errors"
	"fmt"
	"io/fs"
	"net"
	"net/netip"
	"strings"
	"time"

	"tailscale.com/ipn"
	"tailscale.com/tsnet"

	"github.com/tutti-go/tutti/comm"
	"github.com/tutti-go/tutti/comm/store"
)

var _ store.Network = (*Network)(nil)

// Network is a tailnet, for use as Network in tutti.Config, tcp.Config and others. Ranks dial each other by address.
// They dial rank 0 by its name in the tailnet or by its address there.
type Network struct {
	*tsnet.Server // the program closes it after its last communicator

	address netip.Addr // of this node in the tailnet
}

// Up starts a server unless it is running, and returns when this node is in its tailnet or ctx has ended. The error
// names the condition that the node waited for, and the remedy. It wraps fs.ErrPermission if the tailnet refuses the
// server's key, and [comm.ErrTimeout] or [comm.ErrCanceled] if ctx has ended.
func Up(ctx context.Context, server *tsnet.Server) (*Network, error) {
	status, err := server.Up(ctx)
	if err != nil {
		return nil, fmt.Errorf("tailnet: %w", explain(ctx, server, err))
	}
	if len(status.TailscaleIPs) == 0 {
		return nil, errors.New("tailnet: this node has no address in its tailnet")
	}
	return &Network{
		Server:  server,
		address: status.TailscaleIPs[0],
	}, nil
}

// statusTime bounds the time to find out why a node did not come up.
const statusTime = 2 * time.Second

// explain adds the condition that a node waited for to its error. tsnet writes it only to logs.
func explain(ctx context.Context, server *tsnet.Server, err error) error {
	if ctx.Err() != nil {
		err = fmt.Errorf("%w: %w", comm.ContextError(ctx), err)
	}
	local, failed := server.LocalClient()
	if failed != nil {
		return err
	}
	asking, cancel := context.WithTimeout(context.WithoutCancel(ctx), statusTime)
	defer cancel()
	status, failed := local.StatusWithoutPeers(asking)
	if failed != nil {
		return err
	}
	const key = "AuthKey of the server or TS_AUTHKEY in the environment"
	health := strings.Join(status.Health, " ")
	switch {
	case strings.Contains(err.Error(), "invalid authkey"):
		return fmt.Errorf("%w: %w; %s is wrong, used up or expired", fs.ErrPermission, err, key)
	case status.AuthURL != "":
		return fmt.Errorf("%w; this node is not logged in: set %s, or open %s", err, key, status.AuthURL)
	case status.BackendState == ipn.NeedsMachineAuth.String():
		return fmt.Errorf("%w; an administrator of the tailnet has to approve this node", err)
	case health != "":
		return fmt.Errorf("%w; is ControlURL right, and does this machine reach it? %s", err, health)
	}
	return err
}

// Listen implements [store.Network]. Other nodes can dial the listener's address.
func (n *Network) Listen(network, address string) (net.Listener, error) {
	l, err := n.Server.Listen(network, address)
	if err != nil {
		return nil, fmt.Errorf("tailnet: %w", err)
	}
	_, port, err := net.SplitHostPort(l.Addr().String())
	if err != nil {
		return nil, errors.Join(err, l.Close())
	}
	public, err := netip.ParseAddrPort(net.JoinHostPort(n.address.String(), port))
	if err != nil {
		return nil, errors.Join(err, l.Close())
	}
	return &listener{
		Listener: l,
		public:   net.TCPAddrFromAddrPort(public),
	}, nil
}

// listener has its node's address, which tsnet's listeners omit.
type listener struct {
	net.Listener
	public net.Addr // address by which others reach it
}

// Addr implements [net.Listener].
func (l *listener) Addr() net.Addr { return l.public }
