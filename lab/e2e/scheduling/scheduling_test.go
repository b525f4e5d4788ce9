//go:build e2e

package scheduling

import (
	"context"
	"fmt"
	"net/http"
	"net/http/httputil"
	"net/url"
	"strings"
	"sync/atomic"
	"testing"
	"time"

	"golang.org/x/sync/errgroup"
	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/client-go/rest"
	"k8s.io/client-go/tools/clientcmd"
	clientcmdapi "k8s.io/client-go/tools/clientcmd/api"

	"github.com/divvy-gpu/divvy/lab/internal/simnodes"
)

// Nodes join while pods wait for them, a hundred a second, and then all of them lose
// the label at once by which they share their cards, and get it back.
func TestNodesJoinAndChangeLabels(t *testing.T) {
	const nodes, perNode = 300, 2
	w := newWorld(t, simnodes.Group{Count: nodes, Cards: 2, Units: 8})
	e := w.extender()
	w.scheduler("default-scheduler", e)
	w.make("default-scheduler", "early", nodes, 8)
	tick := time.NewTicker(10 * time.Millisecond)
	defer tick.Stop()
	group, ctx := errgroup.WithContext(t.Context())
	for number := range nodes {
		<-tick.C
		group.Go(func() error {
			node, err := w.nodes.Node(number)
			if err == nil {
				_, err = w.client.CoreV1().Nodes().Create(ctx, node, metav1.CreateOptions{})
			}
			return err
		})
	}
	if err := group.Wait(); err != nil {
		t.Fatal(err)
	}
	w.bound(nodes)

	// label sets the label of all nodes, or takes it away.
	label := func(value string) {
		group, ctx := errgroup.WithContext(t.Context())
		group.SetLimit(64)
		for number := range nodes {
			group.Go(func() error {
				patch := fmt.Sprintf(`{"metadata":{"labels":{%q:%s}}}`, simnodes.ShareLabel, value)
				_, err := w.client.CoreV1().Nodes().Patch(ctx, w.nodes.NodeName(number), types.MergePatchType, []byte(patch),
					metav1.PatchOptions{})
				return err
			})
		}
		if err := group.Wait(); err != nil {
			t.Fatal(err)
		}
	}
	// publishing waits until the extender counts so many nodes.
	publishing := func(count int) {
		w.eventually(fmt.Sprintf("the extender counts %d nodes", count), func(ctx context.Context) error {
			text, err := e.Metrics(ctx)
			if err != nil {
				return err
			}
			var value string
			for line := range strings.Lines(text) {
				if rest, ok := strings.CutPrefix(line, `divvy_extender_books_nodes{state="good"} `); ok {
					value = strings.TrimSpace(rest)
				}
			}
			if value != fmt.Sprint(count) {
				return fmt.Errorf("it counts %q", value)
			}
			return nil
		})
	}
	publishing(nodes)
	label("null")
	publishing(0)
	w.make("default-scheduler", "late", 20, 8)
	w.eventually("all late pods were refused", func(context.Context) error {
		refused := 0
		for _, pod := range w.pods() {
			for _, condition := range pod.Status.Conditions {
				if strings.HasPrefix(pod.Name, "late") && condition.Type == corev1.PodScheduled &&
					condition.Reason == corev1.PodReasonUnschedulable {
					refused++
				}
			}
		}
		if refused != 20 {
			return fmt.Errorf("%d were", refused)
		}
		return nil
	})
	label(`"true"`)
	publishing(nodes)
	w.make("default-scheduler", "last", nodes*perNode-nodes-20, 8)
	used := w.bound(nodes * perNode) // the late ones, too; what was held before is not given again
	if len(used) != nodes*perNode {
		t.Errorf("%d devices are in use, all %d should be", len(used), nodes*perNode)
	}
}

