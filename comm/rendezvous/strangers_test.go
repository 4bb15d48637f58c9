package rendezvous

import (
	"crypto/ecdsa"
	"crypto/elliptic"
	"crypto/rand"
	"crypto/tls"
	"crypto/x509"
	"io"
	"math/big"
	"net"
	"strings"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/tutti-go/tutti/internal/gate"
	"github.com/tutti-go/tutti/internal/logtest"
)

// The log tells apart what strangers lack.
func TestWhatStrangersLack(t *testing.T) {
	job := Job{WorldSize: 2, Address: freeAddress(t), Secret: []byte("a secret of this job")}
	kv, err := job.Connect(t.Context())
	require.NoError(t, err)
	defer kv.Close() //nolint:errcheck // nothing is lost
	key, err := ecdsa.GenerateKey(elliptic.P256(), rand.Reader)
	require.NoError(t, err)
	template := &x509.Certificate{SerialNumber: big.NewInt(1), DNSNames: []string{"example.org"}, NotAfter: time.Now().Add(time.Hour)}
	der, err := x509.CreateCertificate(rand.Reader, template, template, key.Public(), key)
	require.NoError(t, err)
	foreign := tls.Certificate{Certificate: [][]byte{der}, PrivateKey: key}
	other := Job{WorldSize: 2, Address: job.Address, Secret: []byte("a secret of another job")}
	conf, err := other.TLS("store")
	require.NoError(t, err)

	handshake := func(conf *tls.Config) func(net.Conn) {
		return func(conn net.Conn) {
			secure := tls.Client(conn, conf)
			_ = secure.Handshake()
			_, _ = io.ReadAll(secure) // in TLS 1.3 the refusal comes then
		}
	}
	trusting := func(c *tls.Config) *tls.Config {
		c = c.Clone()
		c.InsecureSkipVerify = true
		return c
	}
	for name, c := range map[string]struct {
		stranger func(net.Conn)
		reason   string
	}{
		"another secret":             {handshake(trusting(conf)), gate.Secret},
		"another secret, suspicious": {handshake(conf), gate.Secret},
		"no certificate":             {handshake(trusting(&tls.Config{})), gate.Nameless},
		"another program's":          {handshake(trusting(&tls.Config{Certificates: []tls.Certificate{foreign}})), gate.Foreign},
		"no TLS":                     {func(c net.Conn) { _, _ = io.WriteString(c, "GET / HTTP/1.1\r\n\r\n"); _, _ = io.ReadAll(c) }, gate.Plain},
		"TLS of another version":     {handshake(trusting(&tls.Config{MaxVersion: tls.VersionTLS12})), gate.Language},
		"nothing":                    {func(c net.Conn) {}, gate.Silence},
	} {
		t.Run(name, func(t *testing.T) {
			log := logtest.Capture(t)
			conn := dial(t, job.Address)
			c.stranger(conn)
			require.NoError(t, conn.Close())
			require.Eventually(t, func() bool {
				return strings.Contains(log.String(), "times=")
			}, time.Minute, time.Millisecond)
			require.Contains(t, log.String(), c.reason)
		})
	}
}
