package store

import (
	"crypto/ed25519"
	"crypto/hkdf"
	"crypto/rand"
	"crypto/sha256"
	"crypto/tls"
	"crypto/x509"
	"math/big"
	"time"

	"github.com/tutti-go/tutti/internal/gate"
)

// TLS is the configuration of both sides of a connection between processes that know a secret. Each proves it by the
// key of a certificate that follows from the secret and the purpose (HKDF, Ed25519), and accepts no other. Traffic is
// encrypted with keys of the connection alone (TLS 1.3). The secret is used as it is: 32 random bytes or more.
// rendezvous.Job.TLS also takes one that a person may have thought of, and refuses short ones.
func TLS(secret []byte, purpose string) (*tls.Config, error) {
	seed, err := hkdf.Key(sha256.New, secret, nil, "tutti 1 "+purpose, ed25519.SeedSize)
	if err != nil {
		return nil, err
	}
	const name = gate.CertificateName
	key := ed25519.NewKeyFromSeed(seed)
	template := &x509.Certificate{
		SerialNumber: big.NewInt(1),
		DNSNames:     []string{name},
		KeyUsage:     x509.KeyUsageDigitalSignature,
		ExtKeyUsage:  []x509.ExtKeyUsage{x509.ExtKeyUsageServerAuth, x509.ExtKeyUsageClientAuth},
		NotBefore:    time.Unix(0, 0), // whatever the clocks say
		NotAfter:     time.Date(9999, 12, 31, 23, 59, 59, 0, time.UTC),
	}
	der, err := x509.CreateCertificate(rand.Reader, template, template, key.Public(), key)
	if err != nil {
		return nil, err
	}
	leaf, err := x509.ParseCertificate(der)
	if err != nil {
		return nil, err
	}
	pool := x509.NewCertPool()
	pool.AddCert(leaf)
	return &tls.Config{
		Certificates: []tls.Certificate{{Certificate: [][]byte{der}, PrivateKey: key, Leaf: leaf}},
		RootCAs:      pool,
		ServerName:   name,
		ClientCAs:    pool,
		ClientAuth:   tls.RequireAndVerifyClientCert,
		MinVersion:   tls.VersionTLS13,
		NextProtos:   []string{gate.Protocol},

		SessionTicketsDisabled: true,
	}, nil
}
