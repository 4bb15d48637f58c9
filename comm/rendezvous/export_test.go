package rendezvous

import "time"

// SetTellTime changes how long a keeper waits for ranks to hear what it tells.
func SetTellTime(k *ReportKeeper, d time.Duration) {
	k.mu.Lock()
	defer k.mu.Unlock()
	k.tellTime = d
}
