package train

import (
	"testing"
	"time"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"github.com/tutti-go/tutti/distributed/elastic"
	"github.com/tutti-go/tutti/distributed/sparse"
	"github.com/tutti-go/tutti/internal/env"
	"github.com/tutti-go/tutti/runtime/cpu"
)

// TestMemberTimes checks that a member's timeouts follow from --tcp-silence, which launchers pass to ranks in the
// environment, and from --patience.
func TestMemberTimes(t *testing.T) {
	for name, value := range map[string]string{
		"TUTTI_RANK":             "0",
		"TUTTI_WORLD_SIZE":       "1",
		"TUTTI_LOCAL_RANK":       "0",
		"TUTTI_LOCAL_WORLD_SIZE": "1",
		"MASTER_ADDR":            "127.0.0.1",
		"MASTER_PORT":            "29400",
		env.Secret:               "a secret of more than 32 bytes, of this test",
		env.Min:                  "1",
		env.Max:                  "0",
	} {
		t.Setenv(name, value)
	}
	rt := cpu.New()
	defer func() { assert.NoError(t, rt.Close()) }()
	for text, want := range map[string]time.Duration{"": elastic.DefaultSilence, "30s": 30 * time.Second} {
		t.Setenv(env.TCPSilence, text)
		conf, err := membership(rt, Default(sparse.Dense))
		require.NoError(t, err)
		assert.Equal(t, want, conf.Silence, "%s=%q", env.TCPSilence, text)
		assert.Zero(t, conf.Patience, "it is the package's")
	}
	cfg := Default(sparse.Dense)
	cfg.Patience = time.Minute
	conf, err := membership(rt, cfg)
	require.NoError(t, err)
	assert.Equal(t, time.Minute, conf.Patience)
}
