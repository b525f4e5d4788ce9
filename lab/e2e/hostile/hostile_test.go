//go:build e2e

// Package hostile attacks the ports of Divvy's programs that are open to pods, in a short
// form of "make abuse": on the lab's real etcd, API server and kube-scheduler, with
// simulated nodes. It leaves the lab's cluster alone, and needs root for a network of pods.
//
//	go test -tags e2e -count=1 -v ./e2e/hostile
package hostile

import (
	"log/slog"
	"os"
	"testing"
	"time"

	"k8s.io/klog/v2"

	"github.com/divvy-gpu/divvy/lab/internal/abuse"
)

// TestHostileClients prints a table of what was tried, the memory of the programs beside
// their limits, and the pods that were scheduled meanwhile.
func TestHostileClients(t *testing.T) {
	klog.SetSlogLogger(slog.New(slog.DiscardHandler)) // watches that end with the API server
	_, err := abuse.Run(t.Context(), abuse.Options{
		Nodes: 300, Each: 3 * time.Second, Control: os.Getenv("DIVVY_E2E_CONTROL"), Dir: t.TempDir(), Out: t.Output(),
		Only: []string{
			"unread answers of filter", "invented", "unread answers of inspect", "plain stalled", "TLS stalled", "TLS slow handshakes",
			"floods", "containers", "unread answers of /metrics",
		},
	})
	if err != nil {
		t.Error(err)
	}
}
