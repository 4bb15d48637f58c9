package main

import (
	"github.com/spf13/cobra"

	"github.com/tutti-go/tutti/cmd/tutti/lab/drawing"
)

func newPictures() *cobra.Command {
	return &cobra.Command{
		Use:     "pictures",
		Short:   "Draw the pictures of the documents whose data lab/results has",
		Example: `  go run -C lab . pictures`,
		Args:    cobra.NoArgs,
		RunE: func(*cobra.Command, []string) error {
			return drawing.Pictures("..")
		},
	}
}
