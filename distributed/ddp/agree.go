package ddp

import (
	"context"
	"fmt"
	"hash/fnv"
	"strings"

	"github.com/tutti-go/tutti/distributed/internal/base"
)

// agree compares the terms of all buckets before the first step with a communicator.
func (g *Gradients) agree(ctx context.Context) error {
	if g.agreed || g.meter.WorldSize() == 1 {
		return nil
	}
	err := base.Agree(ctx, g.transaction.rt, g.meter, &g.transaction.order, &g.transaction.buffers, g.terms())
	g.agreed = err == nil
	g.step.before = g.lines.outer.Totals() // what the step sends comes now
	return err
}

// terms are the terms of all buckets. Terms that do not fit are in the hash alone.
func (g *Gradients) terms() string {
	var terms strings.Builder
	fmt.Fprintf(&terms, "version %s\n%d gradients\n%v, uneven %v, weighted %v, views %v, shards %v",
		base.Version(), len(g.gradients), g.op, g.cfg.Uneven, g.cfg.Weighted,
		g.cfg.BucketViews, g.cfg.Shard)
	for i, p := range g.gradients {
		fmt.Fprintf(&terms, "\ngradient %d: %d of %v", i, p.n, p.dt)
	}
	h := fnv.New64a()
	for i, b := range g.buckets {
		fmt.Fprintf(&terms, "\nbucket %d: %d of %v as %v, %s, density %v",
			i, b.bytes/b.dt.Size(), b.dt, b.wire, b.cfg.Pattern, b.cfg.Density)
		if reducerTerms := b.reducer.Terms(); reducerTerms != "" {
			terms.WriteString(", " + reducerTerms)
		}
		fmt.Fprintf(h, "%v %+v\n", b.params, b.cfg)
	}
	if !g.transaction.plain {
		fmt.Fprintf(&terms, "\n%+v", g.transaction.cfg)
	}
	h.Write([]byte(terms.String()))
	return fmt.Sprintf("%.*s\nhash %x", base.TermsBytes-32, terms.String(), h.Sum64())
}
