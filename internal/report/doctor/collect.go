package doctor

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"maps"
	"slices"
	"strconv"
	"strings"
	"sync"
	"time"

	authorizationv1 "k8s.io/api/authorization/v1"
	corev1 "k8s.io/api/core/v1"
	rbacv1 "k8s.io/api/rbac/v1"
	resourceapi "k8s.io/api/resource/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	"k8s.io/apimachinery/pkg/api/meta"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/apimachinery/pkg/runtime/schema"
	"k8s.io/apimachinery/pkg/util/net"
	"k8s.io/client-go/discovery"
	"k8s.io/client-go/dynamic"
	"k8s.io/client-go/kubernetes"
	"k8s.io/client-go/restmapper"
	"k8s.io/client-go/tools/pager"

	"github.com/divvy-gpu/divvy/internal/core/accel"
	"github.com/divvy-gpu/divvy/internal/core/wire"
	"github.com/divvy-gpu/divvy/internal/platform/events"
	"github.com/divvy-gpu/divvy/internal/platform/kube"
	"github.com/divvy-gpu/divvy/internal/pool"
)

// Clients read the cluster. Nothing is written with them but
// SubjectAccessReviews, which the API server does not keep.
type Clients struct {
	Kubernetes kubernetes.Interface
	// Objects reads objects of any kind.
	Objects dynamic.Interface
	// Explain says why pods wait, as kubectl divvy why does. It may leave out those that do
	// not.
	Explain func(ctx context.Context, pods []*corev1.Pod) ([]Waits, error)
}

// Options say what to read.
type Options struct {
	// Tool is the version of this program.
	Tool string
	// Namespace is that of the installation to examine; "" for the one that is
	// found.
	Namespace string
	// Timeout bounds each request to one of Divvy's programs.
	Timeout time.Duration
}

// sourceEvents are the events on nodes.
const sourceEvents Source = "events on nodes"

// wiringReasons are those of events about kube-scheduler's configuration.
var wiringReasons = []string{events.SchedulerWired.Reason, events.SchedulerRolledBack.Reason, events.SchedulerUnwired.Reason}

// parallel bounds how many requests are under way at once.
const parallel = 16

// kubeSystem is where control planes run.
const kubeSystem = "kube-system"

// Collect reads a snapshot. It fails when the API server does not answer at all;
// what it could not read otherwise is in Failed.
func Collect(ctx context.Context, c Clients, o Options) (*Snapshot, error) {
	version, err := c.Kubernetes.Discovery().ServerVersion()
	if err != nil {
		return nil, fmt.Errorf("get the version of the API server: %w", err)
	}
	s := &Snapshot{
		Taken: time.Now(), Tool: o.Tool, Kubernetes: version.GitVersion,
		Failed: map[Source]string{}, Copies: map[string][]string{},
		Objects: Objects{Extender: map[string]Answer{}, Readiness: map[string]Answer{}},
	}
	r := &reader{clients: c, options: o, snapshot: s}
	r.cluster(ctx)
	r.releases(ctx)
	if release := s.Release(); release != nil {
		r.installation(ctx, release)
		r.waiting(ctx)
	}
	if err := ctx.Err(); err != nil {
		return nil, fmt.Errorf("the cluster was not read completely: %w", context.Cause(ctx))
	}
	return s, nil
}

// reader fills a snapshot.
type reader struct {
	clients  Clients
	options  Options
	mu       sync.Mutex // guards snapshot while several read
	snapshot *Snapshot
}

// waiting asks why pods wait, if any does.
func (r *reader) waiting(ctx context.Context) {
	s := r.snapshot
	pods := s.waiting()
	if len(pods) == 0 {
		return
	}
	var err error
	if s.Waiting, err = r.clients.Explain(ctx, pods); err != nil {
		r.fail(SourceWaiting, "list of nodes, pods and events", err)
	}
}

// fail notes why a source could not be read; need is the verb and resource that
// reading takes. Of several reasons one stays, always the same.
func (r *reader) fail(source Source, need string, err error) {
	text := err.Error()
	if apierrors.IsForbidden(err) || apierrors.IsUnauthorized(err) {
		text = "needs " + need
	}
	r.mu.Lock()
	defer r.mu.Unlock()
	text = clean(text)
	if before, ok := r.snapshot.Failed[source]; !ok || text < before {
		r.snapshot.Failed[source] = text
	}
}

