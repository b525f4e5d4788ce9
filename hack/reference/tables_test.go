package main

import (
	"bytes"
	"encoding/json"
	"net/http"
	"net/http/httptest"
	"os"
	"path/filepath"
	"regexp"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/spf13/pflag"
	admissionv1 "k8s.io/api/admissionregistration/v1"
	appsv1 "k8s.io/api/apps/v1"
	corev1 "k8s.io/api/core/v1"
	apiresource "k8s.io/apimachinery/pkg/api/resource"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/client-go/kubernetes/scheme"
	"k8s.io/client-go/rest"

	"github.com/divvy-gpu/divvy/internal/app/extender"
	simulatecmd "github.com/divvy-gpu/divvy/internal/app/simulate"
	"github.com/divvy-gpu/divvy/internal/core/accel"
	"github.com/divvy-gpu/divvy/internal/core/place"
	"github.com/divvy-gpu/divvy/internal/core/wire"
	"github.com/divvy-gpu/divvy/internal/platform/kube"
	"github.com/divvy-gpu/divvy/internal/report/doctor"
	"github.com/divvy-gpu/divvy/internal/report/inspect/collect"
	"github.com/divvy-gpu/divvy/internal/report/simulate"
	"github.com/divvy-gpu/divvy/internal/testing/charttest"
)

// TestPagesNameVendorsAndPolicies: what people read of the chart is written by hand
// beside the tables.
func TestPagesNameVendorsAndPolicies(t *testing.T) {
	all, err := render(root)
	if err != nil {
		t.Fatal(err)
	}
	values, names := all[folder+"/values.md"], all[folder+"/annotations.md"]
	for _, want := range []string{"The vendor of the devices: " + accel.Or(accel.VendorNames()...), place.About()} {
		if !strings.Contains(values, want) {
			t.Errorf("the comments of values.yaml lack %q", want)
		}
	}
	for _, v := range accel.Vendors {
		if want := v.NodeLabel + "=true"; !strings.Contains(values, want) {
			t.Errorf("the comments of values.yaml lack %q", want)
		}
		if want := "`divvy.dev/" + v.Name + ".*`"; !strings.Contains(names, want) || !strings.Contains(names, v.Brand) {
			t.Errorf("names.go lacks %s, of %s", want, v.Brand)
		}
	}
}

// The vendor and the policy that the test below adds.
var (
	acme = accel.Vendor{
		Name: "acme", Brand: "Acme", NodeLabel: "acme.com/npu.present",
		Labels: `acme\.com/npu\..+`, ChoosingLabels: `acme\.com/npu\.deploy`,
		Devices: "acme.com/npu", Memory: "acme.com/npu-memory", MemoryText: "NPU Memory", DeviceText: "npu device",
		LegacyPrefix: "acme.com/npu-device-", Plugins: []string{"acme-device-plugin"}, Schedulers: []string{"acme-scheduler"},
	}
	never = place.Entry{Name: "never", About: "none", Policy: rejecting{place.Binpack}}
)

// rejecting is a policy by which no pod fits.
type rejecting struct{ place.Policy }

func (rejecting) Name() string { return never.Name }

func (rejecting) Choose(_ *place.Node, _ *place.Ask, buf []int) (slots []int, rating int64, ok bool) {
	return buf[:0], place.NoRating, false
}

