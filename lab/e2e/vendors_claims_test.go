//go:build e2e

package e2e

import (
	"context"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"reflect"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"
	corev1 "k8s.io/api/core/v1"
	resourceapi "k8s.io/api/resource/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"

	"github.com/divvy-gpu/divvy/internal/node/alloc"
	"github.com/divvy-gpu/divvy/internal/node/dra"
	"github.com/divvy-gpu/divvy/internal/node/state"
	"github.com/divvy-gpu/divvy/internal/testing/vendorsim"
	"github.com/divvy-gpu/divvy/lab/internal/cluster"
	"github.com/divvy-gpu/divvy/lab/internal/demos"
	"github.com/divvy-gpu/divvy/lab/internal/poll"
	"github.com/divvy-gpu/divvy/lab/internal/testenv"
)

// devicesOf are the devices that drivers publish in mixed for claims: two GPUs, two boards and
// their four chips, two GCUs.
var devicesOf = map[string]int{"nvidia.divvy.dev": 2, "iluvatar.divvy.dev": 6, "enflame.divvy.dev": 2}

// republishTimeout is how long a driver may take to publish again what kubelet deleted, which
// may be after it registered the driver: seconds, and more on a busy machine.
const republishTimeout = time.Minute

// beginClaims starts a test on a node that serves ResourceClaims.
func beginClaims(t *testing.T) context.Context {
	t.Helper()
	ctx := beginMixed(t)
	t.Cleanup(func() {
		ctx := context.WithoutCancel(ctx)
		// Those of the examples.
		_, err := lab.CLI.Kubectl(ctx, "delete", "--namespace", namespace, "deployments,resourceclaimtemplates", "--all", "--wait")
		err = errors.Join(err, lab.Pods.DeleteAll(ctx))
		_, deleted := lab.CLI.Kubectl(ctx, "delete", "--namespace", namespace, "resourceclaims", "--all", "--wait")
		if err := errors.Join(err, deleted, released(ctx)); err != nil {
			t.Errorf("after the test: %v", err)
		}
	})
	movedToClaims(t)
	return ctx
}

// movedToClaims moves the node to claims under a pod with units: until it ends, nothing of its device
// is for claims, and its units are what is left of the resource.
func movedToClaims(t *testing.T) {
	t.Helper()
	start(t, asking("units", demos.GCUMemory, 6))
	alive, seen := lives(t), sights(t, "units")
	choose(t, "claims")
	for _, name := range []corev1.ResourceName{demos.GPU, demos.IX} {
		offers(t, name, 0)
	}
	offers(t, demos.GCUMemory, 6) // what the pod has
	slicesPublished(t, settingTimeout, nil)
	inUse(t, 1)
	undisturbed(t, alive)
	if now := sights(t, "units"); !reflect.DeepEqual(now, seen) {
		t.Errorf("after the node moved, the pod with units sees %v, saw %v", now, seen)
	}
	must(t, lab.Pods.Delete(t.Context(), "units"))
	inUse(t, 0)
	offers(t, demos.GCUMemory, 0)
}

// inUse waits until so many devices are published as those that pods have without claims.
func inUse(t *testing.T, want int) {
	t.Helper()
	must(t, poll.Until(t.Context(), settingTimeout, "the devices in use by units", func(ctx context.Context) error {
		devices, err := lab.ClaimDevices(ctx)
		if err != nil {
			return err
		}
		var found []string
		for i := range devices {
			if devices[i].HasTaint(dra.InUseTaint) {
				found = append(found, devices[i].Name)
			}
		}
		if len(found) != want {
			return fmt.Errorf("they are %v, want %d", found, want)
		}
		return nil
	}))
}