// each runs functions at the same time, a bounded number at once.
func each(functions ...func()) {
	slots := make(chan struct{}, parallel)
	var group sync.WaitGroup
	for _, f := range functions {
		slots <- struct{}{}
		group.Go(func() {
			defer func() { <-slots }()
			f()
		})
	}
	group.Wait()
}

// listing returns a function that lists page by page.
func listing[L runtime.Object](ctx context.Context, r *reader, source Source, need string, options metav1.ListOptions,
	page func(context.Context, metav1.ListOptions) (L, error), do func(runtime.Object),
) func() {
	return func() {
		p := pager.New(func(ctx context.Context, o metav1.ListOptions) (runtime.Object, error) { return page(ctx, o) })
		err := p.EachListItem(ctx, options, func(o runtime.Object) error {
			r.mu.Lock()
			defer r.mu.Unlock()
			do(o)
			return nil
		})
		if err != nil {
			r.fail(source, "list of "+need, err)
		}
	}
}

// take returns a function that appends objects of a type to a list.
func take[T any](to *[]T) func(runtime.Object) {
	return func(o runtime.Object) {
		if item, ok := any(o).(*T); ok {
			*to = append(*to, *item)
		}
	}
}

// cluster reads what does not depend on where Divvy is.
func (r *reader) cluster(ctx context.Context) {
	s, c := r.snapshot, r.clients.Kubernetes
	everywhere := metav1.ListOptions{}
	ours := metav1.ListOptions{LabelSelector: labelPartOf + "=" + partOf}
	roles := func(kind string) func(runtime.Object) {
		return func(o runtime.Object) {
			if m, err := meta.Accessor(o); err == nil {
				s.Labelled = append(s.Labelled, labelOf(kind, m))
			}
		}
	}
	each(
		listing(ctx, r, SourceNodes, "nodes", everywhere, c.CoreV1().Nodes().List, take(&s.Nodes)),
		// They say more where there are any; no check needs them.
		listing(ctx, r, sourceEvents, "events in "+metav1.NamespaceDefault,
			metav1.ListOptions{FieldSelector: "involvedObject.kind=Node"},
			c.CoreV1().Events(metav1.NamespaceDefault).List, func(o runtime.Object) {
				if e, ok := o.(*corev1.Event); ok && slices.Contains(wiringReasons, e.Reason) {
					s.Wiring = append(s.Wiring, *e)
				}
			}),
		listing(ctx, r, SourceWorkloads, "daemonsets", everywhere, c.AppsV1().DaemonSets(metav1.NamespaceAll).List,
			take(&s.DaemonSets)),
		listing(ctx, r, SourceWorkloads, "deployments", everywhere, c.AppsV1().Deployments(metav1.NamespaceAll).List,
			take(&s.Deployments)),
		listing(ctx, r, SourceNamespaces, "namespaces", everywhere, c.CoreV1().Namespaces().List, take(&s.Namespaces)),
		listing(ctx, r, SourceQuotas, "resourcequotas", everywhere, c.CoreV1().ResourceQuotas(metav1.NamespaceAll).List,
			take(&s.Quotas)),
		listing(ctx, r, SourceAdmission, "mutatingwebhookconfigurations", everywhere,
			c.AdmissionregistrationV1().MutatingWebhookConfigurations().List, take(&s.Admission.Mutating)),
		listing(ctx, r, SourceAdmission, "validatingwebhookconfigurations", everywhere,
			c.AdmissionregistrationV1().ValidatingWebhookConfigurations().List, take(&s.Admission.Validating)),
		listing(ctx, r, SourcePolicies, "validatingadmissionpolicies", everywhere,
			c.AdmissionregistrationV1().ValidatingAdmissionPolicies().List, take(&s.Admission.Policies)),
		listing(ctx, r, SourcePolicies, "validatingadmissionpolicybindings", everywhere,
			c.AdmissionregistrationV1().ValidatingAdmissionPolicyBindings().List, take(&s.Admission.Bindings)),
		listing(ctx, r, SourceRoles, "clusterroles", ours, c.RbacV1().ClusterRoles().List, roles("clusterrole")),
		listing(ctx, r, SourceRoles, "clusterrolebindings", ours, c.RbacV1().ClusterRoleBindings().List,
			roles("clusterrolebinding")),
	)
	s.Labelled = slices.Concat(s.Labelled, labelled("mutatingwebhookconfiguration", s.Admission.Mutating),
		labelled("validatingwebhookconfiguration", s.Admission.Validating), labelled("validatingadmissionpolicy", s.Admission.Policies),
		labelled("validatingadmissionpolicybinding", s.Admission.Bindings))
	slices.SortFunc(s.Labelled, func(a, b Labelled) int { return cmp.Or(cmp.Compare(a.Kind, b.Kind), cmp.Compare(a.Name, b.Name)) })
	r.claims(ctx)
	// Which pods matter follows from what nodes offer, and from claims.
	offered := s.offered()
	listing(ctx, r, SourcePods, "pods", everywhere, c.CoreV1().Pods(metav1.NamespaceAll).List, func(o runtime.Object) {
		if pod, ok := o.(*corev1.Pod); ok && (matters(pod, offered) || s.Claims.usedBy(pod)) {
			slim := *pod
			slim.ManagedFields = nil
			s.Pods = append(s.Pods, slim)
		}
	})()
}

