package dra

import (
	"context"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"testing"
	"testing/synctest"
	"time"

	"github.com/google/go-cmp/cmp"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"
	resourceapi "k8s.io/api/resource/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	"github.com/divvy-gpu/divvy/internal/node/alloc"
)

var errFull = errors.New("no space left on device")

// file is the CDI specification of a claim.
func (p *plane) file(claim *resourceapi.ResourceClaim) string {
	return filepath.Join(p.dir, "cdi", "divvy-claim-enflame-"+string(claim.UID)+".json")
}

// variable is what containers with the claim find in the variable, "" without a specification.
func (p *plane) variable(claim *resourceapi.ResourceClaim) string {
	spec := p.spec(claim)
	if spec == nil {
		return ""
	}
	return strings.Join(spec.Devices[0].ContainerEdits.Env, " ")
}

// holds reports whether the claims, and no others, are recorded and saved, all prepared and with their files.
func (p *plane) holds(when string, claims ...*resourceapi.ResourceClaim) {
	p.t.Helper()
	var want, got, saved, files []string
	for _, claim := range claims {
		want = append(want, string(claim.UID)+" true")
	}
	slices.Sort(want)
	for _, held := range p.keeper.Claims("enflame") {
		got = append(got, fmt.Sprint(held.UID, " ", held.Prepared))
	}
	p.keeper.set(func(k *keeper) {
		for i := range k.saved.Claims {
			saved = append(saved, fmt.Sprint(k.saved.Claims[i].UID, " ", k.saved.Claims[i].Prepared))
		}
	})
	found, err := filepath.Glob(filepath.Join(p.dir, "cdi", "*"))
	if err != nil {
		p.t.Fatal(err)
	}
	for _, f := range found {
		files = append(files, strings.TrimSuffix(strings.TrimPrefix(filepath.Base(f), "divvy-claim-enflame-"), ".json")+" true")
	}
	for what, all := range map[string][]string{"recorded": got, "saved": saved, "described": files} {
		if diff := cmp.Diff(want, all); diff != "" {
			p.t.Errorf("%s: %s are %v, want %v", when, what, all, want)
		}
	}
}

// prepared prepares a claim of one device, and reports whether kubelet is told what it always is.
func (p *plane) prepared(when string, claim *resourceapi.ResourceClaim) {
	p.t.Helper()
	devices, failed := p.prepare(claim)
	want := claim.Status.Allocation.Devices.Results[0].Device
	if failed != "" || len(devices) != 1 || devices[0].GetDeviceName() != want ||
		!slices.Equal(devices[0].GetCdiDeviceIds(), []string{"enflame.divvy.dev/claim=" + string(claim.UID) + "-r"}) {
		p.t.Errorf("%s: kubelet is told %v, %q", when, devices, failed)
	}
	if got, want := p.variable(claim), "VISIBLE_DEVICES="+strings.TrimPrefix(want, "gcu-"); got != want {
		p.t.Errorf("%s: a container finds %q, want %q", when, got, want)
	}
}

func (p *plane) unprepared(when string, claim *resourceapi.ResourceClaim) {
	p.t.Helper()
	if failed := p.unprepare(claim); failed != "" {
		p.t.Errorf("%s: %s", when, failed)
	}
}

