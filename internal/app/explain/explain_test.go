package explain

import (
	"bytes"
	"net/http"
	"net/http/httptest"
	"strings"
	"testing"
	"time"

	"k8s.io/client-go/rest"

	"github.com/divvy-gpu/divvy/internal/platform/kube"
	"github.com/divvy-gpu/divvy/internal/report/inspect"
)

const explanation = `{"apiVersion":"divvy.dev/v1","kind":"DecisionExplanation","pod":{"namespace":"team","name":"p","uid":"u"},
"at":"2026-01-02T03:04:05Z","request":{"resource":"enflame.com/gcu-memory","units":8,"devices":1},"offered":3,"fits":2,"chosen":"a",
"rejected":[{"code":"noDeviceFits","nodes":1,"named":["c"]}],"policy":"binpack","ratings":[
{"node":"a","rating":-2,"terms":[{"name":"freeLeft","value":-2}],"devices":[
 {"index":0,"total":16,"free":10,"chosen":true,"terms":[{"name":"freeLeft","value":-2}]},
 {"index":1,"total":16,"free":16,"terms":[{"name":"freeLeft","value":-8}]},{"index":2,"total":16,"free":3,"rejected":"too little free"}]},
{"node":"b","rating":-8,"terms":[{"name":"freeLeft","value":-8}],"devices":[{"index":0,"total":16,"free":16,"wouldGet":true}]}],
"bound":{"pod":{"namespace":"team","name":"p","uid":"u"},"at":"2026-01-02T03:04:05Z","node":"a",
"resource":"enflame.com/gcu-memory","units":8,"devices":[{"index":0,"id":"a0"}]}}`

const shown = `team/p requested 8 units of enflame.com/gcu-memory at 2026-01-02T03:04:05Z and was bound to a, device 0.
  POLICY    binpack
  NODES     3 offered by kube-scheduler, the pod fits on 2; 1 noDeviceFits (c)
  a  rated -2: freeLeft -2
    device 0  10 of 16 free  chosen
    device 1  16 of 16 free  would be rated -8: freeLeft -8
    device 2  3 of 16 free   too little free
  b  rated -8: freeLeft -8
    device 0  16 of 16 free  would get
  WON       a over b by freeLeft -2 against -8
`

// TestExplain shows what the extender answers, and its own words where it knows nothing.
func TestExplain(t *testing.T) {
	server := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		switch {
		case strings.HasSuffix(r.URL.Path, "/services/divvy-extender:32766/proxy"+inspect.ExplainRoute+"/team/p"):
			_, _ = w.Write([]byte(explanation))
		case strings.HasSuffix(r.URL.Path, "/old"):
			_, _ = w.Write([]byte(`{}`))
		case strings.HasSuffix(r.URL.Path, inspect.DecisionsRoute):
			time.Sleep(100 * time.Millisecond)
			_, _ = w.Write([]byte(`{}`))
		case strings.HasSuffix(r.URL.Path, "/api/v1/nodes"):
			w.Header().Set("Content-Type", "application/json")
			_, _ = w.Write([]byte(`{"kind":"NodeList","apiVersion":"v1","metadata":{},"items":[{"metadata":{"name":"a"}}]}`))
		case strings.HasSuffix(r.URL.Path, "/api/v1/pods"):
			w.Header().Set("Content-Type", "application/json")
			_, _ = w.Write([]byte(`{"kind":"PodList","apiVersion":"v1","metadata":{},"items":[]}`))
		case strings.HasSuffix(r.URL.Path, "/secret/p"):
			w.WriteHeader(http.StatusForbidden)
			_, _ = w.Write([]byte(`{"kind":"Status","apiVersion":"v1","status":"Failure","message":"services is forbidden","code":403}`))
		default:
			w.WriteHeader(http.StatusNotFound)
			_, _ = w.Write([]byte(`{"Error":"no decision about pod team/q was made since then"}`))
		}
	}))
	defer server.Close()
	for args, want := range map[string]struct{ out, err string }{
		"p -n team":               {shown, ""},
		"p":                       {shown, ""}, // the namespace of the context
		"q -n team":               {"", "no decision about pod team/q was made since then"},
		"old":                     {"", "it may be of an earlier release"},
		"":                        {"", "exactly one POD is required"},
		"p --export f":            {"", "do not name one"},
		"../x":                    {"", `pod "../x"`},
		"p -n ../x":               {"", `--namespace "../x"`},
		"p -o yaml":               {"", `--output "yaml": must be text or json`},
		"p --service=":            {"", "must not be empty"},
		"p --extender-timeout=0s": {"", "must be above zero"},
		"p -n secret":             {"", "ask the extender: services is forbidden: "},
		"--export - --extender-timeout=20ms": {
			`{"apiVersion":"divvy.dev/v1","kind":"DecisionExport","record":{},"cluster":{"kind":"List"`, ""},
	} {
		var out bytes.Buffer
		cmd := command(func() (kube.Clients, error) { return kube.NewClients(&rest.Config{Host: server.URL}, "test") },
			func() (string, error) { return "team", nil })
		cmd.SetArgs(strings.Fields(args))
		cmd.SetOut(&out)
		cmd.SilenceErrors, cmd.SilenceUsage = true, true
		err := cmd.ExecuteContext(t.Context())
		got := out.String()
		if strings.HasPrefix(args, "--export") {
			got = got[:min(len(got), len(want.out))] // the rest is the cluster
		}
		if want.err == "" && err != nil || want.err != "" && (err == nil || !strings.Contains(err.Error(), want.err)) ||
			got != want.out {
			t.Errorf("explain %s: %v\n%s", args, err, out.String())
		}
	}
}
