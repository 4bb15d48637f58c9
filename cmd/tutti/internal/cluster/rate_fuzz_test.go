package cluster

import "testing"

// Formatting a parsed rate and parsing it again gives the same rate.
func FuzzRate(f *testing.F) {
	for _, seed := range []string{"100mbit", "1gbit", "2.5gbit", "64kbit", "123bit", "1e300gbit", "NaNbit", "infmbit", "-1bit", "18446744073709551615bit", "0.0000001bit"} {
		f.Add(seed)
	}
	f.Fuzz(func(t *testing.T, text string) {
		rate, err := ParseRate(text)
		if err != nil {
			return
		}
		if again, err := ParseRate(rate.String()); err != nil || again != rate {
			t.Fatalf("%q is %d bit/s, written as %q, read again as %d, %v", text, uint64(rate), rate, uint64(again), err)
		}
	})
}
