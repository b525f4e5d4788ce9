package doctor

import (
	"bytes"
	"compress/gzip"
	"context"
	"encoding/base64"
	"encoding/json"
	"fmt"
	"net/http"
	"net/http/httptest"
	"reflect"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

	authorizationv1 "k8s.io/api/authorization/v1"
	corev1 "k8s.io/api/core/v1"
	rbacv1 "k8s.io/api/rbac/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/labels"
	"k8s.io/apimachinery/pkg/version"
	"k8s.io/client-go/dynamic"
	"k8s.io/client-go/kubernetes"
	"k8s.io/client-go/rest"
	"sigs.k8s.io/yaml"

	"github.com/divvy-gpu/divvy/internal/pool"
)

// resourceKind is a kind that the server knows.
type resourceKind struct {
	group, resource, kind string
	namespaced            bool
}

var served = []resourceKind{
	{"", "nodes", "Node", false}, {"", "pods", "Pod", true}, {"", "services", "Service", true}, {"", "secrets", "Secret", true},
	{"", "configmaps", "ConfigMap", true}, {"", "namespaces", "Namespace", false}, {"", "resourcequotas", "ResourceQuota", true},
	{"", "events", "Event", true},
	{"resource.k8s.io", "resourceslices", "ResourceSlice", false}, {"resource.k8s.io", "deviceclasses", "DeviceClass", false},
	{"resource.k8s.io", "resourceclaims", "ResourceClaim", true},
	{"apps", "daemonsets", "DaemonSet", true}, {"apps", "deployments", "Deployment", true},
	{"discovery.k8s.io", "endpointslices", "EndpointSlice", true},
	{"rbac.authorization.k8s.io", "clusterroles", "ClusterRole", false}, {"rbac.authorization.k8s.io", "clusterrolebindings",
		"ClusterRoleBinding", false},
	{"admissionregistration.k8s.io", "mutatingwebhookconfigurations", "MutatingWebhookConfiguration", false},
	{"admissionregistration.k8s.io", "validatingwebhookconfigurations", "ValidatingWebhookConfiguration", false},
	{"admissionregistration.k8s.io", "validatingadmissionpolicies", "ValidatingAdmissionPolicy", false},
	{"admissionregistration.k8s.io", "validatingadmissionpolicybindings", "ValidatingAdmissionPolicyBinding", false},
}

// server is as much of an API server as Collect asks.
type server struct {
	mu sync.Mutex
	// objects by resource.
	objects map[string][]map[string]any
	// forbidden are resources that nobody may read, "subjectaccessreviews" and
	// "services/proxy" among them.
	forbidden map[string]bool
	// refused are verbs and resources that no account may use.
	refused map[string]bool
	// proxied are the answers of programs, by the end of the path.
	proxied map[string]string
	// onlyTLS has the extender answer over TLS alone.
	onlyTLS bool
	// asked are the requests that were made.
	asked []string
}

func (s *server) put(resource string, object any) {
	data, err := json.Marshal(object)
	if err != nil {
		panic(err)
	}
	var content map[string]any
	if err := json.Unmarshal(data, &content); err != nil {
		panic(err)
	}
	s.objects[resource] = append(s.objects[resource], content)
}

