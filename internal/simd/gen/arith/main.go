// Command arith writes the AVX2 assembly of reductions (internal/hostops), of conversions (internal/convert) and of
// CPUID (internal/simd).
package main

import (
	"flag"
	"log"

	. "github.com/mmcloughlin/avo/build"
)

func main() {
	output := flag.String("of", "", "what to write: reductions, conversions or cpuid")
	flag.Parse()
	switch *output {
	case "reductions":
		kernels := reductions()
		dispatch(kernels)
		for _, k := range kernels {
			k.generate()
		}
	case "conversions":
		conversions()
	case "cpuid":
		cpuid()
	default:
		log.Fatalf("-of %q: want reductions, conversions or cpuid", *output)
	}
	Generate()
}