// TestAVendorAndAPolicyAreEntries: added to the tables and nowhere else, they work in
// the chart, the extender's options, doctor, inspect and simulate.
func TestAVendorAndAPolicyAreEntries(t *testing.T) {
	dir := filepath.Join(t.TempDir(), "charts", "divvy")
	if err := os.CopyFS(dir, os.DirFS(filepath.Join(root, "charts", "divvy"))); err != nil {
		t.Fatal(err)
	}
	set := []string{
		"--set-json", `sharedResources=[{"name":"acme.com/npu-memory","vendor":"acme","mode":"memory"}]`,
		"--set", "extender.policy=never,node.libraries.acme=/x",
	}
	_, err := charttest.RenderChart(t.Context(), dir, set...)
	for _, want := range []string{"/sharedResources/0/vendor", "/extender/policy"} {
		if err == nil || !strings.Contains(err.Error(), want) {
			t.Errorf("before they are added, the chart does not reject %s: %v", want, err)
		}
	}

	vendors, policies := accel.Vendors, place.Table
	t.Cleanup(func() { accel.Vendors, place.Table = vendors, policies })
	accel.Vendors = slices.Concat([]accel.Vendor{acme}, vendors)
	place.Table = slices.Concat(policies, []place.Entry{never})

	files, err := chart(filepath.Dir(filepath.Dir(dir)))
	if err != nil {
		t.Fatal(err)
	}
	for name, text := range files {
		if err := os.WriteFile(filepath.Join(dir, "..", "..", name), []byte(text), 0o600); err != nil {
			t.Fatal(err)
		}
	}
	text, err := charttest.RenderChart(t.Context(), dir, set...)
	if err != nil {
		t.Fatal(err)
	}
	s := &doctor.Snapshot{Taken: time.Now(), Releases: []doctor.Release{{Name: charttest.Release, Namespace: charttest.Namespace}}}
	for document := range bytes.SplitSeq(text, []byte("\n---\n")) {
		object, _, err := scheme.Codecs.UniversalDeserializer().Decode(document, nil, nil)
		if err != nil {
			t.Fatal(err)
		}
		switch o := object.(type) {
		case *appsv1.DaemonSet:
			s.DaemonSets = append(s.DaemonSets, *o)
		case *corev1.ConfigMap:
			s.Objects.ConfigMaps = append(s.Objects.ConfigMaps, *o)
		case *appsv1.Deployment:
			if o.Name == "divvy-extender" {
				checkExtender(t, o.Spec.Template.Spec.Containers[0].Args)
			}
		case *admissionv1.ValidatingAdmissionPolicy:
			if o.Name == "divvy-node" {
				checkRestriction(t, o.Spec.Variables)
			}
		}
	}

	inventory, err := wire.EncodeInventory([]accel.Inventory{{Resource: acme.Memory, Unit: "1", Shares: []accel.Share{
		{Device: accel.Device{ID: "npu-0", Model: "N1", NUMANode: accel.NoNUMA, MemoryBytes: 16 << 30}, Units: 16},
	}}})
	if err != nil {
		t.Fatal(err)
	}
	node := corev1.Node{ObjectMeta: metav1.ObjectMeta{
		Name: "node-a", Labels: map[string]string{acme.NodeLabel: "true"},
		Annotations: map[string]string{wire.InventoryAnnotation: inventory},
	}}
	pods := []corev1.Pod{
		pod(t, "train", map[string]string{wire.PolicyAnnotation: never.Name}), // as users write it
		pod(t, "serve", map[string]string{}),
	}
	checkDoctor(t, s, node)
	checkCluster(t, node, pods)
}

// pod has 8 units of the node's device.
func pod(t *testing.T, name string, annotations map[string]string) corev1.Pod {
	t.Helper()
	signer, err := wire.NewSigner(bytes.Repeat([]byte("k"), wire.MinKeyBytes))
	if err != nil {
		t.Fatal(err)
	}
	annotations[wire.GrantAnnotation], err = signer.EncodeGrant("uid-of-"+name, accel.Grant{
		Resource: acme.Memory, Node: "node-a", Device: "npu-0", DeviceUnits: 16, Units: 8, At: time.Now(), Confirmed: true,
	})
	if err != nil {
		t.Fatal(err)
	}
	list := corev1.ResourceList{corev1.ResourceName(acme.Memory): apiresource.MustParse("8")}
	p := corev1.Pod{ObjectMeta: metav1.ObjectMeta{Namespace: "team", Name: name, UID: types.UID("uid-of-" + name),
		Annotations: annotations}}
	p.Spec.NodeName = "node-a"
	p.Spec.Containers = []corev1.Container{{Name: "main", Resources: corev1.ResourceRequirements{Limits: list, Requests: list}}}
	p.Status.Phase = corev1.PodRunning
	return p
}

