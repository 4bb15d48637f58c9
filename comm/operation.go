package comm

// operation names a method for decorators that tell the methods apart.
type operation uint8

const (
	opAllReduce operation = iota
	opBroadcast
	opReduce
	opAllGather
	opAllGatherV
	opReduceScatter
	opAllToAll
	opAllToAllV
	opGather
	opScatter
	opSend
	opRecv
	opSync
	opBarrier
	opSplit
	opGroup
	numOperations
)

// operationNames are the names that [OpError.Op] has as well.
var operationNames = [numOperations]string{
	"allreduce", "broadcast", "reduce", "allgather", "allgatherv", "reducescatter", "alltoall", "alltoallv",
	"gather", "scatter", "send", "recv", "sync", "barrier", "split", "group",
}

// String returns the name, also of a number that came over the network.
func (o operation) String() string {
	if o >= numOperations {
		return "unknown operation"
	}
	return operationNames[o]
}

func (o operation) hasRoot() bool {
	return o == opBroadcast || o == opReduce || o == opGather || o == opScatter
}

func (o operation) reduces() bool {
	return o == opAllReduce || o == opReduce || o == opReduceScatter
}

// hasElements reports whether the operation is about elements of some type.
func (o operation) hasElements() bool { return o < opSync }
