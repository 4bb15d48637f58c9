package base

import "context"

// quiet is the key of a context whose steps do not log skips.
type quiet struct{}

// Quiet returns a context whose steps leave it to the caller to log skips.
func Quiet(ctx context.Context) context.Context {
	return context.WithValue(ctx, quiet{}, true)
}

// IsQuiet reports whether a context comes from [Quiet].
func IsQuiet(ctx context.Context) bool { return ctx.Value(quiet{}) != nil }
