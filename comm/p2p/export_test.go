package p2p

// Measured are the sizes that New measures.
var Measured = &measured
