package extender

import (
	"bufio"
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"net/http"
	"net/http/httptest"
	"os"
	"os/exec"
	"path/filepath"
	"runtime/debug"
	"slices"
	"strconv"
	"strings"
	"sync"
	"testing"
	"time"

	v1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/api/resource"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/client-go/tools/cache"
	extenderv1 "k8s.io/kube-scheduler/extender/v1"

	"github.com/divvy-gpu/divvy/internal/core/accel"
	"github.com/divvy-gpu/divvy/internal/core/demand"
	"github.com/divvy-gpu/divvy/internal/core/fragmentation"
	"github.com/divvy-gpu/divvy/internal/core/history"
	"github.com/divvy-gpu/divvy/internal/core/ledger"
	"github.com/divvy-gpu/divvy/internal/core/place"
	"github.com/divvy-gpu/divvy/internal/core/wire"
	"github.com/divvy-gpu/divvy/internal/platform/kube"
	"github.com/divvy-gpu/divvy/internal/scheduler/cluster"
	"github.com/divvy-gpu/divvy/internal/scheduler/decision"
)

// The size at which other extenders of this kind were measured.
const (
	benchNodes = 5000
	benchCards = 8
	benchPods  = 20_000
	// benchMorePods is a size that must make no difference.
	benchMorePods = 50_000
)

// BenchmarkHTTP measures filter and prioritize as kube-scheduler sees them: over a
// real connection to another process, with 5000 node names of 8 cards each, from
// sending the request to the last byte of the answer. Four processes are asked in
// turn, so that whatever else this machine does meets all of them:
//
//   - an extender with 20 000 pods in its books,
//   - one with 50 000,
//   - the floor, which decodes the same request and encodes the same answer with the
//     extender's own means, and looks up nothing in between: no extender with these
//     means can be faster,
//   - the floor of encoding/json, which does the same as most extenders do it, with
//     package k8s.io/kube-scheduler/extender/v1.
//
// It reports ratios, and the resident memory of the processes with the books.
func BenchmarkHTTP(b *testing.B) {
	few, many := startServer(b, serveBooks, benchPods), startServer(b, serveBooks, benchMorePods)
	own, plain := startServer(b, serveFloor, 0), startServer(b, serveJSONFloor, 0)
	for _, kind := range []struct {
		name, path string
		ask        int64 // units
	}{
		{"filter/fitsSome", "/filter", 12}, {"filter/fitsAll", "/filter", 1}, {"filter/fitsNone", "/filter", 20},
		{"prioritize/fitsSome", "/prioritize", 12},
	} {
		body := benchRequest(b, kind.ask)
		b.Run(kind.name, func(b *testing.B) {
			var answer bytes.Buffer
			few.call(b, http.MethodPost, kind.path, body, &answer)
			known := bytes.Clone(answer.Bytes())
			if bytes.Contains(known, []byte(`"Error":"`)) && !bytes.Contains(known, []byte(`"Error":""`)) {
				b.Fatalf("%s answered %.200s", kind.path, known)
			}
			for _, floor := range []*benchServer{own, plain} {
				floor.call(b, http.MethodPut, kind.path, known, &answer)
			}
			servers := []*benchServer{few, many, own, plain}
			took := make([][]time.Duration, len(servers))
			for b.Loop() {
				for i, s := range servers {
					took[i] = append(took[i], s.call(b, http.MethodPost, kind.path, body, &answer))
					if !sameSize(answer.Len(), len(known), i) {
						b.Fatalf("process %d answered %d bytes, the first one %d", i, answer.Len(), len(known))
					}
				}
			}
			b.StopTimer()
			fewTook, manyTook, ownTook, plainTook := times(took[0]), times(took[1]), times(took[2]), times(took[3])
			fewMB, manyMB := few.residentMB(b), many.residentMB(b)
			b.ReportMetric(0, "ns/op") // of four calls, which nobody asked for
			b.ReportMetric(fewTook.p50, "p50-ms")
			b.ReportMetric(fewTook.p99, "p99-ms")
			b.ReportMetric(ownTook.p99, "floor-p99-ms")
			b.ReportMetric(fewTook.p50/ownTook.p50, "x-floor-p50")
			b.ReportMetric(fewTook.mean/ownTook.mean, "x-floor-mean")
			b.ReportMetric(fewTook.p50/plainTook.p50, "x-json-p50")
			b.ReportMetric(manyTook.p50/fewTook.p50, "x-50000-pods")
			b.ReportMetric(fewMB, "resident-MB")
			b.ReportMetric(manyMB, "resident-50000-MB")
			b.Logf("%s of %d nodes, %d pods: p50 %.2f ms, %.2f times the floor (at most 1.5), mean %.2f times (at most 1.5), %.2f times "+
				"that of encoding/json (at most 1.1); p99 %.1f ms (at most 10), of the floor %.1f ms; %.0f MB (at most 150); "+
				"with %d pods p50 %.2f times (0.9 to 1.1), %.0f MB (at most 200)",
				kind.name, benchNodes, benchPods, fewTook.p50, fewTook.p50/ownTook.p50, fewTook.mean/ownTook.mean,
				fewTook.p50/plainTook.p50,
				fewTook.p99, ownTook.p99, fewMB, benchMorePods, manyTook.p50/fewTook.p50, manyMB)
		})
	}
}