// serve makes a server that has what the world has.
func serve(w *world) *server {
	s := &server{objects: map[string][]map[string]any{}, forbidden: map[string]bool{}, refused: map[string]bool{},
		proxied: map[string]string{
			"/healthz": "ok", "/readyz": "ok", "/version": "v0.1.0\n",
		}}
	putAll := func(resource string, list any) {
		for i, v := 0, reflect.ValueOf(list); i < v.Len(); i++ {
			s.put(resource, v.Index(i).Interface())
		}
	}
	putAll("nodes", w.Nodes)
	putAll("pods", w.Pods)
	putAll("daemonsets", w.DaemonSets)
	putAll("deployments", w.Deployments)
	putAll("namespaces", w.Namespaces)
	putAll("resourcequotas", w.Quotas)
	putAll("services", w.Objects.Services)
	putAll("endpointslices", w.Objects.Endpoints)
	putAll("configmaps", w.Objects.ConfigMaps)
	putAll("secrets", w.Objects.Secrets)
	putAll("secrets", w.Token)
	putAll("mutatingwebhookconfigurations", w.Admission.Mutating)
	putAll("validatingwebhookconfigurations", w.Admission.Validating)
	putAll("validatingadmissionpolicies", w.Admission.Policies)
	putAll("validatingadmissionpolicybindings", w.Admission.Bindings)
	putAll("resourceslices", w.Claims.Slices)
	putAll("deviceclasses", w.Claims.Classes)
	putAll("resourceclaims", w.Claims.Claims)
	for ns, names := range w.Copies {
		for _, name := range names {
			s.put("secrets", corev1.Secret{ObjectMeta: metav1.ObjectMeta{Namespace: ns, Name: name}})
		}
	}
	for _, o := range w.Releases[0].Manifest {
		switch o.Kind {
		case "ClusterRole":
			s.objects["clusterroles"] = append(s.objects["clusterroles"], o.Content)
		case "ClusterRoleBinding":
			s.objects["clusterrolebindings"] = append(s.objects["clusterrolebindings"], o.Content)
		}
	}
	s.put("secrets", recorded(w.t, w.Releases[0].Manifest, 3, "deployed"))
	s.put("secrets", recorded(w.t, nil, 2, "failed"))
	return s
}

// recorded is the Secret in which helm keeps a release.
func recorded(t testing.TB, objects []Object, revision int, status string) corev1.Secret {
	t.Helper()
	var manifest strings.Builder
	for _, o := range objects {
		o.Content["apiVersion"], o.Content["kind"] = o.APIVersion, o.Kind
		text, err := yaml.Marshal(o.Content)
		if err != nil {
			t.Fatal(err)
		}
		fmt.Fprintf(&manifest, "---\n# Source: divvy/templates/x.yaml\n%s", text)
	}
	return corev1.Secret{
		ObjectMeta: metav1.ObjectMeta{
			Namespace: system, Name: fmt.Sprintf("sh.helm.release.v1.divvy.v%d", revision),
			Labels: map[string]string{"owner": "helm", "name": "divvy", "status": status, "version": fmt.Sprint(revision)},
		},
		Data: map[string][]byte{"release": packed(t, manifest.String())},
	}
}

func packed(t testing.TB, manifest string) []byte {
	t.Helper()
	data, err := json.Marshal(map[string]any{"name": "divvy", "manifest": manifest})
	if err != nil {
		t.Fatal(err)
	}
	var b bytes.Buffer
	w := gzip.NewWriter(&b)
	if _, err := w.Write(data); err != nil {
		t.Fatal(err)
	}
	if err := w.Close(); err != nil {
		t.Fatal(err)
	}
	return []byte(base64.StdEncoding.EncodeToString(b.Bytes()))
}

func (s *server) ServeHTTP(w http.ResponseWriter, r *http.Request) {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.asked = append(s.asked, r.Method+" "+r.URL.Path)
	switch path := strings.Trim(r.URL.Path, "/"); {
	case path == "version":
		reply(w, http.StatusOK, version.Info{GitVersion: "v1.37.0", Major: "1", Minor: "37"})
	case path == "api":
		reply(w, http.StatusOK, metav1.APIVersions{TypeMeta: metav1.TypeMeta{Kind: "APIVersions"}, Versions: []string{"v1"}})
	case path == "apis":
		reply(w, http.StatusOK, groups())
	case path == "api/v1" || strings.HasPrefix(path, "apis/") && strings.Count(path, "/") == 2:
		reply(w, http.StatusOK, resources(path))
	case strings.HasSuffix(path, "/subjectaccessreviews"):
		s.review(w, r)
	case strings.Contains(path, "/proxy"):
		s.proxy(w, path)
	default:
		s.read(w, r, path)
	}
}

func reply(w http.ResponseWriter, code int, object any) {
	w.Header().Set("Content-Type", "application/json")
	w.WriteHeader(code)
	if err := json.NewEncoder(w).Encode(object); err != nil {
		panic(err)
	}
}

func refuse(w http.ResponseWriter, code int, reason metav1.StatusReason, text string) {
	reply(w, code, metav1.Status{TypeMeta: metav1.TypeMeta{APIVersion: "v1", Kind: "Status"}, Status: metav1.StatusFailure, Reason: reason,
		Message: text, Code: int32(code)})
}

