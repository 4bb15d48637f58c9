package main

import (
	"context"
	"encoding/binary"
	"encoding/json"
	"errors"
	"fmt"
	"math"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"strings"
	"sync"
	"time"
)

// limit only ends commands that hang.
const limit = 3 * time.Minute

// Prepared files are the files that documents mention and readers have.
var prepared = map[string]func(folder, root string) error{
	"docs/deltas.md": checkpoints,
}

// before are lines of shell for the text between a document's commands, by the beginning of the command that follows.
// $ROOT is the checkout, and $PROGRAMS has the examples' programs.
var before = []struct{ page, command, script string }{
	{"README.md", "go get", `go mod init example.com/program`},
	{"README.md", "tutti train", `cp "$ROOT/examples/allreduce/main.go" . && go mod tidy && go build -o program . &&
		./program && tutti launch -n 3 ./program`},
	{"docs/launch.md", "go build", `go mod init example.com/program && go get github.com/tutti-go/tutti@latest &&
		cp "$ROOT/examples/allreduce/main.go" . && go mod tidy`},
	{"docs/tutorial.md", "go mod tidy", `cp "$ROOT/examples/gradients/main.go" .`},
	{"docs/elastic.md", "tutti launch", `cp "$PROGRAMS/gradients" program`},
	{"docs/mpi.md", "mpirun", `cp "$PROGRAMS/gradients" program`},
	{"docs/compressor.md", "tutti cluster", `cp "$PROGRAMS/powersgd" .`},
	{"docs/deltas.md", "tutti delta import", `tutti delta export model/ new/ -o trainer/weight_v000012`},
}

// tools are programs whose commands are left out if they are missing.
var tools = []string{"mpirun", "jq", "openssl"}

// runAll runs the commands that run here, two documents at a time, because some of them wait for slow links.
func runAll(commands []command, root, folder string) error {
	root, err := filepath.Abs(root)
	if err != nil {
		return err
	}
	names := pages(commands)
	errs := make([]error, len(names))
	slots := make(chan struct{}, 2)
	var running sync.WaitGroup
	for i, page := range names {
		chosen := choose(commands, page)
		if len(chosen) == 0 {
			continue
		}
		slots <- struct{}{}
		running.Go(func() {
			errs[i] = runPage(page, chosen, root, filepath.Join(folder, strings.ReplaceAll(page, "/", "-")))
			<-slots
		})
	}
	running.Wait()
	return errors.Join(errs...)
}

// choose returns the commands of a document that run here.
func choose(commands []command, page string) (chosen []command) {
	missing := 0 // block in which a command has been left out; later ones may depend on it
	for _, c := range commands {
		if c.page != page || c.verdict != "here" || c.block == missing {
			continue
		}
		if !available(c) {
			missing = c.block
			continue
		}
		chosen = append(chosen, c)
	}
	return chosen
}

// available reports whether this machine has a command's tools, and prints a line if not.
func available(c command) bool {
	for _, tool := range tools {
		if !regexp.MustCompile(`\b` + tool + `\b`).MatchString(c.text) {
			continue
		}
		if _, err := exec.LookPath(tool); err != nil {
			fmt.Printf("%s:%d: left out with what follows, no %s: %s\n", c.page, c.line, tool, c.text)
			return false
		}
	}
	if strings.HasPrefix(c.text, "tutti cluster") {
		info, err := exec.Command("tutti", "info", "--json").Output()
		if err != nil || !strings.Contains(string(info), `"cluster_unavailable":""`) {
			fmt.Printf("%s:%d: left out with what follows, no networks here: %s\n", c.page, c.line, c.text)
			return false
		}
	}
	return true
}

// runPage runs the commands of a document in one shell, in a new directory.
func runPage(page string, commands []command, root, folder string) error {
	if err := os.MkdirAll(folder, 0o755); err != nil {
		return err
	}
	if prepare := prepared[page]; prepare != nil {
		if err := prepare(folder, root); err != nil {
			return err
		}
	}
	programs, err := filepath.Abs(filepath.Join(folder, "..", "programs"))
	if err != nil {
		return err
	}
	ctx, cancel := context.WithTimeout(context.Background(), limit)
	defer cancel()
	cmd := exec.CommandContext(ctx, "bash", "-uo", "pipefail", "-c", script(commands))
	cmd.Dir = folder
	cmd.Env = append(os.Environ(), "ROOT="+root, "PROGRAMS="+programs)
	cmd.WaitDelay = time.Second
	start := time.Now()
	out, err := cmd.CombinedOutput()
	if err != nil {
		return fmt.Errorf("%s: %w\n%s", page, err, out)
	}
	for _, c := range commands {
		for _, word := range hash.FindAllString(c.shown, -1) {
			if !strings.Contains(string(out), word) {
				return fmt.Errorf("%s:%d: %s shows %q, and did not print it\n%s", page, c.line, c.text, word, out)
			}
		}
	}
	fmt.Printf("%s: %d commands in %.1f s\n", page, len(commands), time.Since(start).Seconds())
	return nil
}

// hash matches hashes of weights in the documents' outputs.
var hash = regexp.MustCompile(`\b[0-9a-f]{8}([0-9a-f]{8})?\b`)

// orExit ends a script if a command, or one part of it, fails, which -e does not do for a part.
const orExit = "{\n%s\n} || exit\n"

// script makes a script that prints and runs commands.
func script(commands []command) string {
	var s strings.Builder
	done := map[int]bool{}
	for _, c := range commands {
		for i, b := range before {
			if b.page == c.page && strings.HasPrefix(c.text, b.command) && !done[i] {
				done[i] = true
				fmt.Fprintf(&s, orExit, b.script)
			}
		}
		fmt.Fprintf(&s, "cat <<'END OF COMMAND'\n$ %s\nEND OF COMMAND\n", c.text)
		fmt.Fprintf(&s, orExit, c.text)
	}
	return s.String()
}

// checkpoints makes two checkpoints of one model as files and as directories. The second one has one different
// weight.
func checkpoints(folder, _ string) error {
	first := make([]float32, 1000)
	for i := range first {
		first[i] = float32(i)
	}
	second := append([]float32(nil), first...)
	second[7]++
	for name, weights := range map[string][]float32{
		"step-1000": first, "step-1010": second, "model": first, "old": first, "new": second,
	} {
		dir := filepath.Join(folder, name)
		if err := os.MkdirAll(dir, 0o755); err != nil {
			return err
		}
		const shard = "model-00001-of-00001.safetensors"
		index, err := json.Marshal(map[string]any{"weight_map": map[string]string{"w": shard}})
		if err != nil {
			return err
		}
		for path, text := range map[string][]byte{
			filepath.Join(dir, shard):                          safetensors(weights),
			filepath.Join(dir, "model.safetensors.index.json"): index,
			dir + ".safetensors":                               safetensors(weights),
		} {
			if err := os.WriteFile(path, text, 0o644); err != nil {
				return err
			}
		}
	}
	return os.Mkdir(filepath.Join(folder, "trainer"), 0o755)
}

// safetensors returns a file with one tensor.
func safetensors(weights []float32) []byte {
	header := fmt.Sprintf(`{"w":{"dtype":"F32","shape":[%d],"data_offsets":[0,%d]}}`, len(weights), 4*len(weights))
	header += strings.Repeat(" ", (8-len(header)%8)%8)
	text := binary.LittleEndian.AppendUint64(nil, uint64(len(header)))
	text = append(text, header...)
	for _, w := range weights {
		text = binary.LittleEndian.AppendUint32(text, math.Float32bits(w))
	}
	return text
}