// claims reads what there is of ResourceClaims, if a node serves them.
func (r *reader) claims(ctx context.Context) {
	s, api := r.snapshot, r.clients.Kubernetes.ResourceV1()
	everywhere := metav1.ListOptions{}
	if !serveClaims(s.Nodes) {
		return
	}
	if err := discovery.ServerSupportsVersion(r.clients.Kubernetes.Discovery(), resourceapi.SchemeGroupVersion); err != nil {
		return
	}
	s.Claims.Served = true
	each(
		listing(ctx, r, SourceClaims, "resourceslices", everywhere, api.ResourceSlices().List, take(&s.Claims.Slices)),
		listing(ctx, r, SourceClaims, "deviceclasses", everywhere, api.DeviceClasses().List, take(&s.Claims.Classes)),
		listing(ctx, r, SourceClaims, "resourceclaims", everywhere, api.ResourceClaims(metav1.NamespaceAll).List, take(&s.Claims.Claims)),
	)
	for _, reason := range claimReasons {
		listing(ctx, r, SourceClaims, "events", metav1.ListOptions{FieldSelector: "reason=" + reason},
			r.clients.Kubernetes.CoreV1().Events(metav1.NamespaceAll).List, take(&s.Claims.Events))()
	}
}

func labelled[T any, P object[T]](kind string, all []T) []Labelled {
	var out []Labelled
	for i := range all {
		if o := P(&all[i]); o.GetLabels()[labelPartOf] == partOf {
			out = append(out, labelOf(kind, o))
		}
	}
	return out
}

func labelOf(kind string, o metadata) Labelled {
	return Labelled{Kind: kind, Name: o.GetName(), Instance: o.GetLabels()[labelInstance]}
}

// offered are the resources that nodes offer through Divvy.
func (s *Snapshot) offered() map[string]bool {
	names := map[string]bool{pool.Resource: true}
	for i := range s.Nodes {
		inventory, err := wire.DecodeInventory(s.Nodes[i].Annotations[wire.InventoryAnnotation])
		if err != nil {
			continue // told by the check of inventories
		}
		for _, in := range inventory {
			names[string(in.Resource)] = true
		}
	}
	for _, r := range s.configured() {
		names[r] = true
	}
	return names
}

// configured are the resources that the programs' arguments name.
func (s *Snapshot) configured() []string {
	var out []string
	for i := range s.Deployments {
		d := &s.Deployments[i]
		if d.Labels[labelPartOf] != partOf {
			continue
		}
		if value, ok := argument(&d.Spec.Template.Spec, "resources"); ok {
			out = append(out, strings.Split(value, ",")...)
		}
	}
	return out
}

// pluginDir is kubelet's folder of device plugins.
const pluginDir = "/var/lib/kubelet/device-plugins"

func matters(pod *corev1.Pod, offered map[string]bool) bool {
	return pod.Labels[labelPartOf] == partOf || isScheduler(pod) || len(asks(pod, offered)) > 0 || mountsPlugins(&pod.Spec)
}

