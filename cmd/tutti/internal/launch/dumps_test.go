package launch

import (
	"bytes"
	"os"
	"path/filepath"
	"strings"
	"syscall"
	"testing"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"github.com/tutti-go/tutti/comm/store"
)

// TestEnds: any text that is written as the end of a job yields a code that a process can end with, a signal that a
// user may send, and a text that a terminal can show.
func TestEnds(t *testing.T) {
	for text, want := range map[string]End{
		`{}`: {},
		`{"text":"rank 3 failed","code":7,"rank":true}`: {Text: "rank 3 failed", Code: 7, Rank: true},
		`{"text":"terminated","code":143,"signal":15}`:  {Text: "terminated", Code: 143, Signal: syscall.SIGTERM},
		`{"text":"x","code":255}`:                       {Text: "x", Code: 255},
		`{"text":"x","code":256}`:                       {Text: "x", Code: 1},
		`{"text":"x","code":512}`:                       {Text: "x", Code: 1},
		`{"text":"x","code":-1}`:                        {Text: "x", Code: 1},
		`{"text":"x"}`:                                  {Text: "x", Code: 1},
		`{"code":3}`:                                    {Text: "the job failed", Code: 3},
		`{"code":256}`:                                  {Text: "the job failed", Code: 1},
		`{"rank":true}`:                                 {Text: "the job failed", Code: 1, Rank: true},
		`{"text":"x","code":1,"signal":9}`:              {Text: "x", Code: 1},
		`{"text":"x","code":1,"signal":-1}`:             {Text: "x", Code: 1},
		`{"text":"a\u001b[2Jb\r\nc","code":1}`:          {Text: `a\x1b[2Jb\r\nc`, Code: 1},
	} {
		end, err := readEnd([]byte(text))
		require.NoError(t, err)
		assert.Equal(t, want, end, text)
	}
	for _, text := range []string{"", "{", `{"code":"x"}`, `{"code":1e99}`} {
		_, err := readEnd([]byte(text))
		require.ErrorContains(t, err, "how the job ended", text)
	}
}

// TestForgedDumps: from other machines' flight records, a launcher writes only files that are flight records, in the
// records' folder, and through no link.
func TestForgedDumps(t *testing.T) {
	dir := t.TempDir()
	records, outside := filepath.Join(dir, "records"), filepath.Join(dir, "outside")
	for _, folder := range []string{records, outside, filepath.Join(records, ".ssh")} {
		require.NoError(t, os.Mkdir(folder, 0o777))
	}
	bashrc, keys := filepath.Join(records, ".bashrc"), filepath.Join(records, ".ssh", "authorized_keys")
	secret := filepath.Join(outside, "secret")
	for _, path := range []string{bashrc, keys, secret} {
		require.NoError(t, os.WriteFile(path, []byte("original"), 0o600))
	}
	for name, target := range map[string]string{
		"out":                  outside,
		"tutti-record-7.json":  secret,
		"tutti-record-8.json":  filepath.Join(outside, "none"),
		"tutti-record-epoch-3": outside,
	} {
		if err := os.Symlink(target, filepath.Join(records, name)); err != nil {
			t.Skipf("needs links: %v", err)
		}
	}
	var said bytes.Buffer
	a := &agent{Config: Config{Records: records}, notes: &said, kv: store.NewServer(store.Options{}).Owner("the launcher")}
	defer a.kv.Close()
	refused := []string{
		".bashrc", ".ssh/authorized_keys", "out/escaped", "../up", "../tutti-record-1.json", "/tmp/tutti-record-1.json", "",
		"tutti-record-1.json/x", "x/tutti-record-1.json", "out/tutti-record-1.json", "tutti-record-1.txt", "record-1.json",
		"./tutti-record-1.json", "tutti-record-epoch-1/x", "tutti-record-epoch-1/../tutti-record-1.json",
		"tutti-record-epoch-1/2/tutti-record-1.json", "tutti-record-epoch-1//tutti-record-1.json",
		"tutti-record-epoch-x/tutti-record-1.json", "tutti-record-epoch-/tutti-record-1.json", "tutti-record-\x1b[2J.json",
		`tutti-record-\..\x.json`, "tutti-record-a:b.json",
	}
	for _, name := range refused {
		require.NoError(t, a.kv.Set(t.Context(), dumps+name+"/000000", []byte("evil")))
	}
	for _, piece := range []string{
		"tutti-record-1.json/000000", "tutti-record-1.json/000001",
		"tutti-record-7.json/000000", "tutti-record-8.json/000000",
		"tutti-record-epoch-2/tutti-record-0.json/000000",
	} {
		require.NoError(t, a.kv.Set(t.Context(), dumps+piece, []byte(piece[len(piece)-1:])))
	}
	require.NoError(t, a.takeDumps())
	assert.Contains(t, said.String(), "not written: 22 files")
	assert.Equal(t, 1, strings.Count(said.String(), "\n"))

	// A folder that is a link is an error, and nothing goes through it.
	require.NoError(t, a.kv.Set(t.Context(), dumps+"tutti-record-epoch-3/tutti-record-0.json/000000", []byte("evil")))
	require.ErrorContains(t, a.takeDumps(), "tutti-record-epoch-3 in "+records+" is no folder")

	for path, want := range map[string]string{
		bashrc: "original", keys: "original", secret: "original",
		filepath.Join(records, "tutti-record-1.json"):                         "01",
		filepath.Join(records, "tutti-record-7.json"):                         "0",
		filepath.Join(records, "tutti-record-8.json"):                         "0",
		filepath.Join(records, "tutti-record-epoch-2", "tutti-record-0.json"): "0",
	} {
		got, err := os.ReadFile(path)
		require.NoError(t, err)
		assert.Equal(t, want, string(got), path)
	}
	for folder, want := range map[string]int{dir: 2, outside: 1, records: 8} {
		files, err := os.ReadDir(folder)
		require.NoError(t, err)
		assert.Len(t, files, want, "%v", files)
	}
}
