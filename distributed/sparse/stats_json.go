package sparse

import (
	"encoding/json"
	"math"
	"strconv"
)

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
	s.Threshold, s.GlobalThreshold = float32(from.Threshold), float32(from.GlobalThreshold)
	return err
}
