package metered_test

import (
	"context"
	"fmt"

	"github.com/tutti-go/tutti/comm"
	"github.com/tutti-go/tutti/comm/local"
	"github.com/tutti-go/tutti/comm/metered"
	"github.com/tutti-go/tutti/dtype"
	"github.com/tutti-go/tutti/runtime/cpu"
)

// The traffic of a program, or of some of its operations.
func Example() {
	rt := cpu.New()
	defer rt.Close()
	err := local.Run(context.Background(), 4, func(ctx context.Context, c comm.Communicator) error {
		buf, err := rt.Allocate(4000)
		if err != nil {
			return err
		}
		defer rt.Deallocate(buf)
		m := metered.New(c)
		if err := m.AllReduce(buf, buf, 1000, dtype.F32, comm.Max); err != nil {
			return err
		}
		if err := m.Sync(ctx); err != nil {
			return err
		}
		if m.Rank() == 0 {
			t := m.Totals() // m.Totals(comm.OpAllReduce) for these alone
			fmt.Println(t.SentElements, "elements,", t.SentBytes, "bytes")
		}
		return nil
	})
	if err != nil {
		fmt.Println(err)
	}
	// Output: 1500 elements, 6000 bytes
}
