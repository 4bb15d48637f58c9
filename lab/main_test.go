package main

import (
	"bytes"
	"encoding/json"
	"strings"
	"testing"
	"unicode/utf8"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"github.com/tutti-go/tutti/cmd/tutti/internal/console"
)

// execute runs a command line and returns its output and error.
func execute(t *testing.T, args ...string) (stdout, stderr string, err error) {
	t.Helper()
	var out, notes bytes.Buffer
	root := newRoot()
	root.SetArgs(args)
	root.SetOut(&out)
	root.SetErr(&notes)
	err = root.ExecuteContext(t.Context())
	return out.String(), notes.String(), err
}

// jsonLines parses an object from each line.
func jsonLines[T any](t *testing.T, text string) []T {
	t.Helper()
	var objects []T
	for line := range strings.Lines(text) {
		var object T
		require.NoError(t, json.Unmarshal([]byte(line), &object), line)
		objects = append(objects, object)
	}
	return objects
}

func TestHelpFitsATerminal(t *testing.T) {
	for _, name := range []string{"overlap", "p2p", "compare", "scoreboard"} {
		stdout, _, err := execute(t, name, "--help")
		require.NoError(t, err)
		assert.Contains(t, stdout, "Examples:", name)
		for line := range strings.Lines(stdout) {
			assert.LessOrEqual(t, utf8.RuneCountInString(line), 80+len("\n"), line)
		}
	}
}

func TestWrongUsage(t *testing.T) {
	for args, want := range map[string]string{
		"overlap --layers 0":                   "layers is 0, want a number in [1, ",
		"overlap --bucket 0":                   "bucket is 0",
		"overlap --sms -1":                     "sms is -1",
		"overlap --rounds 0":                   "rounds is 0",
		"overlap --rounds 9223372036854775807": "rounds is 9223372036854775807, want a number in [1, ",
		"overlap --width 9223372036854775807":  "width is 9223372036854775807, want a number in [1, ",
		"overlap --pattern oktopk --density 0": "density 0 is not in (0, 1]",
		"compare --ranks 9223372036854775807":  "9223372036854775807 ranks are not in [2, ",
		"compare --runs 9223372036854775807":   "9223372036854775807 runs are not in [1, ",
		"compare --max 1024G":                  "compare: the buffers of 16 ranks are 32768.0 GiB",
		"compare --tutti ./nothing":            "--tutti: ",
		"p2p --min 1M --max 1K":                "largest size 1024 is below the smallest, 1048576",
		"scoreboard --runs 0":                  "0 runs are not in [1, ",
	} {
		_, _, err := execute(t, strings.Fields(args)...)
		var usage console.UsageError
		assert.ErrorAs(t, err, &usage, args)
		assert.ErrorContains(t, err, want, args)
	}
	for args, want := range map[string]string{
		"overlap --ctas -1":      `"--ctas" flag: must be 0 or more`,
		"overlap --pattern topk": `did you mean "topkA"?`,
		"p2p --dtype f31":        `unknown element type "f31"`,
		"scorebord":              "unknown command",
	} {
		_, _, err := execute(t, strings.Fields(args)...)
		assert.ErrorContains(t, err, want, args)
	}
}
