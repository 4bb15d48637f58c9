// Package cc compiles the C and C++ of tests, each content once per machine.
package cc

import (
	"cmp"
	"crypto/sha256"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"runtime"
	"strings"
	"sync"
	"testing"
	"time"
)

// builds are the files of this process, by what was asked for: a program that is built again need not be preprocessed.
var builds sync.Map

// Build compiles a source file, followed by text, and returns the path of the library or program. compilers are names
// separated by blanks; the first installed one compiles. Build skips the test if none is installed, if the source is
// missing, as next to a test binary that was moved, and on systems other than Linux.
//
// Results stay in the user's cache directory until a week after their last use. Their names are hashes of the
// preprocessed source, the flags and the compiler's version.
func Build(tb testing.TB, compilers, source, text string, flags ...string) (file string, err error) {
	tb.Helper()
	if runtime.GOOS != "linux" {
		tb.Skipf("C is compiled on Linux, not %s", runtime.GOOS)
	}
	if _, err := os.Stat(source); err != nil {
		tb.Skipf("is a test binary away from its sources: %v", err)
	}
	compiler := ""
	for name := range strings.FieldsSeq(compilers) {
		path, _ := exec.LookPath(name)
		compiler = cmp.Or(compiler, path)
	}
	if compiler == "" {
		tb.Skipf("needs a compiler: %s", compilers)
	}
	asked := fmt.Sprintf("%q", append([]string{compiler, source, text}, flags...))
	if file, built := builds.Load(asked); built {
		return file.(string), nil
	}
	defer func() {
		if err == nil {
			builds.Store(asked, file)
		}
	}()
	run := func(args ...string) (out []byte) {
		if err == nil {
			cmd := exec.Command(compiler, args...)
			cmd.Stdin = strings.NewReader(fmt.Sprintf("#include %q\n%s", source, text))
			out, err = cmd.Output()
		}
		if exit := (*exec.ExitError)(nil); errors.As(err, &exit) {
			err = fmt.Errorf("%s: %v: %s", compiler, exit, exit.Stderr)
		}
		return out
	}
	language := map[string]string{".c": "c", ".cpp": "c++"}[filepath.Ext(source)]
	flags = append([]string{"-x", language, "-", "-x", "none"}, flags...)
	hash := sha256.Sum256(fmt.Appendf(nil, "%s%q%s", run("--version"), flags, run(append(flags, "-E", "-P")...)))

	cache, _ := os.UserCacheDir()
	cache = filepath.Join(cmp.Or(cache, os.TempDir()), "tutti-test")
	file = filepath.Join(cache, fmt.Sprintf("%x", hash))
	now := time.Now()
	if err != nil || os.Chtimes(file, now, now) == nil {
		return file, err
	}
	if err = os.MkdirAll(cache, 0o700); err != nil {
		return "", err
	}
	old, _ := filepath.Glob(filepath.Join(cache, "*"))
	for _, name := range old {
		if info, err := os.Stat(name); err == nil && now.Sub(info.ModTime()) > 7*24*time.Hour {
			os.Remove(name) //nolint:errcheck // another process may have
		}
	}
	made := fmt.Sprintf("%s.%d.%d", file, os.Getpid(), now.UnixNano())
	run(append(flags, "-o", made)...)
	if err == nil {
		err = os.Rename(made, file)
	}
	return file, err
}