// TestStartAfterEachStep: a driver that was killed between any two steps of a Prepare or an Unprepare is followed
// by one that answers both.
func TestStartAfterEachStep(t *testing.T) {
	p := newIdlePlane(t, gcus()...)
	hold := func(claim *resourceapi.ResourceClaim) error {
		wanted, err := Read(claim, "enflame", p.server.pool)
		if err == nil {
			_, err = p.keeper.Hold(t.Context(), wanted)
		}
		return err
	}
	describe := func(claim *resourceapi.ResourceClaim) error {
		held, _ := p.keeper.engine.Claims.Get(alloc.ClaimKey{Vendor: "enflame", UID: string(claim.UID)})
		return p.server.writer.describe(&held)
	}
	note := func(claim *resourceapi.ResourceClaim) error {
		return p.keeper.Prepared(t.Context(), []alloc.Claim{{Vendor: "enflame", UID: string(claim.UID)}})
	}
	remove := func(claim *resourceapi.ResourceClaim) error { return os.Remove(p.file(claim)) }
	forget := func(claim *resourceapi.ResourceClaim) error {
		return p.keeper.Release(t.Context(), alloc.ClaimKey{Vendor: "enflame", UID: string(claim.UID)})
	}
	type steps []func(*resourceapi.ResourceClaim) error
	cases := map[string]steps{
		"nothing":                        nil,
		"recorded":                       {hold},
		"recorded and described":         {hold, describe},
		"prepared":                       {hold, describe, note},
		"prepared, and its file removed": {hold, describe, note, remove},
		"described, and its record lost": {hold, describe, note, forget},
		"recorded, and a file half written": {hold, func(claim *resourceapi.ResourceClaim) error {
			return os.WriteFile(p.file(claim), []byte("{"), 0o600)
		}},
	}
	if err := os.Mkdir(filepath.Join(p.dir, "cdi"), 0o750); err != nil {
		t.Fatal(err)
	}
	claims := map[string]*resourceapi.ResourceClaim{}
	for name, done := range cases {
		for i, next := range []string{"prepare", "unprepare"} {
			claim := p.allocate(fmt.Sprintf("c%d-%d", len(claims), i), allocatedPart("gcu-a", "1Gi"))
			claims[name+", "+next] = claim
			for _, step := range done {
				if err := step(claim); err != nil {
					t.Fatal(err)
				}
			}
		}
	}
	p.keeper.engine = engineOf(t, p.keeper.saved, gcus())
	p.start()
	t.Cleanup(func() { p.stop() })
	p.devices(4)
	for name := range cases {
		first, second := claims[name+", prepare"], claims[name+", unprepare"]
		if _, err := os.Stat(p.file(first)); name == "described, and its record lost" && err == nil {
			t.Errorf("%s: the file is not removed", name)
		}
		p.unprepared(name, second)
		p.prepared(name, first)
		p.prepared(name+", again", second)
		p.unprepared(name, first)
		p.unprepared(name, second)
	}
	p.holds("after all")
}

// TestFileIsRestored: a Prepare of a claim that is prepared writes its CDI specification if it has been lost.
func TestFileIsRestored(t *testing.T) {
	p := newPlane(t, gcus()...)
	claim := p.allocate("c", allocatedPart("gcu-a", "1Gi"))
	p.prepared("at first", claim)
	for name, damage := range map[string]func() error{
		"the folder is gone": func() error { return os.RemoveAll(filepath.Join(p.dir, "cdi")) },
		"the file is gone":   func() error { return os.Remove(p.file(claim)) },
		"the file is cut":    func() error { return os.Truncate(p.file(claim), 20) },
	} {
		if err := damage(); err != nil {
			t.Fatal(err)
		}
		if p.spec(claim) != nil {
			t.Errorf("%s: the file can be read", name)
		}
		p.prepared(name, claim)
		p.holds(name, claim)
	}
}

