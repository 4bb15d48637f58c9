package main

import (
	"log"
	"os"
)

// The program takes no arguments: what it does not know is an error, as with the other examples.
func init() {
	if len(os.Args) > 1 {
		log.Fatalf("unknown arguments: %q", os.Args[1:])
	}
}
