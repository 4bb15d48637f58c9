//go:build unix

package rendezvous

import (
	"bytes"
	"crypto/pbkdf2"
	"crypto/sha256"
	"encoding/hex"
	"fmt"
	"net"
	"os"
	"path/filepath"
	"strings"
	"syscall"
	"testing"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"github.com/tutti-go/tutti/comm"
	"github.com/tutti-go/tutti/comm/store"
)

// fromSecret reads the environment of a job with these variables of a secret.
func fromSecret(pairs ...string) (Job, error) {
	return FromEnv(environment(append([]string{"RANK", "0", "WORLD_SIZE", "2", "MASTER_ADDR", "h", "MASTER_PORT", "1"}, pairs...)...))
}

// A secret that is short is refused with the command that makes one; one that a person may have thought of takes long to
// try, and a random one does not.
func TestShortSecrets(t *testing.T) {
	t.Parallel()
	path := filepath.Join(t.TempDir(), "secret")
	for length, refused := range map[int]bool{1: true, 15: true, 16: false, 31: false, 32: false, 52: false} {
		secret := strings.Repeat("x", length)
		require.NoError(t, os.WriteFile(path, []byte(secret+"\n"), 0o600))
		byFile, errFile := fromSecret("TUTTI_SECRET_FILE", path)
		byText, errText := fromSecret("TUTTI_SECRET", secret+" \n")
		if refused {
			assert.ErrorIs(t, errFile, ErrEnvironment)
			assert.ErrorContains(t, errFile, fmt.Sprintf("(umask 077; head -c 24 /dev/urandom | base64 > %s) makes one", path))
			assert.ErrorIs(t, errText, ErrEnvironment)
			assert.ErrorContains(t, errText, "export TUTTI_SECRET=$(head -c 24 /dev/urandom | base64)")
			continue
		}
		require.NoError(t, errFile, length)
		require.NoError(t, errText, length)
		assert.Equal(t, byText.Secret, byFile.Secret)
		assert.Equal(t, length >= randomSecret, strings.HasPrefix(string(byText.Secret), secret+"\x00"), length)
	}
}

// TestLongSecretFile: a file that is too long for a secret, and so another one, is neither read nor to be overwritten.
func TestLongSecretFile(t *testing.T) {
	path := filepath.Join(t.TempDir(), "model.safetensors")
	for _, bytes := range []int64{longestSecret + 1, 1 << 40} {
		require.NoError(t, os.WriteFile(path, nil, 0o600))
		require.NoError(t, os.Truncate(path, bytes))
		_, err := ReadSecret(path, true)
		require.ErrorContains(t, err, fmt.Sprintf("model.safetensors has %d bytes, and a secret at most 4096", bytes))
		assert.NotContains(t, err.Error(), ">")
	}
}

// A secret that a program gives is refused or stretched as one of the environment is.
func TestSecretsOfPrograms(t *testing.T) {
	t.Parallel()
	for length, uses := range map[int]string{1: "", 15: "", 16: "stretched", 31: "stretched", 32: "as it is", 100: "as it is"} {
		job := Job{WorldSize: 2, Address: freeAddress(t), Secret: bytes.Repeat([]byte("x"), length)}
		got, err := job.TLS("x")
		if uses == "" {
			const want = "Job.Secret has %d bytes, and a secret at least 16: head -c 24 /dev/urandom | base64 makes one"
			assert.ErrorIs(t, err, comm.ErrArgument)
			assert.ErrorContains(t, err, fmt.Sprintf(want, length))
			_, err = job.Connect(t.Context())
			assert.ErrorIs(t, err, comm.ErrArgument)
			continue
		}
		require.NoError(t, err, length)
		secret := string(job.Secret)
		if uses == "stretched" {
			key, err := pbkdf2.Key(sha256.New, secret, []byte("tutti 1 secret"), 200_000, 32)
			require.NoError(t, err)
			secret = hex.EncodeToString(key)
		}
		_, port, err := net.SplitHostPort(job.Address)
		require.NoError(t, err)
		want, err := store.TLS([]byte(secret), "x "+port)
		require.NoError(t, err)
		assert.Equal(t, want.Certificates[0].Certificate, got.Certificates[0].Certificate, length)
	}
}

// A path that is no file cannot hold up a job, and another user's file is no secret.
func TestForeignSecretFiles(t *testing.T) {
	dir := t.TempDir()
	pipe := filepath.Join(dir, "pipe")
	require.NoError(t, syscall.Mkfifo(pipe, 0o600))
	for _, path := range []string{pipe, dir, "/dev/null"} {
		_, err := ReadSecret(path, true)
		assert.ErrorContains(t, err, path+" is no file")
	}
	if os.Geteuid() != 0 {
		t.Skip("only root can give files away")
	}
	path := filepath.Join(dir, "secret")
	_, err := ReadSecret(path, true)
	require.NoError(t, err)
	require.NoError(t, os.Chown(path, 12345, 12345))
	_, err = ReadSecret(path, false)
	assert.ErrorContains(t, err, "belongs to the user with number 12345: chown it, or copy it")
}