// isScheduler reports whether a pod is a kube-scheduler of a control plane.
func isScheduler(pod *corev1.Pod) bool {
	return pod.Namespace == kubeSystem &&
		(pod.Labels["component"] == "kube-scheduler" || strings.HasPrefix(pod.Name, "kube-scheduler-"))
}

func mountsPlugins(spec *corev1.PodSpec) bool {
	return slices.ContainsFunc(spec.Volumes, func(v corev1.Volume) bool {
		return v.HostPath != nil && strings.HasPrefix(strings.TrimSuffix(v.HostPath.Path, "/")+"/", pluginDir+"/")
	})
}

// asks are the offered resources that a pod asks for.
func asks(pod *corev1.Pod, offered map[string]bool) []string {
	names := map[string]bool{}
	for _, containers := range [][]corev1.Container{pod.Spec.InitContainers, pod.Spec.Containers} {
		for i := range containers {
			for _, l := range []corev1.ResourceList{containers[i].Resources.Limits, containers[i].Resources.Requests} {
				for name, q := range l {
					if offered[string(name)] && !q.IsZero() {
						names[string(name)] = true
					}
				}
			}
		}
	}
	return slices.Sorted(maps.Keys(names))
}

// releases finds the installations. Objects that helm made name their release;
// those of a rendered manifest have its name as a label alone.
func (r *reader) releases(ctx context.Context) {
	s := r.snapshot
	type key struct{ name, namespace string }
	found := map[key]*Release{}
	var rendered []*metav1.ObjectMeta
	note := func(m *metav1.ObjectMeta) {
		if m.Labels[labelPartOf] != partOf {
			return
		}
		if namespace := m.Annotations[annotationNamespace]; namespace != "" {
			k := key{m.Annotations[annotationRelease], namespace}
			found[k] = &Release{Name: k.name, Namespace: k.namespace, Helm: true}
			return
		}
		rendered = append(rendered, m)
	}
	for _, w := range s.workloads() {
		note(w.ObjectMeta)
	}
	// The pool's objects are in a namespace of their own, so the others say where
	// the installation is.
	slices.SortStableFunc(rendered, func(a, b *metav1.ObjectMeta) int {
		return cmp.Compare(poolLast(a.Labels[labelName]), poolLast(b.Labels[labelName]))
	})
	for _, m := range rendered {
		k := key{name: m.Labels[labelInstance]}
		if found[k] == nil {
			found[k] = &Release{Name: k.name, Namespace: m.Namespace}
		}
	}
	for _, release := range found {
		s.Releases = append(s.Releases, *release)
	}
	slices.SortFunc(s.Releases, func(a, b Release) int {
		return cmp.Or(cmp.Compare(a.Namespace, b.Namespace), cmp.Compare(a.Name, b.Name))
	})
	if o := r.options.Namespace; o != "" {
		s.Releases = slices.DeleteFunc(s.Releases, func(release Release) bool { return release.Namespace != o })
	}
	if release := s.Release(); release != nil && release.Helm {
		r.helm(ctx, release)
	}
}

func poolLast(name string) int {
	if name == namePoolHook || name == namePoolNode {
		return 1
	}
	return 0
}

// helm reads the newest revision of a release.
func (r *reader) helm(ctx context.Context, release *Release) {
	secrets := r.clients.Kubernetes.CoreV1().Secrets(release.Namespace)
	listed, err := secrets.List(ctx, metav1.ListOptions{LabelSelector: "owner=helm,status!=superseded,name=" + release.Name})
	if err != nil {
		r.fail(SourceRelease, "list of secrets in "+release.Namespace, err)
		return
	}
	revision := func(s *corev1.Secret) int {
		n, err := strconv.Atoi(s.Labels["version"])
		if err != nil {
			return 0
		}
		return n
	}
	var newest, deployed *corev1.Secret
	for i := range listed.Items {
		item := &listed.Items[i]
		if newest == nil || revision(item) > revision(newest) {
			newest = item
		}
		if item.Labels["status"] == "deployed" && (deployed == nil || revision(item) > revision(deployed)) {
			deployed = item
		}
	}
	if newest == nil {
		r.fail(SourceRelease, "", fmt.Errorf("helm has no record of release %s in namespace %s", release.Name, release.Namespace))
		return
	}
	release.Status, release.Revision = newest.Labels["status"], revision(newest)
	objects, err := decodeRelease(cmp.Or(deployed, newest))
	if err != nil {
		r.fail(SourceRelease, "", fmt.Errorf("secret %s: %w", newest.Name, err))
		return
	}
	for i := range objects {
		// helm puts what names no namespace into the release's.
		objects[i].Namespace = cmp.Or(objects[i].Namespace, release.Namespace)
	}
	release.Manifest = objects
}

