package tcp

// The locks of this package, in the order in which a goroutine takes them. It may leave some out:
//
//	schedule.Engine     held while the engine calls its wire
//	connector.mu        the lanes of all pairs while they are made
//	lane.writing        held while frames are collected and sent
//	lane.sealing        held while the memory of a send is read; track.sealing likewise
//	pair.mu             the outbox, the inbox, the credit and the state of a pair, and the matchers of its rank
//	node.mu             the communicators of a node
//	wire.mu             what a wire has for its engine
//	neighborhood.mu     the communicators that look wakes; taken with the engine's lock or no lock held
//	link.mu             the bytes that TLS has written
//
// lane.filling is held while the memory of a receive is written, and nothing is waited for meanwhile. A
// goroutine that holds it takes link.mu alone, as TLS may answer what it reads. awaitUnlock takes sealing and
// filling of lanes and tracks with no lock held but the engine's.
//
// track.filling is held while frames are read: a goroutine that holds it takes pair.mu and those below.
//
// A goroutine that holds pair.mu does not call the engine, and does not write to a connection: it wakes the
// writer of a lane.
