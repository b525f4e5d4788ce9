package ui

import (
	"context"
	"fmt"
	"slices"
	"strings"
	"sync"
	"sync/atomic"
	"time"

	v1 "k8s.io/api/core/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	coreinformers "k8s.io/client-go/informers/core/v1"
	"k8s.io/client-go/kubernetes"
	"k8s.io/klog/v2"

	"github.com/divvy-gpu/divvy/internal/core/wire"
	"github.com/divvy-gpu/divvy/internal/platform/informers"
	"github.com/divvy-gpu/divvy/internal/platform/kube"
	"github.com/divvy-gpu/divvy/internal/report/inspect/nodeusage"
	"github.com/divvy-gpu/divvy/internal/report/ui/picture"
	"github.com/divvy-gpu/divvy/internal/report/why"
)

const (
	// checkEvery is the pause between checks that the picture is current, and measureEvery the pause
	// between readings of the use of devices, while a page is open.
	checkEvery   = 10 * time.Second
	measureEvery = 30 * time.Second
	// settle is how long a page is left to draw its first picture.
	settle = time.Second
	// look is the interval at which loops check whether they may begin.
	look = 250 * time.Millisecond
	// askLimit bounds one request.
	askLimit = 10 * time.Second
)

// Options say what a Feed follows.
type Options struct {
	Client kubernetes.Interface
	// Cluster names the cluster for the person: the context of kubectl.
	Cluster string
	// Namespace is the one whose pods are shown if those of all may not be listed.
	Namespace string
	// Usage reads what is in use on nodes; nil if that is not shown.
	Usage func(ctx context.Context, nodes []string) (nodeusage.Reports, error)
	Now   func() time.Time
}

// Status is what the page says of the reading itself.
type Status struct {
	Cluster string `json:"cluster"`
	// Reading is what has not been read yet, "" once all has.
	Reading string `json:"reading,omitempty"`
	// Notes are sentences about what is missing.
	Notes []string `json:"notes,omitempty"`
	// Stale is why the picture may be old, "" if it is not.
	Stale string `json:"stale,omitempty"`
	// Usage is true if the use of devices is measured.
	Usage bool `json:"usage,omitempty"`
}

func (s *Status) equal(o *Status) bool {
	return s.Reading == o.Reading && s.Stale == o.Stale && slices.Equal(s.Notes, o.Notes)
}

// Feed follows a cluster with the rights of one person.
type Feed struct {
	options   Options
	cluster   *picture.Cluster
	informers informers.Group
	// missing are the sources of a why.Snapshot that may not be read.
	missing []why.Failure
	rights  []string // notes about missing
	// followed are the resources that the person could list and watch, with their namespaces.
	followed []followed
	// pages is how many streams are open.
	pages atomic.Int32

	mu           sync.Mutex // guards what follows
	stale, usage string

	explainer explainer
}

// followed is a resource in a namespace, "" for all.
type followed struct{ resource, namespace string }

// NewFeed asks which rights the person has. It fails if the API server does not answer.
func NewFeed(ctx context.Context, o Options) (*Feed, error) {
	f := &Feed{options: o}
	ctx, cancel := context.WithTimeout(ctx, askLimit)
	defer cancel()
	nodes, err := f.mayFollow(ctx, "nodes", "")
	if err != nil {
		return nil, err
	}
	f.cluster = picture.NewCluster(!nodes)
	if nodes {
		f.informers.Add("nodes", coreinformers.NewNodeInformer(o.Client, 0, nil), trim, f.nodeChanged)
		f.followed = append(f.followed, followed{"nodes", ""})
	} else {
		f.lack(why.SourceNodes, "You may not list and watch nodes: devices without pods, capacity and health are not shown.")
		if o.Usage != nil {
			f.usage = "The use of devices is not shown: you may not list and watch nodes."
		}
	}
	namespace := metav1.NamespaceAll
	all, err := f.mayFollow(ctx, "pods", namespace)
	pods := all
	if err == nil && !all {
		namespace = o.Namespace
		pods, err = f.mayFollow(ctx, "pods", namespace)
	}
	switch {
	case err != nil:
		return nil, err
	case !pods:
		f.lack(why.SourcePods, fmt.Sprintf("You may not list and watch pods, neither of all namespaces nor of namespace %s: "+
			"allocations and pods that wait are not shown. To select another namespace, use -n.", namespace))
	case !all:
		f.lack(why.SourcePods, fmt.Sprintf("You may not list and watch the pods of all namespaces: only those of namespace %s are shown; "+
			"devices may have less free capacity than the picture shows.", namespace))
	}
	if pods {
		f.informers.Add("pods", coreinformers.NewPodInformer(o.Client, namespace, 0, nil), trim, f.podChanged)
		f.followed = append(f.followed, followed{"pods", namespace})
	}
	return f, nil
}

func (f *Feed) lack(source, note string) {
	f.missing = append(f.missing, why.Failure{Source: source, Reason: "you may not list and watch them"})
	f.rights = append(f.rights, note)
}

// mayFollow reports whether the person may list and watch objects.
func (f *Feed) mayFollow(ctx context.Context, resource, namespace string) (bool, error) {
	for _, verb := range []string{"list", "watch"} {
		if allowed, err := kube.Allowed(ctx, f.options.Client, verb, resource, namespace); err != nil || !allowed {
			return false, err
		}
	}
	return true, nil
}

// trim removes what neither the page nor why looks at, which is half of an object.
func trim(obj any) (any, error) {
	if o, ok := obj.(metav1.Object); ok {
		o.SetManagedFields(nil)
		delete(o.GetAnnotations(), v1.LastAppliedConfigAnnotation)
	}
	if n, ok := obj.(*v1.Node); ok {
		n.Status.Images = nil
	}
	return obj, nil
}

