package keeper

import (
	"bufio"
	"fmt"
	"io"
	"os"
	"os/exec"
	"strconv"
	"strings"
	"testing"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"
)

// roleVariable makes the test binary a process of a rank, or its keeper.
const roleVariable = "TUTTI_TEST_ROLE"

// keeperVariable has the number of the keeper's process.
const keeperVariable = "TUTTI_TEST_KEEPER"

func TestMain(m *testing.M) {
	switch os.Getenv(roleVariable) {
	case "":
		os.Exit(m.Run())
	case "keeper": // with a name, which starts a script
		if err := os.WriteFile("/proc/self/comm", []byte(os.Args[1]), 0); err != nil {
			panic(err)
		}
		cmd := exec.Command("sh", "-c", os.Args[2], os.Args[0])
		cmd.Env = append(os.Environ(), roleVariable+"=rank")
		if os.Getenv(keeperVariable) == "" {
			cmd.Env = append(cmd.Env, fmt.Sprint(keeperVariable, "=", os.Getpid()))
		}
		cmd.Stdin = os.Stdin
		cmd.Stdout = os.Stdout
		cmd.Stderr = os.Stdout
		_ = cmd.Run()
	case "rank": // tells whether it has found its keeper, and ends with its input
		pid, _ := strconv.Atoi(os.Getenv(keeperVariable))
		file := open(pid)
		Follow(os.Getenv(keeperVariable))
		fmt.Println(os.Getpid(), file != nil)
		_, _ = io.Copy(io.Discard, os.Stdin)
	}
}

// family is a process that stands for a keeper, and one that it has started.
type family struct {
	keeper *exec.Cmd
	rank   int           // process
	found  bool          // the rank has found its keeper
	output *bufio.Reader // of the rank
}

// start starts a family.
func start(t *testing.T, name, script string, environment ...string) *family {
	t.Helper()
	f := &family{keeper: exec.Command(os.Args[0], name, script)}
	f.keeper.Env = append(append(os.Environ(), environment...), roleVariable+"=keeper")
	_, err := f.keeper.StdinPipe() // ends with this process
	require.NoError(t, err)
	output, err := f.keeper.StdoutPipe()
	require.NoError(t, err)
	require.NoError(t, f.keeper.Start())
	f.output = bufio.NewReader(output)
	_, err = fmt.Fscanln(f.output, &f.rank, &f.found)
	require.NoError(t, err)
	return f
}

// A process ends after its keeper was killed, behind wrappers, and says why.
func TestKilledKeeper(t *testing.T) {
	for name, script := range map[string]string{
		"alone":       `exec "$0"`,
		"shell":       `"$0"; true`,
		"session":     `setsid --wait "$0"`,
		"no terminal": `nohup "$0"; true`,
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			f := start(t, Name, script)
			require.True(t, f.found)
			require.NoError(t, f.keeper.Process.Kill())
			text, err := io.ReadAll(f.output) // until all of its processes have ended
			require.NoError(t, err)
			const format = "tutti: process %d ends, because the keeper of its rank (rank-keeper, process %d) was killed\n"
			assert.Equal(t, fmt.Sprintf(format, f.rank, f.keeper.Process.Pid), string(text))
			require.Error(t, f.keeper.Wait())
		})
	}
}

// A process follows nobody but a keeper that is its ancestor.
func TestStrangers(t *testing.T) {
	other := start(t, Name, `exec "$0"`)
	namespace := `unshare --user --map-root-user --pid --fork "$0"`
	if os.Geteuid() == 0 {
		namespace = `unshare --pid --fork "$0"`
	}
	mayUnshare := exec.Command("sh", "-c", namespace, "true").Run() == nil
	for name, c := range map[string]struct {
		name   string
		script string
		keeper int
	}{
		"ancestor of another name": {"keeper", `exec "$0"`, 0},
		"keeper of another rank":   {Name, `exec "$0"`, other.keeper.Process.Pid},
		"its test":                 {Name, `exec "$0"`, os.Getpid()},
		"nobody":                   {Name, `exec "$0"`, 1 << 30},
		"the first process":        {Name, `exec "$0"`, 1},
		"itself":                   {Name, `TUTTI_TEST_KEEPER=$$ exec "$0"`, 0},
		"another namespace":        {Name, namespace, 0},
	} {
		t.Run(name, func(t *testing.T) {
			if strings.HasPrefix(c.script, "unshare") && !mayUnshare {
				t.Skip("needs namespaces")
			}
			var environment []string
			if c.keeper != 0 {
				environment = []string{fmt.Sprint(keeperVariable, "=", c.keeper)}
			}
			f := start(t, c.name, c.script, environment...)
			assert.False(t, f.found)
		})
	}
}
