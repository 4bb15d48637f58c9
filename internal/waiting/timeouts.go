package waiting

import "time"

// DefaultLimit is the limit of a wait without a deadline, unless env.ConnectTimeout sets another: the processes of a
// job may start some minutes apart.
const DefaultLimit = 10 * time.Minute

// first is the time of the first reminder: processes started by hand are further apart.
const first = 2 * time.Second

// longest is the longest interval between reminders, so that a log of hours stays short.
const longest = 2 * time.Minute
