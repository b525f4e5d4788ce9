package extender

import (
	"bytes"
	"context"
	"encoding/json"
	"fmt"
	"io"
	"net/http"
	"net/http/httptest"
	"os"
	"runtime/debug"
	"slices"
	"strconv"
	"strings"
	"testing"
	"time"

	v1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/api/resource"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/client-go/tools/cache"
	extenderv1 "k8s.io/kube-scheduler/extender/v1"

	"github.com/divvy-gpu/divvy/internal/accel"
	"github.com/divvy-gpu/divvy/internal/accel/ledger"
	"github.com/divvy-gpu/divvy/internal/accel/wire"
	"github.com/divvy-gpu/divvy/internal/kube"
)

// The size at which other extenders of this kind were measured.
const (
	benchNodes = 5000
	benchCards = 8
	benchPods  = 20_000
	// benchMorePods is a size that must make no difference.
	benchMorePods = 50_000
)

// BenchmarkHTTPFilter measures filter as kube-scheduler sees it: over a real
// connection, with 5000 node names of 8 cards each and 20 000 and 50 000 pods in the
// books, from sending the request to the last byte of the answer. Beside each call,
// in turn with it, a floor answers the same bytes after it has decoded the same
// request and encoded the answer, with nothing looked up in between. It reports
// the ratio of the two, and the resident memory of the whole process, which is more
// than the extender's own: the client and the floor are in it.
func BenchmarkHTTPFilter(b *testing.B) {
	server, refill := benchServer(b)
	alone := map[string]time.Duration{}
	for _, pods := range []int{benchPods, benchMorePods} {
		refill(pods)
		resident := residentMB(b)
		for _, kind := range []struct {
			name string
			ask  int64 // units
		}{
			{"fitsSome", 12}, {"fitsAll", 1}, {"fitsNone", 20},
		} {
			body := benchRequest(b, kind.ask)
			b.Run(fmt.Sprintf("%s/pods=%d", kind.name, pods), func(b *testing.B) {
				var answer bytes.Buffer
				benchCall(b, server, "/filter", body, &answer)
				floor := floorServer(b, body, answer.Bytes())
				var took, least []time.Duration
				for b.Loop() {
					took = append(took, benchCall(b, server, "/filter", body, &answer))
					least = append(least, benchCall(b, floor, "", body, &answer))
				}
				b.StopTimer()
				var result extenderv1.ExtenderFilterResult
				if err := json.Unmarshal(answer.Bytes(), &result); err != nil || result.Error != "" {
					b.Fatalf("answer: %v %s", err, result.Error)
				}
				slices.Sort(took)
				slices.Sort(least)
				p50 := took[len(took)/2]
				b.ReportMetric(0, "ns/op") // of two calls, which nobody asked for
				b.ReportMetric(p50.Seconds()*1e3, "p50-ms")
				b.ReportMetric(took[len(took)*99/100].Seconds()*1e3, "p99-ms")
				b.ReportMetric(least[len(least)/2].Seconds()*1e3, "floor-p50-ms")
				b.ReportMetric(p50.Seconds()/least[len(least)/2].Seconds(), "x-floor")
				b.ReportMetric(float64(len(*result.NodeNames)), "nodes-fit")
				b.ReportMetric(max(resident, residentMB(b)), "resident-MB")
				if pods == benchPods {
					alone[kind.name] = p50
				} else if before := alone[kind.name]; before > 0 {
					b.ReportMetric(p50.Seconds()/before.Seconds(), "x-20000-pods")
				}
			})
		}
	}
}

// benchCall asks, and returns how long it took.
func benchCall(b *testing.B, server *httptest.Server, path string, body []byte, answer *bytes.Buffer) time.Duration {
	b.Helper()
	if path != "" {
		path = Prefix + path
	}
	start := time.Now()
	resp, err := server.Client().Post(server.URL+path, "application/json", bytes.NewReader(body))
	if err != nil {
		b.Fatal(err)
	}
	answer.Reset()
	_, err = answer.ReadFrom(resp.Body)
	if err := resp.Body.Close(); err != nil {
		b.Fatal(err)
	}
	if err != nil {
		b.Fatal(err)
	}
	return time.Since(start)
}

