package agent

import (
	"bytes"
	"context"
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"sync/atomic"
	"testing"
	"testing/synctest"
	"time"

	corev1 "k8s.io/api/core/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/runtime"
	k8stesting "k8s.io/client-go/testing"
	"k8s.io/utils/ptr"
	"tags.cncf.io/container-device-interface/pkg/cdi"

	"github.com/divvy-gpu/divvy/internal/core/accel"
	"github.com/divvy-gpu/divvy/internal/node/alloc"
	"github.com/divvy-gpu/divvy/internal/node/state"
)

// TestClaimsFile: whatever becomes of the file, devices that claims hold are not given out again, and a file that
// cannot be read is kept.
func TestClaimsFile(t *testing.T) {
	s := newClaiming(t)
	_, stop := s.play()
	eventually(t, "devices are published", func() bool { return strings.Count(s.published(), ",") == 2 })
	s.allocate("one", "gpu-a")
	if failed := s.prepare("one"); failed != "" {
		t.Fatal(failed)
	}
	stop()
	path := filepath.Join(s.config.StateDir, claimsFile)
	saved, err := os.ReadFile(path)
	if err != nil {
		t.Fatal(err)
	}
	replaced := func(from, to string) func() error {
		return func() error {
			changed := bytes.Replace(saved, []byte(from), []byte(to), 1)
			if bytes.Equal(changed, saved) {
				return fmt.Errorf("%s is not in %s", from, saved)
			}
			return os.WriteFile(path, changed, 0o600)
		}
	}
	// What another release writes is a valid file with other fields.
	written := func(claim map[string]any) func() error {
		return func() error {
			file := state.NewDocument[map[string]any](s.config.StateDir, claimsFile)
			return file.Save(map[string]any{"claims": []any{claim}})
		}
	}
	claim := func(part map[string]any) map[string]any {
		return map[string]any{"vendor": "nvidia", "uid": "uid-one", "namespace": "ns", "name": "one", "pods": []string{claimingUID},
			"prepared": true, "parts": []any{part}}
	}
	newer := claim(map[string]any{"request": "r", "device": "gpu-a", "type": "gpu", "power": 300,
		"card": alloc.StoredCard{ID: "a", MemoryBytes: 40 << 30, Chips: []accel.DeviceID{"a"}}})
	newer["since"] = "2030-01-01"
	tests := []struct {
		name   string
		damage func() error
		aside  bool // whether the file is moved aside
	}{
		{"removed", func() error { return os.Remove(path) }, false},
		{"empty", func() error { return os.WriteFile(path, nil, 0o600) }, true},
		{"cut off", func() error { return os.WriteFile(path, saved[:len(saved)/2], 0o600) }, true},
		{"changed by hand", replaced(`"gpu-a"`, `"gpu-b"`), true},
		{"of a newer version", replaced(`"version":1`, `"version":2`), true},
		{"of an older version", replaced(`"version":1`, `"version":0`), true},
		{"with fields of a newer release", written(newer), false},
		{"of an older release, without descriptions", written(claim(map[string]any{"request": "r", "device": "gpu-a"})), false},
	}
	for _, tt := range tests {
		t.Run(tt.name, func(t *testing.T) {
			_ = os.Remove(path + ".damaged")
			if err := tt.damage(); err != nil {
				t.Fatal(err)
			}
			damaged, _ := os.ReadFile(path)
			a, stop := s.play()
			eventually(t, "claim and devices are known", func() bool { return len(a.claims.Claims("nvidia")) == 1 && claimable(a) })
			if why := s.rejected(a, "gpu-a"); !strings.Contains(why, "device gpu-a is held by claim ns/one as gpu-a") {
				t.Errorf("the device is given out again: %q", why)
			}
			if why := s.rejected(a, "gpu-b"); why != "" {
				t.Errorf("another device is not given out: %s", why)
			}
			if err := a.claims.Release(t.Context(), alloc.ClaimKey{Vendor: "nvidia", UID: "uid-two"}); err != nil {
				t.Fatal(err)
			}
			if _, err := cdi.ReadSpec(filepath.Join(s.config.CDIDir, "divvy-claim-nvidia-uid-one.json"), 0); err != nil {
				t.Errorf("what its containers have is not described any more: %v", err)
			}
			stop()
			aside, err := os.ReadFile(path + ".damaged")
			if (err == nil) != tt.aside || tt.aside && !bytes.Equal(aside, damaged) {
				t.Errorf("moved aside is %q (%v), want that: %t", aside, err, tt.aside)
			}
			now, _, err := state.NewDocument[alloc.ClaimsState](s.config.StateDir, claimsFile).Load()
			if err != nil || now.Partial || len(now.Claims) != 1 || !now.Claims[0].Prepared || now.Claims[0].Parts[0].Card.ID != "a" {
				t.Errorf("the file has %+v: %v", now, err)
			}
		})
	}
}