// BenchmarkHTTPPolicies is BenchmarkHTTP for one request by each placement policy,
// with 20 000 pods. That of fragmentation has a prior and renews its prices every
// second, as in a cluster where pods come and go.
func BenchmarkHTTPPolicies(b *testing.B) {
	floor := startServer(b, serveFloor, 0)
	policies := []string{serveBooks, serveSpread, serveFragmentation}
	var servers []*benchServer
	for _, policy := range policies {
		servers = append(servers, startServer(b, policy, benchPods))
	}
	for _, path := range []string{"/filter", "/prioritize"} {
		body := benchRequest(b, 12)
		b.Run(path[1:], func(b *testing.B) {
			var answer bytes.Buffer
			servers[0].call(b, http.MethodPost, path, body, &answer)
			floor.call(b, http.MethodPut, path, bytes.Clone(answer.Bytes()), &answer)
			took, least := make([][]time.Duration, len(servers)), []time.Duration(nil)
			for b.Loop() {
				for i, s := range servers {
					took[i] = append(took[i], s.call(b, http.MethodPost, path, body, &answer))
				}
				least = append(least, floor.call(b, http.MethodPost, path, body, &answer))
			}
			b.StopTimer()
			b.ReportMetric(0, "ns/op") // of four calls, which nobody asked for
			of := times(least)
			for i, policy := range policies {
				t := times(took[i])
				b.ReportMetric(t.p50/of.p50, policy+"-x-floor-p50")
				b.Logf("%s by %s: p50 %.2f ms, %.2f times the floor (at most 1.5), mean %.2f times; p99 %.1f ms (at most 10), of the "+
					"floor %.1f ms; %.0f MB",
					path[1:], policy, t.p50, t.p50/of.p50, t.mean/of.mean, t.p99, of.p99, servers[i].residentMB(b))
			}
		})
	}
}

// sameSize reports whether a process answered what the first one did. The one with
// more pods has room on other nodes, but for fewer or more bytes it has a reason.
func sameSize(got, want, process int) bool {
	if process == 1 {
		return got > want/2 && got < want*2
	}
	return got >= want-1 && got <= want+1 // json.Encoder ends with a newline
}

// taken are milliseconds.
type taken struct{ p50, p99, mean float64 }

func times(all []time.Duration) taken {
	slices.Sort(all)
	var sum time.Duration
	for _, one := range all {
		sum += one
	}
	ms := func(d time.Duration) float64 { return d.Seconds() * 1e3 }
	return taken{p50: ms(all[len(all)/2]), p99: ms(all[len(all)*99/100]), mean: ms(sum) / float64(len(all))}
}