func groups() metav1.APIGroupList {
	list := metav1.APIGroupList{TypeMeta: metav1.TypeMeta{APIVersion: "v1", Kind: "APIGroupList"}}
	seen := map[string]bool{"": true}
	for _, k := range served {
		if seen[k.group] {
			continue
		}
		seen[k.group] = true
		v := metav1.GroupVersionForDiscovery{GroupVersion: k.group + "/v1", Version: "v1"}
		list.Groups = append(list.Groups, metav1.APIGroup{Name: k.group, Versions: []metav1.GroupVersionForDiscovery{v},
			PreferredVersion: v})
	}
	return list
}

func resources(path string) metav1.APIResourceList {
	group := ""
	if parts := strings.Split(path, "/"); len(parts) == 3 {
		group = parts[1]
	}
	list := metav1.APIResourceList{TypeMeta: metav1.TypeMeta{APIVersion: "v1", Kind: "APIResourceList"},
		GroupVersion: strings.TrimPrefix(group+"/v1", "/")}
	for _, k := range served {
		if k.group == group {
			list.APIResources = append(list.APIResources, metav1.APIResource{Name: k.resource, Kind: k.kind, Namespaced: k.namespaced})
		}
	}
	return list
}

func (s *server) review(w http.ResponseWriter, r *http.Request) {
	if s.forbidden["subjectaccessreviews"] {
		refuse(w, http.StatusForbidden, metav1.StatusReasonForbidden, "reviews are not for you")
		return
	}
	var review authorizationv1.SubjectAccessReview
	if err := json.NewDecoder(r.Body).Decode(&review); err != nil {
		panic(err)
	}
	a := review.Spec.ResourceAttributes
	resource := a.Resource
	if a.Subresource != "" {
		resource += "/" + a.Subresource
	}
	review.Status.Allowed = !s.refused[a.Verb+" "+resource]
	reply(w, http.StatusCreated, review)
}

func (s *server) proxy(w http.ResponseWriter, path string) {
	if s.forbidden["services/proxy"] {
		refuse(w, http.StatusForbidden, metav1.StatusReasonForbidden, "services/proxy is not for you")
		return
	}
	for end, text := range s.proxied {
		if s.onlyTLS && !strings.Contains(path, "/https:divvy-extender:32765/") {
			break
		}
		if strings.HasSuffix(path, "/proxy"+end) {
			fmt.Fprint(w, text)
			return
		}
	}
	refuse(w, http.StatusServiceUnavailable, metav1.StatusReasonServiceUnavailable, "no endpoints available")
}

func (s *server) read(w http.ResponseWriter, r *http.Request, path string) {
	path = strings.TrimPrefix(path, "api/v1/")
	if parts := strings.SplitN(path, "/", 4); parts[0] == "apis" {
		path = parts[3]
	}
	namespace, name := "", ""
	parts := strings.Split(path, "/")
	if parts[0] == "namespaces" && len(parts) > 2 {
		namespace, parts = parts[1], parts[2:]
	}
	if len(parts) > 1 {
		name = parts[1]
	}
	resource := parts[0]
	if s.forbidden[resource] || s.forbidden[resource+" in "+namespace] {
		refuse(w, http.StatusForbidden, metav1.StatusReasonForbidden, resource+" are not for you")
		return
	}
	i := slices.IndexFunc(served, func(k resourceKind) bool { return k.resource == resource })
	if i < 0 {
		refuse(w, http.StatusNotFound, metav1.StatusReasonNotFound, "no such resource")
		return
	}
	selector, err := labels.Parse(r.URL.Query().Get("labelSelector"))
	if err != nil {
		panic(err)
	}
	items := []map[string]any{}
	for _, o := range s.objects[resource] {
		m, _ := o["metadata"].(map[string]any)
		set := labels.Set{}
		for k, v := range asMap(m["labels"]) {
			set[k] = fmt.Sprint(v)
		}
		ns, _ := m["namespace"].(string)
		if namespace != "" && ns != namespace || !selector.Matches(set) || name != "" && m["name"] != name {
			continue
		}
		o["kind"], o["apiVersion"] = served[i].kind, strings.TrimPrefix(served[i].group+"/v1", "/")
		items = append(items, o)
	}
	switch {
	case name == "":
		reply(w, http.StatusOK, map[string]any{"kind": served[i].kind + "List", "apiVersion": strings.TrimPrefix(served[i].group+"/v1",
			"/"), "metadata": map[string]any{}, "items": items})
	case len(items) == 0:
		refuse(w, http.StatusNotFound, metav1.StatusReasonNotFound, resource+" "+name+" not found")
	default:
		reply(w, http.StatusOK, items[0])
	}
}

