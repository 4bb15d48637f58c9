package main

import (
	"context"
	"crypto/tls"
	"crypto/x509"
	"encoding/pem"
	"errors"
	"fmt"
	"io"
	"net/url"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"time"

	"go.etcd.io/etcd/client/pkg/v3/transport"
	"go.etcd.io/etcd/client/pkg/v3/types"
	clientv3 "go.etcd.io/etcd/client/v3"
	"go.etcd.io/etcd/server/v3/embed"
	"go.etcd.io/etcd/server/v3/etcdserver/api/v3client"
	"go.uber.org/zap"

	"github.com/tutti-go/tutti/adapters/etcd"
)

// cluster is an external etcd.
type cluster struct {
	endpoints     []string // URLs of its members
	ca, cert, key string   // files; "" for a cluster without TLS
}

// open connects to the cluster. It fails if no member answers, or if this process may not access the keys of jobs. A
// session detects both.
func (c *cluster) open(ctx context.Context, silence time.Duration) (*clientv3.Client, error) {
	conf := clientv3.Config{Endpoints: c.endpoints, Logger: zap.NewNop(), Context: ctx}
	if c.ca != "" || c.cert != "" || c.key != "" {
		info := transport.TLSInfo{TrustedCAFile: c.ca, CertFile: c.cert, KeyFile: c.key}
		var err error
		if conf.TLS, err = info.ClientConfig(); err != nil {
			return nil, err
		}
	}
	client, err := clientv3.New(conf)
	if err != nil {
		return nil, err
	}
	session, err := etcd.Dial(ctx, etcd.Config{Client: client, Prefix: root, Silence: silence})
	if err != nil {
		return nil, errors.Join(fmt.Errorf("--endpoints %s: %w", strings.Join(c.endpoints, ","), err), client.Close())
	}
	return client, session.Close()
}

// member is an etcd in this process.
type member struct {
	folder   string          // of its data
	name     string          // of the member
	cluster  string          // "" if the member is alone
	state    string          // "new" or "existing"
	peers    string          // URLs; "" for the URLs in cluster
	clients  string          // URLs; "" for none
	logLevel string          // of etcd, such as error
	log      zap.AtomicLevel // level of the running member's log
}

// alone is the peer URL of a member without peers.
const alone = "https://localhost:2380"

// urls returns the URLs of the cluster's members.
func (m *member) urls() (types.URLsMap, error) {
	text := m.cluster
	if text == "" {
		text = m.name + "=" + alone
	}
	all, err := types.NewURLsMap(text)
	if err != nil {
		return nil, fmt.Errorf("--initial-cluster takes NAME=https://HOST:PORT, with commas between: %w", err)
	}
	return all, nil
}

// check returns an error for settings that contradict each other.
func (m *member) check() error {
	all, err := m.urls()
	if err != nil {
		return err
	}
	if all[m.name] == nil {
		return fmt.Errorf("--name %q is not in --initial-cluster %s", m.name, m.cluster)
	}
	for name, list := range all {
		if slices.ContainsFunc(list, func(u url.URL) bool { return u.Scheme != "https" }) {
			return fmt.Errorf("the URL of %s in --initial-cluster does not begin with https: "+
				"members prove to each other that they know the secret", name)
		}
	}
	if m.state != embed.ClusterStateFlagNew && m.state != embed.ClusterStateFlagExisting {
		return fmt.Errorf("--initial-cluster-state is new or existing, not %q", m.state)
	}
	if _, err := zap.ParseAtomicLevel(m.logLevel); err != nil {
		return fmt.Errorf("--log-level: %w", err)
	}
	return nil
}