// TestDiskFull: what cannot be saved fails, changes nothing for others, and succeeds once there is space.
func TestDiskFull(t *testing.T) {
	p := newPlane(t, gcus()...)
	full := func(err error) { p.keeper.set(func(k *keeper) { k.full = err }) }
	one, two := p.allocate("one", allocatedPart("gcu-a", "1Gi")), p.allocate("two", allocatedPart("gcu-b", "1Gi"))
	p.prepared("at first", one)
	// The record of the second claim fits, and that it is prepared does not. Its container has both.
	p.keeper.set(func(k *keeper) {
		k.uses, k.onEdits = []Use{useOf("p", "c", "one", "two")}, func() { full(errFull) }
	})
	if _, failed := p.prepare(two); !strings.Contains(failed, "claim ns/two: "+errFull.Error()) {
		t.Errorf("without space, Prepare answers %q", failed)
	}
	if p.spec(two) != nil || p.variable(one) != "VISIBLE_DEVICES=a" {
		t.Errorf("without space, containers find %q and %q", p.variable(one), p.variable(two))
	}
	if held := p.keeper.Claims("enflame"); len(held) != 1 || held[0].Name != "one" || !held[0].Prepared || held[0].Together != nil {
		t.Errorf("without space, recorded are %+v", held)
	}
	p.keeper.set(func(k *keeper) { k.onEdits, k.full = nil, nil })
	if _, failed := p.prepare(two); failed != "" {
		t.Error(failed)
	}
	for _, claim := range []*resourceapi.ResourceClaim{one, two} {
		if got := p.variable(claim); got != "VISIBLE_DEVICES=a,b" {
			t.Errorf("with space, a container with claim %s finds %q", claim.Name, got)
		}
	}
	p.holds("with space", one, two)

	p.keeper.set(func(k *keeper) { k.uses, k.full = nil, errFull })
	if failed := p.unprepare(two); !strings.Contains(failed, errFull.Error()) {
		t.Errorf("without space, Unprepare answers %q", failed)
	}
	if saved := p.keeper.saved.Claims; len(saved) != 2 || saved[1].Name != "two" {
		t.Errorf("a driver that is restarted would not know the claim: %+v", saved)
	}
	full(nil)
	p.unprepared("with space", two)
	p.holds("after the release", one)

	// A file that cannot be removed: a container might start with it.
	if err := errors.Join(os.Remove(p.file(one)), os.MkdirAll(filepath.Join(p.file(one), "busy"), 0o750)); err != nil {
		t.Fatal(err)
	}
	if failed := p.unprepare(one); !strings.Contains(failed, "remove the CDI specification of a claim") {
		t.Errorf("with a file that stays, Unprepare answers %q", failed)
	}
	if held := p.keeper.Claims("enflame"); len(held) != 1 {
		t.Errorf("with a file that stays, recorded are %+v", held)
	}
	if err := os.RemoveAll(p.file(one)); err != nil {
		t.Fatal(err)
	}
	p.unprepared("without the file", one)
	p.holds("after all")
}

// TestPrepareOfReleased: a Prepare that was delayed until its claim was released succeeds only if the claim is used
// again by the API server.
func TestPrepareOfReleased(t *testing.T) {
	change := func(how func(*resourceapi.ResourceClaim)) func(*plane, *resourceapi.ResourceClaim) {
		return func(p *plane, claim *resourceapi.ResourceClaim) {
			now := claim.DeepCopy()
			how(now)
			p.delete(claim)
			if _, err := p.client.ResourceV1().ResourceClaims("ns").Create(p.t.Context(), now, metav1.CreateOptions{}); err != nil {
				p.t.Fatal(err)
			}
		}
	}
	const unused, unknown = "claim ns/c was released, and no pod uses it", "claim ns/c was released, and its state is not known: "
	for name, tt := range map[string]struct {
		change func(*plane, *resourceapi.ResourceClaim)
		want   string
	}{
		"used again":  {func(*plane, *resourceapi.ResourceClaim) {}, ""},
		"no pod":      {change(func(c *resourceapi.ResourceClaim) { c.Status.ReservedFor = nil }), unused},
		"deallocated": {change(func(c *resourceapi.ResourceClaim) { c.Status.Allocation = nil }), unused},
		"another UID": {change(func(c *resourceapi.ResourceClaim) { c.UID = "uid-other" }), unused},
		"gone":        {(*plane).delete, unknown + `resourceclaims.resource.k8s.io "c" not found`},
		"not answered": {func(p *plane, _ *resourceapi.ResourceClaim) {
			p.failing.Store("get resourceclaims", apierrors.NewServiceUnavailable("away"))
		}, unknown + "away"},
	} {
		t.Run(name, func(t *testing.T) {
			p := newIdlePlane(t, gcus()...)
			claim := p.allocate("c", allocatedPart("gcu-a", "10Gi"))
			if _, err := p.server.prepare(t.Context(), claim); err != nil {
				t.Fatal(err)
			}
			if err := p.server.Release(t.Context(), alloc.ClaimKey{Vendor: "enflame", UID: "uid-c"}); err != nil {
				t.Fatal(err)
			}
			tt.change(p, claim)
			_, err := p.server.prepare(t.Context(), claim)
			if tt.want == "" {
				if err != nil {
					t.Error(err)
				}
				p.holds("prepared again", claim)
				return
			}
			if err == nil || err.Error() != tt.want {
				t.Errorf("got %v, want %s", err, tt.want)
			}
			p.holds("rejected")
		})
	}
}

