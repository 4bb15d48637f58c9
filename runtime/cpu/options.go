package cpu

// Option configures [New].
type Option func(*options)

type options struct {
	cacheLimit int64
}

// WithCacheLimit bounds the memory kept for reuse in blocks above 256 KiB: a
// block whose return would take the cache over the limit goes back to the
// system at once. Zero keeps none; a negative limit, the default, keeps all.
func WithCacheLimit(bytes int64) Option {
	return func(o *options) { o.cacheLimit = bytes }
}
