package doctor

import (
	"bytes"
	"encoding/json"
	"errors"
	"fmt"
	"net/http"
	"net/http/httptest"
	"os"
	"path/filepath"
	"reflect"
	"strings"
	"sync/atomic"
	"testing"
	"time"

	"github.com/spf13/pflag"

	"github.com/divvy-gpu/divvy/internal/app/kubectl"
	"github.com/divvy-gpu/divvy/internal/core/accel"
	"github.com/divvy-gpu/divvy/internal/core/wire"
	"github.com/divvy-gpu/divvy/internal/report/doctor"
)

// lists are the kinds of the lists that are read of a cluster without Divvy.
var lists = map[string]string{
	"/api/v1/nodes": "v1 NodeList", "/api/v1/pods": "v1 PodList", "/api/v1/namespaces": "v1 NamespaceList",
	"/api/v1/namespaces/default/events": "v1 EventList", "/api/v1/resourcequotas": "v1 ResourceQuotaList",
	"/apis/apps/v1/daemonsets": "apps/v1 DaemonSetList", "/apis/apps/v1/deployments": "apps/v1 DeploymentList",
	"/apis/rbac.authorization.k8s.io/v1/clusterroles":        "rbac.authorization.k8s.io/v1 ClusterRoleList",
	"/apis/rbac.authorization.k8s.io/v1/clusterrolebindings": "rbac.authorization.k8s.io/v1 ClusterRoleBindingList",
	"/apis/admissionregistration.k8s.io/v1/mutatingwebhookconfigurations": "admissionregistration.k8s.io/v1 " +
		"MutatingWebhookConfigurationList",
	"/apis/admissionregistration.k8s.io/v1/validatingwebhookconfigurations": "admissionregistration.k8s.io/v1 " +
		"ValidatingWebhookConfigurationList",
	"/apis/admissionregistration.k8s.io/v1/validatingadmissionpolicies": "admissionregistration.k8s.io/v1 " +
		"ValidatingAdmissionPolicyList",
	"/apis/admissionregistration.k8s.io/v1/validatingadmissionpolicybindings": "admissionregistration.k8s.io/v1 " +
		"ValidatingAdmissionPolicyBindingList",
}

// deployment is one of Divvy that has been scaled to 0.
const deployment = `{"metadata":{"name":"divvy-extender","namespace":"divvy-system","generation":2,
"labels":{"app.kubernetes.io/name":"divvy-extender","app.kubernetes.io/instance":"divvy","app.kubernetes.io/part-of":"divvy"}},
"spec":{"replicas":1,"selector":{"matchLabels":{"app.kubernetes.io/name":"divvy-extender"}}},"status":{"observedGeneration":%d}}`

// cluster answers as an API server does; items are those of lists by path.
func cluster(t *testing.T, items func(path string) string) string {
	t.Helper()
	s := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		w.Header().Set("Content-Type", "application/json")
		kind, known := lists[r.URL.Path]
		switch {
		case r.URL.Path == "/version":
			fmt.Fprint(w, `{"gitVersion":"v1.37.0"}`)
		case known:
			version, kind, _ := strings.Cut(kind, " ")
			fmt.Fprintf(w, `{"apiVersion":%q,"kind":%q,"metadata":{},"items":[%s]}`, version, kind, items(r.URL.Path))
		default:
			w.WriteHeader(http.StatusForbidden)
			fmt.Fprint(w, `{"apiVersion":"v1","kind":"Status","status":"Failure","reason":"Forbidden","message":"not for you","code":403}`)
		}
	}))
	t.Cleanup(s.Close)
	return s.URL
}

func nothing(string) string { return "" }

func run(t *testing.T, host string, change func(*Options)) (string, error) {
	t.Helper()
	c, fs := kubectl.New(), pflag.NewFlagSet("", pflag.ContinueOnError)
	c.AddFlags(fs)
	if err := fs.Parse([]string{"--server", host, "--kubeconfig", os.DevNull}); err != nil {
		t.Fatal(err)
	}
	clients, err := connect(c)
	if err != nil {
		t.Fatal(err)
	}
	o := DefaultOptions()
	o.Settle = 0
	if change != nil {
		change(&o)
	}
	var out bytes.Buffer
	err = Run(t.Context(), o, clients, func(r doctor.Report) doctor.Report { return r }, &out)
	return out.String(), err
}

// wantCode checks with which code the program would end.
func wantCode(t *testing.T, err error, code int, text string) {
	t.Helper()
	if kubectl.ExitCode(err) != code || (err == nil) != (code == 0) || err != nil && !strings.Contains(err.Error(), text) {
		t.Errorf("exit code %d, error %v; want %d, %q", kubectl.ExitCode(err), err, code, text)
	}
}