// TestReleasedAreForgotten: a claim that was released is remembered for a while, and not forever.
func TestReleasedAreForgotten(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		p := newIdlePlane(t, gcus()...)
		p.failing.Store("get resourceclaims", apierrors.NewServiceUnavailable("away"))
		claim := p.allocate("c", allocatedPart("gcu-a", "10Gi"))
		release := func(uid string) {
			t.Helper()
			if err := p.server.Release(t.Context(), alloc.ClaimKey{Vendor: "enflame", UID: uid}); err != nil {
				t.Error(err)
			}
		}
		release("uid-c")
		time.Sleep(releasedFor)
		release("uid-other")
		if _, err := p.server.prepare(t.Context(), claim); err == nil {
			t.Errorf("the release is forgotten after %v", releasedFor)
		}
		time.Sleep(time.Second)
		release("uid-another")
		if _, err := p.server.prepare(t.Context(), claim); err != nil || len(p.server.released) != 2 {
			t.Errorf("the release is not forgotten: %v, %v", err, p.server.released)
		}
	})
}

// TestAPIServerAway: without the API server no claim is prepared, none is lost, and those that kubelet releases are
// released.
func TestAPIServerAway(t *testing.T) {
	p := newPlane(t, gcus()...)
	old, young := p.allocate("old", allocatedPart("gcu-a", "1Gi")), p.allocate("young", allocatedPart("gcu-b", "1Gi"))
	p.prepared("at first", old)
	away := apierrors.NewServiceUnavailable("away")
	uses := func(err error, all ...Use) {
		p.keeper.set(func(k *keeper) { k.uses, k.onUses = all, func(context.Context) error { return err } })
	}

	p.failing.Store("get resourceclaims", away)
	for _, claim := range []*resourceapi.ResourceClaim{young, old} {
		want := "retrieve claim ns/" + claim.Name + ": away"
		if _, err := p.ask(t.Context(), claim); err == nil || !strings.Contains(err.Error(), want) {
			t.Errorf("claim %s cannot be read: %v", claim.Name, err)
		}
		p.holds("a claim cannot be read", old)
	}
	p.failing.Clear()

	uses(away)
	for _, claim := range []*resourceapi.ResourceClaim{young, old} {
		if _, failed := p.prepare(claim); failed != "find out which containers use claim ns/"+claim.Name+": away" {
			t.Errorf("the pods of claim %s cannot be read: %q", claim.Name, failed)
		}
		p.holds("the pods cannot be read", old)
	}
	both := []Use{useOf("p", "c", "old", "young")}
	uses(nil, both...)
	if _, failed := p.prepare(young); failed != "" || p.variable(old) != "VISIBLE_DEVICES=a,b" {
		t.Errorf("once it is back: %q, and containers find %q", failed, p.variable(old))
	}
	p.holds("once it is back", old, young)

	p.failing.Store("get resourceclaims", away)
	uses(away)
	p.unprepared("without the API server", young)
	p.holds("without the API server", old)
	p.failing.Clear()
	uses(nil)
	if err := p.server.writer.settle(t.Context()); err != nil || p.variable(old) != "VISIBLE_DEVICES=a" {
		t.Errorf("once it is back: %v, and containers find %q", err, p.variable(old))
	}
}