// movedBack moves the node back under a pod with a claim of both chips of a board: the board is not
// offered before the pod has ended.
func movedBack(t *testing.T, pod string, seen testenv.Sight) {
	t.Helper()
	alive := lives(t)
	choose(t, "")
	offers(t, demos.GPU, 2)
	offers(t, demos.IX, 1)
	offers(t, demos.IXMemory, 64)
	must(t, poll.Until(t.Context(), settingTimeout, "the devices to be withdrawn from claims", func(ctx context.Context) error {
		devices, err := lab.ClaimDevices(ctx)
		if err != nil {
			return err
		}
		for i := range devices {
			if !devices[i].HasTaint(dra.UnhealthyTaint) {
				return fmt.Errorf("device %s is for claims", devices[i].Name)
			}
		}
		if len(devices) != 2 { // those that the pod has
			return fmt.Errorf("%d devices are published, want 2", len(devices))
		}
		return nil
	}))
	undisturbed(t, alive)
	if now := sights(t, pod)[pod]; !reflect.DeepEqual(now, seen) {
		t.Errorf("after the node moved back, the pod %s sees %v, saw %v", pod, now, seen)
	}
	must(t, lab.Pods.Delete(t.Context(), pod))
	offers(t, demos.IX, 2)
}

// slicesPublished waits until the drivers publish all devices, in other slices than before, and returns
// the UIDs of the slices.
func slicesPublished(t *testing.T, timeout time.Duration, before map[types.UID]bool) map[types.UID]bool {
	t.Helper()
	var now map[types.UID]bool
	must(t, poll.Until(t.Context(), timeout, "the devices for claims", func(ctx context.Context) error {
		list, err := lab.Client.ResourceV1().ResourceSlices().List(ctx, metav1.ListOptions{})
		if err != nil {
			return err
		}
		devices := map[string]int{}
		now = map[types.UID]bool{}
		for i := range list.Items {
			s := &list.Items[i]
			if before[s.UID] {
				return fmt.Errorf("slice %s is that of before", s.Name)
			}
			now[s.UID] = true
			devices[s.Spec.Driver] += len(s.Spec.Devices)
		}
		if !reflect.DeepEqual(devices, devicesOf) {
			return fmt.Errorf("the drivers have %v, want %v", devices, devicesOf)
		}
		return nil
	}))
	return now
}

// held returns what the daemon has recorded of claims.
func held() ([]alloc.Claim, error) {
	s, _, err := state.NewDocument[alloc.ClaimsState]("/var/lib/divvy", "claims.json").Load()
	return s.Claims, err
}

// specsOfClaims are the files that describe claims to the container runtime, with their content.
func specsOfClaims() (map[string]string, error) {
	files, err := filepath.Glob("/var/run/cdi/divvy-claim-*")
	found := map[string]string{}
	for _, f := range files {
		data, failed := os.ReadFile(f)
		err = errors.Join(err, failed)
		found[f] = string(data)
	}
	return found, err
}

// released waits until nothing of a claim is left on the node.
func released(ctx context.Context) error {
	return poll.Until(ctx, podTimeout, "all claims to be released", func(context.Context) error {
		claims, err := held()
		specs, failed := specsOfClaims()
		if err = errors.Join(err, failed); err == nil && len(claims)+len(specs) > 0 {
			err = fmt.Errorf("there are %d claims, and files %v", len(claims), specs)
		}
		return err
	})
}

// replicas waits until there are so many pods of a Deployment, and returns their names.
func replicas(t *testing.T, app string, want int) (names []string) {
	t.Helper()
	must(t, poll.Until(t.Context(), podTimeout, "the pods of "+app, func(ctx context.Context) error {
		list, err := lab.Pods.API.List(ctx, metav1.ListOptions{LabelSelector: "app=" + app})
		if err != nil {
			return err
		}
		names = nil
		for _, pod := range list.Items {
			names = append(names, pod.Name)
		}
		if len(names) != want {
			return fmt.Errorf("there are %v, want %d", names, want)
		}
		return nil
	}))
	return names
}