// checkExtender: the extender takes the policy, and its help describes it.
func checkExtender(t *testing.T, args []string) {
	t.Helper()
	t.Setenv("POD_NAMESPACE", charttest.Namespace)
	t.Setenv("POD_NAME", "divvy-extender-0")
	o := extender.DefaultOptions()
	fs := pflag.NewFlagSet("extender", pflag.ContinueOnError)
	o.AddFlags(fs)
	if err := fs.Parse(args[1:]); err != nil {
		t.Fatal(err)
	}
	p := o.Placement
	if err := o.Validate(); err != nil || p.Policy != never.Name || !strings.Contains(p.NodeLabel, acme.NodeLabel+"=true") {
		t.Errorf("policy %q, node label %q: %v", p.Policy, p.NodeLabel, err)
	}
	if usage := fs.Lookup("policy").Usage; !strings.HasSuffix(usage, "or never (none)") {
		t.Errorf("the help of --policy is %q", usage)
	}
}

// checkRestriction: divvy-node may write the labels that describe the vendor's devices,
// and the annotations that pods of the vendor had before.
func checkRestriction(t *testing.T, variables []admissionv1.Variable) {
	t.Helper()
	expression := map[string]string{}
	for _, v := range variables {
		expression[v.Name] = strings.TrimSuffix(strings.TrimPrefix(v.Expression, "r'"), "'")
	}
	describing, choosing := regexp.MustCompile(expression["describing"]), regexp.MustCompile(expression["choosing"])
	for key, want := range map[string][2]bool{
		"divvy.dev/acme.present": {true, false}, "acme.com/npu.count": {true, false}, "acme.com/npu.deploy": {true, true},
		"acme.com/other":       {false, false},
		"nvidia.com/gpu.count": {true, false}, "nvidia.com/gpu.deploy.driver": {true, true}, "divvy.dev/other.present": {false, false},
	} {
		if got := [2]bool{describing.MatchString(key), choosing.MatchString(key)}; got != want {
			t.Errorf("label %s: describing, choosing = %v, want %v", key, got, want)
		}
	}
	if !strings.Contains(expression["ours"], "'acme.com/npu-device-id'") {
		t.Errorf("divvy-node may not write annotations of %s: %s", acme.Name, expression["ours"])
	}
}

// checkDoctor: the configuration is right, the vendor's label chooses the node, and the
// vendor's own plugin and scheduler are noticed.
func checkDoctor(t *testing.T, s *doctor.Snapshot, node corev1.Node) {
	t.Helper()
	s.Nodes = []corev1.Node{node}
	for _, d := range s.DaemonSets {
		if d.Name != "divvy-node" {
			continue
		}
		s.Pods = append(s.Pods, corev1.Pod{
			ObjectMeta: metav1.ObjectMeta{Namespace: charttest.Namespace, Name: "divvy-node-x", Labels: d.Spec.Template.Labels},
			Spec:       corev1.PodSpec{NodeName: node.Name}, Status: corev1.PodStatus{Phase: corev1.PodRunning},
		})
	}
	s.Pods = append(s.Pods, corev1.Pod{
		ObjectMeta: metav1.ObjectMeta{Namespace: "kube-system", Name: "acme-device-plugin-x"},
		Spec: corev1.PodSpec{NodeName: node.Name, Volumes: []corev1.Volume{{VolumeSource: corev1.VolumeSource{
			HostPath: &corev1.HostPathVolumeSource{Path: "/var/lib/kubelet/device-plugins"},
		}}}},
	})
	s.Deployments = []appsv1.Deployment{{ObjectMeta: metav1.ObjectMeta{Namespace: "kube-system", Name: "acme-scheduler"}}}
	want := map[string]string{
		"configuration": "", "node-labels": "",
		"other-plugins": "Pod kube-system/acme-device-plugin-x", "leftovers": "Deployment kube-system/acme-scheduler",
	}
	for _, r := range doctor.Examine(s).Results {
		object, ok := want[r.Check]
		switch {
		case !ok:
		case r.Skipped != "":
			t.Errorf("check %s was skipped: %s", r.Check, r.Skipped)
		case object == "" && len(r.Findings) > 0, object != "" && (len(r.Findings) != 1 || r.Findings[0].Object != object):
			t.Errorf("check %s found %+v, want %q", r.Check, r.Findings, object)
		}
		delete(want, r.Check)
	}
	if len(want) > 0 {
		t.Errorf("checks that were not made: %v", want)
	}
}

