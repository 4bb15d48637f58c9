// The kernels for small messages, which start before the kernel ahead of them in
// the stream has ended, and wait for that themselves. Launched with that attribute.
#define DEPENDENT_LAUNCH
#include "p2p.cu"
