package etcd_test

import (
	"context"
	"crypto/ecdsa"
	"crypto/elliptic"
	"crypto/rand"
	"crypto/tls"
	"crypto/x509"
	"crypto/x509/pkix"
	"encoding/pem"
	"errors"
	"io"
	"io/fs"
	stdlog "log"
	"math"
	"math/big"
	"net"
	"net/http"
	"net/http/httptest"
	"os"
	"os/exec"
	"path/filepath"
	"strconv"
	"strings"
	"testing"
	"time"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"
	"go.etcd.io/etcd/api/v3/authpb"
	"go.etcd.io/etcd/api/v3/etcdserverpb"
	clientv3 "go.etcd.io/etcd/client/v3"
	"go.uber.org/zap"

	"github.com/tutti-go/tutti/adapters/etcd"
	"github.com/tutti-go/tutti/comm"
	"github.com/tutti-go/tutti/comm/store"
	"github.com/tutti-go/tutti/internal/jobtest"
)

// authority signs a test's certificates.
type authority struct {
	cert *x509.Certificate
	key  *ecdsa.PrivateKey
	pool *x509.CertPool
	file string
}

// newAuthority makes an authority with its certificate in a file.
func newAuthority(t *testing.T) *authority {
	key, err := ecdsa.GenerateKey(elliptic.P256(), rand.Reader)
	require.NoError(t, err)
	template := &x509.Certificate{
		SerialNumber:          big.NewInt(1),
		Subject:               pkix.Name{CommonName: "authority"},
		NotAfter:              time.Now().Add(time.Hour),
		IsCA:                  true,
		KeyUsage:              x509.KeyUsageCertSign,
		BasicConstraintsValid: true,
	}
	der, err := x509.CreateCertificate(rand.Reader, template, template, key.Public(), key)
	require.NoError(t, err)
	a := &authority{key: key, pool: x509.NewCertPool(), file: filepath.Join(t.TempDir(), "ca.pem")}
	a.cert, err = x509.ParseCertificate(der)
	require.NoError(t, err)
	a.pool.AddCert(a.cert)
	require.NoError(t, os.WriteFile(a.file, pem.EncodeToMemory(&pem.Block{Type: "CERTIFICATE", Bytes: der}), 0o600))
	return a
}

// sign makes a certificate for a host and a client in two files. It has ended if validity is negative.
func (a *authority) sign(t *testing.T, host string, validity time.Duration) (pair tls.Certificate, cert, key string) {
	private, err := ecdsa.GenerateKey(elliptic.P256(), rand.Reader)
	require.NoError(t, err)
	template := &x509.Certificate{
		SerialNumber: big.NewInt(2),
		Subject:      pkix.Name{CommonName: "a process"},
		NotAfter:     time.Now().Add(validity),
		KeyUsage:     x509.KeyUsageDigitalSignature,
		ExtKeyUsage:  []x509.ExtKeyUsage{x509.ExtKeyUsageServerAuth, x509.ExtKeyUsageClientAuth},
		IPAddresses:  []net.IP{net.ParseIP(host)},
	}
	der, err := x509.CreateCertificate(rand.Reader, template, a.cert, private.Public(), a.key)
	require.NoError(t, err)
	text, err := x509.MarshalPKCS8PrivateKey(private)
	require.NoError(t, err)
	certPEM := pem.EncodeToMemory(&pem.Block{Type: "CERTIFICATE", Bytes: der})
	keyPEM := pem.EncodeToMemory(&pem.Block{Type: "PRIVATE KEY", Bytes: text})
	pair, err = tls.X509KeyPair(certPEM, keyPEM)
	require.NoError(t, err)
	dir := t.TempDir()
	cert = filepath.Join(dir, "cert.pem")
	key = filepath.Join(dir, "key.pem")
	require.NoError(t, os.WriteFile(cert, certPEM, 0o600))
	require.NoError(t, os.WriteFile(key, keyPEM, 0o600))
	return pair, cert, key
}

// open tries to begin a session without a deadline.
func open(t *testing.T, cfg clientv3.Config) error {
	cfg.Logger = zap.NewNop()
	client, err := clientv3.New(cfg)
	if err != nil {
		return err
	}
	defer client.Close()
	kv, err := etcd.Dial(t.Context(), etcd.Config{Client: client, Prefix: "/test/", Silence: 2 * time.Second})
	if err != nil {
		return err
	}
	return kv.Close()
}

