//go:build e2e

package scheduling

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"io/fs"
	"net/http"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	corev1 "k8s.io/api/core/v1"
	resourceapi "k8s.io/api/resource/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/utils/ptr"
	"sigs.k8s.io/yaml"

	"github.com/divvy-gpu/divvy/internal/core/accel"
	"github.com/divvy-gpu/divvy/internal/install/schedconf"
	"github.com/divvy-gpu/divvy/lab/internal/controlplane"
	labscheduler "github.com/divvy-gpu/divvy/lab/internal/scheduler"
	"github.com/divvy-gpu/divvy/lab/internal/simnodes"
)

const (
	claimDriver = "gpu.divvy.example"
	claimClass  = "gpu.divvy.example"
)

// placements are the requests by which schedulers place pods, in the order of their arrival.
type placements struct {
	mu  sync.Mutex
	by  []string // scheduler, without repetitions
	all map[string]int
}

// note wraps the API server for one scheduler, which has the rights of kube-scheduler there.
func (p *placements) note(scheduler string) func(http.Handler) http.Handler {
	return func(next http.Handler) http.Handler {
		return http.HandlerFunc(func(out http.ResponseWriter, request *http.Request) {
			request.Header.Set("Impersonate-User", "system:kube-scheduler")
			request.Header.Set("Impersonate-Group", "system:authenticated")
			if request.Method == http.MethodPost && strings.HasSuffix(request.URL.Path, "/binding") ||
				request.Method != http.MethodGet && strings.Contains(request.URL.Path, "/resourceclaims/") {
				p.mu.Lock()
				if len(p.by) == 0 || p.by[len(p.by)-1] != scheduler {
					p.by = append(p.by, scheduler)
				}
				p.all[scheduler]++
				p.mu.Unlock()
			}
			next.ServeHTTP(out, request)
		})
	}
}

// controlPlaneNode is one of several, with its kube-scheduler as a static pod.
type controlPlaneNode struct {
	*world
	name, dir  string
	kubeconfig string
	manifest   []byte
	placements *placements
	process    *controlplane.Process
	run        int // of the process
}

// kubeconfigOf is that of a scheduler, which is noted by its own name.
func (n *controlPlaneNode) kubeconfigOf(scheduler string) {
	n.Helper()
	data, err := os.ReadFile(n.before(scheduler, n.placements.note(scheduler)))
	if err != nil {
		n.Fatal(err)
	}
	if err := os.WriteFile(n.kubeconfig, data, 0o600); err != nil {
		n.Fatal(err)
	}
}

// start runs what the manifest says, as kubelet does.
func (n *controlPlaneNode) start() {
	n.Helper()
	var pod corev1.Pod
	if err := yaml.UnmarshalStrict(n.manifest, &pod); err != nil {
		n.Fatal(err)
	}
	ports, err := controlplane.FreePorts(2)
	if err != nil {
		n.Fatal(err)
	}
	n.run++
	scheduler := fmt.Sprintf("%s-%d", n.name, n.run)
	n.kubeconfigOf(scheduler)
	c := pod.Spec.Containers[0]
	program, args := filepath.Join(programs.BinDir, "kube-scheduler"), slices.Concat(c.Command, c.Args)
	var env []string
	if strings.Contains(c.Image, "divvy-scheduler") {
		if program, err = newest.build(n.Context()); err != nil {
			n.Fatal(err)
		}
		env = []string{"POD_NAME=" + labscheduler.PodName + "-" + n.name, "POD_NAMESPACE=" + labscheduler.Namespace}
		for i := range args { // the nodes of this test have one network
			args[i] = strings.Replace(args[i], schedconf.ReplacedAddress, fmt.Sprint("127.0.0.1:", ports[1]), 1)
		}
	} else {
		args = args[1:]
	}
	args = append(args, fmt.Sprint("--secure-port=", ports[0]), "--cert-dir="+filepath.Join(n.dir, "certs"))
	if n.process, err = controlplane.StartProcess(scheduler, program, filepath.Join(n.dir, "scheduler.log"), env, args...); err != nil {
		n.Fatal(err)
	}
}

// input is the node as schedconf sees it.
func (n *controlPlaneNode) input() schedconf.Input {
	return schedconf.Input{Manifest: n.manifest, ManifestPath: "kube-scheduler.yaml", ConfigDir: n.dir,
		ReadFile: func(path string) ([]byte, error) {
			data, err := os.ReadFile(path)
			if errors.Is(err, fs.ErrNotExist) {
				return nil, fs.ErrNotExist
			}
			return data, err
		}}
}

// roll gives kubelet another manifest.
func (n *controlPlaneNode) roll(manifest []byte, files []schedconf.File) {
	n.Helper()
	for _, file := range files {
		if err := errors.Join(os.MkdirAll(filepath.Dir(file.Path), 0o755), os.WriteFile(file.Path, file.Content, file.Mode)); err != nil {
			n.Fatal(err)
		}
	}
	if err := n.process.Stop(3 * stopGrace); err != nil {
		n.Fatal(err)
	}
	n.manifest = manifest
	n.start()
}

