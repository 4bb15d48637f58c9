//go:build unix

package rendezvous

import (
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"syscall"
	"testing"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"
)

// fromSecret reads the environment of a job with these variables of a secret.
func fromSecret(pairs ...string) (Job, error) {
	return FromEnv(environment(append([]string{"RANK", "0", "WORLD_SIZE", "2", "MASTER_ADDR", "h", "MASTER_PORT", "1"}, pairs...)...))
}

// A secret that is short is refused with the command that makes one; one that a person may have thought of takes long to
// try, and a random one does not.
func TestShortSecrets(t *testing.T) {
	path := filepath.Join(t.TempDir(), "secret")
	for length, refused := range map[int]bool{1: true, 15: true, 16: false, 31: false, 32: false, 52: false, 5000: true} {
		secret := strings.Repeat("x", length)
		require.NoError(t, os.WriteFile(path, []byte(secret+"\n"), 0o600))
		byFile, errFile := fromSecret("TUTTI_SECRET_FILE", path)
		byText, errText := fromSecret("TUTTI_SECRET", secret)
		if refused {
			assert.ErrorIs(t, errFile, ErrEnvironment)
			assert.ErrorContains(t, errFile, fmt.Sprintf("(umask 077; head -c 24 /dev/urandom | base64 > %s) makes one", path))
			if length < shortestSecret {
				assert.ErrorIs(t, errText, ErrEnvironment)
				assert.ErrorContains(t, errText, "export TUTTI_SECRET=$(head -c 24 /dev/urandom | base64)")
			}
			continue
		}
		require.NoError(t, errFile, length)
		require.NoError(t, errText, length)
		assert.Equal(t, byText.Secret, byFile.Secret)
		assert.Equal(t, length >= randomSecret, strings.HasPrefix(string(byText.Secret), secret+"\x00"), length)
	}
}

// What is no file cannot hold up a job, and a file of another user's is no secret.
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