// serveTLS starts a server with a certificate and returns its URL.
func serveTLS(t *testing.T, pair tls.Certificate) string {
	server := httptest.NewUnstartedServer(http.NotFoundHandler())
	server.Config.ErrorLog = stdlog.New(io.Discard, "", 0)
	server.TLS = &tls.Config{Certificates: []tls.Certificate{pair}}
	server.EnableHTTP2 = true // as an etcd has it
	server.StartTLS()
	t.Cleanup(server.Close)
	return server.URL
}

// Dial ends if no etcd can be reached, even without a deadline, and each cause has its own text.
func TestDialNamesTheCause(t *testing.T) {
	ours := newAuthority(t)
	others := newAuthority(t)
	address := jobtest.Address(t, 1)
	host, _, err := net.SplitHostPort(address)
	require.NoError(t, err)
	pair, cert, key := ours.sign(t, host, time.Hour)
	stranger, _, _ := others.sign(t, host, time.Hour)
	old, _, _ := ours.sign(t, host, -time.Hour)
	elsewhere, _, _ := ours.sign(t, "192.0.2.1", time.Hour)
	s := prepare(t)
	both := s.client + ",https://" + address
	s.more = []string{"--listen-client-urls", both, "--advertise-client-urls", both,
		"--cert-file", cert, "--key-file", key, "--trusted-ca-file", ours.file, "--client-cert-auth"}
	s.start(t)
	mute, err := net.Listen("tcp", "127.0.0.1:0") // it accepts nothing
	require.NoError(t, err)
	t.Cleanup(func() { _ = mute.Close() })
	web := httptest.NewServer(http.NotFoundHandler())
	t.Cleanup(web.Close)
	webTLS := httptest.NewUnstartedServer(http.NotFoundHandler())
	webTLS.Config.ErrorLog = stdlog.New(io.Discard, "", 0)
	webTLS.StartTLS()
	t.Cleanup(webTLS.Close)
	// A client refuses these before it knows whether they are etcd.
	ended := serveTLS(t, old)
	moved := serveTLS(t, elsewhere)
	for name, test := range map[string]struct {
		endpoint string
		conf     *tls.Config
		kind     error
		text     string
	}{
		"dead port": {
			jobtest.Address(t, 1), nil, comm.ErrPeerFailed, "connect: connection refused: etcd does not run there",
		},
		"silent port": {mute.Addr().String(), nil, comm.ErrPeerFailed, "takes connections, and answers nothing"},
		"no port":     {"127.0.0.1", nil, comm.ErrArgument, `the endpoint "127.0.0.1" is not HOST:PORT`},
		"large port":  {"http://127.0.0.1:99999", nil, comm.ErrArgument, "is not HOST:PORT"},
		"word":        {"127.0.0.1:client", nil, comm.ErrArgument, "is not HOST:PORT"},
		"empty":       {"", nil, comm.ErrArgument, `the endpoint "" is not HOST:PORT`},
		"no such host": {
			"no-such-host.invalid:2379", nil, comm.ErrUnavailable, "check the endpoint and this host's DNS",
		},
		"web server": {web.URL, nil, comm.ErrArgument, "is no etcd: it speaks neither TLS nor HTTP/2"},
		"encrypted web server": {
			webTLS.URL, &tls.Config{InsecureSkipVerify: true}, comm.ErrArgument, "speaks TLS, but is no etcd",
		},
		"no client certificate": {
			"https://" + address, &tls.Config{RootCAs: ours.pool}, fs.ErrPermission,
			"asks for a client's certificate that it accepts",
		},
		"another client": {
			"https://" + address, &tls.Config{RootCAs: ours.pool, Certificates: []tls.Certificate{stranger}},
			fs.ErrPermission, "asks for a client's certificate that it accepts",
		},
		"client's certificate has ended": {
			"https://" + address, &tls.Config{RootCAs: ours.pool, Certificates: []tls.Certificate{old}},
			fs.ErrPermission, "in etcd's --trusted-ca-file, and one that is valid now",
		},
		"another authority": {
			"https://" + address, &tls.Config{RootCAs: others.pool, Certificates: []tls.Certificate{pair}}, fs.ErrPermission,
			"a certificate of an authority that etcd's client does not know: add it to RootCAs of its TLS configuration",
		},
		"server's certificate has ended": {
			ended, &tls.Config{RootCAs: ours.pool}, fs.ErrPermission,
			"a certificate that is not valid now: renew it, or set the clock of this host",
		},
		"server's certificate is of another host": {
			moved, &tls.Config{RootCAs: ours.pool}, fs.ErrPermission,
			"a certificate of another host: the endpoint must be one of its names",
		},
		"no TLS": {
			"http://" + address, nil, comm.ErrArgument, "speaks TLS: the endpoint must begin with https://",
		},
		"no TLS here": {
			strings.Replace(s.client, "http:", "https:", 1), &tls.Config{RootCAs: ours.pool}, comm.ErrArgument,
			"the endpoint must begin with http://",
		},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			for range 10 { // a machine under load may not say it the first time
				err := open(t, clientv3.Config{Endpoints: []string{test.endpoint}, TLS: test.conf})
				if errors.Is(err, test.kind) && strings.Contains(err.Error(), test.text) {
					return
				}
				t.Log(err)
			}
			t.Errorf("no error is %v and has %q", test.kind, test.text)
		})
	}
	right := &tls.Config{RootCAs: ours.pool, Certificates: []tls.Certificate{pair}}
	require.NoError(t, open(t, clientv3.Config{Endpoints: []string{"https://" + address}, TLS: right}))
}

