package main

import (
	"context"
	"errors"
	"fmt"
	"io"
	"math/rand/v2"
	"slices"
	"strings"
	"time"

	corev1 "k8s.io/api/core/v1"
	resourceapi "k8s.io/api/resource/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/utils/ptr"

	"github.com/divvy-gpu/divvy/lab/internal/audit"
	"github.com/divvy-gpu/divvy/lab/internal/demos"
	"github.com/divvy-gpu/divvy/lab/internal/poll"
	"github.com/divvy-gpu/divvy/lab/internal/progress"
	"github.com/divvy-gpu/divvy/lab/internal/testenv"
)

const (
	bothTopology = "both.ini"
	// bothCards are its GCUs for units, claimGiB is the memory of what is for claims, 3 GCUs, 2 GPUs
	// and 4 chips, and wholeGiB that of the GPUs that pods get whole.
	bothCards = 3
	claimGiB  = 3*16 + 2*40 + 4*32
	wholeGiB  = 2 * 40
	// minHeld is the part of the memory for claims that claims must have had at a time.
	minHeld = 0.6
	gib     = 1 << 30
	// releasedWithin is how long claims may hold devices after their last pod has ended: kubelet
	// looks for what it missed while it was stopped once a minute.
	releasedWithin = 3 * time.Minute
)

// claimsEnvironment has devices of three vendors, divided between units and claims.
var claimsEnvironment = testenv.Options{Topology: bothTopology, MemoryUnit: "1", Values: []string{"both.yaml"}}

// claimShape is what a claim asks for.
type claimShape struct {
	name     string
	gib      int64 // in all
	requests []resourceapi.ExactDeviceRequest
	// together is an attribute that all devices have in common, "" for none.
	together resourceapi.FullyQualifiedName
}

// claimShapes are what claims ask for. The names of claims and templates begin with theirs.
var claimShapes = []claimShape{
	{"gcu2", 2, []resourceapi.ExactDeviceRequest{testenv.MemoryRequest(testenv.ClassGCU, "2Gi")}, ""},
	{"gcu5", 5, []resourceapi.ExactDeviceRequest{testenv.MemoryRequest(testenv.ClassGCU, "5Gi")}, ""},
	{"gcu", 16, []resourceapi.ExactDeviceRequest{{DeviceClassName: testenv.ClassGCU}}, ""},
	{"gpu8", 8, []resourceapi.ExactDeviceRequest{testenv.MemoryRequest(testenv.ClassGPU, "8Gi")}, ""},
	{"gpu20", 20, []resourceapi.ExactDeviceRequest{testenv.MemoryRequest(testenv.ClassGPU, "20Gi")}, ""},
	{"gpu", 40, []resourceapi.ExactDeviceRequest{{DeviceClassName: testenv.ClassGPU}}, ""},
	{"chip12", 12, []resourceapi.ExactDeviceRequest{testenv.MemoryRequest(testenv.ClassChip, "12Gi")}, ""},
	{"chips", 16, []resourceapi.ExactDeviceRequest{counted(testenv.MemoryRequest(testenv.ClassChip, "8Gi"), 2)},
		"iluvatar.divvy.dev/boardID"},
	{"board", 64, []resourceapi.ExactDeviceRequest{{DeviceClassName: testenv.ClassBoard}}, ""},
	{"mixed", 7, []resourceapi.ExactDeviceRequest{
		testenv.MemoryRequest(testenv.ClassGCU, "3Gi"), testenv.MemoryRequest(testenv.ClassChip, "4Gi")}, ""},
}

func counted(r resourceapi.ExactDeviceRequest, count int64) resourceapi.ExactDeviceRequest {
	r.Count = count
	return r
}

// spec is that of a claim of the shape. Its requests are r0, r1, ...
func (s *claimShape) spec() resourceapi.ResourceClaimSpec {
	var spec resourceapi.ResourceClaimSpec
	for i := range s.requests {
		spec.Devices.Requests = append(spec.Devices.Requests, resourceapi.DeviceRequest{Name: fmt.Sprint("r", i), Exactly: &s.requests[i]})
	}
	if s.together != "" {
		spec.Devices.Constraints = []resourceapi.DeviceConstraint{{MatchAttribute: &s.together}}
	}
	return spec
}

// shapeOf returns the shape of a claim or template by its name.
func shapeOf(name string) (*claimShape, bool) {
	name, _, _ = strings.Cut(name, "-")
	i := slices.IndexFunc(claimShapes, func(s claimShape) bool { return s.name == name })
	if i < 0 {
		return nil, false
	}
	return &claimShapes[i], true
}

// claimants are the pods that have devices by claims, or whole, and what is seen of them.
type claimants struct {
	churn   *churn
	watch   *audit.ClaimWatch
	auditor *audit.Auditor
	chips   []audit.Chip
	end     comparison
}

