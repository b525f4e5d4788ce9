// Package abuse attacks every port of Divvy's programs that is open to pods, as pods
// would: from other addresses, with a real kube-scheduler and API server at work. It
// measures the memory of the programs while real pods are created and scheduled.
package abuse

import (
	"context"
	"errors"
	"fmt"
	"io"
	"os"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"sync"
	"text/tabwriter"
	"time"

	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/watch"
)

// Options say how much is tried.
type Options struct {
	// Nodes is how many nodes with 8 cards the cluster has.
	Nodes int
	// Each is how long each attack lasts; all together last three times as long.
	Each time.Duration
	// Only are words of attacks: those that have one in their port or name are tried. All
	// are when it is empty.
	Only []string
	// Control is divvy-control to attack instead of that of this checkout.
	Control string
	// ExtenderArgs are further flags of the extender.
	ExtenderArgs []string
	// Dir is an existing folder for all that is written.
	Dir string
	Out io.Writer
}

const (
	// most is how much of its limit a program may have.
	most = 0.6
	// betweenPods is how often a pod is created, for one kube-scheduler after the other.
	betweenPods = 250 * time.Millisecond
	// patience is how long a pod may take to be scheduled while the attack goes on.
	patience = 30 * time.Second
	// probeEvery, probeTimeout and probeFailures are how kubelet probes, but for the
	// interval, which is 10 s: it restarts a program after as many failures.
	probeEvery, probeTimeout, probeFailures = time.Second, 5 * time.Second, 3
)

// target is a port.
type target struct {
	name    string
	program program
	// address is host:port; probe and metrics are asked by others meanwhile, "" for nothing.
	address, probe, metrics string
	attacks                 []attack
}

// targets are all ports that are open to pods.
func (w *world) targets() []target {
	var names []string
	for n := range w.nodes.Count {
		names = append(names, w.nodes.NodeName(n))
	}
	url := func(scheme, port, path string) string { return scheme + "://" + w.ports[port] + path }
	h1 := []string{"http/1.1"}
	metrics := []attack{unread("/metrics", "/metrics", nil), slow(nil), stalled("/metrics", nil, 1<<20)}
	probes := append([]attack{unread("probes", "/healthz", nil)}, metrics...)
	extender := url("http", "extender plain", "/healthz")
	all := []target{
		{"extender plain", w.extenderProgram, w.ports["extender plain"], extender, "", []attack{
			unreadFilters(nil), slow(nil), stalled(filter, nil, 1<<20-1, 2<<20-1), invented(names), unread("inspect", inspect, nil),
			fromNode(unreadFilters(nil)), fromNode(slow(nil)), fromNode(stalled(filter, nil, 1<<20-1, 2<<20-1)),
		}},
		{"extender TLS", w.extenderProgram, w.ports["extender tls"], extender, "", []attack{
			unreadFilters(h1), slowHandshakes(), slow(h1), stalled(filter, h1, 1<<20-1, 2<<20-1), unread("inspect", inspect, h1),
			floods(inspect), bombs("/admission/config"), stalled("/admission/config", h1, 1<<20-1, 8<<20-1),
			unreadReviews("/admission/config"),
			fromNode(slowHandshakes()), fromNode(unreadFilters(h1)), fromNode(floods(inspect)),
		}},
		{"extender metrics", w.extenderProgram, w.ports["extender metrics"], extender, url("http", "extender metrics", "/metrics"),
			metrics},
		{"webhooks TLS", w.webhook, w.ports["webhook tls"], url("https", "webhook tls", "/healthz"), "", []attack{
			unreadReviews("/mutate"), slowHandshakes(), slow(h1), stalled("/mutate", h1, 1<<20-1, 8<<20-1), bombs("/mutate"),
			floods("/healthz"),
		}},
		{"webhooks metrics", w.webhook, w.ports["webhook metrics"], url("https", "webhook tls", "/healthz"),
			url("http", "webhook metrics", "/metrics"), metrics},
		{"divvy-node", w.nodeAgent, w.ports["node"], url("http", "node", "/healthz"), url("http", "node", "/metrics"), probes},
		{"divvy-node pool", w.poolAgent, w.ports["node pool"], url("http", "node pool", "/healthz"), url("http", "node pool", "/metrics"),
			probes},
	}
	const ofExtender = 3
	together := attack{name: "all of these at once", beside: all[:ofExtender]}
	return append(all, target{"extender", w.extenderProgram, "", extender, url("http", "extender metrics", "/metrics"), []attack{together}})
}

// Result is what one attack did.
type Result struct {
	Port, Attack string
	// Opened is how many connections were made, Ended how many of them the server ended.
	Opened, Ended int64
	// Before and Peak are the resident memory of the program in bytes, without pages of
	// files, which the kernel can drop; Limit is that of its container.
	Before, Peak, Limit int64
	// Pods were created meanwhile; Scheduled is how many of them were scheduled while the
	// attack went on, the slowest of them after Slowest.
	Pods, Scheduled int
	Slowest         time.Duration
	// Probes and Failed are those of kubelet, Restarts how often it would have restarted
	// the program, or the program ended.
	Probes, Failed, Restarts int
	// Scrapes are those of Prometheus that succeeded, of all that were tried.
	Scrapes, Scraped int
}

