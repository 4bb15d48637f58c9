package cluster

import (
	"testing"
	"time"

	"github.com/stretchr/testify/assert"
)

func TestRates(t *testing.T) {
	for text, want := range map[string]Rate{"100mbit": 1e8, "1gbit": 1e9, "10GBit": 1e10, "2.5gbit": 2.5e9, "64kbit": 64e3, "800000bit": 8e5} {
		got, err := ParseRate(text)
		assert.NoError(t, err, text)
		assert.Equal(t, want, got, text)
		again, err := ParseRate(got.String())
		assert.NoError(t, err, text)
		assert.Equal(t, got, again, text)
	}
	for _, text := range []string{"", "1", "1g", "gbit", "-1mbit", "0bit", "NaNbit", "1e9gbit", "1 gibit"} {
		_, err := ParseRate(text)
		assert.ErrorContains(t, err, "is not a rate", text)
	}
	for rate, want := range map[Rate]string{1e9: "1gbit", 2.5e9: "2500mbit", 1e8: "100mbit", 123: "123bit", 0: "0bit"} {
		assert.Equal(t, want, rate.String())
	}
}

// A burst is no larger than a link's speed explains. Pieces fit it with the headers of their packets, which take up
// to 78 bytes for 1,448 bytes of data.
func TestBursts(t *testing.T) {
	for _, rate := range []Rate{minRate, 1e7, 1e8, 1e9, 1e10, 1e11, maxRate} {
		burst, segment := rate.burst(), rate.segment()
		assert.LessOrEqual(t, float64(burst), max(8192, float64(rate)/8*0.000126), rate)
		assert.GreaterOrEqual(t, segment, 3000, "two packets at %v", rate)
		assert.LessOrEqual(t, segment, 65536, rate)
		assert.LessOrEqual(t, segment+(segment/1448+1)*78, burst, rate)
	}
}

func TestValidateNamesBadSettings(t *testing.T) {
	assert.NoError(t, Default().Validate())
	for want, change := range map[string]func(*Config){
		"0 hosts":            func(c *Config) { c.Hosts = 0 },
		"251 hosts":          func(c *Config) { c.Hosts = 251 },
		"0 ranks per host":   func(c *Config) { c.PerHost = 0 },
		"1025 ranks per ":    func(c *Config) { c.PerHost = 1025 },
		"rate 1kbit":         func(c *Config) { c.Rate = 1e3 },
		"delay -1s":          func(c *Config) { c.Delay = -time.Second },
		"delay 1.5µs":        func(c *Config) { c.Delay = 1500 },
		"loss 100 is not in": func(c *Config) { c.Loss = 100 },
	} {
		c := Default()
		change(&c)
		assert.ErrorContains(t, c.Validate(), want)
	}
}

func TestNetworkSaysWhatDiffersFromAPlainOne(t *testing.T) {
	assert.Equal(t, "4 hosts, 1gbit", Default().Network())
	c := Config{Hosts: 1, PerHost: 2, Rate: 1e8, Delay: 1500 * time.Microsecond, Loss: 0.25}
	assert.Equal(t, "1 host, 100mbit, delay 1500us, loss 0.25%", c.Network())
}