// floorServer decodes requests like this one and encodes this answer, with the
// extender's own means, which are faster than those of encoding/json
// (BenchmarkDecodeFilterArgs): no extender with them can be faster.
func floorServer(b *testing.B, request, answer []byte) *httptest.Server {
	b.Helper()
	var known extenderv1.ExtenderFilterResult
	if err := json.Unmarshal(answer, &known); err != nil {
		b.Fatal(err)
	}
	asked, err := decodeFilterArgs(request)
	if err != nil {
		b.Fatal(err)
	}
	var result filterResult
	fits := map[string]bool{}
	for _, name := range *known.NodeNames {
		fits[name] = true
	}
	for i, name := range asked.names {
		reason, unresolvable := known.FailedAndUnresolvableNodes[name]
		switch {
		case fits[name]:
			result.fits = append(result.fits, i)
		case unresolvable:
			result.refusals = append(result.refusals, refusal{node: name, reason: reason, unresolvable: true})
		default:
			result.refusals = append(result.refusals, refusal{node: name, reason: known.FailedNodes[name]})
		}
	}
	server := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		body, out := getBuffer(), getBuffer()
		defer putBuffer(body)
		defer putBuffer(out)
		into := bytes.NewBuffer((*body)[:0])
		into.Grow(int(r.ContentLength) + bytes.MinRead)
		if _, err := into.ReadFrom(r.Body); err != nil {
			b.Error(err)
			return
		}
		*body = into.Bytes()
		args, err := decodeFilterArgs(*body)
		if err != nil {
			b.Error(err)
			return
		}
		*out = appendFilterResult((*out)[:0], args, result)
		writeJSON(w, http.StatusOK, *out)
	}))
	b.Cleanup(server.Close)
	return server
}

// benchServer serves an extender whose books are filled as a reflector fills
// them, from whole objects: the nodes once, and so many pods each time that refill
// is called.
func benchServer(b *testing.B) (server *httptest.Server, refill func(pods int)) {
	b.Helper()
	books := ledger.New(ledger.Options{})
	keys := newKeys(b)
	resources := []accel.Resource{gcuMemory}
	follower := kube.NewBooks(kube.BooksConfig{Ledger: books, Grants: keys, Resources: resources})
	signer, err := keys.Signer()
	if err != nil {
		b.Fatal(err)
	}

	fill := func(store cache.TransformingStore, n int, object func(i int) any) {
		items := make([]any, n)
		for i := range items {
			if items[i], err = store.Transformer()(object(i)); err != nil {
				b.Fatal(err)
			}
		}
		if err := store.Replace(items, ""); err != nil {
			b.Fatal(err)
		}
	}
	fill(follower.Nodes(), benchNodes, func(i int) any { return benchNode(b, i) })
	refill = func(pods int) {
		b.Helper()
		fill(follower.Pods(), pods, func(i int) any { return benchPod(b, i, signer) })
		debug.FreeOSMemory() // what making the objects took is not the extender's
	}

	e, err := New(Config{
		Ledger: books, Cluster: follower, Binder: noBinder{}, Signer: keys.Signer,
		Ready: func() error { return nil }, Resources: resources, Version: "bench",
	})
	if err != nil {
		b.Fatal(err)
	}
	server = httptest.NewServer(e.Handler())
	b.Cleanup(server.Close)
	return server, refill
}

func benchNodeName(i int) string { return fmt.Sprintf("accelerator-node-%04d", i) }

func benchNode(b *testing.B, i int) *metav1.PartialObjectMetadata {
	b.Helper()
	units := accel.Units(16)
	if i%2 == 1 {
		units = 8 // every other node has smaller cards, so that some requests fit some nodes
	}
	inv := accel.Inventory{Resource: gcuMemory, Unit: "1"}
	for c := range benchCards {
		inv.Shares = append(inv.Shares, accel.Share{Units: units, Device: accel.Device{
			Index: c, ID: accel.DeviceID(fmt.Sprintf("U5300%04d%02d", i, c)), Model: "S60", MemoryBytes: int64(units) << 30, NUMANode: c / 4,
		}})
	}
	annotation, err := wire.EncodeInventory([]accel.Inventory{inv})
	if err != nil {
		b.Fatal(err)
	}
	return &metav1.PartialObjectMetadata{ObjectMeta: metav1.ObjectMeta{
		Name: benchNodeName(i), Annotations: map[string]string{wire.InventoryAnnotation: annotation},
	}}
}

