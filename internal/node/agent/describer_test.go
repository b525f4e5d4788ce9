package agent

import (
	"context"
	"encoding/base64"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

	"google.golang.org/protobuf/proto"
	pluginapi "k8s.io/kubelet/pkg/apis/deviceplugin/v1beta1"
	"tags.cncf.io/container-device-interface/pkg/cdi"
	cdispecs "tags.cncf.io/container-device-interface/specs-go"

	config "github.com/divvy-gpu/divvy/api/config/v1alpha1"
	"github.com/divvy-gpu/divvy/internal/core/accel"
	"github.com/divvy-gpu/divvy/internal/node/alloc"
	"github.com/divvy-gpu/divvy/internal/node/backend"
	"github.com/divvy-gpu/divvy/internal/node/deviceplugin"
	"github.com/divvy-gpu/divvy/internal/platform/atomicfile"
)

// specSource is a backend.Specifier whose answers the test says.
type specSource struct {
	mu        sync.Mutex
	cause     string
	causeErr  error
	spec      backend.Specification
	err       error
	generated int
	// gate, when set, is received from before Specify answers.
	gate chan struct{}
}

func (s *specSource) SpecCause() (string, error) {
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.cause, s.causeErr
}

func (s *specSource) Specify(ctx context.Context) (backend.Specification, error) {
	if s.gate != nil {
		select {
		case <-s.gate:
		case <-ctx.Done():
			return backend.Specification{}, ctx.Err()
		}
	}
	s.mu.Lock()
	defer s.mu.Unlock()
	s.generated++
	return s.spec, s.err
}

// completeFor is a complete description of devices with that library.
func completeFor(library string, ids ...string) backend.Specification {
	out := backend.Specification{Devices: map[accel.DeviceID]cdispecs.ContainerEdits{}, Failed: map[accel.DeviceID]error{}}
	out.Common.Mounts = []*cdispecs.Mount{{HostPath: library, ContainerPath: library, Options: []string{"ro"}}}
	for _, id := range ids {
		out.Devices[accel.DeviceID(id)] = cdispecs.ContainerEdits{DeviceNodes: []*cdispecs.DeviceNode{{Path: "/dev/full-" + id}}}
	}
	return out
}

func TestDescriberGenerates(t *testing.T) {
	now := time.Now()
	s, changes := &specSource{}, 0
	d := newDescriber("nvidia", s, func() { changes++ })
	d.now = func() time.Time { return now }
	broken, one := errors.New("segmentation fault"), completeFor("/a", "a")
	partly := completeFor("/a", "a")
	partly.Failed["b"] = errors.New("no device node")
	for _, step := range []struct {
		name      string
		after     time.Duration
		change    func()
		generated int // times, in this step
		changed   bool
		err       string
	}{
		{"no device yet", 0, func() {}, 0, false, "being generated"},
		{"the hook is missing", 0, func() { s.causeErr = errors.New("no hook") }, 0, true, "no hook"},
		{"and still is", time.Hour, func() {}, 0, false, "no hook"},
		{"the hook appears", 0, func() { s.cause, s.causeErr, s.spec = "1", nil, one }, 1, true, ""},
		{"nothing changes", time.Hour, func() {}, 0, false, ""},
		{"a cause changes, nothing else", 0, func() { s.cause = "2" }, 1, false, ""},
		{"another driver", 0, func() { s.cause, s.spec = "3", completeFor("/b", "a") }, 1, true, ""},
		{"the generator crashes", 0, func() { s.cause, s.err = "4", broken }, 1, true, "segmentation fault"},
		{"it is left alone for a while", 3 * time.Second, func() {}, 0, false, "segmentation fault"},
		{"it is tried again", time.Second, func() {}, 1, false, "segmentation fault"},
		{"less often", 7 * time.Second, func() {}, 0, false, "segmentation fault"},
		{"again", time.Second, func() {}, 1, false, "segmentation fault"},
		{"at once for another cause", 0, func() { s.cause = "5" }, 1, false, "segmentation fault"},
		{"it works again", 4 * time.Second, func() { s.err, s.spec = nil, partly }, 1, true, ""},
		{"a device that failed is tried again", 8 * time.Second, func() {}, 1, false, ""},
		{"and works", 16 * time.Second, func() { s.spec = completeFor("/a", "a", "b") }, 1, true, ""},
		{"which is the end of it", time.Hour, func() {}, 0, false, ""},
	} {
		now = now.Add(step.after)
		step.change()
		generated, before := s.generated, changes
		d.turn(t.Context())
		if got := s.generated - generated; got != step.generated {
			t.Errorf("%s: generated %d times, want %d", step.name, got, step.generated)
		}
		if got := changes > before; got != step.changed {
			t.Errorf("%s: changed is %v", step.name, got)
		}
		_, _, err := d.edits("a")
		if (err != nil) != (step.err != "") || err != nil && !strings.Contains(err.Error(), step.err) {
			t.Errorf("%s: error %v, want %q", step.name, err, step.err)
		}
	}
}