func asMap(v any) map[string]any { m, _ := v.(map[string]any); return m }

// collect reads a snapshot of the server.
func collect(t *testing.T, s *server, o Options) (*Snapshot, error) {
	t.Helper()
	http := httptest.NewServer(s)
	t.Cleanup(http.Close)
	config := &rest.Config{Host: http.URL, QPS: -1, ContentConfig: rest.ContentConfig{ContentType: "application/json"}}
	typed, err := kubernetes.NewForConfig(config)
	if err != nil {
		t.Fatal(err)
	}
	objects, err := dynamic.NewForConfig(config)
	if err != nil {
		t.Fatal(err)
	}
	o.Tool, o.Timeout = "v0.1.0", 5*time.Second
	snapshot, err := Collect(t.Context(), Clients{Kubernetes: typed, Objects: objects}, o)
	if snapshot != nil {
		snapshot.Taken = now // certificates of the tests are of that time
	}
	return snapshot, err
}

// What is read of a healthy cluster is healthy.
func TestCollect(t *testing.T) {
	w := healthy(t)
	s := serve(w)
	snapshot, err := collect(t, s, Options{})
	if err != nil {
		t.Fatal(err)
	}
	for _, r := range Examine(snapshot).Results {
		if r.Severity != OK || r.Skipped != "" {
			t.Errorf("%s: %s, skipped because %q, %+v", r.Check, r.Severity, r.Skipped, r.Findings)
		}
	}
	if len(snapshot.Failed) > 0 {
		t.Errorf("could not be read: %v", snapshot.Failed)
	}
	if r := snapshot.Release(); len(snapshot.Releases) != 1 || r.Revision != 3 || r.Status != "deployed" ||
		len(r.Manifest) != len(w.Releases[0].Manifest) {
		t.Errorf("releases %d, revision %d, status %s, %d objects", len(snapshot.Releases), r.Revision, r.Status, len(r.Manifest))
	}
	if got, want := len(snapshot.Objects.Access), len(w.Objects.Access); got != want {
		t.Errorf("%d rights were asked for, want %d", got, want)
	}
	for _, request := range s.asked {
		if !strings.HasPrefix(request, "GET ") && !strings.HasSuffix(request, "/subjectaccessreviews") {
			t.Errorf("it asked for %s: a doctor changes nothing", request)
		}
	}
}