// benchPod is one of four pods on each node, on cards that differ from node to
// node.
func benchPod(b *testing.B, i int, signer *wire.Signer) *v1.Pod {
	b.Helper()
	node, uid := i%benchNodes, types.UID(fmt.Sprintf("00000000-0000-0000-0000-%012d", i))
	card, units := (i/benchNodes+node)%benchCards, int64(1+(node*7+i/benchNodes)%8)
	value, err := signer.EncodeGrant(string(uid), accel.Grant{
		Resource: gcuMemory, Node: benchNodeName(node), Device: accel.DeviceID(fmt.Sprintf("U5300%04d%02d", node, card)),
		Index: card, DeviceUnits: 16, Units: accel.Units(units), At: time.Unix(1, 0), Confirmed: true,
	})
	if err != nil {
		b.Fatal(err)
	}
	pod := benchPodSpec("pod-"+strconv.Itoa(i), units)
	pod.UID, pod.Spec.NodeName = uid, benchNodeName(node)
	pod.Annotations = map[string]string{wire.GrantAnnotation: value}
	return pod
}

// benchPodSpec is a pod as it comes from the API server, of usual size.
func benchPodSpec(name string, units int64) *v1.Pod {
	amount := v1.ResourceList{v1.ResourceName(gcuMemory): *resource.NewQuantity(units, resource.DecimalSI)}
	pod := &v1.Pod{
		ObjectMeta: metav1.ObjectMeta{
			Name: name, Namespace: "team", UID: types.UID("uid-of-" + name), CreationTimestamp: metav1.Unix(1662450043, 0),
			Labels: map[string]string{"app": name, "team": "vision"},
			ManagedFields: []metav1.ManagedFieldsEntry{{Manager: "kubectl", Operation: metav1.ManagedFieldsOperationUpdate, APIVersion: "v1",
				FieldsV1: metav1.NewFieldsV1(`{"f:spec":{` + strings.Repeat(`"f:containers":{},`, 60) + `"f:x":{}}}`)}},
		},
		Spec: v1.PodSpec{Containers: []v1.Container{{
			Name: "main", Image: "registry.example/vision/serving:1.2.3",
			Resources: v1.ResourceRequirements{Limits: amount, Requests: amount},
		}}},
	}
	for i := range 20 {
		pod.Spec.Containers[0].Env = append(pod.Spec.Containers[0].Env, v1.EnvVar{Name: "VARIABLE_" + strconv.Itoa(i), Value: "some value of it"})
	}
	return pod
}

func benchRequest(b *testing.B, units int64) []byte {
	b.Helper()
	names := make([]string, benchNodes)
	for i := range names {
		names[i] = benchNodeName(i)
	}
	body, err := json.Marshal(extenderv1.ExtenderArgs{Pod: benchPodSpec("candidate", units), NodeNames: &names})
	if err != nil {
		b.Fatal(err)
	}
	return body
}

type noBinder struct{}

func (noBinder) Get(context.Context, string, string) (kube.Pod, error) {
	return kube.Pod{}, kube.ErrPodGone
}

func (noBinder) Bind(context.Context, accel.PodRef, string, map[string]string) error {
	return kube.ErrPodGone
}

// residentMB reads the resident memory of this process from the kernel.
func residentMB(b *testing.B) float64 {
	b.Helper()
	file, err := os.Open("/proc/self/status")
	if err != nil {
		b.Skipf("no resident memory to read: %v", err)
	}
	defer file.Close() //nolint:errcheck // opened for reading
	status, err := io.ReadAll(file)
	if err != nil {
		b.Fatal(err)
	}
	for line := range strings.Lines(string(status)) {
		if rest, ok := strings.CutPrefix(line, "VmRSS:"); ok {
			kb, err := strconv.ParseFloat(strings.Fields(rest)[0], 64)
			if err != nil {
				b.Fatal(err)
			}
			return kb / 1024
		}
	}
	b.Fatal("/proc/self/status has no VmRSS")
	return 0
}

// BenchmarkDecodeFilterArgs compares the reading of kube-scheduler's own form
// with that of any other.
func BenchmarkDecodeFilterArgs(b *testing.B) {
	body := benchRequest(b, 4)
	for name, decode := range map[string]func([]byte) (filterArgs, error){"fast": decodeFilterArgs, "any": decodeAnyFilterArgs} {
		b.Run(name, func(b *testing.B) {
			b.SetBytes(int64(len(body)))
			for b.Loop() {
				if _, err := decode(body); err != nil {
					b.Fatal(err)
				}
			}
		})
	}
}