func TestNothingInstalled(t *testing.T) {
	out, err := run(t, cluster(t, nothing), nil)
	wantCode(t, err, ExitFindings, "")
	if err.Error() != "" {
		t.Errorf("the error says %q beside the report", err)
	}
	for _, want := range []string{"Divvy: not installed", "Divvy is not installed", "helm install divvy", "1 error, 0 warnings"} {
		if !strings.Contains(out, want) {
			t.Errorf("the report lacks %q:\n%s", want, out)
		}
	}
	out, err = run(t, cluster(t, nothing), func(o *Options) { o.Output = "json" })
	wantCode(t, err, ExitFindings, "")
	var report doctor.Report
	if err := json.Unmarshal([]byte(out), &report); err != nil || report.Kubernetes != "v1.37.0" ||
		len(report.Results) != len(doctor.Checks()) {
		t.Errorf("%v, Kubernetes %s, %d results", err, report.Kubernetes, len(report.Results))
	}
}

// Where all that could be looked at is well, and not everything could, the code
// says so.
func TestNotEverythingCouldBeLookedAt(t *testing.T) {
	forbidden := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		w.Header().Set("Content-Type", "application/json")
		if r.URL.Path == "/version" {
			fmt.Fprint(w, `{"gitVersion":"v1.37.0"}`)
			return
		}
		w.WriteHeader(http.StatusForbidden)
		fmt.Fprint(w, `{"apiVersion":"v1","kind":"Status","status":"Failure","reason":"Forbidden","message":"not for you","code":403}`)
	}))
	defer forbidden.Close()
	out, err := run(t, forbidden.URL, nil)
	wantCode(t, err, ExitUnknown, "")
	for _, want := range []string{"needs list of nodes", "needs list of daemonsets", "could not be performed"} {
		if !strings.Contains(out, want) {
			t.Errorf("the report lacks %q:\n%s", want, out)
		}
	}
}

func TestNoAnswer(t *testing.T) {
	closed := httptest.NewServer(http.NotFoundHandler())
	closed.Close()
	out, err := run(t, closed.URL, nil)
	wantCode(t, err, ExitUnknown, "get the version of the API server")
	if out != "" {
		t.Errorf("there is a report: %s", out)
	}
	asked := make(chan struct{})
	defer close(asked)
	_, err = run(t, cluster(t, func(path string) string {
		if path == "/api/v1/pods" {
			<-asked
		}
		return ""
	}), func(o *Options) { o.Timeout = 200 * time.Millisecond })
	wantCode(t, err, ExitUnknown, "--timeout 200ms")
}

// What may mend itself is looked at twice.
func TestSecondLook(t *testing.T) {
	var looks atomic.Int32
	host := cluster(t, func(path string) string {
		if path != "/apis/apps/v1/deployments" {
			return ""
		}
		// The controller has seen the newest settings by the second time.
		return fmt.Sprintf(deployment, looks.Add(1))
	})
	out, err := run(t, host, func(o *Options) { o.Settle = time.Millisecond })
	if looks.Load() != 2 || strings.Contains(out, "latest settings") {
		t.Errorf("%d looks, %v:\n%s", looks.Load(), err, out)
	}
	looks.Store(0)
	if out, _ := run(t, host, nil); looks.Load() != 1 || !strings.Contains(out, "latest settings") {
		t.Errorf("without a second look, %d looks:\n%s", looks.Load(), out)
	}
}

func TestValidate(t *testing.T) {
	o := Options{Output: "xml", Namespace: "A b", Timeout: -1, Settle: -1}
	err := o.Validate()
	for _, want := range []string{`output format "xml"`, `--namespace "A b"`, "--timeout -1ns", "--settle -1ns"} {
		if err == nil || !strings.Contains(err.Error(), want) {
			t.Errorf("error %v lacks %q", err, want)
		}
	}
	if err := DefaultOptions().Validate(); err != nil {
		t.Error(err)
	}
	o = DefaultOptions()
	o.Settle = o.Timeout
	if err := o.Validate(); err == nil || !strings.Contains(err.Error(), "below --timeout") {
		t.Errorf("error %v", err)
	}
	_, err = run(t, "http://127.0.0.1:1", func(o *Options) { o.Output = "xml" })
	wantCode(t, err, ExitUnknown, `output format "xml"`)
}