// An etcd that refuses a user or is full says so.
func TestDialIsRefused(t *testing.T) {
	s := newServer(t, "--quota-backend-bytes", strconv.Itoa(4<<20))
	admin := s.dial(t)
	var err error
	for i := 0; err == nil; i++ {
		_, err = admin.Put(t.Context(), strconv.Itoa(i), strings.Repeat("x", 1<<20))
	}
	require.ErrorContains(t, err, "database space exceeded")
	err = open(t, clientv3.Config{Endpoints: []string{s.client}})
	assert.ErrorIs(t, err, store.ErrFull)
	assert.ErrorContains(t, err, "database space exceeded")

	s = newServer(t)
	admin = s.dial(t)
	_, err = admin.UserAdd(t.Context(), "root", "right")
	require.NoError(t, err)
	_, err = admin.RoleAdd(t.Context(), "root")
	require.NoError(t, err)
	_, err = admin.UserGrantRole(t.Context(), "root", "root")
	require.NoError(t, err)
	_, err = admin.AuthEnable(t.Context())
	require.NoError(t, err)
	cfg := clientv3.Config{Endpoints: []string{s.client}, Username: "root", Password: "right"}
	require.NoError(t, open(t, cfg))
	cfg.Password = "wrong"
	err = open(t, cfg)
	assert.ErrorContains(t, err, "invalid user ID or password") // the client's error begins with it

	// A job learns at once that it may not access its keys, and the remedy.
	err = open(t, clientv3.Config{Endpoints: []string{s.client}})
	require.ErrorIs(t, err, fs.ErrPermission)
	require.ErrorContains(t, err, "set Username and Password of its client")
	root := clientv3.Config{Endpoints: []string{s.client}, Username: "root", Password: "right", Logger: zap.NewNop()}
	owner, err := clientv3.New(root)
	require.NoError(t, err)
	defer owner.Close()
	_, err = owner.UserAdd(t.Context(), "user", "theirs")
	require.NoError(t, err)
	_, err = owner.RoleAdd(t.Context(), "role")
	require.NoError(t, err)
	_, err = owner.UserGrantRole(t.Context(), "user", "role")
	require.NoError(t, err)
	end := clientv3.GetPrefixRangeEnd("/test/")
	cfg.Username = "user"
	cfg.Password = "theirs"
	for _, right := range []authpb.Permission_Type{clientv3.PermWrite, clientv3.PermRead} {
		err = open(t, cfg)
		require.ErrorIs(t, err, fs.ErrPermission)
		require.ErrorContains(t, err, "etcdctl role grant-permission ROLE readwrite /test/ --prefix")
		_, err = owner.RoleGrantPermission(t.Context(), "role", "/test/", end, clientv3.PermissionType(right))
		require.NoError(t, err)
	}
	require.ErrorIs(t, open(t, cfg), fs.ErrPermission, "it may read alone")
	both := clientv3.PermReadWrite
	_, err = owner.RoleGrantPermission(t.Context(), "role", "/test/", end, clientv3.PermissionType(both))
	require.NoError(t, err)
	require.NoError(t, open(t, cfg))
}