// rolledUnderClaims replaces the daemon while pods with claims come and go: kubelet finds a driver
// for each of them at once. It would repeat a Prepare without one after a minute.
func rolledUnderClaims(t *testing.T, ctx context.Context) {
	t.Helper()
	request := testenv.MemoryRequest("chip.iluvatar.divvy.dev", "1Gi")
	template := &resourceapi.ResourceClaimTemplate{ObjectMeta: metav1.ObjectMeta{Name: "small"}}
	template.Spec.Spec.Devices.Requests = []resourceapi.DeviceRequest{{Name: "r", Exactly: &request}}
	_, err := lab.Client.ResourceV1().ResourceClaimTemplates(namespace).Create(ctx, template, metav1.CreateOptions{})
	must(t, err)
	rolled := make(chan error, 1)
	go func() { rolled <- lab.Divvy.Roll(ctx, settingTimeout) }()
	var names []string
	for rolling := true; rolling; {
		select {
		case err := <-rolled:
			must(t, err)
			rolling = false
		case <-time.After(2 * podInterval):
			if len(names) == maxLoad {
				continue
			}
			pod := lab.Pods.Claiming(fmt.Sprint("small-", len(names)), "")
			pod.Spec.ResourceClaims[0] = corev1.PodResourceClaim{Name: "devices", ResourceClaimTemplateName: &template.Name}
			names = append(names, pod.Name)
			create(t, pod)
		}
	}
	running(t, names...)
	failed := metav1.ListOptions{FieldSelector: "reason=FailedPrepareDynamicResources"}
	events, err := lab.Client.CoreV1().Events(namespace).List(ctx, failed)
	must(t, err)
	for _, e := range events.Items {
		// Kubelet asks for the claim of a pod that was just bound, and the API server's authorizer of
		// nodes follows bindings by a watch of its own. Kubelet tries again.
		if !strings.Contains(e.Message, "no relationship found between node") {
			t.Errorf("pod %s: %s", e.InvolvedObject.Name, e.Message)
		}
	}
	t.Logf("%d pods with claims came while the daemon was replaced", len(names))
	must(t, lab.Pods.Delete(ctx, names...))
}

