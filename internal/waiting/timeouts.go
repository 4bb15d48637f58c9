package waiting

import "time"

// DefaultLimit is how long a wait without a deadline takes at most, unless env.ConnectTimeout says otherwise: the
// processes of a job may start some minutes apart.
const DefaultLimit = 10 * time.Minute

// first is when a wait says for the first time what it waits for: nobody starts processes closer together by hand.
const first = 2 * time.Second

// longest is the longest pause until it says so again, so that a log of hours stays short.
const longest = 2 * time.Minute
