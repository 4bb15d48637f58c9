//go:build unix

package main

import (
	"bytes"
	"cmp"
	"context"
	"fmt"
	"net"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"github.com/tutti-go/tutti/internal/jobtest"
)

// member is a process of a job without a launcher.
type member struct {
	env  string // in addition to its rank's
	says string // a regular expression for its output
	code int
}

// situation is a situation of a newcomer who starts the processes of a job by hand, each with its rank in the
// environment.
type situation struct {
	role     string   // of the processes, "" for "works"
	told     []string // files for [told]
	occupied bool     // another program has the port of rank 0
	members  []member
}

// impatient is the environment of ranks that wait in vain: they end after this time.
const impatient = "TUTTI_CONNECT_TIMEOUT=5s "

// situations are the situations of newcomers who started ranks by hand, by the rows of a review's tables.
var situations = map[string]situation{
	"wrong secret": {members: []member{
		{env: impatient, says: `it knows another secret: .*TUTTI_SECRET or the file`, code: 1},
		{env: impatient + "TUTTI_SECRET=anotherSecretOfSomeLength", says: `it knows another secret: .*TUTTI_SECRET or the file`, code: 1},
	}},
	"file missing": {members: []member{
		{env: "TUTTI_SECRET= TUTTI_SECRET_FILE=nowhere", says: `nowhere: no such file`, code: 1},
	}},
	"port taken": {told: []string{"end"}, occupied: true, members: []member{
		{says: `the port of rank 0 is in use by others; listening on another one`},
		{},
	}},
	"rank 0 never comes": {members: []member{
		1: {env: impatient, says: `store: no connection yet; .*rank 1: timed out: .*dial tcp 127\.\S+: connect: connection refused`, code: 1},
	}},
	"rank 1 never comes": {members: []member{
		{env: impatient, says: `waiting for ranks that have not come .*missing="rank 1".*rank 1 did not come`, code: 1},
	}},
	"two rank 0s": {members: []member{
		{env: impatient, says: `rank 0 is here already`, code: 1},
		{env: impatient + "RANK=0", says: `rank 0 is here already`, code: 1},
	}},
	"other world size": {members: []member{
		{env: impatient, says: `rank 1 of 3 in a job of 2`, code: 1},
		{env: impatient + "WORLD_SIZE=3", says: `rank 1 of 3 in a job of 2`, code: 1},
	}},
	"other lengths": {told: []string{"count.1"}, members: []member{
		{says: `rank \d called allreduce of \d f32.* rank \d called allreduce of \d f32`, code: 1},
		{says: `rank \d called allreduce of \d f32.* rank \d called allreduce of \d f32`, code: 1},
	}},
	"other types": {told: []string{"type.1"}, members: []member{
		{says: `rank \d called allreduce of 4 f\d\d.* rank \d called allreduce of 4 f\d\d`, code: 1},
		{says: `rank \d called allreduce of 4 f\d\d.* rank \d called allreduce of 4 f\d\d`, code: 1},
	}},
	"forgot Close": {told: []string{"exit.1"}, members: []member{
		{says: `(EOF|connection reset by peer) \(its process has ended, perhaps without closing its communicators\)`, code: 1},
		{},
	}},
	"another shape on one rank": {role: "trains", told: []string{"shape.1"}, members: []member{
		{says: `rank 0 has "gradient 1: 4096 of f32", rank 1 has "gradient 1: 4160 of f32"`, code: 1},
		{says: `rank 0 has "gradient 1: 4096 of f32", rank 1 has "gradient 1: 4160 of f32"`, code: 1},
	}},
	"another type on one rank": {role: "trains", told: []string{"type.1"}, members: []member{
		{says: `rank 0 has "gradient 1: 4096 of f32", rank 1 has "gradient 1: 4096 of f64"`, code: 1},
		{says: `rank 0 has "gradient 1: 4096 of f32", rank 1 has "gradient 1: 4096 of f64"`, code: 1},
	}},
	"another number of parameters": {role: "trains", told: []string{"count.1"}, members: []member{
		{says: `rank 0 has "3 gradients", rank 1 has "2 gradients"`, code: 1},
		{says: `rank 0 has "3 gradients", rank 1 has "2 gradients"`, code: 1},
	}},
	"other flags": {role: "trains", told: []string{"pattern.1"}, members: []member{
		{says: `dense.*topkA|topkA.*dense`, code: 1},
		{says: `dense.*topkA|topkA.*dense`, code: 1},
	}},
	"sparse over vectors": {role: "trains", told: []string{"pattern", "vector"}, members: []member{
		{says: `all gradients are vectors, which stay dense beside pattern topkA: .*cpu\.Wrap\(rt, data, rows, cols\)`, code: 1},
		{says: `all gradients are vectors, which stay dense beside pattern topkA: .*cpu\.Wrap\(rt, data, rows, cols\)`, code: 1},
	}},
}