// TestClaims: kube-scheduler allocates devices of three vendors to claims, and containers get
// them, and keep them whatever restarts.
func TestClaims(t *testing.T) {
	ctx := beginClaims(t)
	slicesBefore := slicesPublished(t, republishTimeout, nil)

	_, err := lab.CLI.Kubectl(ctx, "apply", "--namespace", namespace, "--filename", lab.CLI.Example("dra"))
	must(t, err)
	must(t, lab.Pods.Claim(ctx, "rest", testenv.MemoryRequest(testenv.ClassGCU, "6Gi")))
	create(t, lab.Pods.Claiming("second-user", "two-chips"), lab.Pods.Claiming("rest", "rest"))
	const gpu, chips = "claim-whole-gpu", "claim-two-chips"
	gcus := replicas(t, "claim-gcu-memory", 2)
	names := append([]string{gpu, chips, "second-user", "rest"}, gcus...)
	running(t, names...)
	seen := sights(t, names...)
	if visible := seen[gpu].Env["NVIDIA_VISIBLE_DEVICES"]; !strings.Contains(uuidsOf(t, vendorsim.NVIDIA), visible) || visible == "" ||
		!slices.Contains(seen[gpu].Nodes, "nvidiactl") ||
		slices.Contains(seen[gpu].Nodes, "nvidia0") == slices.Contains(seen[gpu].Nodes, "nvidia1") {
		t.Errorf("the pod of a whole GPU sees %v", seen[gpu])
	}
	for _, name := range []string{chips, "second-user"} {
		nodes := strings.Join(seen[name].Nodes, " ")
		if visible := seen[name].Env["IX_VISIBLE_DEVICES"]; !strings.Contains(uuidsOf(t, vendorsim.Iluvatar), visible) ||
			strings.Count(visible, ",") != 1 || nodes != "iluvatar0 iluvatar1 itrctl" && nodes != "iluvatar2 iluvatar3 itrctl" {
			t.Errorf("the pod %s, of two chips of one board, sees %v", name, seen[name])
		}
	}
	if !reflect.DeepEqual(seen[chips], seen["second-user"]) {
		t.Errorf("two pods with one claim see %v and %v", seen[chips], seen["second-user"])
	}
	// 16 GiB have no place for two times ten, and one for the six.
	if a, b := seen[gcus[0]].Nodes, seen[gcus[1]].Nodes; len(a) != 1 || len(b) != 1 || a[0] == b[0] {
		t.Errorf("two pods of 10 GiB see the GCUs %v and %v, want one each", a, b)
	}
	if got := seen["rest"].Nodes; len(got) != 1 {
		t.Errorf("the pod of 6 GiB sees %v", got)
	}
	must(t, lab.Pods.Claim(ctx, "too-much", testenv.MemoryRequest(testenv.ClassGCU, "7Gi")))
	_, err = lab.Pods.WaitEvent(ctx, podTimeout, create(t, lab.Pods.Claiming("too-much", "too-much"))[0], "cannot allocate all claims")
	must(t, err)
	must(t, lab.Pods.Delete(ctx, "too-much"))

	table, err := lab.CLI.Kubectl(ctx, "divvy", "inspect")
	must(t, err)
	t.Log(table)
	for _, want := range []string{"10 devices for claims", namespace + "/rest", "6 GiB  rest\n", "8 GiB  "} {
		if !strings.Contains(table, want) {
			t.Errorf("kubectl divvy inspect does not show %q", want)
		}
	}
	alive := lives(t)
	specs, err := specsOfClaims()
	must(t, err)
	if len(specs) != 5 {
		t.Errorf("%d files describe claims, want 5: %v", len(specs), specs)
	}
	unchanged := func(after string) {
		t.Helper()
		if now := sights(t, names...); !reflect.DeepEqual(now, seen) {
			t.Errorf("%s, pods see %v, saw %v", after, now, seen)
		}
		// Kubelet may not have released the claims of deleted pods yet.
		must(t, poll.Until(ctx, podTimeout, after+", the files of claims to be as they were", func(context.Context) error {
			now, err := specsOfClaims()
			if diff := cmp.Diff(specs, now); err == nil && diff != "" {
				err = fmt.Errorf("they are not (-before +now):\n%s", diff)
			}
			return err
		}))
		undisturbed(t, alive)
	}
	// Kubelet deletes the slices of its node when it starts.
	must(t, lab.Cluster.Restart(ctx, cluster.Kubelet))
	began := time.Now()
	slicesPublished(t, republishTimeout, slicesBefore)
	t.Logf("the devices were published again %v after kubelet was up", time.Since(began).Round(100*time.Millisecond))
	unchanged("after kubelet was started again")
	must(t, lab.Divvy.Kill(ctx, testenv.NodeDaemon))
	must(t, lab.Divvy.Wait(ctx, settingTimeout))
	slicesPublished(t, republishTimeout, nil)
	unchanged("after the daemon was started again")

	rolledUnderClaims(t, ctx)
	unchanged("after the daemon was replaced")

	// What is released is given out again.
	_, err = lab.CLI.Kubectl(ctx, "delete", "--namespace", namespace, "deployment", "claim-gcu-memory", "--cascade=foreground")
	must(t, err)
	must(t, lab.Pods.Delete(ctx, slices.Concat([]string{"rest"}, gcus)...))
	must(t, poll.Until(ctx, podTimeout, "the claims of the pods to be deleted", func(ctx context.Context) error {
		list, err := lab.Client.ResourceV1().ResourceClaims(namespace).List(ctx, metav1.ListOptions{})
		if err == nil && len(list.Items) != 4 {
			err = fmt.Errorf("there are %d, want 4: rest, two-chips, too-much, and that of the GPU", len(list.Items))
		}
		return err
	}))
	start(t, lab.Pods.Claiming("too-much-again", "too-much"))

	must(t, lab.Pods.Delete(ctx, gpu, chips, "too-much-again"))
	if got := sights(t, "second-user")["second-user"]; !reflect.DeepEqual(got, seen["second-user"]) {
		t.Errorf("without the first user of its claim, a pod sees %v, saw %v", got, seen["second-user"])
	}
	movedBack(t, "second-user", seen["second-user"])
	must(t, released(ctx))
}