func (f *Feed) nodeChanged(before, after any) {
	if n, ok := after.(*v1.Node); ok {
		f.cluster.SetNode(n)
	} else if n, ok := before.(*v1.Node); ok {
		f.cluster.DeleteNode(n.Name)
	}
}

func (f *Feed) podChanged(before, after any) {
	if p, ok := after.(*v1.Pod); ok {
		f.cluster.SetPod(p)
	} else if p, ok := before.(*v1.Pod); ok {
		f.cluster.DeletePod(p.Namespace, p.Name)
	}
}

// Run follows the cluster until ctx ends.
func (f *Feed) Run(ctx context.Context) {
	// What goes wrong is on the page; the terminal belongs to the person.
	ctx = klog.NewContext(ctx, klog.Logger{})
	var running sync.WaitGroup
	running.Go(func() { f.informers.Run(ctx) })
	running.Go(func() { f.prepare(ctx) })
	running.Go(func() { f.whileWatched(ctx, checkEvery, f.check) })
	running.Go(func() { f.whileWatched(ctx, explainEvery, f.explainWaiting) })
	if f.options.Usage != nil {
		running.Go(func() { f.whileWatched(ctx, measureEvery, f.measure) })
	}
	running.Wait()
}

// prepare draws all nodes once they have been read, while the person still opens the page.
func (f *Feed) prepare(ctx context.Context) {
	last := ""
	for err := f.informers.Synced(); err != nil; err = f.informers.Synced() {
		if err.Error() != last {
			last = err.Error()
			f.cluster.Wake()
		}
		select {
		case <-ctx.Done():
			return
		case <-time.After(look):
		}
	}
	f.cluster.Since(0)
	f.cluster.Wake() // for the status, even if there is nothing to draw
}

// whileWatched calls do while a page is open, with a pause that is no shorter than four times what do
// takes. The first picture of a page comes first.
func (f *Feed) whileWatched(ctx context.Context, pause time.Duration, do func(context.Context)) {
	for next := time.Now(); ; {
		select {
		case <-ctx.Done():
			return
		case <-time.After(look):
		}
		if f.pages.Load() == 0 {
			next = time.Now().Add(settle)
		}
		if time.Now().Before(next) || f.informers.Synced() != nil {
			continue
		}
		began := time.Now()
		do(ctx)
		next = time.Now().Add(max(pause, 4*time.Since(began)))
	}
}

// watched counts a page until the function that it returns is called.
func (f *Feed) watched() func() {
	f.pages.Add(1)
	return func() { f.pages.Add(-1) }
}

// Status returns the newest.
func (f *Feed) Status() Status {
	s := Status{Cluster: f.options.Cluster, Notes: f.rights, Usage: f.options.Usage != nil}
	if err := f.informers.Synced(); err != nil {
		s.Reading = err.Error()
	}
	f.mu.Lock()
	defer f.mu.Unlock()
	s.Stale = f.stale
	if f.usage != "" {
		s.Notes = append(slices.Clone(s.Notes), f.usage)
	}
	return s
}

// check updates why the picture may be old: an informer whose watch fails keeps what it has read without
// a notice.
func (f *Feed) check(ctx context.Context) {
	bounded, cancel := context.WithTimeout(ctx, askLimit)
	defer cancel()
	problem := f.problem(bounded)
	if ctx.Err() != nil {
		return
	}
	defer f.cluster.Wake()
	f.mu.Lock()
	defer f.mu.Unlock()
	switch {
	case problem == "":
		f.stale = ""
	case f.stale == "":
		f.stale = fmt.Sprintf("The picture is not up to date since %s: %s.", f.options.Now().Format(time.TimeOnly), problem)
	}
}

// problem is why what was read may be old, "" if it is not.
func (f *Feed) problem(ctx context.Context) string {
	for _, one := range f.followed {
		switch allowed, err := f.mayFollow(ctx, one.resource, one.namespace); {
		case err != nil:
			return fmt.Sprintf("the API server does not answer: %v", err)
		case !allowed && one.namespace == "":
			return fmt.Sprintf("you may not list and watch %s any more", one.resource)
		case !allowed:
			return fmt.Sprintf("you may not list and watch %s in namespace %s any more", one.resource, one.namespace)
		}
	}
	if err := f.informers.Failing(); err != nil {
		return err.Error()
	}
	return ""
}

// measure reads what is in use of the devices. What is not read now is not known any more.
func (f *Feed) measure(ctx context.Context) {
	nodes := f.cluster.Names()
	if len(nodes) == 0 { // which would ask all
		return
	}
	reports, err := f.options.Usage(ctx, nodes)
	if ctx.Err() != nil {
		return
	}
	read := map[string]*wire.UsageReport{}
	for i := range reports.Reports {
		read[reports.Reports[i].Node] = &reports.Reports[i]
	}
	for _, node := range nodes {
		f.cluster.SetUse(node, read[node])
	}
	defer f.cluster.Wake()
	f.mu.Lock()
	defer f.mu.Unlock()
	f.usage = ""
	switch {
	case apierrors.IsForbidden(err):
		f.usage = fmt.Sprintf("The use of devices is not shown: %s.", strings.TrimSuffix(err.Error(), "."))
	case err != nil:
		f.usage = fmt.Sprintf("The use of devices could not be read: %s.", strings.TrimSuffix(err.Error(), "."))
	case len(reports.Failed) > 0:
		one := reports.Failed[0]
		f.usage = fmt.Sprintf("The use of devices could not be read on %d of %d nodes, such as %s: %s.", len(reports.Failed),
			len(reports.Failed)+len(reports.Reports), one.Node, strings.TrimSuffix(one.Error, "."))
	}
}
