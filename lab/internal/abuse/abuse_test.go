package abuse

import (
	"strings"
	"testing"

	admissionregistrationv1 "k8s.io/api/admissionregistration/v1"
	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
)

// A run that shows nothing is not one in which all is well.
func TestMisses(t *testing.T) {
	good := Result{Port: "port", Attack: "attack", Opened: 10, Peak: 300 << 20, Limit: 512 << 20, Pods: 5, Scheduled: 5, Scrapes: 2,
		Scraped: 1}
	if got := good.misses(); len(got) != 0 {
		t.Errorf("a good one misses %q", got)
	}
	for want, change := range map[string]func(*Result){
		"310 MiB at the peak, more than 60 % of 512 MiB": func(r *Result) { r.Peak = 310 << 20 },
		"1 restarts":                  func(r *Result) { r.Restarts = 1 },
		"4 of 5 pods were scheduled":  func(r *Result) { r.Scheduled = 4 },
		"no pod was created":          func(r *Result) { r.Pods, r.Scheduled = 0, 0 },
		"no connection was made":      func(r *Result) { r.Opened = 0 },
		"none of 2 scrapes succeeded": func(r *Result) { r.Scraped = 0 },
	} {
		bad := good
		change(&bad)
		if got := bad.misses(); len(got) != 1 || got[0] != "port, attack: "+want {
			t.Errorf("misses %q, want %q", got, want)
		}
		if err := missed([]Result{good, bad}); err == nil || !strings.Contains(err.Error(), want) {
			t.Errorf("error %v", err)
		}
	}
	if err := missed([]Result{good}); err != nil {
		t.Error(err)
	}
	only := Options{Only: []string{"TLS stalled", "pool"}}
	for name, want := range map[string]bool{"extender TLS stalled bodies": true, "extender plain stalled bodies": false,
		"divvy-node pool slow headers": true} {
		if only.wants(name) != want || !(Options{}).wants(name) {
			t.Errorf("%s is wanted: %t", name, !want)
		}
	}
}

func TestConfigurations(t *testing.T) {
	mutating, validating, err := configurations(4711)
	if err != nil {
		t.Fatal(err)
	}
	for path, hook := range map[string]struct {
		client   admissionregistrationv1.WebhookClientConfig
		rules    []admissionregistrationv1.RuleWithOperations
		selector *metav1.LabelSelector
	}{
		"/mutate":   {mutating.Webhooks[0].ClientConfig, mutating.Webhooks[0].Rules, mutating.Webhooks[0].NamespaceSelector},
		"/validate": {validating.Webhooks[0].ClientConfig, validating.Webhooks[0].Rules, validating.Webhooks[0].NamespaceSelector},
	} {
		service := hook.client.Service
		if *service.Path != path || *service.Port != 4711 || service.Namespace != poolSpace || len(hook.rules) != 1 ||
			hook.selector.MatchLabels[corev1.LabelMetadataName] != namespace {
			t.Errorf("%s: %+v", path, hook)
		}
	}
}