// What a process of the benchmark serves.
const (
	serveBooks         = "binpack" // an extender with the default policy
	serveSpread        = "spread"
	serveFragmentation = fragmentation.Name
	serveFloor         = "floor"
	serveJSONFloor     = "json"
)

// benchServer is a process of this program that serves.
type benchServer struct {
	pid    int
	url    string
	client *http.Client
}

// benchEnv says to this program that it is such a process, and which: see TestMain.
const benchEnv = "DIVVY_EXTENDER_BENCHMARK"

func startServer(b *testing.B, what string, pods int) *benchServer {
	b.Helper()
	cmd := exec.CommandContext(context.WithoutCancel(b.Context()), os.Args[0])
	cmd.Env = append(os.Environ(), fmt.Sprintf("%s=%s %d", benchEnv, what, pods))
	cmd.Stderr = os.Stderr
	stdin, err := cmd.StdinPipe() // it ends when this is closed
	if err != nil {
		b.Fatal(err)
	}
	stdout, err := cmd.StdoutPipe()
	if err != nil {
		b.Fatal(err)
	}
	if err := cmd.Start(); err != nil {
		b.Fatal(err)
	}
	b.Cleanup(func() {
		if err := errors.Join(stdin.Close(), cmd.Wait()); err != nil {
			b.Error(err)
		}
	})
	url, err := bufio.NewReader(stdout).ReadString('\n')
	if err != nil {
		b.Fatalf("the process that serves %s: %v", what, err)
	}
	return &benchServer{pid: cmd.Process.Pid, url: strings.TrimSpace(url), client: &http.Client{Transport: &http.Transport{}}}
}

// call asks, and returns how long it took.
func (s *benchServer) call(b *testing.B, method, path string, body []byte, answer *bytes.Buffer) time.Duration {
	b.Helper()
	start := time.Now()
	req, err := http.NewRequestWithContext(b.Context(), method, s.url+Prefix+path, bytes.NewReader(body))
	if err != nil {
		b.Fatal(err)
	}
	req.Header.Set("Content-Type", "application/json")
	resp, err := s.client.Do(req)
	if err != nil {
		b.Fatal(err)
	}
	answer.Reset()
	_, err = answer.ReadFrom(resp.Body)
	if err := errors.Join(err, resp.Body.Close()); err != nil {
		b.Fatal(err)
	}
	took := time.Since(start)
	if resp.StatusCode != http.StatusOK {
		b.Fatalf("%s %s: %s: %s", method, path, resp.Status, answer)
	}
	return took
}

