package sparse

import (
	"encoding/json"
	"math"
	"strconv"
	"time"
)

// Stats tells what the last step of a [Reducer] did on this rank.
type Stats struct {
	Step int // number of the step, from 0
	// Pattern is what ran: that of the configuration, "dense" in the warm-up, and
	// what oktopk uses where it is no better: dense, topkA2 or gtopk. It is empty
	// at density 0.
	Pattern  string
	Dense    bool // a step of the dense pattern, or of the warm-up
	Skipped  bool // the step was rolled back by [SkipNonFinite]
	Elements int  // length of the tensor
	K        int  // entries that a rank was to select
	// SelectedLocal is how many entries this rank selected.
	SelectedLocal int
	// SelectedGlobal is how many entries the result was put together from: the
	// number of entries that it has, or, where an exchange does not merge the
	// ranks' lists before it gathers them, the sum of their lengths.
	SelectedGlobal int
	// Threshold is the magnitude that the selected entries have at least,
	// GlobalThreshold (oktopk) that of the sums that went into the result.
	Threshold, GlobalThreshold float32
	// SentElements and SentBytes are what this rank sent as package metered counts:
	// a value and an index are one element each, an allgather counts what the
	// rank receives. What [Auto] sent to choose does not count.
	SentElements, SentBytes int64
	// SelectTime is the host's time for adding the gradient to the residual
	// and selecting, ExchangeTime for everything after. On a device with streams
	// the host runs ahead, and each may contain the device's work of the other.
	SelectTime, ExchangeTime time.Duration
	// Chosen is the pattern that was chosen for [Auto], empty for another pattern.
	Chosen string
}

// jsonFloat is a number that JSON has no notation for if it is not finite: then it
// is the string "NaN", "+Inf" or "-Inf".
type jsonFloat float32

func (f jsonFloat) MarshalJSON() ([]byte, error) {
	text := strconv.FormatFloat(float64(f), 'g', -1, 32)
	if x := float64(f); math.IsNaN(x) || math.IsInf(x, 0) {
		return json.Marshal(text)
	}
	return []byte(text), nil
}

func (f *jsonFloat) UnmarshalJSON(data []byte) error {
	text := string(data)
	if len(data) > 0 && data[0] == '"' {
		if err := json.Unmarshal(data, &text); err != nil {
			return err
		}
	}
	x, err := strconv.ParseFloat(text, 32)
	*f = jsonFloat(x)
	return err
}

// fields are those of [Stats], of which jsonStats replaces some.
type fields Stats

type jsonStats struct {
	*fields
	Threshold, GlobalThreshold jsonFloat
}

// MarshalJSON implements [json.Marshaler]. Thresholds that are not finite become
// the strings "NaN" and "+Inf"; durations are in nanoseconds.
func (s Stats) MarshalJSON() ([]byte, error) {
	return json.Marshal(jsonStats{(*fields)(&s), jsonFloat(s.Threshold), jsonFloat(s.GlobalThreshold)})
}

// UnmarshalJSON implements [json.Unmarshaler].
func (s *Stats) UnmarshalJSON(data []byte) error {
	from := jsonStats{fields: (*fields)(s)}
	err := json.Unmarshal(data, &from)
	s.Threshold = float32(from.Threshold)
	s.GlobalThreshold = float32(from.GlobalThreshold)
	return err
}