// namespaces are those of the release's workloads.
func (r *reader) namespaces(release *Release) []string {
	names := map[string]bool{release.Namespace: true}
	for _, w := range r.snapshot.workloads() {
		if release.of(w) {
			names[w.Namespace] = true
		}
	}
	return slices.Sorted(maps.Keys(names))
}

// installation reads what belongs to a release.
func (r *reader) installation(ctx context.Context, release *Release) {
	s, c := r.snapshot, r.clients.Kubernetes
	var reads []func()
	for _, ns := range r.namespaces(release) {
		reads = append(reads,
			listing(ctx, r, SourceServices, "services in "+ns, metav1.ListOptions{}, c.CoreV1().Services(ns).List,
				take(&s.Objects.Services)),
			listing(ctx, r, SourceServices, "endpointslices in "+ns, metav1.ListOptions{}, c.DiscoveryV1().EndpointSlices(ns).List,
				take(&s.Objects.Endpoints)),
			listing(ctx, r, SourceConfigMaps, "configmaps in "+ns, metav1.ListOptions{}, c.CoreV1().ConfigMaps(ns).List,
				take(&s.Objects.ConfigMaps)),
			listing(ctx, r, SourceSecrets, "secrets in "+ns, metav1.ListOptions{LabelSelector: "owner!=helm"},
				c.CoreV1().Secrets(ns).List, take(&s.Objects.Secrets)))
	}
	reads = append(reads, func() { r.token(ctx) }, func() { r.programs(ctx) }, func() { r.objects(ctx, release) },
		func() { r.reviews(ctx, release) })
	each(reads...)
}

// token reads the pool's secrets, and which of them the namespaces of the pool's
// pods have.
func (r *reader) token(ctx context.Context) {
	s := r.snapshot
	hook := program(s.Release(), s.Deployments, namePoolHook)
	if hook == nil {
		return
	}
	names := []string{pool.CASecret, pool.ClientSecret, pool.ServersSecret, pool.SingleSecret}
	source, ok := argument(&hook.Spec.Template.Spec, "source-namespace")
	if !ok {
		source = kubeSystem
	}
	get := func(namespace, name string) (*corev1.Secret, bool) {
		secret, err := r.clients.Kubernetes.CoreV1().Secrets(namespace).Get(ctx, name, metav1.GetOptions{})
		if err != nil && !apierrors.IsNotFound(err) {
			r.fail(SourceToken, "get of secrets in "+namespace, err)
		}
		return secret, err == nil
	}
	for _, name := range names {
		if secret, ok := get(source, name); ok {
			r.mu.Lock()
			s.Token = append(s.Token, *secret)
			r.mu.Unlock()
		}
	}
	users := map[string]bool{}
	for i := range s.Pods {
		if p := &s.Pods[i]; p.Labels[pool.ConvertedLabel] == "true" && !ended(p) {
			users[p.Namespace] = true
		}
	}
	for ns := range users {
		found := []string{}
		for _, name := range names {
			if _, ok := get(ns, name); ok {
				found = append(found, name)
			}
		}
		r.mu.Lock()
		s.Copies[ns] = found
		r.mu.Unlock()
	}
}

