package cli

import (
	"bytes"
	"fmt"
	"image/png"
	"os"
	"path/filepath"
	"testing"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"
)

// TestPlot draws the output of train --json beside the points of another program.
func TestPlot(t *testing.T) {
	t.Chdir(t.TempDir())
	code, out, stderr := execute(t, "train", "--ranks", "2", "--epochs", "1", "--pattern", "dense,topkA", "--json")
	require.Equal(t, exitOK, code, stderr)
	require.NoError(t, os.WriteFile("train.jsonl", []byte(out), 0o666))
	const points = `{"step": 1, "s": 0.1, "sent_bytes": 4000, "accuracy": 20, "loss": 2}

{"step": 40, "s": 1, "sent_bytes": 90000, "accuracy": 70, "loss": 0.5}
`
	require.NoError(t, os.WriteFile("program.jsonl", []byte(points), 0o666))
	for _, args := range [][]string{{}, {"--x", "seconds"}, {"--x", "steps", "--y", "loss", "--title", "a title"}} {
		args = append([]string{"plot", "train.jsonl", "program.jsonl"}, args...)
		code, _, stderr = execute(t, args...)
		require.Equal(t, exitOK, code, stderr)
		data, err := os.ReadFile("plot.svg")
		require.NoError(t, err)
		for _, text := range []string{"dense", "topkA", "program"} {
			assert.Contains(t, string(data), ">"+text+"<", args)
		}
	}
	code, stdout, stderr := execute(t, "plot", "train.jsonl", "--only", "topkA", "-o", "small.png")
	require.Equal(t, exitOK, code, stderr)
	assert.Equal(t, "wrote small.png\n", stdout)
	var outer string
	for _, name := range []string{"topkA, every 8", "other"} {
		for step := range 2 {
			outer += fmt.Sprintf("{\"name\": %q, \"step\": %d, \"loss\": 2}\n", name, step)
		}
	}
	require.NoError(t, os.WriteFile("outer.jsonl", []byte(outer), 0o666))
	code, _, stderr = execute(t, "plot", "outer.jsonl", "--x", "steps", "--y", "loss", "--only", "topkA, every 8", "--only", "other")
	require.Equal(t, exitOK, code, stderr)
	data, err := os.ReadFile("small.png")
	require.NoError(t, err)
	image, err := png.Decode(bytes.NewReader(data))
	require.NoError(t, err)
	assert.Greater(t, image.Bounds().Dx(), 900, "sharp on screens with two dots for a pixel of 600")
}

// The prefix that a launcher writes before a rank's line is not part of it.
func TestPlotOfALauncher(t *testing.T) {
	t.Chdir(t.TempDir())
	const lines = `[ 0] {"name": "a", "step": 1, "loss": 2}
[ 0] {"name": "a", "step": 2, "loss": 1}
b.example: [12] {"name": "b", "step": 1, "loss": 2}
b.example: [12] {"name": "b", "step": 2, "loss": 1}
`
	require.NoError(t, os.WriteFile("launch.jsonl", []byte(lines), 0o666))
	code, _, stderr := execute(t, "plot", "launch.jsonl", "--x", "steps", "--y", "loss")
	require.Equal(t, exitOK, code, stderr)
	data, err := os.ReadFile("plot.svg")
	require.NoError(t, err)
	assert.Contains(t, string(data), ">a<")
	assert.Contains(t, string(data), ">b<")
}

// Errors name wrong lines by file and number, and nothing is drawn.
func TestPlotRefuses(t *testing.T) {
	dir := t.TempDir()
	path := func(name, text string) string {
		p := filepath.Join(dir, name)
		require.NoError(t, os.WriteFile(p, []byte(text), 0o666))
		return p
	}
	const good = `{"step": 1, "loss": 2}` + "\n"
	for name, c := range map[string]struct {
		text string
		args []string
		code int
		says []string
	}{
		"no JSON":  {text: good + "oops\n{oops}\noops\n", code: exitFailure, says: []string{`bad.jsonl:2: no JSON object, but "oops": has the program`, "bad.jsonl:3: no JSON object: ", `bad.jsonl:4: no JSON object, but "oops"` + "\n"}},
		"a prefix": {text: good + "[0] {}\n", code: exitFailure, says: []string{`bad.jsonl:2: none of "step"`}},
		"no x":     {text: good + "\n\n" + `{"loss": 2}`, code: exitFailure, says: []string{`bad.jsonl:4: none of "step", "s" and "sent_bytes"`}},
		"no y":     {text: `{"step": 2}`, code: exitFailure, says: []string{`bad.jsonl:1: neither "accuracy" nor "loss"`}},
		"a text":   {text: `{"step": "2", "loss": 1}`, code: exitFailure, says: []string{`bad.jsonl:1: "step" is a string`}},
		"a test":   {text: `{"pattern": "dense", "tests": [{"step": 1, "loss": 1}, {"step": 2}]}`, code: exitFailure, says: []string{"bad.jsonl:1: test 2: neither"}},
		"nothing":  {text: "\n", code: exitFailure, says: []string{"bad.jsonl: nothing to draw"}},
		"a point":  {text: good, args: []string{"--x", "steps", "--y", "loss"}, code: exitFailure, says: []string{`"bad" has 1 points with both steps and loss`}},
		"bytes":    {text: good + good, args: []string{"--y", "loss"}, code: exitFailure, says: []string{`"bad" has 0 points with both bytes and loss: a line needs two; it has them with --x steps --y loss`}},
		"no name":  {text: good, args: []string{"--only", "other"}, code: exitUsage, says: []string{"there is no such training"}},
		"axis":     {text: good, args: []string{"--x", "byte"}, code: exitUsage, says: []string{"bytes"}},
		"a format": {text: good, args: []string{"-o", "plot.pdf"}, code: exitUsage, says: []string{".png or .svg"}},
		"six lines": {
			text: `{"name":"a","step":1,"loss":1}` + "\n" + `{"name":"b","step":1,"loss":1}` + "\n" + `{"name":"c","step":1,"loss":1}` + "\n" +
				`{"name":"d","step":1,"loss":1}` + "\n" + `{"name":"e","step":1,"loss":1}` + "\n" + `{"name":"f","step":1,"loss":1}`,
			code: exitFailure, says: []string{"6 trainings, and a picture has at most 5: choose by --only from a, b, c, d, e, f"},
		},
	} {
		t.Run(name, func(t *testing.T) {
			t.Chdir(dir)
			code, _, stderr := execute(t, append([]string{"plot", path("bad.jsonl", c.text)}, c.args...)...)
			assert.Equal(t, c.code, code)
			for _, text := range c.says {
				assert.Contains(t, stderr, text)
			}
			assert.NoFileExists(t, "plot.svg")
		})
	}
}