// start starts the member. Its connections to peers use TLS with a key derived from the secret.
func (m *member) start(secret string) (*embed.Etcd, error) {
	conf := embed.NewConfig()
	conf.Name = m.name
	conf.Dir = m.folder
	conf.ClusterState = m.state
	logger, err := m.logger()
	if err != nil {
		return nil, err
	}
	conf.ZapLoggerBuilder = embed.NewZapLoggerBuilder(logger)
	// A job keeps changing a few keys as members come and go. Their old values are useless.
	conf.AutoCompactionMode = embed.CompactorModeRevision
	conf.AutoCompactionRetention = "1000"
	all, err := m.urls()
	if err != nil {
		return nil, err
	}
	conf.InitialCluster = all.String()
	conf.AdvertisePeerUrls = all[m.name]
	conf.ListenPeerUrls = all[m.name]
	if m.peers != "" {
		if conf.ListenPeerUrls, err = parseURLs("listen-peer-urls", m.peers); err != nil {
			return nil, err
		}
	}
	conf.ListenClientUrls = nil
	conf.AdvertiseClientUrls = nil
	if m.clients != "" {
		if conf.ListenClientUrls, err = parseURLs("listen-client-urls", m.clients); err != nil {
			return nil, err
		}
		conf.AdvertiseClientUrls = conf.ListenClientUrls
	}
	if err := os.MkdirAll(m.folder, 0o700); err != nil {
		return nil, err
	}
	if conf.PeerTLSInfo, err = m.identity(secret); err != nil {
		return nil, err
	}
	e, err := embed.StartEtcd(conf)
	if err != nil {
		return nil, fmt.Errorf("the etcd in %s: %w", m.folder, err)
	}
	return e, nil
}

// logger writes lines to standard error.
func (m *member) logger() (*zap.Logger, error) {
	var err error
	if m.log, err = zap.ParseAtomicLevel(m.logLevel); err != nil {
		return nil, err
	}
	return zap.Config{
		Level: m.log, Encoding: "console", EncoderConfig: zap.NewDevelopmentEncoderConfig(), OutputPaths: []string{"stderr"},
		DisableCaller: true, DisableStacktrace: true,
	}.Build()
}

// stop ends the member in order. Errors of closed listeners are ignored.
func (m *member) stop(e *embed.Etcd) {
	m.log.SetLevel(zap.FatalLevel)
	e.Close()
}

// parseURLs parses the value of a flag.
func parseURLs(flag, text string) ([]url.URL, error) {
	list, err := types.NewURLs(splitList(text))
	if err != nil {
		return nil, fmt.Errorf("--%s: %w", flag, err)
	}
	return list, nil
}

// identity writes a certificate whose key follows from the secret to files in the folder. The member accepts no
// other.
func (m *member) identity(secret string) (info transport.TLSInfo, err error) {
	conf, err := storeTLS(secret, "etcd")
	if err != nil {
		return info, err
	}
	pair := conf.Certificates[0]
	key, err := x509.MarshalPKCS8PrivateKey(pair.PrivateKey)
	if err != nil {
		return info, err
	}
	cert := filepath.Join(m.folder, "peer.pem")
	keys := filepath.Join(m.folder, "peer-key.pem")
	err = errors.Join(
		writePEM(cert, "CERTIFICATE", pair.Certificate[0]),
		writePEM(keys, "PRIVATE KEY", key))
	return transport.TLSInfo{
		CertFile: cert, KeyFile: keys, TrustedCAFile: cert, ClientCertAuth: true,
		ServerName: conf.ServerName, SkipClientSANVerify: true, // all hosts share one certificate
		MinVersion: tls.VersionTLS13,
	}, err
}

// writePEM writes a file that only its owner can read.
func writePEM(path, kind string, text []byte) error {
	return os.WriteFile(path, pem.EncodeToMemory(&pem.Block{Type: kind, Bytes: text}), 0o600)
}

// patience is how long a member waits silently for the others.
const patience = 5 * time.Second

// ready waits until the member has joined its cluster and returns a client in this process.
func (m *member) ready(ctx context.Context, e *embed.Etcd, log io.Writer) (*clientv3.Client, error) {
	late := time.NewTimer(patience)
	defer late.Stop()
	for {
		select {
		case <-e.Server.ReadyNotify():
			return v3client.New(e.Server), nil
		case err := <-e.Err():
			return nil, fmt.Errorf("the etcd in %s: %w", m.folder, err)
		case <-late.C:
			fmt.Fprintf(log, "tutti-store: waiting for a majority of %s\n", m.cluster)
		case <-ctx.Done():
			return nil, ctx.Err()
		}
	}
}