// What differs in the cluster is seen.
func TestCollectSeesWhatDiffers(t *testing.T) {
	tests := map[string]struct {
		edit  func(w *world, s *server)
		check string
		want  string
	}{
		"an object is missing": {
			func(_ *world, s *server) { s.objects["clusterrolebindings"] = nil }, "objects", "ClusterRoleBinding divvy-node: it is missing",
		},
		"a rule is gone": {
			func(_ *world, s *server) {
				s.objects["clusterroles"] = nil
				s.put("clusterroles", rbacv1.ClusterRole{ObjectMeta: ofDivvy("", "divvy-node", nameNode)})
			}, "objects", "ClusterRole divvy-node: it was changed after the installation, at rules",
		},
		"an account may not": {
			func(_ *world, s *server) { s.refused["patch nodes/status"] = true },
			"rbac", "ServiceAccount divvy-system/divvy-node: it lacks permissions of role divvy-node: patch nodes/status",
		},
		"the extender does not answer": {
			func(_ *world, s *server) { s.proxied = nil }, "extender", "does not respond through the API server",
		},
		"a daemon that is not ready says why": {
			func(w *world, s *server) {
				s.objects["pods"] = nil
				w.ready("divvy-node-x", false)
				for _, p := range w.Pods {
					s.put("pods", p)
				}
				s.proxied["/readyz"] = "the driver is not there"
			}, "workloads", "kubelet has not updated",
		},
		"copies are missing": {
			func(_ *world, s *server) {
				s.objects["secrets"] = slices.DeleteFunc(s.objects["secrets"],
					func(o map[string]any) bool { return asMap(o["metadata"])["namespace"] == "team" })
			}, "pool-copies", "Namespace team: it lacks " + pool.CASecret,
		},
		"a newer revision failed": {
			func(w *world, s *server) { s.put("secrets", recorded(w.t, nil, 4, "failed")) }, "release", "helm's revision 4 failed",
		},
		"the wiring was rolled back": {
			func(w *world, s *server) {
				s.objects["pods"] = nil
				w.pod("kube-scheduler-" + theNode).Annotations = nil
				for _, p := range w.Pods {
					s.put("pods", p)
				}
				s.put("events", corev1.Event{
					ObjectMeta: metav1.ObjectMeta{Namespace: "default", Name: "e"}, Reason: "SchedulerRolledBack",
					Message:        "an unknown field",
					InvolvedObject: corev1.ObjectReference{Kind: "Node", Name: theNode},
				})
			}, "scheduler", "rolled back: an unknown field",
		},
		"a kind that is not served": {
			func(w *world, s *server) {
				s.objects["secrets"] = slices.DeleteFunc(s.objects["secrets"], func(o map[string]any) bool {
					return asMap(asMap(o["metadata"])["labels"])["owner"] == "helm"
				})
				s.put("secrets", recorded(w.t,
					[]Object{{APIVersion: "monitoring.coreos.com/v1",
						Kind: "ServiceMonitor", Content: map[string]any{"metadata": map[string]any{"name": "x"}}}}, 3, "deployed"))
			}, "objects", "ServiceMonitor divvy-system/x: the API server does not serve monitoring.coreos.com/v1 ServiceMonitor",
		},
	}
	for name, tt := range tests {
		t.Run(name, func(t *testing.T) {
			w := healthy(t)
			s := serve(w)
			tt.edit(w, s)
			snapshot, err := collect(t, s, Options{})
			if err != nil {
				t.Fatal(err)
			}
			for _, f := range Examine(snapshot).Findings() {
				if f.Check == tt.check && strings.Contains(f.Object+": "+f.Problem, tt.want) {
					return
				}
			}
			t.Errorf("no finding of %s that says %q: %+v", tt.check, tt.want, Examine(snapshot).Findings())
		})
	}
}

// What is forbidden is unknown, with the right that is missing.
func TestCollectWithoutPermissions(t *testing.T) {
	tests := map[string]struct {
		resource string
		source   Source
		need     string
	}{
		"nodes":         {"nodes", SourceNodes, "needs list of nodes"},
		"pods":          {"pods", SourcePods, "needs list of pods"},
		"daemonsets":    {"daemonsets", SourceWorkloads, "needs list of daemonsets"},
		"webhooks":      {"validatingwebhookconfigurations", SourceAdmission, "needs list of validatingwebhookconfigurations"},
		"policies":      {"validatingadmissionpolicies", SourcePolicies, "needs list of validatingadmissionpolicies"},
		"quotas":        {"resourcequotas", SourceQuotas, "needs list of resourcequotas"},
		"services":      {"services", SourceServices, "needs list of services in bwki"},
		"configmaps":    {"configmaps in divvy-system", SourceConfigMaps, "needs list of configmaps in divvy-system"},
		"secrets":       {"secrets in divvy-system", SourceSecrets, "needs list of secrets in divvy-system"},
		"the release":   {"secrets in divvy-system", SourceRelease, "needs list of secrets in divvy-system"},
		"the token":     {"secrets in kube-system", SourceToken, "needs get of secrets in kube-system"},
		"reviews":       {"subjectaccessreviews", SourceReviews, "needs create of subjectaccessreviews"},
		"the extender":  {"services/proxy", SourceExtender, "needs get of services/proxy in divvy-system"},
		"cluster roles": {"clusterroles", SourceRoles, "needs list of clusterroles"},
	}
	for name, tt := range tests {
		t.Run(name, func(t *testing.T) {
			s := serve(healthy(t))
			s.forbidden[tt.resource] = true
			snapshot, err := collect(t, s, Options{})
			if err != nil {
				t.Fatal(err)
			}
			if got := snapshot.Failed[tt.source]; got != tt.need {
				t.Errorf("%s: %q, want %q", tt.source, got, tt.need)
			}
			report := Examine(snapshot)
			for i, r := range report.Results {
				if slices.Contains(checks[i].Needs, tt.source) && r.Severity != Unknown {
					t.Errorf("check %s, which needs %s, is %s", r.Check, tt.source, r.Severity)
				}
			}
			if report.Count(Unknown) == 0 {
				t.Error("nothing is unknown")
			}
		})
	}
}

