package console

import (
	"bytes"
	"testing"
	"testing/synctest"
	"time"

	"github.com/stretchr/testify/assert"
)

func TestParseSize(t *testing.T) {
	for text, want := range map[string]int{"8": 8, "64K": 64 << 10, "64k": 64 << 10, "16MiB": 16 << 20, "1.5M": 3 << 19, "1G": 1 << 30, "4KB": 4096, "0": 0} {
		got, err := parseSize(text)
		assert.NoError(t, err, text)
		assert.Equal(t, want, got, text)
	}
	for _, text := range []string{"", "K", "-1", "1.3", "8T", "NaN", "1e30G"} {
		_, err := parseSize(text)
		assert.Error(t, err, text)
	}
	for bytes, want := range map[int]string{8: "8", 1 << 10: "1K", 3 << 19: "1536K", 64 << 20: "64M", 1 << 30: "1G"} {
		assert.Equal(t, want, FormatSize(bytes))
	}
}

// Without a terminal, long work prints its progress now and then.
func TestProgressInAPipe(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		var out bytes.Buffer
		b := &Bars{Out: &out, Pieces: 2}
		for step := range 20 {
			b.Set("topkA", step+1, 20)
			time.Sleep(time.Second)
		}
		b.Stop()
		assert.Equal(t, "tutti: topkA: 6 of 20\ntutti: topkA: 11 of 20\ntutti: topkA: 16 of 20\n", out.String())
	})
}
