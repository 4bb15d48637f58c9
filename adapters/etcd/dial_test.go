package etcd_test

import (
	"crypto/ecdsa"
	"crypto/elliptic"
	"crypto/rand"
	"crypto/tls"
	"crypto/x509"
	"crypto/x509/pkix"
	"encoding/pem"
	"math/big"
	"net"
	"os"
	"path/filepath"
	"strconv"
	"strings"
	"testing"
	"time"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"
	clientv3 "go.etcd.io/etcd/client/v3"
	"go.uber.org/zap"

	"github.com/tutti-go/tutti/adapters/etcd"
	"github.com/tutti-go/tutti/comm"
	"github.com/tutti-go/tutti/comm/store"
	"github.com/tutti-go/tutti/internal/jobtest"
)

// authority signs certificates of a test.
type authority struct {
	cert *x509.Certificate
	key  *ecdsa.PrivateKey
	pool *x509.CertPool
	file string
}

// newAuthority makes one, whose certificate is in a file.
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

// sign makes a certificate of a host and of a client, in two files.
func (a *authority) sign(t *testing.T, host string) (pair tls.Certificate, cert, key string) {
	private, err := ecdsa.GenerateKey(elliptic.P256(), rand.Reader)
	require.NoError(t, err)
	template := &x509.Certificate{
		SerialNumber: big.NewInt(2),
		Subject:      pkix.Name{CommonName: "a process"},
		NotAfter:     time.Now().Add(time.Hour),
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

// open tries to begin a session, without a deadline.
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

// Dial ends where no etcd can be reached, also without a deadline, and each cause has its own words.
func TestDialNamesTheCause(t *testing.T) {
	ours := newAuthority(t)
	others := newAuthority(t)
	address := jobtest.Address(t, 1)
	host, _, err := net.SplitHostPort(address)
	require.NoError(t, err)
	pair, cert, key := ours.sign(t, host)
	stranger, _, _ := others.sign(t, host)
	s := prepare(t)
	both := s.client + ",https://" + address
	s.more = []string{"--listen-client-urls", both, "--advertise-client-urls", both,
		"--cert-file", cert, "--key-file", key, "--trusted-ca-file", ours.file, "--client-cert-auth"}
	s.start(t)
	mute, err := net.Listen("tcp", "127.0.0.1:0") // which accepts nothing
	require.NoError(t, err)
	t.Cleanup(func() { _ = mute.Close() })
	for name, test := range map[string]struct {
		endpoint string
		conf     *tls.Config
		text     string
	}{
		"dead port":             {jobtest.Address(t, 1), nil, "connect: connection refused"},
		"silent port":           {mute.Addr().String(), nil, "takes connections, and answers nothing"},
		"no client certificate": {"https://" + address, &tls.Config{RootCAs: ours.pool}, "asks for a client's certificate that it accepts"},
		"another client": {
			"https://" + address, &tls.Config{RootCAs: ours.pool, Certificates: []tls.Certificate{stranger}},
			"asks for a client's certificate that it accepts",
		},
		"another authority": {
			"https://" + address, &tls.Config{RootCAs: others.pool, Certificates: []tls.Certificate{pair}},
			"certificate signed by unknown authority",
		},
		"no TLS": {"http://" + address, nil, "speaks TLS"},
		"no TLS here": {
			strings.Replace(s.client, "http:", "https:", 1), &tls.Config{RootCAs: ours.pool}, "does not speak TLS",
		},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			for range 10 { // a machine under load may be too slow to say it at once
				err := open(t, clientv3.Config{Endpoints: []string{test.endpoint}, TLS: test.conf})
				require.ErrorIs(t, err, comm.ErrPeerFailed)
				if strings.Contains(err.Error(), test.text) {
					return
				}
				t.Log(err)
			}
			t.Errorf("no error has %q", test.text)
		})
	}
	right := &tls.Config{RootCAs: ours.pool, Certificates: []tls.Certificate{pair}}
	require.NoError(t, open(t, clientv3.Config{Endpoints: []string{"https://" + address}, TLS: right}))
}

// An etcd that refuses a user, or has no room, says so.
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
	assert.ErrorContains(t, open(t, cfg), "invalid user ID or password") // of the client, which begins with it
}