// programs asks the extender, and the daemons that are not ready.
func (r *reader) programs(ctx context.Context) {
	s := r.snapshot
	core := r.clients.Kubernetes.CoreV1().RESTClient()
	ask := func(namespace, resource, scheme, name string, port int, path string) (Answer, error) {
		ctx, cancel := context.WithTimeout(ctx, r.options.Timeout)
		defer cancel()
		result := core.Get().Namespace(namespace).Resource(resource).Name(net.JoinSchemeNamePort(scheme, name, strconv.Itoa(port))).
			SubResource("proxy").Suffix(path).SetHeader("Accept", "text/plain, application/json").Do(ctx)
		body, err := result.Raw()
		text := clean(string(body))
		if err != nil {
			if apierrors.IsForbidden(err) {
				return Answer{}, err
			}
			return Answer{Text: cmp.Or(text, clean(err.Error()))}, nil
		}
		return Answer{OK: true, Text: text}, nil
	}
	if s.hasExtender() {
		for _, route := range []string{"healthz", "readyz", "version"} {
			answer, err := ask(s.Release().Namespace, "services", "", nameExtender, portExtender, "/"+route)
			if err == nil && !answer.OK {
				// The plain port may be open to its own host alone.
				if over, err := ask(s.Release().Namespace, "services", "https", nameExtender, portExtenderTLS, "/"+route); err == nil &&
					over.OK {
					answer = over
				}
			}
			if err != nil {
				r.fail(SourceExtender, "get of services/proxy in "+s.Release().Namespace, err)
				continue
			}
			r.mu.Lock()
			s.Objects.Extender[route] = answer
			r.mu.Unlock()
		}
	}
	for i := range s.Pods {
		p := &s.Pods[i]
		if p.Labels[labelPartOf] != partOf || p.Labels[labelName] != nameNode || kube.PodReady(p) || p.Status.PodIP == "" {
			continue
		}
		answer, err := ask(p.Namespace, "pods", "", p.Name, portNode, "/readyz")
		if err != nil {
			continue // the pod's status still tells that it is not ready
		}
		r.mu.Lock()
		s.Objects.Readiness[p.Namespace+"/"+p.Name] = answer
		r.mu.Unlock()
	}
}

// hasExtender reports whether the release has an extender, alone or beside a
// scheduler of its own.
func (s *Snapshot) hasExtender() bool {
	return program(s.Release(), s.Deployments, nameExtender) != nil || program(s.Release(), s.Deployments, nameScheduler) != nil
}

// objects looks for every object of the release's manifest.
func (r *reader) objects(ctx context.Context, release *Release) {
	if len(release.Manifest) == 0 {
		return
	}
	groups, err := restmapper.GetAPIGroupResources(r.clients.Kubernetes.Discovery())
	if err != nil {
		r.fail(SourceRelease, "discovery of the API", err)
		return
	}
	mapper := restmapper.NewDiscoveryRESTMapper(groups)
	live := make([]Live, len(release.Manifest))
	var reads []func()
	for i, o := range release.Manifest {
		reads = append(reads, func() { live[i] = r.live(ctx, mapper, o) })
	}
	each(reads...)
	r.mu.Lock()
	defer r.mu.Unlock()
	r.snapshot.Objects.Live = live
}

func (r *reader) live(ctx context.Context, mapper meta.RESTMapper, o Object) Live {
	gv, err := schema.ParseGroupVersion(o.APIVersion)
	if err != nil {
		return Live{Object: o, Error: err.Error()}
	}
	mapping, err := mapper.RESTMapping(schema.GroupKind{Group: gv.Group, Kind: o.Kind}, gv.Version)
	if err != nil {
		return Live{Object: o, Error: "the API server does not serve " + o.APIVersion + " " + o.Kind}
	}
	var client dynamic.ResourceInterface = r.clients.Objects.Resource(mapping.Resource)
	if mapping.Scope.Name() == meta.RESTScopeNameNamespace {
		client = r.clients.Objects.Resource(mapping.Resource).Namespace(o.Namespace)
	} else {
		o.Namespace = ""
	}
	have, err := client.Get(ctx, o.Name, metav1.GetOptions{})
	switch {
	case apierrors.IsNotFound(err):
		return Live{Object: o}
	case apierrors.IsForbidden(err):
		return Live{Object: o, Error: "needs get of " + mapping.Resource.Resource}
	case err != nil:
		return Live{Object: o, Error: clean(err.Error())}
	}
	return Live{Object: o, Found: true, Differs: differs(o.Kind, o.Content, have.Object)}
}

// maxReviews bounds how many questions are put to the API server.
const maxReviews = 2000