// playClaims lets pods with units and pods with claims come and go on one node.
func playClaims(ctx context.Context, s *testenv.Env, o options, out io.Writer) (err error) {
	hardware, err := s.Cards(bothTopology)
	if err != nil {
		return err
	}
	beside := s.In(namespace + "-claims")
	if err := beside.Pods.EnsureNamespace(ctx); err != nil {
		return err
	}
	if err := beside.Pods.EmptyNamespace(ctx); err != nil {
		return err
	}
	defer func() {
		if !o.keep && s.FoundLab() {
			err = errors.Join(err, beside.Pods.RemoveNamespace(context.WithoutCancel(ctx)))
		}
	}()
	for i := range claimShapes {
		shape := &claimShapes[i]
		template := &resourceapi.ResourceClaimTemplate{ObjectMeta: metav1.ObjectMeta{Name: shape.name}}
		template.Spec.Spec = shape.spec()
		templates := s.Client.ResourceV1().ResourceClaimTemplates(beside.Pods.Namespace)
		if _, err := templates.Create(ctx, template, metav1.CreateOptions{}); err != nil && !apierrors.IsAlreadyExists(err) {
			return fmt.Errorf("create claim template %s: %w", shape.name, err)
		}
	}
	auditor, chips := audit.New(s), audit.ChipsOf(hardware)
	rng := rand.New(rand.NewPCG(o.seed, 3)) //nolint:gosec // chance, not secrecy
	claiming := kind{make: newClaimingPod, units: claimedGiB, before: makeClaims, tidy: tidyClaims}
	return playPods(ctx, s, o, bothCards, &claimants{
		churn: newChurn(beside, rng, claimGiB+wholeGiB, claiming),
		watch: audit.NewClaimWatch(auditor, chips), auditor: auditor, chips: chips,
	}, out)
}

// newClaimingPod returns a pod whose containers have claims, whole GPUs, or claims of one vendor's
// devices and units or whole devices of another.
func newClaimingPod(s *testenv.Env, rng *rand.Rand, name string) *corev1.Pod {
	shape := claimShapes[rng.IntN(len(claimShapes))]
	var command []string
	if rng.IntN(8) == 0 {
		command = []string{"sleep", fmt.Sprint(2 + rng.IntN(6))} // ends by itself
	}
	app := testenv.Container("app", 0, command...)
	pod := s.Pods.New(name, app)
	containers := func(all ...corev1.Container) { pod.Spec.Containers = all }
	switch rng.IntN(9) {
	case 0: // a whole GPU, without a claim
		containers(testenv.Asking("app", demos.GPU, 1, command...))
	case 1: // a whole GPU, and a claim of another vendor's devices
		both := testenv.Asking("app", demos.GPU, 1, command...)
		both.Resources.Claims = claim(pod, "gcu2", false, rng)
		containers(both)
	case 2: // a container with units beside one with a claim
		app.Resources.Claims = claim(pod, shape.name, true, rng)
		containers(app, testenv.Container("units", 1, command...))
	case 3: // two claims of one vendor's devices in a container, which no other pod has
		app.Resources.Claims = slices.Concat(claim(pod, "gcu2", false, rng), claim(pod, "gcu5", false, rng))
		containers(app)
	case 4: // each container has another request
		first, second := app, testenv.Container("second", 0, command...)
		claims := claim(pod, "mixed", false, rng)
		first.Resources.Claims = []corev1.ResourceClaim{{Name: claims[0].Name, Request: "r0"}}
		second.Resources.Claims = []corev1.ResourceClaim{{Name: claims[0].Name, Request: "r1"}}
		containers(first, second)
	case 5: // a sidecar has the claim, too
		sidecar := testenv.Sidecar("sidecar", 0)
		app.Resources.Claims = claim(pod, shape.name, true, rng)
		sidecar.Resources.Claims = app.Resources.Claims
		pod.Spec.InitContainers = []corev1.Container{sidecar}
		containers(app)
	default:
		app.Resources.Claims = claim(pod, shape.name, true, rng)
		containers(app)
	}
	pod.Spec.TerminationGracePeriodSeconds = ptr.To(rng.Int64N(3))
	return pod
}

// claim adds a claim of a shape to the pod, and returns how a container uses it: one from a template,
// one of the pod's own or, where that may be, one that pods share.
func claim(pod *corev1.Pod, shape string, shared bool, rng *rand.Rand) []corev1.ResourceClaim {
	use := fmt.Sprint("c", len(pod.Spec.ResourceClaims))
	one := corev1.PodResourceClaim{Name: use}
	switch kind := rng.IntN(4); {
	case kind < 2 && shared:
		one.ResourceClaimName = ptr.To(shape + "-shared")
	case kind%2 == 0:
		one.ResourceClaimName = ptr.To(fmt.Sprintf("%s-%s-%s", shape, use, pod.Name))
	default:
		one.ResourceClaimTemplateName = &shape
	}
	pod.Spec.ResourceClaims = append(pod.Spec.ResourceClaims, one)
	return []corev1.ResourceClaim{{Name: use}}
}