// completePart is a part whose devices are described completely, and what describes it.
func completePart(w *cdiWriter, s *specSource) (*pool, func(...string) map[accel.DeviceID]error) {
	p := &pool{config: alloc.Config{ID: alloc.ID{Resource: gpu}, Vendor: "nvidia"}}
	d := newDescriber("nvidia", s, func() {})
	w.describers["nvidia"] = d
	return p, func(ids ...string) map[accel.DeviceID]error {
		d.turn(context.Background())
		return w.specify(p, &gpuBackend{}, devicesNamed(ids...))
	}
}

// TestCompleteCDISpecification: the file follows the descriptions, is left alone when
// they are the same, and outlives failures.
func TestCompleteCDISpecification(t *testing.T) {
	dir := t.TempDir()
	file := filepath.Join(dir, "divvy-nvidia.com-gpu.yaml")
	s := &specSource{cause: "1", spec: completeFor("/lib/libcuda.so.1", "a")}
	_, specify := completePart(cdiWriterIn(dir), s)
	want := func(step string, texts ...string) os.FileInfo {
		t.Helper()
		text, err := os.ReadFile(file)
		if err != nil {
			t.Fatal(err)
		}
		for _, w := range texts {
			if !strings.Contains(string(text), w) {
				t.Errorf("%s: the file has no %q:\n%s", step, w, text)
			}
		}
		info, err := os.Stat(file)
		if err != nil {
			t.Fatal(err)
		}
		return info
	}
	if failed := specify("a", "b"); len(failed) != 1 || failed["b"] == nil {
		t.Errorf("not described are %v, want b alone", failed)
	}
	first := want("first", "/lib/libcuda.so.1", "/dev/full-a", "cdiVersion: 0.5.0")
	s.cause = "2"
	if specify("a"); !atomicfile.Same(first, want("again")) {
		t.Error("the file was written though nothing changed")
	}
	s.cause, s.err = "3", errors.New("the driver root is not mounted")
	if failed := specify("a"); failed["a"] == nil || !strings.Contains(failed["a"].Error(), "not mounted") {
		t.Errorf("not described are %v", failed)
	}
	if !atomicfile.Same(first, want("failed", "/dev/full-a")) {
		t.Error("the file was written though nothing was generated")
	}
	s.cause, s.err, s.spec = "4", nil, completeFor("/lib/libcuda.so.2", "a", "b")
	s.spec.Devices["a"].DeviceNodes[0].GID = new(uint32(44))
	common := s.spec.Common
	common.AdditionalGIDs = []uint32{44}
	s.spec.Common = common
	if failed := specify("a", "b"); len(failed) > 0 {
		t.Error(failed)
	}
	want("another driver", "/lib/libcuda.so.2", "/dev/full-b", "cdiVersion: 0.7.0")
	// A daemon that starts finds the file and writes none.
	last := want("last")
	_, specify = completePart(cdiWriterIn(dir), s)
	if failed := specify("a", "b"); len(failed) > 0 || !atomicfile.Same(last, want("restarted")) {
		t.Errorf("after a restart the file was written again; not described are %v", failed)
	}
}

// A device that another program's file defines as well is resolved by neither.
func TestCDIDeviceOfTwoSpecifications(t *testing.T) {
	dir := t.TempDir()
	w, p := cdiWriterIn(dir), &pool{}
	theirs := filepath.Join(dir, "theirs.json")
	writeFile(t, theirs, specOf("nvidia.com/gpu", "b"))
	failed := w.specify(p, &gpuBackend{}, devicesNamed("a", "b"))
	if len(failed) != 1 || failed["b"] == nil || !strings.Contains(failed["b"].Error(), theirs) {
		t.Errorf("not described are %v, want b with the file", failed)
	}
	if err := os.Remove(theirs); err != nil {
		t.Fatal(err)
	}
	if failed := w.specify(p, &gpuBackend{}, devicesNamed("a", "b")); len(failed) > 0 {
		t.Errorf("without the file: %v", failed)
	}
}