// controlPlaneNodes starts the schedulers of three.
func (w *world) controlPlaneNodes(p *placements) (nodes []*controlPlaneNode) {
	w.Helper()
	for i := range 3 {
		n := &controlPlaneNode{world: w, name: fmt.Sprint("cp-", i+1), dir: w.TempDir(), placements: p}
		n.kubeconfig = filepath.Join(n.dir, "scheduler.conf")
		manifest, err := labscheduler.Manifest("registry.k8s.io/kube-scheduler:" + programs.Kubernetes)
		if err != nil {
			w.Fatal(err)
		}
		n.manifest = []byte(strings.NewReplacer(labscheduler.Kubeconfig, n.kubeconfig, "    - --leader-elect=true\n",
			"    - --leader-elect=true\n    - --leader-elect-lease-duration=6s\n    - --leader-elect-renew-deadline=5s\n"+
				"    - --leader-elect-retry-period=500ms\n").Replace(string(manifest)))
		// The mirror that kubelet shows of the static pod.
		mirror := &corev1.Pod{ObjectMeta: metav1.ObjectMeta{Namespace: labscheduler.Namespace, Name: labscheduler.PodName + "-" + n.name},
			Spec: corev1.PodSpec{NodeName: w.nodes.NodeName(0), Containers: []corev1.Container{{Name: "s", Image: "example.com/s:1"}}}}
		w.eventually("the mirror of a static pod", func(ctx context.Context) error { // in a namespace that the API server makes
			_, err := w.client.CoreV1().Pods(mirror.Namespace).Create(ctx, mirror, metav1.CreateOptions{})
			return err
		})
		n.start()
		w.Cleanup(func() { w.end(n.process) })
		nodes = append(nodes, n)
	}
	return nodes
}

// makeDevices lets each node offer devices to claims.
func (w *world) makeDevices(count int) {
	w.Helper()
	class := &resourceapi.DeviceClass{ObjectMeta: metav1.ObjectMeta{Name: claimClass}, Spec: resourceapi.DeviceClassSpec{
		Selectors: []resourceapi.DeviceSelector{{CEL: &resourceapi.CELDeviceSelector{
			Expression: fmt.Sprintf("device.driver == %q", claimDriver)}}}}}
	if _, err := w.client.ResourceV1().DeviceClasses().Create(w.Context(), class, metav1.CreateOptions{}); err != nil {
		w.Fatal(err)
	}
	for i := range w.nodes.Count {
		name := w.nodes.NodeName(i)
		slice := &resourceapi.ResourceSlice{ObjectMeta: metav1.ObjectMeta{Name: name}, Spec: resourceapi.ResourceSliceSpec{
			Driver: claimDriver, NodeName: &name, Pool: resourceapi.ResourcePool{Name: name, Generation: 1, ResourceSliceCount: 1}}}
		for d := range count {
			slice.Spec.Devices = append(slice.Spec.Devices, resourceapi.Device{Name: fmt.Sprint("gpu-", d)})
		}
		if _, err := w.client.ResourceV1().ResourceSlices().Create(w.Context(), slice, metav1.CreateOptions{}); err != nil {
			w.Fatal(err)
		}
	}
}

// createClaiming makes a pod with a claim for one device.
func (w *world) createClaiming(ctx context.Context, name string) error {
	claim := &resourceapi.ResourceClaim{ObjectMeta: metav1.ObjectMeta{Name: name}, Spec: resourceapi.ResourceClaimSpec{
		Devices: resourceapi.DeviceClaim{Requests: []resourceapi.DeviceRequest{{Name: "gpu", Exactly: &resourceapi.ExactDeviceRequest{
			DeviceClassName: claimClass, AllocationMode: resourceapi.DeviceAllocationModeExactCount, Count: 1}}}}}}
	if _, err := w.client.ResourceV1().ResourceClaims(metav1.NamespaceDefault).Create(ctx, claim, metav1.CreateOptions{}); err != nil {
		return err
	}
	pod := w.nodes.Pod(metav1.NamespaceDefault, name, 0)
	delete(pod.Spec.Containers[0].Resources.Requests, resource)
	delete(pod.Spec.Containers[0].Resources.Limits, resource)
	pod.Spec.SchedulerName = corev1.DefaultSchedulerName
	pod.Spec.ResourceClaims = []corev1.PodResourceClaim{{Name: "gpu", ResourceClaimName: ptr.To(name)}}
	pod.Spec.Containers[0].Resources.Claims = []corev1.ResourceClaim{{Name: "gpu"}}
	_, err := w.client.CoreV1().Pods(pod.Namespace).Create(ctx, pod, metav1.CreateOptions{})
	return err
}

