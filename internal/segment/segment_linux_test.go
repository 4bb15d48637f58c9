package segment

import (
	"context"
	"encoding/json"
	"fmt"
	"net"
	"os"
	"os/exec"
	"runtime"
	"strings"
	"sync/atomic"
	"syscall"
	"testing"
	"time"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"
	"golang.org/x/sys/unix"

	"github.com/tutti-go/tutti/internal/hostmem"
)

const page = 4096

func soon(t *testing.T) context.Context {
	ctx, cancel := context.WithTimeout(t.Context(), time.Minute)
	t.Cleanup(cancel)
	return ctx
}

// helpers are what this binary does as another process, instead of its tests.
var helpers = map[string]func() error{
	"machine": func() error {
		machine, err := Machine()
		fmt.Print(machine)
		return err
	},
	"probe": Probe,
	"join": func() error {
		var offer Offer
		if err := json.Unmarshal([]byte(os.Getenv("SEGMENT_TEST_OFFER")), &offer); err != nil {
			return err
		}
		offer.Machine, _ = Machine() // that is no proof
		memory, err := Join(context.Background(), offer, page)
		if err == nil {
			memory[1] = 43
		}
		return err
	},
}

func TestMain(m *testing.M) {
	if helper := helpers[os.Getenv("SEGMENT_TEST_HELPER")]; helper != nil {
		if err := helper(); err != nil {
			fmt.Print(err)
			os.Exit(1)
		}
		return
	}
	os.Exit(m.Run())
}

// help returns a command that runs a helper in another process, which a program starts if there is one.
func help(t *testing.T, helper string, program ...string) *exec.Cmd {
	self, err := os.Executable()
	require.NoError(t, err)
	line := append(program, self)
	cmd := exec.CommandContext(soon(t), line[0], line[1:]...)
	cmd.Env = append(os.Environ(), "SEGMENT_TEST_HELPER="+helper)
	return cmd
}

func serve(t *testing.T) (*Server, []byte) {
	s, memory, err := Serve(page)
	require.NoError(t, err)
	t.Cleanup(func() {
		s.Close()
		Unmap(memory)
	})
	return s, memory
}

// A segment is handed over to who has the offer, in its size.
func TestHandover(t *testing.T) {
	s, a := serve(t)
	b, err := Join(soon(t), s.Offer(), page)
	require.NoError(t, err)
	a[17] = 42
	assert.Equal(t, byte(42), b[17])

	_, err = Join(soon(t), s.Offer(), 2*page)
	assert.ErrorIs(t, err, errSize)
	other := s.Offer()
	other.Key[0]++
	_, err = Join(soon(t), other, page)
	assert.Error(t, err, "another key, which is another address")
	other = s.Offer()
	other.Machine++
	_, err = Join(soon(t), other, page)
	assert.ErrorIs(t, err, errAlien)
	_, err = Join(soon(t), Offer{}, page)
	assert.ErrorIs(t, err, errNone)

	s.Close()
	_, err = Join(soon(t), s.Offer(), page)
	assert.Error(t, err)
	a[18] = 43
	assert.Equal(t, byte(43), b[18], "those that have it keep it")
	Unmap(b)
}

// A process that finds the socket and has not the key gets nothing, whatever it says.
func TestStrangersGetNothing(t *testing.T) {
	s, _ := serve(t)
	offer := s.Offer()
	for _, code := range [][]byte{make([]byte, 32), offer.code(toServe), offer.code(toName)} {
		conn, err := new(net.Dialer).DialContext(soon(t), "unix", s.listener.Addr().String())
		require.NoError(t, err)
		_, err = conn.Write(code)
		require.NoError(t, err)
		n, err := conn.Read(make([]byte, 100))
		assert.Error(t, err)
		assert.Zero(t, n)
		require.NoError(t, conn.Close())
	}
}

