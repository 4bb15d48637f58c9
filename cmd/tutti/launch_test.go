//go:build unix

package main

import (
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"runtime"
	"slices"
	"strings"
	"testing"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"github.com/tutti-go/tutti/comm/rendezvous"
)

// Flags of tcp are variables of the ranks.
func TestLaunchFlagsOfTCP(t *testing.T) {
	t.Parallel()
	stdout, stderr, err := execute(t, build(t), "launch", "--tcp-silence", "30s", "--tcp-listen", "127.0.0.1", "sh", "-c", "echo $TUTTI_TCP_SILENCE $TUTTI_TCP_LISTEN")
	require.NoError(t, err, stderr)
	assert.Equal(t, "[0] 30s 127.0.0.1\n", stdout)

	_, stderr, err = execute(t, build(t), "train", "--backend", "tcp", "--tcp-silence", "30", "--epochs", "1")
	require.Error(t, err)
	assert.Contains(t, stderr, `TUTTI_TCP_SILENCE="30"`)
}

// twoMachines runs the scripts $FIRST and $SECOND in two networks that a cable joins, and ends with the first exit code
// that is not 0. Everything is gone with the namespaces.
const twoMachines = `set -e
mount -t tmpfs tutti /mnt
touch /mnt/net
unshare --net=/mnt/net true
ip link add eth0 type veth peer name eth0 netns /mnt/net
up='ip link set lo up && ip link set eth0 up && ip address add dev eth0'
sh -c "$up 10.78.0.1/24"
nsenter --net=/mnt/net sh -c "$up 10.78.0.2/24"
sh -c "$FIRST" > first 2> first.err & first=$!
nsenter --net=/mnt/net sh -c "$SECOND" > second 2> second.err
wait $first
`

// Two machines without MPI train together by the two commands of the README, to the weights that ranks of one process
// get.
func TestTwoMachinesByTheReadme(t *testing.T) {
	t.Parallel()
	if runtime.GOOS != "linux" {
		t.Skip("needs namespaces of Linux")
	}
	unshare := []string{"unshare", "--mount", "--net", "--pid", "--fork", "--kill-child", "--mount-proc"}
	if os.Geteuid() != 0 {
		unshare = append(unshare, "--user", "--map-root-user")
	}
	inside := func(script string) []string { return append(slices.Clone(unshare), "sh", "-c", script) }
	probe := inside("mount -t tmpfs tutti /mnt && ip link add eth0 type veth peer name eth1 && nsenter --version")
	if out, err := exec.Command(probe[0], probe[1:]...).CombinedOutput(); err != nil {
		t.Skipf("needs namespaces, iproute2 and util-linux: %v: %s", err, out)
	}
	readme, err := os.ReadFile("../../README.md")
	require.NoError(t, err)
	commands := regexp.MustCompile(`(?m)^tutti (launch .*--secret-file .*?) *# on the (first|second)`).FindAllStringSubmatch(string(readme), -1)
	require.Len(t, commands, 2, "two commands")
	dir := t.TempDir()
	_, err = rendezvous.ReadSecret(filepath.Join(dir, "secret"), true)
	require.NoError(t, err)
	tutti := build(t)
	const options = " --epochs 3 --pattern dense,oktopk --json"
	script := func(i int) string {
		assert.Equal(t, []string{"first", "second"}[i], commands[i][2])
		return tutti + " " + strings.Replace(commands[i][1], "FIRST", "10.78.0.1", 1) + options
	}
	all := inside(twoMachines)
	cmd := command(t, all[0], all[1:]...)
	cmd.Dir = dir
	cmd.Env = append(os.Environ(), "FIRST="+script(0), "SECOND="+script(1), "TUTTI_MPI_LIB=/nowhere")
	out, err := cmd.CombinedOutput()
	read := func(name string) string {
		text, _ := os.ReadFile(filepath.Join(dir, name))
		return string(text)
	}
	require.NoError(t, err, "%s%s%s", out, read("first.err"), read("second.err"))
	hashes := regexp.MustCompile(`"hash":"([0-9a-f]{16})"`)
	got := hashes.FindAllStringSubmatch(read("first"), -1)
	require.Len(t, got, 2, read("first"))
	assert.Empty(t, hashes.FindString(read("second")), "rank 0 prints")

	stdout, stderr, err := execute(t, tutti, strings.Fields("train --ranks 4"+options)...)
	require.NoError(t, err, stderr)
	assert.Equal(t, hashes.FindAllStringSubmatch(stdout, -1), got)
}
