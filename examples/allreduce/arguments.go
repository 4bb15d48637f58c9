package main

import (
	"log"
	"os"
)

// The program takes no arguments: like the other examples, it refuses unknown ones.
func init() {
	if len(os.Args) > 1 {
		log.Fatalf("unknown arguments: %q", os.Args[1:])
	}
}
