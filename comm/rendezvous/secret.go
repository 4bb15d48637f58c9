package rendezvous

import (
	"crypto/pbkdf2"
	"crypto/rand"
	"crypto/sha256"
	"encoding/hex"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"os"
	"path/filepath"
	"runtime"
	"strings"
	"sync"
	"syscall"
	"time"

	"github.com/tutti-go/tutti/comm"
)

// Bounds of a secret, in bytes.
const (
	shortestSecret = 16
	longestSecret  = 4 << 10
)

// secretCommand makes a secret.
const secretCommand = "head -c 24 /dev/urandom | base64"

// Anyone who connects to a process sees its public key, and can try secrets against it offline. One that is too short
// to be random for sure takes that many rounds for each try.
const (
	randomSecret = 32 // bytes
	rounds       = 200_000
)

// stretched are secrets that this process has stretched.
var stretched sync.Map

// stretch makes a secret costly to guess.
func stretch(secret string) (string, error) {
	if len(secret) >= randomSecret {
		return secret, nil
	}
	if known, ok := stretched.Load(secret); ok {
		return known.(string), nil
	}
	key, err := pbkdf2.Key(sha256.New, secret, []byte("tutti 1 secret"), rounds, sha256.Size)
	if err != nil {
		return "", err
	}
	text := hex.EncodeToString(key)
	stretched.Store(secret, text)
	return text, nil
}

// strongSecret is the secret as connections use it: stretched, if a person may have thought of it. A job's name is used
// as it is, as everybody may know it.
func (j Job) strongSecret() ([]byte, error) {
	if j.Guessable || len(j.Secret) == 0 {
		return j.Secret, nil
	}
	if len(j.Secret) < shortestSecret {
		return nil, fmt.Errorf("rendezvous: %w: Job.Secret has %d bytes, and a secret at least %d: %s makes one",
			comm.ErrArgument, len(j.Secret), shortestSecret, secretCommand)
	}
	text, err := stretch(string(j.Secret))
	return []byte(text), err
}

// useFile adds the user's secret to one that others can guess, where all ranks find the same file.
func (j *Job) useFile() {
	if !j.OneHost() || len(j.Secret) > 0 && !j.Guessable {
		return
	}
	secret, err := userSecret()
	if err == nil {
		j.Secret = []byte(secret + "\x00" + string(j.Secret))
		j.Guessable = false
		return
	}
	if j.Rank == 0 {
		slog.Warn("rendezvous: no file with the user's secret", "err", err)
	}
}

// userSecret reads the user's secret, and makes it if there is none.
func userSecret() (string, error) {
	path, err := UserSecretFile()
	if err != nil {
		return "", err
	}
	secret, err := ReadSecret(path, true)
	if err != nil {
		return "", err
	}
	return stretch(secret)
}

// UserSecretFile is where the user's secret is: tutti/secret in the user's configuration directory.
func UserSecretFile() (string, error) {
	dir, err := os.UserConfigDir()
	return filepath.Join(dir, "tutti", "secret"), err
}

// ReadSecret reads a secret from a file that only its owner may read, who is this user or root. It may make the file,
// with a random secret.
func ReadSecret(path string, create bool) (string, error) {
	info, err := os.Stat(path)
	if create && errors.Is(err, os.ErrNotExist) {
		if err := makeSecret(path); err != nil {
			return "", err
		}
		info, err = os.Stat(path)
	}
	if err != nil {
		return "", err
	}
	if !info.Mode().IsRegular() { // reading of which may not end
		return "", fmt.Errorf("%s is no file, and so not one with a secret", path)
	}
	if mode := info.Mode().Perm(); runtime.GOOS != "windows" && mode&0o077 != 0 {
		return "", fmt.Errorf("others can read the secret in %s, whose mode is %v: chmod 600 it", path, mode)
	}
	if err := checkOwner(path, info); err != nil {
		return "", err
	}
	if size := info.Size(); size > longestSecret { // no advice to overwrite what may be dear
		return "", fmt.Errorf("%s has %d bytes, and a secret at most %d: name another file", path, size, longestSecret)
	}
	text, err := readShared(path)
	if err != nil {
		return "", err
	}
	secret := strings.TrimSpace(string(text))
	if len(secret) < shortestSecret {
		const format = "%s has %d bytes; a secret has %d to %d: (umask 077; %s > %s) makes one"
		return "", fmt.Errorf(format, path, len(secret), shortestSecret, longestSecret, secretCommand, path)
	}
	return secret, nil
}

// sharingViolation is Windows' error for a file that another process is removing a name of, as makeSecret does.
const sharingViolation = syscall.Errno(32)

// readShared reads a file that another process may be making. On Windows it tries again for a second: removing a name
// takes milliseconds.
func readShared(path string) (text []byte, err error) {
	for range readTries {
		text, err = os.ReadFile(path)
		if runtime.GOOS != "windows" || !errors.Is(err, sharingViolation) {
			break
		}
		time.Sleep(readEvery)
	}
	return text, err
}

// makeSecret makes a file of mode 0600, whole or not at all, unless another process is faster.
func makeSecret(path string) error {
	if err := os.MkdirAll(filepath.Dir(path), 0o700); err != nil {
		return err
	}
	f, err := os.CreateTemp(filepath.Dir(path), ".secret")
	if err != nil {
		return err
	}
	defer os.Remove(f.Name()) //nolint:errcheck // it has another name then
	_, err = io.WriteString(f, rand.Text()+rand.Text()+"\n")
	if err := errors.Join(err, f.Sync(), f.Close()); err != nil {
		return err
	}
	err = os.Link(f.Name(), path)
	if errors.Is(err, os.ErrExist) {
		return nil
	}
	return err
}