// Another process of this user joins; one of another user is refused by both sides, though it has the key.
func TestOtherProcesses(t *testing.T) {
	s, memory := serve(t)
	offer, err := json.Marshal(s.Offer())
	require.NoError(t, err)
	same := help(t, "join")
	same.Env = append(same.Env, "SEGMENT_TEST_OFFER="+string(offer))
	out, err := same.CombinedOutput()
	require.NoError(t, err, "%s", out)
	assert.Equal(t, byte(43), memory[1])

	if os.Geteuid() != 0 {
		t.Skip("needs the right to be another user")
	}
	memory[1] = 0
	self, err := os.ReadFile("/proc/self/exe")
	require.NoError(t, err)
	copied := t.TempDir() + "/helper"
	require.NoError(t, os.WriteFile(copied, self, 0o755)) //nolint:gosec // the other user runs it
	for dir := copied; dir != "/tmp" && dir != "/"; dir = dir[:max(1, strings.LastIndex(dir, "/"))] {
		require.NoError(t, os.Chmod(dir, 0o755)) //nolint:gosec // likewise
	}
	other := exec.CommandContext(soon(t), copied)
	other.Env = append(os.Environ(), "SEGMENT_TEST_HELPER=join", "SEGMENT_TEST_OFFER="+string(offer))
	other.Dir = "/"
	other.SysProcAttr = &syscall.SysProcAttr{Credential: &syscall.Credential{Uid: 65534, Gid: 65534}}
	out, err = other.CombinedOutput()
	assert.Error(t, err)
	assert.Contains(t, string(out), "a process of user 0")
	assert.Zero(t, memory[1])
}

// Nobody can take pages away under the feet of others, and memory from which one could is refused.
func TestSeals(t *testing.T) {
	fd, err := create(page)
	require.NoError(t, err)
	assert.ErrorIs(t, unix.Ftruncate(fd, 0), unix.EPERM)
	require.NoError(t, unix.Close(fd))

	fd, err = unix.MemfdCreate("without-seals", unix.MFD_CLOEXEC|unix.MFD_ALLOW_SEALING)
	require.NoError(t, err)
	require.NoError(t, unix.Ftruncate(fd, page))
	_, err = mapMemory(fd, page)
	assert.ErrorIs(t, err, errSize)
	require.NoError(t, unix.Close(fd))
}

// Processes of another namespace do not try, and those of this one do.
func TestMachine(t *testing.T) {
	machine, err := Machine()
	require.NoError(t, err)
	out, err := help(t, "machine").Output()
	require.NoError(t, err)
	assert.Equal(t, fmt.Sprint(machine), string(out))
	for _, kind := range []string{"--ipc", "--net", "--user"} {
		out, err := help(t, "machine", "unshare", kind).Output()
		if err != nil {
			t.Log("needs the right to make namespaces: ", err)
			continue
		}
		assert.NotEqual(t, fmt.Sprint(machine), string(out), kind)
	}
}

// Where the size of files is limited, the kernel's signal is not provoked.
func TestFileLimit(t *testing.T) {
	out, err := help(t, "probe", "sh", "-c", `ulimit -f 1; exec "$0"`).CombinedOutput()
	assert.Error(t, err)
	assert.Contains(t, string(out), "ulimit -f")
	out, err = help(t, "probe").CombinedOutput()
	assert.NoError(t, err, "%s", out)
}

// Everybody who arms the bell, looks, and sleeps is woken by what comes after that.
func TestBell(t *testing.T) {
	memory := make([]uint64, 1)
	mine := NewBell(hostmem.Addr(memory))
	other := NewBell(hostmem.Addr(memory))
	mine.Sleep() // it is not armed
	const times = 20_000
	var given, taken atomic.Uint64
	done := make(chan struct{})
	go func() {
		defer close(done)
		for taken.Load() < times {
			mine.Arm()
			if given.Load() == taken.Load() {
				mine.Sleep()
			}
			taken.Store(given.Load())
		}
	}()
	for i := range uint64(times) {
		given.Store(i + 1)
		other.Ring()
		for i%64 == 0 && taken.Load() <= i {
			time.Sleep(time.Microsecond)
		}
	}
	<-done

	// One that has ended between its two halves has not woken anybody.
	mine.Arm()
	slept := make(chan struct{})
	go func() {
		mine.Sleep()
		close(slept)
	}()
	mine.word.Store(quiet)
	mine.Rouse()
	<-slept
}

// A process that mutes its bell does not leave those asleep who have armed it: nobody would ring for them.
func TestMuteWakes(t *testing.T) {
	memory := make([]uint64, 1)
	bell := NewBell(hostmem.Addr(memory))
	late := soon(t)
	for range 1000 {
		bell.Arm()
		begun := make(chan struct{})
		slept := make(chan struct{})
		go func() {
			close(begun)
			bell.Sleep()
			close(slept)
		}()
		<-begun
		runtime.Gosched() // most of them sleep by now
		bell.Mute()
		select {
		case <-slept:
		case <-late.Done():
			bell.Rouse()
			require.FailNow(t, "it sleeps on")
		}
	}
}