// claimedGiB is the memory of what a pod asks for beside units. A shared claim counts for each pod.
func claimedGiB(pod *corev1.Pod) int64 {
	var sum int64
	for _, c := range pod.Spec.Containers {
		gpus := c.Resources.Limits[demos.GPU]
		sum += 40 * gpus.Value()
	}
	for _, one := range pod.Spec.ResourceClaims {
		if shape, known := shapeOf(ptr.Deref(one.ResourceClaimName, ptr.Deref(one.ResourceClaimTemplateName, ""))); known {
			sum += shape.gib
		}
	}
	return sum
}

// makeClaims creates the claims that a pod names and that do not exist. One that is being deleted is
// not replaced: its pod waits until it is deleted by chance.
func makeClaims(ctx context.Context, s *testenv.Env, pod *corev1.Pod) error {
	for _, one := range pod.Spec.ResourceClaims {
		if one.ResourceClaimName == nil {
			continue
		}
		shape, known := shapeOf(*one.ResourceClaimName)
		if !known {
			return fmt.Errorf("claim %s has no shape", *one.ResourceClaimName)
		}
		claim := &resourceapi.ResourceClaim{ObjectMeta: metav1.ObjectMeta{Name: *one.ResourceClaimName}, Spec: shape.spec()}
		claims := s.Client.ResourceV1().ResourceClaims(pod.Namespace)
		if _, err := claims.Create(ctx, claim, metav1.CreateOptions{}); err != nil && !apierrors.IsAlreadyExists(err) {
			return fmt.Errorf("create claim %s: %w", claim.Name, err)
		}
	}
	return nil
}

// tidyClaims deletes the claims that no living pod names. Those of templates are deleted with their pods.
func tidyClaims(ctx context.Context, s *testenv.Env, living []*corev1.Pod) {
	named := map[string]bool{}
	for _, pod := range living {
		for _, one := range pod.Spec.ResourceClaims {
			named[ptr.Deref(one.ResourceClaimName, "")] = true
		}
	}
	claims := s.Client.ResourceV1().ResourceClaims(s.Pods.Namespace)
	list, err := claims.List(ctx, metav1.ListOptions{})
	if err != nil {
		return // at the next turn
	}
	for i := range list.Items {
		if c := &list.Items[i]; len(c.OwnerReferences) == 0 && c.DeletionTimestamp == nil && !named[c.Name] {
			_ = claims.Delete(ctx, c.Name, metav1.DeleteOptions{Preconditions: metav1.NewUIDPreconditions(string(c.UID))})
		}
	}
}

// comparison is that of all records at the end.
type comparison struct {
	containers int
	// took is how long the node needed to release what no pod has.
	took time.Duration
	err  error
}

// settle compares all records, which must agree once the node has released what no pod has.
func (c *claimants) settle(ctx context.Context) error {
	began := time.Now()
	c.end.err = poll.Until(ctx, releasedWithin, "all records of claims to agree", func(ctx context.Context) (err error) {
		c.end.containers, err = c.auditor.CheckClaims(ctx, c.chips)
		return err
	})
	c.end.took = time.Since(began)
	return ctx.Err()
}

// result is what was seen.
func (c *claimants) result() *claimsResult {
	c.churn.mu.Lock()
	defer c.churn.mu.Unlock()
	return &claimsResult{ClaimSummary: c.watch.Summary(), ran: len(c.churn.ran), end: c.end}
}

// claimsResult is what a run found of claims.
type claimsResult struct {
	audit.ClaimSummary

	ran int // pods of the churn with claims
	end comparison
}

// String is a summary of two lines.
func (r *claimsResult) String() string {
	return fmt.Sprintf("  %d of the pods had claims or whole GPUs; %d samples, %d of them with the answers of all; compared %d containers "+
		"of %d claims, %d times one that pods share, %d times one with devices by both ways\n"+
		"  claims had up to %d of %d GiB; at the end the records of %d containers agreed, and no others were left, after %s",
		r.ran, r.Samples, r.Full, r.Containers, r.Claims, r.Shared, r.Both,
		r.Largest/gib, claimGiB, r.end.containers, progress.Elapsed(r.end.took))
}

// mismatches are all that were seen.
func (r *claimsResult) mismatches() []string {
	out := slices.Clone(r.Violations)
	if r.end.err != nil {
		out = append(out, "at the end: "+r.end.err.Error())
	}
	return out
}

// faults returns everything that must not be, or nil.
func (r *claimsResult) faults() error {
	var errs []error
	for _, text := range r.mismatches() {
		errs = append(errs, fmt.Errorf("mismatch: %s", text))
	}
	if r.Full == 0 || r.ran == 0 || r.Claims == 0 || r.Shared == 0 || r.Both == 0 || r.end.containers == 0 {
		errs = append(errs, errors.New("this shows nothing of claims"))
	}
	if held := float64(r.Largest) / float64(claimGiB*gib); held < minHeld {
		errs = append(errs, fmt.Errorf("claims had %.0f %% of the memory for them only, expected %.0f %%", 100*held, 100*minHeld))
	}
	return errors.Join(errs...)
}