// Two kube-schedulers fill the same cards at once. What one has placed the other
// does not know for a while; no card is given out twice, and no room is lost.
func TestTwoSchedulers(t *testing.T) {
	const nodes, cards, each = 10, 4, 80
	w := newWorld(t, simnodes.Group{Count: nodes, Cards: cards, Units: 8})
	if err := w.nodes.Create(t.Context(), w.client); err != nil {
		t.Fatal(err)
	}
	e := w.extender()
	w.scheduler("left", e)
	w.scheduler("right", e)
	group, _ := errgroup.WithContext(t.Context())
	for _, name := range []string{"left", "right"} {
		group.Go(func() error { w.make(name, name, each, 2); return nil })
	}
	if err := group.Wait(); err != nil {
		t.Fatal(err)
	}
	for device, units := range w.bound(2 * each) {
		if units != 8 {
			t.Errorf("device %s holds %d units, all 8 are asked for", device, units)
		}
	}
}

// The API server takes two seconds for each bind. Binds wait beside each other, also
// on one node, and no pod is placed twice or wrongly.
func TestSlowServer(t *testing.T) {
	const nodes, pods, slow = 4, 500, 2 * time.Second
	w := newWorld(t, simnodes.Group{Count: nodes, Cards: 8, Units: 16})
	if err := w.nodes.Create(t.Context(), w.client); err != nil {
		t.Fatal(err)
	}
	server := w.slowServer(slow)
	e := w.extender("--kubeconfig=" + server.kubeconfig)
	w.scheduler("default-scheduler", e)
	start := time.Now()
	w.make("default-scheduler", "pod", pods, 1)
	used := w.bound(pods)
	most, sum := server.most.Load(), 0
	for _, units := range used {
		sum += int(units)
	}
	t.Logf("%d pods were bound in %.0f s, up to %d binds were under way at once", pods, time.Since(start).Seconds(), most)
	if sum != pods {
		t.Errorf("%d units are held, %d were asked for", sum, pods)
	}
	// One bind at a time for each node would have had no more under way than nodes.
	if most <= 2*nodes {
		t.Errorf("no more than %d binds were under way at once on %d nodes: something makes them wait for each other", most, nodes)
	}
}

// slowServer stands before the API server.
type slowServer struct {
	kubeconfig string
	most       atomic.Int64 // binds under way at once
}

// slowServer starts a proxy that keeps each bind back for a while.
func (w *world) slowServer(wait time.Duration) *slowServer {
	w.Helper()
	s := &slowServer{}
	var now atomic.Int64
	s.kubeconfig = w.before("slow", func(proxy http.Handler) http.Handler {
		return http.HandlerFunc(func(out http.ResponseWriter, r *http.Request) {
			if strings.HasSuffix(r.URL.Path, "/binding") {
				for under := now.Add(1); ; {
					most := s.most.Load()
					if under <= most || s.most.CompareAndSwap(most, under) {
						break
					}
				}
				defer now.Add(-1)
				select {
				case <-time.After(wait):
				case <-r.Context().Done():
				}
			}
			proxy.ServeHTTP(out, r)
		})
	})
	return s
}

// before starts a proxy before the API server, which wrap changes, and returns the
// path of an administrator's kubeconfig file for it.
func (w *world) before(name string, wrap func(proxy http.Handler) http.Handler) (kubeconfig string) {
	w.Helper()
	config, err := w.plane.RESTConfig()
	if err != nil {
		w.Fatal(err)
	}
	transport, err := rest.TransportFor(config)
	if err != nil {
		w.Fatal(err)
	}
	target, err := url.Parse(config.Host)
	if err != nil {
		w.Fatal(err)
	}
	address := w.serve(wrap(&httputil.ReverseProxy{
		Rewrite:       func(r *httputil.ProxyRequest) { r.SetURL(target) },
		Transport:     transport,
		FlushInterval: -1, // watches
		ErrorHandler: func(out http.ResponseWriter, _ *http.Request, _ error) {
			out.WriteHeader(http.StatusBadGateway) // the client, or the API server, hung up
		},
	}))
	file := clientcmdapi.NewConfig()
	file.Clusters[name] = &clientcmdapi.Cluster{Server: address}
	file.Contexts[name] = &clientcmdapi.Context{Cluster: name}
	file.CurrentContext = name
	kubeconfig = w.plane.Dir() + "/" + name + ".conf"
	if err := clientcmd.WriteToFile(*file, kubeconfig); err != nil {
		w.Fatal(err)
	}
	return kubeconfig
}
