package ddp

// Patterns returns the patterns of the buckets, also before the first step.
func (g *Gradients) Patterns() []string { return g.patterns }

// RollsBack reports whether gradients of a step that fails are as before.
func (g *Gradients) RollsBack() bool { return g.transaction.rollsBack() }