// specOf is a specification of a device.
func specOf(kind, name string) string {
	return fmt.Sprintf(`{"cdiVersion": "0.5.0", "kind": %q, "devices": [{"name": %q, "containerEdits": {"env": ["A=b"]}}]}`, kind, name)
}

// renamedBackend gives devices names of another kind than earlier releases.
type renamedBackend struct{ gpuBackend }

func (b *renamedBackend) Edits(ids ...accel.DeviceID) (backend.Edits, error) {
	e, err := b.gpuBackend.Edits(ids...)
	for _, d := range e.CDIDevices {
		e.FormerCDIDevices = append(e.FormerCDIDevices, backend.CDIDevice{Kind: "former.com/gpu", Name: d.Name})
	}
	return e, err
}

// checkpointOf returns kubelet's checkpoint with answers of device plugins.
func checkpointOf(t *testing.T, answers ...*pluginapi.ContainerAllocateResponse) string {
	t.Helper()
	var entries []string
	for _, one := range answers {
		data, err := proto.Marshal(one)
		if err != nil {
			t.Fatal(err)
		}
		entries = append(entries, `{"AllocResp":"`+base64.StdEncoding.EncodeToString(data)+`"}`)
	}
	return `{"Data":{"PodDeviceEntries":[` + strings.Join(entries, ",") + `]}}`
}

// TestFormerCDINames: the names that an earlier release gave containers are kept
// where containers may have them, and never beside the same names of another program.
func TestFormerCDINames(t *testing.T) {
	const former, plugins = "divvy-former.com-gpu.yaml", "former.com-gpu.json"
	checkpoint := func(name string) map[string]string {
		return map[string]string{kubeletCheckpoint: checkpointOf(t, &pluginapi.ContainerAllocateResponse{
			CdiDevices: []*pluginapi.CDIDevice{{Name: name}}})}
	}
	annotations := map[string]string{kubeletCheckpoint: checkpointOf(t, &pluginapi.ContainerAllocateResponse{
		Annotations: map[string]string{cdi.AnnotationPrefix + "divvy_x": "nvidia.com/gpu=a,former.com/gpu=a"}})}
	beside := map[string]string{kubeletCheckpoint: checkpointOf(t, &pluginapi.ContainerAllocateResponse{
		Annotations: map[string]string{cdi.AnnotationPrefix + "other": "no name"}},
		&pluginapi.ContainerAllocateResponse{CdiDevices: []*pluginapi.CDIDevice{{Name: "former.com/gpu=a"}}})}
	ofPlugin := map[string]string{former: specOf("former.com/gpu", "a"), plugins: specOf("former.com/gpu", "a")}
	for name, tt := range map[string]struct {
		files map[string]string
		want  string
	}{
		"a new installation":                {nil, ""},
		"the file of an earlier one":        {map[string]string{former: specOf("former.com/gpu", "x")}, "a b"},
		"a file that is none":               {map[string]string{former: "{}"}, ""},
		"kubelet has an answer with it":     {checkpoint("former.com/gpu=a"), "a b"},
		"in an annotation":                  {annotations, "a b"},
		"beside an answer that is invalid":  {beside, "a b"},
		"kubelet has other answers":         {checkpoint("nvidia.com/gpu=a"), ""},
		"kubelet's file is of another form": {map[string]string{kubeletCheckpoint: `[1]`}, ""},
		"the vendor's plugin has the names": {ofPlugin, ""},
	} {
		t.Run(name, func(t *testing.T) {
			dir := t.TempDir()
			for file, text := range tt.files {
				writeFile(t, filepath.Join(dir, file), text)
			}
			w, p := cdiWriterIn(dir), &pool{}
			w.wanted[p] = nil
			for range 2 {
				if failed := w.specify(p, &renamedBackend{}, devicesNamed("a", "b")); len(failed) > 0 {
					t.Error(failed)
				}
			}
			if got := cdiDevicesIn(t, filepath.Join(dir, former)); got != tt.want {
				t.Errorf("under the former kind are %q, want %q", got, tt.want)
			}
			if got := cdiDevicesIn(t, filepath.Join(dir, "divvy-nvidia.com-gpu.yaml")); got != "a b" {
				t.Errorf("under the present kind are %q", got)
			}
			// Nobody holds anything.
			if err := w.tidy(); err != nil {
				t.Fatal(err)
			}
			w.specify(p, &renamedBackend{}, devicesNamed("a", "b"))
			if _, err := os.Stat(filepath.Join(dir, former)); err == nil {
				t.Error("the file of the former kind is left")
			}
		})
	}
}