// devicesOfClaims fails the test where two claims have one device, and returns how many are given.
func (w *world) devicesOfClaims() int {
	w.Helper()
	claims, err := w.client.ResourceV1().ResourceClaims(metav1.NamespaceDefault).List(w.Context(), metav1.ListOptions{})
	if err != nil {
		w.Fatal(err)
	}
	holders := map[string]string{}
	for i := range claims.Items {
		c := &claims.Items[i]
		if c.Status.Allocation == nil {
			continue
		}
		for _, r := range c.Status.Allocation.Devices.Results {
			device := r.Pool + "/" + r.Device
			if other := holders[device]; other != "" {
				w.Errorf("claims %s and %s both have %s", other, c.Name, device)
			}
			holders[device] = c.Name
		}
	}
	return len(holders)
}

// TestReplaceThreeControlPlanes rolls three control planes to divvy-scheduler and back while claims
// arrive, with what schedconf writes and the rights of kube-scheduler. In the end the claims have
// every device, each has its own, and no scheduler placed anything after the next one had begun.
func TestReplaceThreeControlPlanes(t *testing.T) {
	const nodes, devices, units = 10, 8, 8
	w := newWorld(t, simnodes.Group{Count: nodes, Cards: 2, Units: units})
	if err := w.nodes.Create(t.Context(), w.client); err != nil {
		t.Fatal(err)
	}
	w.makeDevices(devices)
	p := &placements{all: map[string]int{}}
	planes := w.controlPlaneNodes(p)
	key, err := w.plane.GrantKey()
	if err != nil {
		t.Fatal(err)
	}
	secret, err := os.ReadFile(key)
	if err != nil {
		t.Fatal(err)
	}
	divvy := schedconf.Extender{Resources: []string{resource}, Program: &schedconf.Program{
		Image: "example.com/divvy-scheduler-" + schedconf.Minor + ":v1", Key: secret,
		Args: []string{"--resources=" + resource, "--node-label="}}}

	// Claims arrive until all devices are taken; the last are kept for the end.
	const kept = 8
	var made atomic.Int32
	arriving, stop := make(chan error, 1), make(chan struct{})
	go func() {
		for ; made.Load() < nodes*devices-kept; made.Add(1) {
			if err := w.createClaiming(t.Context(), fmt.Sprintf("claim-%03d", made.Load())); err != nil {
				arriving <- err
				return
			}
			select {
			case <-stop:
			case <-time.After(500 * time.Millisecond):
			}
		}
		arriving <- nil
	}()
	placed := func() int {
		p.mu.Lock()
		defer p.mu.Unlock()
		sum := 0
		for _, n := range p.all {
			sum += n
		}
		return sum
	}
	goesOn := func() {
		t.Helper()
		before := placed()
		w.eventually("pods are placed", func(context.Context) error {
			for _, n := range planes {
				if !n.process.Running() {
					n.start() // as kubelet does
				}
			}
			if made.Load() >= nodes*devices-kept {
				return nil
			}
			if placed() < before+4 {
				return errors.New("none is")
			}
			return nil
		})
		w.devicesOfClaims()
	}
	goesOn()
	originals := map[string][]byte{}
	for _, n := range planes {
		originals[n.name] = n.manifest
		change, err := schedconf.Wire(n.input(), divvy)
		if err != nil {
			t.Fatal(err)
		}
		n.roll(change.Manifest, change.Files)
		goesOn()
	}
	// Divvy's own resource is placed by whichever leads.
	w.make(corev1.DefaultSchedulerName, "units", nodes, accel.Units(units))
	if total := sum(w.bound(nodes)); total != nodes*units {
		t.Errorf("pods hold %d units, want %d", total, nodes*units)
	}
	for _, n := range planes {
		change, _, err := schedconf.Unwire(n.input(), originals[n.name])
		if err != nil {
			t.Fatal(err)
		}
		if !bytes.Equal(change.Manifest, originals[n.name]) {
			t.Errorf("%s has another manifest than before:\n%s", n.name, change.Manifest)
		}
		n.roll(change.Manifest, nil)
		goesOn()
	}
	close(stop)
	if err := <-arriving; err != nil {
		t.Fatal(err)
	}
	for i := range kept {
		if err := w.createClaiming(t.Context(), fmt.Sprintf("last-%d", i)); err != nil {
			t.Fatal(err)
		}
	}
	w.eventually("all devices are taken", func(context.Context) error {
		if n := w.devicesOfClaims(); n != nodes*devices {
			return fmt.Errorf("%d of %d are", n, nodes*devices)
		}
		return nil
	})
	p.mu.Lock()
	defer p.mu.Unlock()
	t.Logf("schedulers placed in the order %v, with so many writes: %v", p.by, p.all)
	for i, scheduler := range p.by {
		if slices.Contains(p.by[:i], scheduler) {
			t.Errorf("%s placed pods again after another had begun: %v", scheduler, p.by)
		}
	}
	if len(p.by) < 3 {
		t.Errorf("only %v placed pods, so too little was handed over", p.by)
	}
}