// started holds the processes of a job and their output.
type started struct {
	members []member
	running []*exec.Cmd // nil for a rank that does not come
	said    []bytes.Buffer
}

// TestNewcomers checks the output of each rank in each row of a review's tables.
func TestNewcomers(t *testing.T) {
	t.Parallel()
	ctx, cancel := context.WithTimeout(t.Context(), 2*time.Minute) // ends hangs
	defer cancel()
	jobs := map[string]*started{}
	for name, s := range situations {
		jobs[name] = s.start(ctx, t)
	}
	for name, job := range jobs {
		t.Run(name, job.judge)
	}
}

// start starts the processes.
func (s situation) start(ctx context.Context, t *testing.T) *started {
	dir := t.TempDir()
	for _, name := range s.told {
		require.NoError(t, os.WriteFile(filepath.Join(dir, name), nil, 0o600))
	}
	address := jobtest.Address(t, 8)
	host, port, err := net.SplitHostPort(address)
	require.NoError(t, err)
	if s.occupied {
		occupy(t, address)
	}
	job := &started{
		members: s.members,
		running: make([]*exec.Cmd, len(s.members)),
		said:    make([]bytes.Buffer, len(s.members)),
	}
	for rank, m := range s.members {
		if m == (member{}) && s.told == nil {
			continue
		}
		cmd := exec.CommandContext(ctx, os.Args[0])
		cmd.Dir = dir
		cmd.Env = append(os.Environ(), roleVariable+"="+cmp.Or(s.role, "works"), "MASTER_ADDR="+host, "MASTER_PORT="+port,
			fmt.Sprintf("RANK=%d", rank), fmt.Sprintf("LOCAL_RANK=%d", rank), "WORLD_SIZE=2", "TUTTI_BACKEND=tcp",
			"TUTTI_SECRET=aSecretOfTheTestsOfSomeLength")
		cmd.Env = append(cmd.Env, strings.Fields(m.env)...)
		cmd.Stdout = &job.said[rank]
		cmd.Stderr = &job.said[rank]
		require.NoError(t, cmd.Start())
		job.running[rank] = cmd
	}
	return job
}

// occupy is another program at an address. It does not understand its clients.
func occupy(t *testing.T, address string) {
	l, err := net.Listen("tcp", address)
	require.NoError(t, err)
	t.Cleanup(func() { _ = l.Close() })
	go func() {
		for c, err := l.Accept(); err == nil; c, err = l.Accept() {
			_ = c.Close()
		}
	}()
}

// judge waits until the processes have ended and checks their output.
func (job *started) judge(t *testing.T) {
	for rank, cmd := range job.running {
		if cmd == nil {
			continue
		}
		_ = cmd.Wait() // the code is checked elsewhere
		want := job.members[rank]
		text := strings.ReplaceAll(job.said[rank].String(), "\n", " ")
		assert.Equal(t, want.code, cmd.ProcessState.ExitCode(), "rank %d: %s", rank, text)
		assert.Regexp(t, want.says, text, "rank %d", rank)
	}
}