// A refused request has a reason and leaves the session unchanged.
func TestRequestsAreRefused(t *testing.T) {
	s := newServer(t)
	client := s.dial(t)
	kv, err := etcd.Dial(t.Context(), etcd.Config{Client: client, Prefix: "/test/", Silence: 2 * time.Second})
	require.NoError(t, err)
	for _, bytes := range []int{1600 << 10, 3 << 20} { // beyond the limits of etcd and of its client
		err = kv.Set(t.Context(), "large", []byte(strings.Repeat("x", bytes)))
		require.ErrorIs(t, err, comm.ErrArgument)
		require.ErrorContains(t, err, "--max-request-bytes")
	}
	require.NoError(t, kv.Set(t.Context(), "small", []byte("x")))

	const ages = math.MaxInt64
	_, err = etcd.Dial(t.Context(), etcd.Config{Client: client, Prefix: "/test/", Silence: ages})
	require.ErrorIs(t, err, comm.ErrArgument)
	require.ErrorContains(t, err, "shorten Silence")

	// A server whose data differs from its peers' refuses everything but reads.
	members, err := client.MemberList(t.Context())
	require.NoError(t, err)
	alarms := etcdserverpb.NewMaintenanceClient(client.ActiveConnection())
	_, err = alarms.Alarm(t.Context(), &etcdserverpb.AlarmRequest{
		Action:   etcdserverpb.AlarmRequest_ACTIVATE,
		MemberID: members.Members[0].ID,
		Alarm:    etcdserverpb.AlarmType_CORRUPT,
	})
	require.NoError(t, err)
	err = kv.Set(t.Context(), "small", []byte("y"))
	require.ErrorIs(t, err, comm.ErrPeerFailed)
	require.ErrorContains(t, err, "replace it (etcdctl alarm list)")
}

// If somebody revokes a session's lease, the session ends and says what that may mean.
func TestLostLease(t *testing.T) {
	client := newServer(t).dial(t)
	kv, err := etcd.Dial(t.Context(), etcd.Config{Client: client, Prefix: "/test/", Silence: 2 * time.Second})
	require.NoError(t, err)
	leases, err := client.Leases(t.Context())
	require.NoError(t, err)
	require.Len(t, leases.Leases, 1)
	_, err = client.Revoke(t.Context(), leases.Leases[0].ID)
	require.NoError(t, err)
	select {
	case <-kv.Done():
	case <-time.After(limit):
		require.Fail(t, "the session goes on")
	}
	require.ErrorIs(t, kv.Err(), comm.ErrPeerFailed)
	require.ErrorContains(t, kv.Err(), "longer than Silence, or somebody revoked the lease")
	require.ErrorContains(t, kv.Set(t.Context(), "key", nil), "the session's lease has ended")
}

// If etcd stops, or loses most of its servers, a session ends and says so, instead of blaming this process.
func TestServerIsLost(t *testing.T) {
	for name, lose := range map[string]func(t *testing.T, s *server){
		"killed": func(_ *testing.T, s *server) { s.stop() },
		"stopped": func(t *testing.T, s *server) {
			require.NoError(t, exec.Command("kill", "-STOP", strconv.Itoa(s.cmd.Process.Pid)).Run())
		},
		"without a majority": func(t *testing.T, s *server) {
			ctx, cancel := context.WithTimeout(t.Context(), limit)
			defer cancel()
			_, err := s.dial(t).MemberAdd(ctx, []string{"http://" + jobtest.Address(t, 1)}) // which never runs
			require.NoError(t, err)
		},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			s := newServer(t)
			kv, err := etcd.Dial(t.Context(), etcd.Config{Client: s.dial(t), Prefix: "/test/", Silence: 2 * time.Second})
			require.NoError(t, err)
			lose(t, s)
			select {
			case <-kv.Done():
			case <-time.After(limit):
				require.Fail(t, "the session goes on")
			}
			require.ErrorIs(t, kv.Err(), comm.ErrPeerFailed)
			require.NotErrorIs(t, kv.Err(), comm.ErrTimeout)
			require.ErrorContains(t, kv.Err(), "the session's lease has ended; etcd does not answer, or has no leader: ")
			require.NotContains(t, kv.Err().Error(), "of this process")
		})
	}
}