// TestClaimsWithoutFile: without the file, the claims of the node's pods are recovered from the API server, for all
// vendors.
func TestClaimsWithoutFile(t *testing.T) {
	s := newClaiming(t)
	b := resultOf("nvidia", "gpu-b")
	elsewhere, admin, second := b, b, b
	elsewhere.Pool = "another-node/nvidia"
	admin.AdminAccess = ptr.To(true)
	second.Request = "s"
	s.allocateResults("both-vendors", claimingUID, resultOf("nvidia", "gpu-a"), resultOf("iluvatar", "chip-x-slots"))
	s.allocateResults("admin", claimingUID, admin)
	s.allocateResults("several", claimingUID, b, second)
	s.allocateResults("elsewhere", claimingUID, elsewhere)
	s.allocateResults("of-another-driver", claimingUID, resultOf("unknown", "gpu-b"))
	s.allocateResults("ended", claimingUID, b)
	s.allocateResults("gone", claimingUID, b)
	ended, err := s.client.CoreV1().Pods("ns").Get(t.Context(), "ended", metav1.GetOptions{})
	if err != nil {
		t.Fatal(err)
	}
	ended.Status.Phase = corev1.PodSucceeded
	if _, err := s.client.CoreV1().Pods("ns").UpdateStatus(t.Context(), ended, metav1.UpdateOptions{}); err != nil {
		t.Fatal(err)
	}
	if err := s.client.ResourceV1().ResourceClaims("ns").Delete(t.Context(), "gone", metav1.DeleteOptions{}); err != nil {
		t.Fatal(err)
	}
	a, stop := s.play()
	held := func() string {
		var out []string
		for _, vendor := range []string{"nvidia", "iluvatar"} {
			for _, c := range a.claims.Claims(vendor) {
				for _, p := range c.Parts {
					out = append(out, fmt.Sprint(vendor, " ", c.Name, " ", p.Request, " ", p.Card.ID, " ", p.Admin, " ", c.Prepared))
				}
			}
		}
		slices.Sort(out)
		return strings.Join(out, "\n")
	}
	want := "iluvatar both-vendors r x false true\nnvidia admin r b true true\nnvidia both-vendors r a false true\n" +
		"nvidia several r b false true\nnvidia several s b false true"
	eventually(t, "the claims are recovered", func() bool { return held() == want })
	stop()
	a, _ = s.play()
	eventually(t, "the claims are there after a restart", func() bool { return held() == want })
}

// TestRecoveryIsRepeated: until the API server has answered for all claims of the node's pods, nothing is recorded as
// complete, nothing is given out, and nothing that a claim holds is released.
func TestRecoveryIsRepeated(t *testing.T) {
	s := newClaiming(t)
	s.allocate("one", "gpu-a")
	s.allocate("three", "gpu-none")
	dir := t.TempDir()
	synctest.Test(t, func(t *testing.T) {
		engine, err := alloc.New()
		if err != nil {
			t.Fatal(err)
		}
		kept := alloc.Claim{Vendor: "nvidia", UID: "uid-kept", Namespace: "ns", Name: "kept", Prepared: true,
			Parts: []alloc.ClaimPart{{Request: "r", Device: "gpu-kept"}}}
		engine.Claims.Restore(alloc.ClaimsState{Partial: true, Claims: []alloc.Claim{kept}})
		engine.Claims.Serve("nvidia", alloc.Config{ID: alloc.ID{Kind: alloc.Slots}, Vendor: "nvidia"})
		engine.Claims.Discover("nvidia", alloc.Discovery{Devices: []accel.Device{gpuDevice(0, "a"), gpuDevice(1, "b")}})
		// The calls that fail, one at each attempt, and what is asked after the last of them.
		failures := []string{"list pods", "get one", "get three", "get three"}
		var attempts atomic.Int32
		s.client.PrependReactor("*", "*", func(action k8stesting.Action) (bool, runtime.Object, error) {
			call := action.GetVerb() + " " + action.GetResource().Resource
			if get, ok := action.(k8stesting.GetAction); ok {
				call = "get " + get.GetName()
			}
			if n := int(attempts.Load()); n < len(failures) && failures[n] == call {
				attempts.Add(1)
				return true, nil, apierrors.NewServiceUnavailable("restarting")
			}
			return false, nil, nil
		})
		d := &claimDesk{node: thisNode, client: s.client, withdrawn: func() {}, recovered: make(chan struct{}),
			file:    state.NewDocument[alloc.ClaimsState](dir, claimsFile),
			records: &records{pods: newNodePods(s.client, thisNode, func() {}), owner: &owner{engine: engine}}}
		ctx, cancel := context.WithCancel(t.Context())
		ended := make(chan struct{})
		go func() {
			defer close(ended)
			d.run(ctx)
		}()
		known := func() bool {
			select {
			case <-d.recovered:
				return true
			default:
				return false
			}
		}
		for i := 1; i <= len(failures); i++ {
			synctest.Wait()
			e, done := d.records.owner.use()
			found := e.Claims.State()
			_, err := e.Claims.Hold(alloc.Claim{Vendor: "nvidia", UID: "uid-two", Namespace: "ns", Name: "two",
				Parts: []alloc.ClaimPart{{Request: "r", Device: "gpu-b"}}})
			done()
			if n := int(attempts.Load()); n != i || known() || !found.Partial || len(found.Claims) != 1 {
				t.Fatalf("after %d of %d failures: known: %t, %+v", n, i, known(), found)
			}
			if err == nil || !alloc.MayPass(err) {
				t.Errorf("a claim is served meanwhile: %v", err)
			}
			if _, exists, err := state.NewDocument[alloc.ClaimsState](dir, claimsFile).Load(); exists || err != nil {
				t.Errorf("the file is written meanwhile (%v)", err)
			}
			time.Sleep(claimsRetry)
		}
		synctest.Wait()
		if !known() {
			t.Fatal("the claims are not known after all calls were answered")
		}
		cancel()
		<-ended
		now, _, err := state.NewDocument[alloc.ClaimsState](dir, claimsFile).Load()
		var names []string
		for _, c := range now.Claims {
			names = append(names, c.Name)
		}
		if got := strings.Join(names, " "); err != nil || now.Partial || got != "kept one three" {
			t.Errorf("the file has %s, partial: %t: %v", got, now.Partial, err)
		}
	})
}