func TestCollectWhereNothingIs(t *testing.T) {
	w := healthy(t)
	s := serve(w)
	for resource := range s.objects {
		if resource != "nodes" && resource != "namespaces" {
			delete(s.objects, resource)
		}
	}
	snapshot, err := collect(t, s, Options{})
	if err != nil {
		t.Fatal(err)
	}
	report := Examine(snapshot)
	if report.Release != "" || report.Results[0].Severity != Error ||
		!strings.Contains(report.Results[0].Findings[0].Remedy, "helm install divvy") {
		t.Errorf("release %q, %+v", report.Release, report.Results[0])
	}
	for _, r := range report.Results {
		if r.Severity == OK && r.Skipped == "" && r.Check != "leftovers" {
			t.Errorf("%s is well where nothing is installed", r.Check)
		}
	}
}

// A rendered manifest leaves no release behind.
func TestCollectWithoutHelm(t *testing.T) {
	w := healthy(t)
	for i := range w.DaemonSets {
		w.DaemonSets[i].Annotations = nil
	}
	for i := range w.Deployments {
		w.Deployments[i].Annotations = nil
	}
	snapshot, err := collect(t, serve(w), Options{})
	if err != nil {
		t.Fatal(err)
	}
	r := snapshot.Release()
	if len(snapshot.Releases) != 1 || r.Helm || r.Name != "divvy" || r.Namespace != system {
		t.Fatalf("releases %+v", snapshot.Releases)
	}
	for _, result := range Examine(snapshot).Results {
		skipped := result.Check == "objects" || result.Check == "rbac"
		if (result.Skipped != "") != skipped || result.Severity != OK {
			t.Errorf("%s: %s, skipped because %q: %+v", result.Check, result.Severity, result.Skipped, result.Findings)
		}
	}
}

// The plain port may be open to the extender's own host alone.
func TestExtenderThatAnswersOverTLSAlone(t *testing.T) {
	s := serve(healthy(t))
	s.onlyTLS = true
	snapshot, err := collect(t, s, Options{})
	if err != nil {
		t.Fatal(err)
	}
	for _, f := range Examine(snapshot).Findings() {
		t.Errorf("%+v", f)
	}
}

func TestCollectOfOneNamespace(t *testing.T) {
	for namespace, want := range map[string]int{system: 1, "elsewhere": 0} {
		snapshot, err := collect(t, serve(healthy(t)), Options{Namespace: namespace})
		if err != nil || len(snapshot.Releases) != want {
			t.Errorf("%s: %d releases, %v; want %d", namespace, len(snapshot.Releases), err, want)
		}
	}
}

func TestCollectFailsWithoutAnAPIServer(t *testing.T) {
	closed := httptest.NewServer(http.NotFoundHandler())
	closed.Close()
	client, err := kubernetes.NewForConfig(&rest.Config{Host: closed.URL})
	if err != nil {
		t.Fatal(err)
	}
	if _, err := Collect(t.Context(), Clients{Kubernetes: client}, Options{Timeout: time.Second}); err == nil ||
		!strings.Contains(err.Error(), "get the version of the API server") {
		t.Errorf("error %v", err)
	}
	ctx, cancel := context.WithCancel(t.Context())
	s := httptest.NewServer(serve(healthy(t)))
	defer s.Close()
	cancel()
	client, err = kubernetes.NewForConfig(&rest.Config{Host: s.URL})
	if err != nil {
		t.Fatal(err)
	}
	if _, err := Collect(ctx, Clients{Kubernetes: client}, Options{Timeout: time.Second}); err == nil ||
		!strings.Contains(err.Error(), "the cluster was not read completely") {
		t.Errorf("error %v", err)
	}
}
