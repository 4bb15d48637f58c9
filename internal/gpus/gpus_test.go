package gpus

import (
	"testing"

	"github.com/stretchr/testify/assert"

	"github.com/tutti-go/tutti/comm"
	"github.com/tutti-go/tutti/comm/rendezvous"
)

func TestChoose(t *testing.T) {
	alone := rendezvous.Job{Launcher: "none", WorldSize: 1}
	third := rendezvous.Job{Launcher: "openmpi", Rank: 6, WorldSize: 8, LocalRank: 2}
	for name, c := range map[string]struct {
		job            rendezvous.Job
		ranks, visible int
		want           []int
		refused        string
	}{
		"all GPUs":                       {job: alone, visible: 4, want: []int{0, 1, 2, 3}},
		"the first ones":                 {job: alone, ranks: 2, visible: 4, want: []int{0, 1}},
		"a launcher's only process":      {job: rendezvous.Job{Launcher: "openmpi", WorldSize: 1}, visible: 2, want: []int{0, 1}},
		"its number on the host":         {job: third, visible: 4, want: []int{2}},
		"ranks as started":               {job: third, ranks: 8, visible: 3, want: []int{2}},
		"the only one that it is shown":  {job: third, visible: 1, want: []int{0}},
		"none":                           {job: alone, refused: "1 ranks with a GPU each, and this process sees 0"},
		"none of those asked for":        {job: alone, ranks: 2, refused: "2 ranks with a GPU each, and this process sees 0"},
		"too few":                        {job: alone, ranks: 5, visible: 4, refused: "5 ranks with a GPU each, and this process sees 4"},
		"too few for the host":           {job: third, visible: 2, refused: "rank 6 is process 3 of this host, which has 2 GPUs"},
		"none for a process of the host": {job: third, refused: "rank 6 is process 3 of this host, which has 0 GPUs"},
	} {
		t.Run(name, func(t *testing.T) {
			assert.Equal(t, c.want, Choose(c.job, c.ranks, c.visible))
			if c.want == nil {
				err := tooFew(c.job, c.ranks, c.visible)
				assert.ErrorIs(t, err, comm.ErrUnavailable)
				assert.ErrorContains(t, err, c.refused)
			}
		})
	}
}