// residentMB reads the resident memory of the process from the kernel.
func (s *benchServer) residentMB(b *testing.B) float64 {
	b.Helper()
	status, err := os.ReadFile(fmt.Sprintf("/proc/%d/status", s.pid))
	if err != nil {
		b.Fatalf("no resident memory to read: %v", err)
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
	b.Fatal("/proc has no VmRSS")
	return 0
}

// serveBenchmark is what a process of the benchmark does: it writes where it serves,
// and serves until its input ends.
func serveBenchmark(what string) error {
	kind, count, _ := strings.Cut(what, " ")
	pods, err := strconv.Atoi(count)
	if err != nil {
		return err
	}
	var handler http.Handler
	switch kind {
	case serveBooks, serveSpread, serveFragmentation:
		ctx, cancel := context.WithCancel(context.Background())
		var keeps sync.WaitGroup
		defer keeps.Wait()
		defer cancel()
		var renew func()
		if handler, renew, err = benchHandler(kind, pods); err != nil {
			return err
		}
		keeps.Go(func() {
			for ctx.Err() == nil {
				renew()
				select {
				case <-ctx.Done():
				case <-time.After(time.Second):
				}
			}
		})
	case serveFloor:
		handler = &floor{read: readOwn, write: writeOwn}
	case serveJSONFloor:
		handler = &floor{read: readJSON, write: writeJSONAnswer}
	}
	server := httptest.NewServer(handler)
	defer server.Close()
	fmt.Println(server.URL)
	_, err = io.Copy(io.Discard, os.Stdin)
	return err
}

// floor decodes requests and encodes an answer that it was told by PUT.
type floor struct {
	// read decodes a request to the names of its nodes.
	read func(body []byte) (filterArgs, error)
	// write encodes the answer.
	write func(out []byte, args filterArgs, known *knownAnswer) ([]byte, error)

	known knownAnswer // one client asks one thing after the other
}

// knownAnswer is one of the two, as package extenderv1 and as this package has it.
type knownAnswer struct {
	filter  *extenderv1.ExtenderFilterResult
	result  decision.Answer
	ratings extenderv1.HostPriorityList
	scores  []int64
}

// ServeHTTP answers POST, and is told the next answer by PUT.
func (f *floor) ServeHTTP(w http.ResponseWriter, r *http.Request) {
	body, out := getBuffer(), getBuffer()
	defer putBuffer(body)
	defer putBuffer(out)
	into := bytes.NewBuffer((*body)[:0])
	into.Grow(int(r.ContentLength) + bytes.MinRead)
	_, err := into.ReadFrom(r.Body)
	*body = into.Bytes()
	if err == nil && r.Method == http.MethodPut {
		f.known, err = learn(*body)
	} else if err == nil {
		var args filterArgs
		if args, err = f.read(*body); err == nil {
			*out, err = f.write((*out)[:0], args, &f.known)
		}
	}
	if err != nil {
		http.Error(w, err.Error(), http.StatusInternalServerError)
		return
	}
	writeJSON(w, http.StatusOK, *out)
}

func learn(answer []byte) (knownAnswer, error) {
	var k knownAnswer
	if answer[0] == '[' {
		err := json.Unmarshal(answer, &k.ratings)
		for _, one := range k.ratings {
			k.scores = append(k.scores, one.Score)
		}
		return k, err
	}
	if err := json.Unmarshal(answer, &k.filter); err != nil {
		return k, err
	}
	fits := map[string]bool{}
	for _, name := range *k.filter.NodeNames {
		fits[name] = true
	}
	for i := range benchNodes {
		name := benchNodeName(i)
		if fits[name] {
			k.result.Fits = append(k.result.Fits, i)
		} else if reason, ok := k.filter.FailedNodes[name]; ok {
			k.result.Refusals = append(k.result.Refusals, decision.Refusal{Node: name, Reason: reason})
		} else {
			k.result.Refusals = append(k.result.Refusals, decision.Refusal{Node: name, Reason: k.filter.FailedAndUnresolvableNodes[name],
				Unresolvable: true})
		}
	}
	return k, nil
}

func readOwn(body []byte) (filterArgs, error) { return decodeFilterArgs(body) }

func writeOwn(out []byte, args filterArgs, known *knownAnswer) ([]byte, error) {
	if known.filter == nil {
		return appendPriorities(out, args.names, known.scores), nil
	}
	return appendFilterResult(out, args, &known.result), nil
}

func readJSON(body []byte) (filterArgs, error) {
	var args extenderv1.ExtenderArgs
	if err := json.Unmarshal(body, &args); err != nil {
		return filterArgs{}, err
	}
	return filterArgs{pod: args.Pod, names: *args.NodeNames}, nil
}

func writeJSONAnswer(_ []byte, _ filterArgs, known *knownAnswer) ([]byte, error) {
	if known.filter == nil {
		return json.Marshal(known.ratings)
	}
	return json.Marshal(known.filter)
}

// benchHandler is an extender whose books are filled as a reflector fills them, from
// whole objects.
func benchHandler(policy string, pods int) (handler http.Handler, renew func(), err error) {
	options, renew := ledger.Options{}, func() {}
	var books *ledger.Ledger
	switch policy {
	case serveSpread:
		options.Policy = place.Spread
	case serveFragmentation:
		var prior []demand.Count
		for _, units := range []accel.Units{1, 2, 4, 8, 12, 16} {
			prior = append(prior, demand.Count{Kind: demand.Kind{Units: units, Devices: 1}, Pods: 100})
		}
		prices := fragmentation.New(demand.Options{Prior: prior})
		options.Policy = prices
		renew = func() {
			prices.Renew(books.Each(gcuMemory))
			books.Refresh(1)
		}
	}
	books = ledger.New(options)
	dir, err := os.MkdirTemp("", "divvy-bench-")
	if err != nil {
		return nil, nil, err
	}
	defer os.RemoveAll(dir) //nolint:errcheck // the key was read
	file := filepath.Join(dir, "key")
	if err := os.WriteFile(file, bytes.Repeat([]byte("k"), 32), 0o600); err != nil {
		return nil, nil, err
	}
	keys := kube.NewKeyring(file)
	signer, err := keys.Signer()
	if err != nil {
		return nil, nil, err
	}
	resources := []accel.Resource{gcuMemory}
	follower := cluster.NewState(cluster.Config{Ledger: books, Grants: keys, Resources: resources})

	fill := func(store cache.TransformingStore, n int, object func(i int) (any, error)) error {
		items := make([]any, n)
		for i := range items {
			whole, err := object(i)
			if err != nil {
				return err
			}
			if items[i], err = store.Transformer()(whole); err != nil {
				return err
			}
		}
		return store.Replace(items, "")
	}
	if err := fill(follower.Nodes(), benchNodes, benchNode); err != nil {
		return nil, nil, err
	}
	if err := fill(follower.Pods(), pods, func(i int) (any, error) { return benchPod(i, signer) }); err != nil {
		return nil, nil, err
	}
	e, err := New(Config{Version: "bench", Config: decision.Config{
		Ledger: books, Cluster: follower, Binder: noBinder{}, Signer: func() (*wire.Signer, error) { return signer, nil },
		Ready: func() error { return nil }, Resources: resources,
		Recorder: &decision.Recorder{Ledger: books, Log: history.NewLog(time.Now()), Now: time.Now},
	}})
	if err != nil {
		return nil, nil, err
	}
	debug.FreeOSMemory() // what making the objects took is not the extender's
	renew()
	if policy == serveFragmentation && options.Policy.Epoch() == 0 {
		return nil, nil, errors.New("the policy has made no prices")
	}
	return e.Handler(), renew, nil
}

func benchNodeName(i int) string { return fmt.Sprintf("accelerator-node-%04d", i) }

func benchNode(i int) (any, error) {
	units := accel.Units(16)
	if i%2 == 1 {
		units = 8 // every other node has smaller cards, so that some requests fit some nodes
	}
	inv := accel.Inventory{Resource: gcuMemory, Unit: "1"}
	for c := range benchCards {
		inv.Shares = append(inv.Shares, accel.Share{Units: units, Device: accel.Device{
			Index: c, ID: accel.DeviceID(fmt.Sprintf("U5300%04d%02d", i, c)), Model: "S60", MemoryBytes: int64(units) << 30,
			NUMANode: c / 4,
		}})
	}
	annotation, err := wire.EncodeInventory([]accel.Inventory{inv})
	return &metav1.PartialObjectMetadata{ObjectMeta: metav1.ObjectMeta{
		Name: benchNodeName(i), Annotations: map[string]string{wire.InventoryAnnotation: annotation},
	}}, err
}

// benchPod is one of four pods on each node, on cards that differ from node to
// node.
func benchPod(i int, signer *wire.Signer) (*v1.Pod, error) {
	node, uid := i%benchNodes, types.UID(fmt.Sprintf("00000000-0000-0000-0000-%012d", i))
	card, units := (i/benchNodes+node)%benchCards, int64(1+(node*7+i/benchNodes)%8)
	value, err := signer.EncodeGrant(string(uid), accel.Grant{
		Resource: gcuMemory, Node: benchNodeName(node), Device: accel.DeviceID(fmt.Sprintf("U5300%04d%02d", node, card)),
		Index: card, DeviceUnits: 16, Units: accel.Units(units), At: time.Unix(1, 0), Confirmed: true,
	})
	pod := benchPodSpec("pod-"+strconv.Itoa(i), units)
	pod.UID, pod.Spec.NodeName = uid, benchNodeName(node)
	pod.Annotations = map[string]string{wire.GrantAnnotation: value}
	return pod, err
}

// benchPodSpec is a pod as it comes from the API server, of usual size.
func benchPodSpec(name string, units int64) *v1.Pod {
	amount := v1.ResourceList{v1.ResourceName(gcuMemory): *resource.NewQuantity(units, resource.DecimalSI)}
	pod := &v1.Pod{
		ObjectMeta: metav1.ObjectMeta{
			Name: name, Namespace: "team", UID: types.UID("uid-of-" + name), CreationTimestamp: metav1.Unix(1662450043, 0),
			Labels: map[string]string{"app": name, "team": "vision"},
			ManagedFields: []metav1.ManagedFieldsEntry{{Manager: "kubectl", Operation: metav1.ManagedFieldsOperationUpdate,
				APIVersion: "v1",
				FieldsV1:   metav1.NewFieldsV1(`{"f:spec":{` + strings.Repeat(`"f:containers":{},`, 60) + `"f:x":{}}}`)}},
		},
		Spec: v1.PodSpec{Containers: []v1.Container{{
			Name: "main", Image: "registry.example/vision/serving:1.2.3",
			Resources: v1.ResourceRequirements{Limits: amount, Requests: amount},
		}}},
	}
	for i := range 20 {
		pod.Spec.Containers[0].Env = append(pod.Spec.Containers[0].Env, v1.EnvVar{Name: "VARIABLE_" + strconv.Itoa(i),
			Value: "some value of it"})
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

func (noBinder) Get(context.Context, string, string) (cluster.Pod, error) {
	return cluster.Pod{}, cluster.ErrPodGone
}

func (noBinder) Bind(context.Context, accel.PodRef, string, map[string]string) error {
	return cluster.ErrPodGone
}

// BenchmarkDecodeFilterArgs reads requests of 5000 nodes, and what kube-scheduler asks of
// 1000.
func BenchmarkDecodeFilterArgs(b *testing.B) {
	names := make([]string, 420)
	for i := range names {
		names[i] = benchNodeName(i)
	}
	some, err := json.Marshal(extenderv1.ExtenderArgs{Pod: benchWholePod(), NodeNames: &names})
	if err != nil {
		b.Fatal(err)
	}
	for nodes, body := range map[string][]byte{"5000": benchRequest(b, 4), "420": some} {
		b.Run(nodes, func(b *testing.B) {
			b.SetBytes(int64(len(body)))
			for b.Loop() {
				if _, err := decodeFilterArgs(body); err != nil {
					b.Fatal(err)
				}
			}
		})
	}
}

// benchWholePod is a pod with all that the API server adds to one of a Deployment,
// as kube-scheduler sends it, which leaves out the managed fields.
func benchWholePod() *v1.Pod {
	amounts := func(cpu, memory string, units int64) v1.ResourceList {
		list := v1.ResourceList{v1.ResourceCPU: resource.MustParse(cpu), v1.ResourceMemory: resource.MustParse(memory)}
		if units > 0 {
			list[v1.ResourceName(gcuMemory)] = *resource.NewQuantity(units, resource.DecimalSI)
		}
		return list
	}
	pod := benchPodSpec("serving-7d9c5f6b8d-x2x7k", 4)
	pod.ManagedFields, pod.GenerateName, pod.ResourceVersion = nil, "serving-7d9c5f6b8d-", "123456"
	pod.Labels["pod-template-hash"] = "7d9c5f6b8d"
	pod.Annotations = map[string]string{"kubectl.kubernetes.io/restartedAt": "2026-01-02T03:04:05Z"}
	pod.OwnerReferences = []metav1.OwnerReference{{
		APIVersion: "apps/v1", Kind: "ReplicaSet", Name: "serving-7d9c5f6b8d", UID: "5d7a8a9c-0f3e-4a57-9c63-5b9d2c1e7f40",
		Controller: new(true), BlockOwnerDeletion: new(true),
	}}
	spec := &pod.Spec
	spec.Containers[0].Resources = v1.ResourceRequirements{Requests: amounts("2", "4Gi", 4), Limits: amounts("4", "8Gi", 4)}
	spec.Containers[0].Env = spec.Containers[0].Env[:4]
	spec.Containers = append(spec.Containers, v1.Container{
		Name: "metrics", Image: "registry.example/vision/metrics:1.2.3",
		Ports:     []v1.ContainerPort{{Name: "http", ContainerPort: 9090, Protocol: v1.ProtocolTCP}},
		Resources: v1.ResourceRequirements{Requests: amounts("50m", "64Mi", 0), Limits: amounts("100m", "128Mi", 0)},
	})
	const token = "kube-api-access-8m2xk"
	for i := range spec.Containers {
		c := &spec.Containers[i]
		c.VolumeMounts = []v1.VolumeMount{{Name: token, ReadOnly: true, MountPath: "/var/run/secrets/kubernetes.io/serviceaccount"}}
		c.TerminationMessagePath, c.TerminationMessagePolicy = "/dev/termination-log", v1.TerminationMessageReadFile
		c.ImagePullPolicy = v1.PullIfNotPresent
	}
	spec.Volumes = []v1.Volume{{Name: token, VolumeSource: v1.VolumeSource{Projected: &v1.ProjectedVolumeSource{
		DefaultMode: new(int32(0o644)),
		Sources: []v1.VolumeProjection{
			{ServiceAccountToken: &v1.ServiceAccountTokenProjection{ExpirationSeconds: new(int64(3607)), Path: "token"}},
			{ConfigMap: &v1.ConfigMapProjection{
				LocalObjectReference: v1.LocalObjectReference{Name: "kube-root-ca.crt"},
				Items:                []v1.KeyToPath{{Key: "ca.crt", Path: "ca.crt"}},
			}},
			{DownwardAPI: &v1.DownwardAPIProjection{Items: []v1.DownwardAPIVolumeFile{{
				Path: "namespace", FieldRef: &v1.ObjectFieldSelector{APIVersion: "v1", FieldPath: "metadata.namespace"},
			}}}},
		},
	}}}}
	spec.RestartPolicy, spec.DNSPolicy, spec.SchedulerName = v1.RestartPolicyAlways, v1.DNSClusterFirst, v1.DefaultSchedulerName
	spec.ServiceAccountName, spec.DeprecatedServiceAccount = "default", "default"
	spec.TerminationGracePeriodSeconds, spec.SecurityContext = new(int64(30)), &v1.PodSecurityContext{}
	spec.Priority, spec.EnableServiceLinks, spec.PreemptionPolicy = new(int32(0)), new(true), new(v1.PreemptLowerPriority)
	for _, key := range []string{v1.TaintNodeNotReady, v1.TaintNodeUnreachable} {
		spec.Tolerations = append(spec.Tolerations, v1.Toleration{
			Key: key, Operator: v1.TolerationOpExists, Effect: v1.TaintEffectNoExecute, TolerationSeconds: new(int64(300)),
		})
	}
	pod.Status = v1.PodStatus{Phase: v1.PodPending, QOSClass: v1.PodQOSBurstable}
	return pod
}