// The names of the former kind return when the other program's file is gone.
func TestFormerCDINamesAfterTheOtherFileIsGone(t *testing.T) {
	dir := t.TempDir()
	const former, plugins = "divvy-former.com-gpu.yaml", "former.com-gpu.json"
	writeFile(t, filepath.Join(dir, former), specOf("former.com/gpu", "a"))
	w, p := cdiWriterIn(dir), &pool{}
	specify := func() string {
		w.specify(p, &renamedBackend{}, devicesNamed("a"))
		return cdiDevicesIn(t, filepath.Join(dir, former))
	}
	for _, step := range []struct{ theirs, want string }{{"", "a"}, {specOf("former.com/gpu", "a"), ""}, {"", "a"}} {
		if step.theirs != "" {
			writeFile(t, filepath.Join(dir, plugins), step.theirs)
		} else if err := os.RemoveAll(filepath.Join(dir, plugins)); err != nil {
			t.Fatal(err)
		}
		if got := specify(); got != step.want {
			t.Errorf("with %q of another program: %q, want %q", step.theirs, got, step.want)
		}
	}
}

// specBackend is a vendor's backend that describes its devices completely.
type specBackend struct {
	*vendorBackend
	*specSource
}

// TestDevicesWaitForTheirSpecification: kubelet is told of no healthy device before
// the file describes it, and of unhealthy ones with the reason when it cannot.
func TestDevicesWaitForTheirSpecification(t *testing.T) {
	s := newStage(t)
	s.vendors["nvidia"].set(nil, gpuDevice(0, "a"))
	s.vendors["iluvatar"].set(nil, gpuDevice(0, "x"))
	s.config.Vendors = map[string]config.Vendor{"nvidia": {Injection: []config.Injection{config.InjectCDI}}}
	source := &specSource{cause: "1", spec: completeFor("/lib/libcuda.so.1", "a"), gate: make(chan struct{})}
	s.dressed = map[string]backend.Backend{"nvidia": &specBackend{s.vendors["nvidia"], source}}
	file := filepath.Join(s.config.CDIDir, "divvy-nvidia.com-gpu.yaml")
	a, stop := s.play()
	// offered are the units that kubelet is told of.
	offered := func(resource accel.Resource) (out []deviceplugin.Unit) {
		for _, r := range a.offerings {
			if r.name == resource {
				r.mu.Lock()
				out = slices.Clone(r.lists[0])
				r.mu.Unlock()
			}
		}
		return out
	}
	healthy := func() bool { units := offered(gpu); return len(units) == 1 && !units[0].Unhealthy }
	eventually(t, "the other vendor's devices are offered", func() bool { return len(offered("iluvatar.com/gpu")) == 2 })
	time.Sleep(300 * time.Millisecond)
	if got := offered(gpu); len(got) > 0 {
		t.Errorf("offered before they are described: %v", got)
	}
	source.gate <- struct{}{}
	eventually(t, "the device is offered", healthy)
	if text, err := os.ReadFile(file); err != nil || !strings.Contains(string(text), "libcuda.so.1") {
		t.Errorf("the file is %s, %v", text, err)
	}
	source.mu.Lock()
	source.causeErr = errors.New("the hook is missing")
	source.mu.Unlock()
	reason := func() string {
		for p := range a.offerings.parts(func(r *offering, _ *pool) bool { return r.name == gpu }) {
			return see(p, (*alloc.Engine).Inventory).Shares[0].Health.Reason
		}
		return ""
	}
	eventually(t, "the device is unhealthy with the reason", func() bool { return reason() == "the hook is missing" })
	source.mu.Lock()
	source.causeErr = nil
	source.mu.Unlock()
	close(source.gate)
	eventually(t, "the device recovers", func() bool { return reason() == "" })
	stop()
}
