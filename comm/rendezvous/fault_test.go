package rendezvous

import (
	"testing"

	"github.com/tutti-go/tutti/comm/internal/faulttest"
)

// TestFaultsAreTested has a test for each of the table's faults.
func TestFaultsAreTested(t *testing.T) {
	faulttest.CheckElsewhere(t, "rendezvous", map[string]func(*testing.T){
		"stranger": TestStrangersAreRefused, "garbage": TestStrangersAreRefused, "silence": TestSilentConnectionsDelayNobody,
		"missing at the rendezvous": TestARankThatDoesNotComeIsNamed,
	})
}