// The command takes kubectl's flags, and its commands speak to the same cluster.
func TestCommand(t *testing.T) {
	host := cluster(t, func(path string) string {
		if path == "/apis/rbac.authorization.k8s.io/v1/clusterroles" {
			return `{"metadata":{"name":"old","labels":{"app.kubernetes.io/part-of":"divvy","app.kubernetes.io/instance":"gone"}}}`
		}
		return ""
	})
	file := filepath.Join(t.TempDir(), "kubeconfig")
	text := fmt.Sprintf("apiVersion: v1\nkind: Config\nclusters:\n- {name: c, cluster: {server: %q}}\ncontexts:\n- {name: there, "+
		"context: {cluster: c, user: u}}\nusers:\n- {name: u}\n", host)
	if err := os.WriteFile(file, []byte(text), 0o600); err != nil {
		t.Fatal(err)
	}
	cmd := Command()
	var out bytes.Buffer
	cmd.SetOut(&out)
	cmd.SetErr(&out)
	cmd.SilenceUsage, cmd.SilenceErrors = true, true
	cmd.SetArgs([]string{"--kubeconfig", file, "--context", "there", "--settle", "0"})
	wantCode(t, cmd.ExecuteContext(t.Context()), ExitFindings, "")
	want := "$ kubectl --kubeconfig=" + file + " --context=there delete clusterrole old\n"
	if !strings.Contains(out.String(), want) {
		t.Errorf("no %q in:\n%s", want, out.String())
	}

	for name, args := range map[string][]string{
		`context "nowhere" does not exist`: {"--kubeconfig", file, "--context", "nowhere"},
		"no such file":                     {"--kubeconfig", file + "x"},
		`output format "table"`:            {"-o", "table"},
	} {
		cmd := Command()
		cmd.SetOut(&out)
		cmd.SetErr(&out)
		cmd.SilenceUsage, cmd.SilenceErrors = true, true
		cmd.SetArgs(args)
		wantCode(t, cmd.ExecuteContext(t.Context()), ExitUnknown, name)
	}
}

func TestExitCode(t *testing.T) {
	cause := errors.New("x")
	for name, tt := range map[string]struct {
		err  error
		want int
	}{
		"nothing":         {nil, 0},
		"any error":       {cause, 1},
		"findings":        {&kubectl.ExitError{Code: ExitFindings}, 1},
		"unknown":         {unknown(cause), 2},
		"wrapped":         {fmt.Errorf("doctor: %w", unknown(cause)), 2},
		"nothing unknown": {unknown(nil), 0},
	} {
		if got := kubectl.ExitCode(tt.err); got != tt.want {
			t.Errorf("%s: %d, want %d", name, got, tt.want)
		}
	}
	if !errors.Is(unknown(cause), cause) {
		t.Error("the cause is lost")
	}
}

// TestWaiting: why a pod waits, and what admits it, is what kubectl divvy why says. Nothing is
// said about a pod that is about to start.
func TestWaiting(t *testing.T) {
	inventory, err := wire.EncodeInventory([]accel.Inventory{{Resource: "enflame.com/gcu-memory", Unit: "1", Several: true,
		Shares: []accel.Share{{Units: 16, Device: accel.Device{Index: 0, ID: "a", NUMANode: accel.NoNUMA}},
			{Units: 16, Device: accel.Device{Index: 1, ID: "b", NUMANode: accel.NoNUMA}}}}})
	if err != nil {
		t.Fatal(err)
	}
	pod := func(name, units, rest string) string {
		return fmt.Sprintf(`{"metadata":{"namespace":"team","name":%q,"uid":%[1]q,"creationTimestamp":%[2]q},"spec":{
			"containers":[{"name":"main",
			"resources":{"limits":{"enflame.com/gcu-memory":%[3]q},"requests":{"enflame.com/gcu-memory":%[3]q}}}]%[4]s}`, name,
			time.Now().Add(-time.Minute).Format(time.RFC3339), units, rest)
	}
	const message = "0/1 nodes are available: 1 insufficient GCU Memory in one gcu device."
	items := map[string]string{
		"/apis/apps/v1/deployments": fmt.Sprintf(deployment, 2),
		"/api/v1/nodes": fmt.Sprintf(`{"metadata":{"name":"node-a","labels":{"enflame.com/gcushare":"true"},
			"annotations":{%q:%q}},"status":{
			"allocatable":{"enflame.com/gcu-memory":"32","pods":"110"},"conditions":[{"type":"Ready","status":"True"}]}}`,
			wire.InventoryAnnotation, inventory),
		"/api/v1/pods": pod("train", "20",
			fmt.Sprintf(`},"status":{"phase":"Pending","conditions":[{"type":"PodScheduled","status":"False","message":%q}]}`,
				message)) + "," + pod("begins", "2", `,"nodeName":"node-a"},"status":{"phase":"Pending"}`),
	}
	out, err := run(t, cluster(t, func(path string) string { return items[path] }), func(o *Options) { o.Output = "json" })
	wantCode(t, err, ExitFindings, "")
	var report doctor.Report
	if err := json.Unmarshal([]byte(out), &report); err != nil {
		t.Fatal(err)
	}
	for _, r := range report.Results {
		if r.Check != "waiting" {
			continue
		}
		want := []doctor.Finding{{Check: "waiting", Severity: doctor.Warning, Object: "Pod team/train",
			Problem:  "it waits: 20 units of enflame.com/gcu-memory (20 GB) are more than any device has",
			Remedy:   "What would help: spread over 2 devices (10 each).",
			Commands: []string{"kubectl annotate pod -n team train divvy.dev/devices=2"}}}
		if !reflect.DeepEqual(r.Findings, want) {
			t.Errorf("findings %+v, want %+v", r.Findings, want)
		}
		return
	}
	t.Error("no check named waiting")
}