// checkCluster: inspect shows the vendor's devices, and simulate uses them and the policy.
func checkCluster(t *testing.T, node corev1.Node, pods []corev1.Pod) {
	t.Helper()
	server := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		var list any
		switch metadata := strings.Contains(r.Header.Get("Accept"), "PartialObjectMetadataList"); {
		case r.URL.Path == "/api/v1/pods":
			list = &corev1.PodList{TypeMeta: metav1.TypeMeta{APIVersion: "v1", Kind: "PodList"}, Items: pods}
		case r.URL.Path == "/api/v1/nodes" && metadata:
			list = &metav1.PartialObjectMetadataList{TypeMeta: metav1.TypeMeta{APIVersion: "meta.k8s.io/v1",
				Kind: "PartialObjectMetadataList"},
				Items: []metav1.PartialObjectMetadata{{ObjectMeta: node.ObjectMeta}}}
		case r.URL.Path == "/api/v1/nodes":
			list = &corev1.NodeList{TypeMeta: metav1.TypeMeta{APIVersion: "v1", Kind: "NodeList"}, Items: []corev1.Node{node}}
		default:
			http.NotFound(w, r)
			return
		}
		w.Header().Set("Content-Type", "application/json")
		if err := json.NewEncoder(w).Encode(list); err != nil {
			t.Error(err)
		}
	}))
	defer server.Close()
	clients, err := kube.NewClients(&rest.Config{Host: server.URL}, "test")
	if err != nil {
		t.Fatal(err)
	}

	var out, notes bytes.Buffer
	if err := collect.Run(t.Context(), collect.DefaultOptions(), clients, "", &out, &notes); err != nil {
		t.Fatal(err)
	}
	for _, want := range []string{`NODE node-a: 1 card, acme\.com/npu-memory `, ` N1 +healthy +16 +16 +0 .* team/serve +8\n`,
		` team/train +8\n`} {
		if !regexp.MustCompile(want).Match(out.Bytes()) {
			t.Errorf("inspect does not show %q:\n%s", want, &out)
		}
	}

	o := simulatecmd.DefaultOptions()
	o.FromCluster, o.Shuffles, o.Output = true, 1, "json"
	out.Reset()
	notes.Reset()
	connect := func() (kube.Clients, error) { return clients, nil }
	if err := simulatecmd.Run(t.Context(), o, connect, nil, &out, &notes); err != nil {
		t.Fatal(err)
	}
	var report simulate.Report
	if err := json.Unmarshal(out.Bytes(), &report); err != nil {
		t.Fatal(err)
	}
	allocated := map[string]float64{}
	for _, p := range report.Workloads[0].Policies {
		allocated[p.Policy] = p.Points[0].AllocatedPercent.Mean
	}
	if len(allocated) != len(place.Table) || allocated[place.Binpack.Name()] != 100 || allocated[never.Name] != 0 || notes.Len() > 0 {
		t.Errorf("simulate allocates %v percent and notes %q", allocated, &notes)
	}
}