// reviews asks whether each account may do what its roles are to grant. The
// roles are those of the release's manifest: what is there now may lack
// something.
func (r *reader) reviews(ctx context.Context, release *Release) {
	wanted := wantedAccess(release.Manifest)
	if len(wanted) > maxReviews {
		wanted = wanted[:maxReviews]
	}
	var asks []func()
	for i := range wanted {
		asks = append(asks, func() {
			a := &wanted[i]
			namespace, name, _ := strings.Cut(a.Account, "/")
			resource, group, _ := strings.Cut(a.Resource, ".")
			resource, sub, _ := strings.Cut(resource, "/")
			review := &authorizationv1.SubjectAccessReview{Spec: authorizationv1.SubjectAccessReviewSpec{
				User: "system:serviceaccount:" + namespace + ":" + name,
				// What the API server adds to every token of an account.
				Groups: []string{"system:serviceaccounts", "system:serviceaccounts:" + namespace, "system:authenticated"},
				ResourceAttributes: &authorizationv1.ResourceAttributes{
					Namespace: a.Namespace, Verb: a.Verb, Group: group, Resource: resource, Subresource: sub, Name: a.Name,
				},
			}}
			answer, err := r.clients.Kubernetes.AuthorizationV1().SubjectAccessReviews().Create(ctx, review, metav1.CreateOptions{})
			if err != nil {
				r.fail(SourceReviews, "create of subjectaccessreviews", err)
				return
			}
			a.Allowed = answer.Status.Allowed
		})
	}
	each(asks...)
	r.mu.Lock()
	defer r.mu.Unlock()
	r.snapshot.Objects.Access = wanted
}

// wantedAccess lists what the roles of a manifest grant to its accounts.
func wantedAccess(objects []Object) []Access {
	type role struct{ kind, namespace, name string }
	rules := map[role][]rbacv1.PolicyRule{}
	for _, o := range objects {
		if o.Kind != "ClusterRole" && o.Kind != "Role" {
			continue
		}
		var has struct {
			Rules []rbacv1.PolicyRule `json:"rules"`
		}
		if !o.into(&has) {
			continue
		}
		k := role{kind: o.Kind, name: o.Name}
		if o.Kind == "Role" {
			k.namespace = o.Namespace
		}
		rules[k] = has.Rules
	}
	var out []Access
	for _, o := range objects {
		if o.Kind != "ClusterRoleBinding" && o.Kind != "RoleBinding" {
			continue
		}
		var binding struct {
			RoleRef  rbacv1.RoleRef   `json:"roleRef"`
			Subjects []rbacv1.Subject `json:"subjects"`
		}
		if !o.into(&binding) {
			continue
		}
		k := role{kind: binding.RoleRef.Kind, name: binding.RoleRef.Name}
		where := ""
		if o.Kind == "RoleBinding" {
			where = o.Namespace
			if k.kind == "Role" {
				k.namespace = o.Namespace
			}
		}
		for _, subject := range binding.Subjects {
			if subject.Kind != rbacv1.ServiceAccountKind {
				continue
			}
			account := cmp.Or(subject.Namespace, o.Namespace) + "/" + subject.Name
			for _, rule := range rules[k] {
				out = append(out, expand(rule, account, binding.RoleRef.Name, where)...)
			}
		}
	}
	return out
}

// expand lists the single rights of a rule.
func expand(rule rbacv1.PolicyRule, account, role, namespace string) []Access {
	names := rule.ResourceNames
	if len(names) == 0 {
		names = []string{""}
	}
	var out []Access
	for _, group := range rule.APIGroups {
		for _, resource := range rule.Resources {
			if group != "" {
				resource += "." + group
			}
			for _, verb := range rule.Verbs {
				for _, name := range names {
					out = append(out, Access{Account: account, Role: role, Verb: verb, Resource: resource, Name: name,
						Namespace: namespace})
				}
			}
		}
	}
	return out
}

// errNoInventory says that a node publishes nothing.
var errNoInventory = errors.New("it has no annotation " + wire.InventoryAnnotation)

// inventory reads what a node publishes.
func inventory(n *corev1.Node) ([]accel.Inventory, error) {
	text, ok := n.Annotations[wire.InventoryAnnotation]
	if !ok {
		return nil, errNoInventory
	}
	return wire.DecodeInventory(text)
}