// TestPrepareIsCut: of a call that kubelet gives up nothing is left but what its repetition finds, and that gets the
// same devices.
func TestPrepareIsCut(t *testing.T) {
	for name, tt := range map[string]struct {
		// blocks makes a Prepare stay where it is until it is cut, or until cut is closed. It closes reached there.
		blocks func(p *plane, reached, cut chan struct{})
		// kept is true if the claim has been prepared nevertheless.
		kept bool
	}{
		"while it waits for a holder": {blocks: func(p *plane, reached, _ chan struct{}) {
			p.prepared("the holder", p.allocate("holder", allocatedPart("gcu-a", "16Gi")))
			go func() {
				defer close(reached)
				p.await("the call does not wait", func() bool {
					p.keeper.mu.Lock()
					defer p.keeper.mu.Unlock()
					return p.keeper.rejected > 0
				})
			}()
		}},
		"while it asks for pods": {blocks: func(p *plane, reached, _ chan struct{}) {
			p.keeper.set(func(k *keeper) {
				k.onUses = func(ctx context.Context) error {
					close(reached)
					<-ctx.Done()
					return ctx.Err()
				}
			})
		}},
		"before its answer": {blocks: func(p *plane, reached, cut chan struct{}) {
			p.keeper.set(func(k *keeper) {
				k.onEdits = func() {
					close(reached)
					<-cut
				}
			})
		}, kept: true},
	} {
		t.Run(name, func(t *testing.T) {
			p := newIdlePlane(t, gcus()...)
			p.patience = time.Minute
			p.start()
			t.Cleanup(func() { p.stop() })
			reached, cut := make(chan struct{}), make(chan struct{})
			tt.blocks(p, reached, cut)
			held := p.keeper.Claims("enflame")
			claim := p.allocate("c", allocatedPart("gcu-a", "10Gi"))
			ctx, cancel := context.WithCancel(t.Context())
			ended := make(chan error, 1)
			go func() {
				_, err := p.ask(ctx, claim)
				ended <- err
			}()
			<-reached
			cancel()
			if err := <-ended; status.Code(err) != codes.Canceled {
				t.Errorf("the call ended with %v", err)
			}
			close(cut)
			p.await("the call has not ended", func() bool { return p.server.door.calls.Load() == 0 })
			p.keeper.set(func(k *keeper) { k.onUses, k.onEdits = nil, nil })
			if now := p.keeper.Claims("enflame"); tt.kept != (len(now) == len(held)+1) || tt.kept != (p.spec(claim) != nil) {
				t.Errorf("recorded are %+v", now)
			}
			if n := len(p.server.claims.locks); n > 0 {
				t.Errorf("%d claims are locked", n)
			}
			for i := range held {
				if err := p.server.Release(t.Context(), held[i].Key()); err != nil {
					t.Error(err)
				}
			}
			edited := p.keeper.edited
			p.prepared("repeated", claim)
			if tt.kept && p.keeper.edited != edited {
				t.Error("the claim is described again")
			}
			p.holds("repeated", claim)
			p.unprepared("at last", claim)
			p.holds("at last")
		})
	}
}

// TestParallelPrepares: calls for one claim, and calls for different ones, do not disturb each other.
func TestParallelPrepares(t *testing.T) {
	p := newPlane(t, gcus()...)
	const calls = 8
	claim := p.allocate("same", allocatedPart("gcu-b", "1Gi"))
	others := make(chan struct{})
	p.keeper.set(func(k *keeper) { k.onEdits = func() { <-others } })
	var work sync.WaitGroup
	for range calls {
		work.Go(func() { p.prepared("one of several calls", claim) })
	}
	p.await("the calls do not wait for the first one", func() bool {
		p.server.claims.mu.Lock()
		defer p.server.claims.mu.Unlock()
		l := p.server.claims.locks[string(claim.UID)]
		return l != nil && l.users == calls
	})
	close(others)
	work.Wait()
	p.holds("after several calls", claim)
	if p.keeper.edited != 1 {
		t.Errorf("the claim was described %d times", p.keeper.edited)
	}

	var leaving, coming []*resourceapi.ResourceClaim
	for i := range calls {
		leaving = append(leaving, p.allocate(fmt.Sprint("leaving", i), allocatedPart("gcu-a", "2Gi")))
		coming = append(coming, p.allocate(fmt.Sprint("coming", i), allocatedPart("gcu-b", "1Gi")))
		p.prepared("one that leaves", leaving[i])
	}
	for i := range calls {
		for range 2 {
			work.Go(func() { p.unprepared("beside others", leaving[i]) })
			work.Go(func() { p.prepared("beside others", coming[i]) })
		}
	}
	work.Wait()
	p.holds("after all", append(coming, claim)...)
	if n := len(p.server.claims.locks); n > 0 {
		t.Errorf("%d claims are locked", n)
	}
}
