package console

import "testing"

// Formatting a parsed size and parsing it again gives the same size.
func FuzzSize(f *testing.F) {
	for _, seed := range []string{"8", "64K", "16M", "1G", "1.5GiB", "1073741824G", "9223372036854775807", "-1", "NaN", "inf", "1e18", "0x10", "1e-9G", " 4 k "} {
		f.Add(seed)
	}
	f.Fuzz(func(t *testing.T, text string) {
		bytes, err := parseSize(text)
		if err != nil {
			return
		}
		if bytes < 0 {
			t.Fatalf("%q is %d bytes", text, bytes)
		}
		if again, err := parseSize(FormatSize(bytes)); err != nil || float64(again) != float64(bytes) {
			t.Fatalf("%q is %d bytes, written as %q, read again as %d, %v", text, bytes, FormatSize(bytes), again, err)
		}
	})
}
