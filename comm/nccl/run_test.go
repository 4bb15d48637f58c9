package nccl

import (
	"testing"

	"github.com/stretchr/testify/assert"

	"github.com/tutti-go/tutti/comm"
	"github.com/tutti-go/tutti/comm/rendezvous"
)

func TestGPUsOfAProcess(t *testing.T) {
	alone := rendezvous.Job{Launcher: "none", WorldSize: 1}
	third := rendezvous.Job{Launcher: "openmpi", Rank: 6, WorldSize: 8, LocalRank: 2}
	for name, c := range map[string]struct {
		job         rendezvous.Job
		ranks, gpus int
		want        []int
		err         error
		says        string
	}{
		"all":                           {job: alone, gpus: 4, want: []int{0, 1, 2, 3}},
		"the first":                     {job: alone, ranks: 2, gpus: 4, want: []int{0, 1}},
		"a launcher's only process":     {job: rendezvous.Job{Launcher: "openmpi", WorldSize: 1}, gpus: 2, want: []int{0, 1}},
		"its number on the host":        {job: third, gpus: 4, want: []int{2}},
		"ranks as started":              {job: third, ranks: 8, gpus: 3, want: []int{2}},
		"the only one that it is shown": {job: third, gpus: 1, want: []int{0}},
		"too few":                       {job: alone, ranks: 5, gpus: 4, err: comm.ErrUnavailable, says: "5 ranks need 5 GPUs, and this process sees 4"},
		"too few on this host":          {job: third, gpus: 2, err: comm.ErrUnavailable, says: "rank 6 is process 3 of this host, which has 2 GPUs: start at most one process per GPU"},
		"not as started":                {job: third, ranks: 2, gpus: 4, err: comm.ErrArgument, says: "2 ranks, but there is a process for each of 8; the launcher decides"},
		"negative":                      {job: alone, ranks: -1, gpus: 4, err: comm.ErrArgument, says: "-1 ranks"},
	} {
		t.Run(name, func(t *testing.T) {
			got, err := chooseGPUs(c.job, c.ranks, c.gpus)
			assert.Equal(t, c.want, got)
			assert.ErrorIs(t, err, c.err)
			if c.err != nil {
				assert.ErrorContains(t, err, c.says)
			}
		})
	}
}