// misses says what is not as it should be.
func (r Result) misses() []string {
	var out []string
	miss := func(wrong bool, format string, args ...any) {
		if wrong {
			out = append(out, r.Port+", "+r.Attack+": "+fmt.Sprintf(format, args...))
		}
	}
	miss(float64(r.Peak) > most*float64(r.Limit), "%d MiB at the peak, more than %.0f %% of %d MiB", r.Peak>>20, most*100, r.Limit>>20)
	miss(r.Restarts > 0, "%d restarts", r.Restarts)
	miss(r.Scheduled < r.Pods, "%d of %d pods were scheduled", r.Scheduled, r.Pods)
	miss(r.Pods == 0, "no pod was created")
	miss(r.Opened == 0, "no connection was made")
	miss(r.Scrapes > 0 && r.Scraped == 0, "none of %d scrapes succeeded", r.Scrapes)
	return out
}

// Run attacks all ports one after the other, prints a table, and returns what was found.
// The error says what is not as it should be.
func Run(ctx context.Context, o Options) (results []Result, err error) {
	w := &world{o: o, dir: o.Dir}
	defer func() { err = errors.Join(err, w.stop()) }()
	if err := w.start(ctx); err != nil {
		return nil, err
	}
	watcher, err := w.watchPods(ctx)
	if err != nil {
		return nil, err
	}
	defer watcher.stop()
	fmt.Fprintf(o.Out, "%d nodes with 8 cards; each attack lasts %s and comes from %d addresses.\n", o.Nodes, o.Each, attackers)
	for _, t := range w.targets() {
		for _, a := range t.attacks {
			if !o.wants(t.name + " " + a.name) {
				continue
			}
			r, err := w.try(ctx, t, a, watcher)
			if err != nil {
				return results, fmt.Errorf("%s, %s: %w", t.name, a.name, err)
			}
			results = append(results, r)
			fmt.Fprintf(o.Out, "  %s: %s: %d MiB at the peak, %d of %d pods\n", t.name, a.name, r.Peak>>20, r.Scheduled, r.Pods)
			if r.Restarts > 0 {
				return results, errors.Join(write(o.Out, results), missed(results)) // nothing more can be learned
			}
		}
	}
	return results, errors.Join(write(o.Out, results), missed(results))
}

func (o Options) wants(name string) bool {
	return len(o.Only) == 0 || slices.ContainsFunc(o.Only, func(word string) bool { return strings.Contains(name, word) })
}

func missed(results []Result) error {
	var all []string
	for _, r := range results {
		all = append(all, r.misses()...)
	}
	if len(all) == 0 {
		return nil
	}
	return errors.New("not as it should be:\n  " + strings.Join(all, "\n  "))
}

func write(out io.Writer, results []Result) error {
	t := tabwriter.NewWriter(out, 0, 0, 2, ' ', 0)
	fmt.Fprintln(t, "\nPORT\tTRIED\tCONNECTIONS\tENDED BY US\tBEFORE\tPEAK\tLIMIT\tOF IT\tRESTARTS\tPROBES FAILED\tPODS SCHEDULED\tSLOWEST")
	mib := func(bytes int64) string { return fmt.Sprintf("%d MiB", bytes>>20) }
	for _, r := range results {
		fmt.Fprintf(t, "%s\t%s\t%d\t%d\t%s\t%s\t%s\t%.0f %%\t%d\t%d of %d\t%d of %d\t%.1f s\n", r.Port, r.Attack, r.Opened, r.Ended,
			mib(r.Before), mib(r.Peak), mib(r.Limit),
			100*float64(r.Peak)/float64(r.Limit), r.Restarts, r.Failed, r.Probes, r.Scheduled, r.Pods, r.Slowest.Seconds())
	}
	return t.Flush()
}

func (w *world) try(ctx context.Context, t target, a attack, watcher *watcher) (Result, error) {
	r := Result{Port: t.name, Attack: a.name, Limit: t.program.limit}
	usage, err := t.program.Usage()
	if err != nil {
		return r, err
	}
	r.Before = usage.Resident - usage.File
	// The peak is from now on.
	if err := os.WriteFile(filepath.Join("/proc", strconv.Itoa(t.program.PID()), "clear_refs"), []byte("5"), 0o200); err != nil {
		return r, fmt.Errorf("forget the peak of before: %w", err)
	}
	attacking, end := context.WithCancel(ctx)
	defer end()
	var group sync.WaitGroup
	var counted tally
	group.Go(func() { a.run(attacking, w.outside, t.address, &counted) })
	var failed, probes, restarts, scrapes, scraped int
	group.Go(func() { probes, failed, restarts = w.probe(attacking, t.probe) })
	if t.metrics != "" {
		group.Go(func() { scrapes, scraped = w.scrape(attacking, t.metrics) })
	}
	lasts := w.o.Each
	if a.beside != nil {
		lasts *= 3 // the machine is busy, and everything takes longer
	}
	pods, err := w.createPods(ctx, lasts)
	if err == nil {
		r.Pods = len(pods)
		r.Scheduled, r.Slowest = watcher.scheduled(ctx, pods)
	}
	usage, usageErr := t.program.Usage()
	end()
	group.Wait()
	r.Opened, r.Ended = counted.opened.Load(), counted.ended.Load()
	r.Probes, r.Failed, r.Restarts, r.Scrapes, r.Scraped = probes, failed, restarts, scrapes, scraped
	if !t.program.Running() {
		r.Restarts++
	} else if usageErr != nil {
		return r, usageErr
	}
	r.Peak = usage.Peak - usage.File
	if r.Restarts == 0 && err == nil {
		w.delete(ctx, pods)
		sleep(ctx, 2*time.Second) // what is left of the attack's connections ends
	}
	return r, err
}

// probe asks as kubelet does, and counts as it does.
func (w *world) probe(ctx context.Context, address string) (probes, failed, restarts int) {
	row := 0
	w.again(ctx, bystander, address, probeTimeout, probeEvery, func(err error) {
		probes++
		if err == nil {
			row = 0
		} else if failed, row = failed+1, row+1; row == probeFailures {
			restarts, row = restarts+1, 0
		}
	})
	return probes, failed, restarts
}

// scrape asks as Prometheus does.
func (w *world) scrape(ctx context.Context, address string) (scrapes, scraped int) {
	w.again(ctx, bystander-1, address, 10*time.Second, 2*time.Second, func(err error) {
		scrapes++
		if err == nil {
			scraped++
		}
	})
	return scrapes, scraped
}

// again asks an address, from another outside, again and again until the context ends.
func (w *world) again(ctx context.Context, from int, address string, timeout, every time.Duration, note func(error)) {
	client := w.from(from)
	for {
		bounded, cancel := context.WithTimeout(ctx, timeout)
		err := ask(bounded, client, address)
		cancel()
		if ctx.Err() != nil {
			return
		}
		note(err)
		sleep(ctx, every)
	}
}

// podNumber tells pods of all attacks apart.
var podNumber int

// createPods creates pods for as long, for one kube-scheduler after the other.
func (w *world) createPods(ctx context.Context, lasts time.Duration) (pods map[string]time.Time, err error) {
	pods = map[string]time.Time{}
	for began := time.Now(); time.Since(began) < lasts; {
		podNumber++
		name := fmt.Sprintf("pod-%05d", podNumber)
		pod := w.nodes.Pod(namespace, name, 2)
		pod.Spec.SchedulerName = w.schedulers[podNumber%len(w.schedulers)]
		pods[name] = time.Now()
		if _, err := w.client.CoreV1().Pods(namespace).Create(ctx, pod, metav1.CreateOptions{}); err != nil {
			if ctx.Err() != nil {
				return pods, err
			}
			fmt.Fprintf(w.o.Out, "  pod %s was not created: %v\n", name, err)
		}
		sleep(ctx, betweenPods)
	}
	return pods, ctx.Err()
}

func (w *world) delete(ctx context.Context, pods map[string]time.Time) {
	now := int64(0)
	for name := range pods {
		_ = w.client.CoreV1().Pods(namespace).Delete(ctx, name, metav1.DeleteOptions{GracePeriodSeconds: &now}) // one more or less
	}
}

// watcher notes when pods were bound.
type watcher struct {
	mu    sync.Mutex
	bound map[string]time.Time
	stop  func()
}

func (w *world) watchPods(ctx context.Context) (*watcher, error) {
	ctx, stop := context.WithCancel(ctx)
	events, err := w.client.CoreV1().Pods(namespace).Watch(ctx, metav1.ListOptions{})
	if err != nil {
		stop()
		return nil, fmt.Errorf("watch pods: %w", err)
	}
	v := &watcher{bound: map[string]time.Time{}}
	done := make(chan struct{})
	go func() {
		defer close(done)
		for event := range events.ResultChan() {
			if pod, ok := event.Object.(*corev1.Pod); ok && event.Type != watch.Deleted && pod.Spec.NodeName != "" {
				v.mu.Lock()
				if v.bound[pod.Name].IsZero() {
					v.bound[pod.Name] = time.Now()
				}
				v.mu.Unlock()
			}
		}
	}()
	v.stop = func() { stop(); <-done }
	return v, nil
}

// scheduled waits until all pods are bound, and returns how many are and how long the
// slowest took.
func (v *watcher) scheduled(ctx context.Context, pods map[string]time.Time) (n int, slowest time.Duration) {
	for deadline := time.Now().Add(patience); ; {
		n, slowest = 0, 0
		v.mu.Lock()
		for name, created := range pods {
			if at := v.bound[name]; !at.IsZero() {
				n++
				slowest = max(slowest, at.Sub(created))
			}
		}
		v.mu.Unlock()
		if n == len(pods) || time.Now().After(deadline) || ctx.Err() != nil {
			return n, slowest
		}
		sleep(ctx, 50*time.Millisecond)
	}
}
