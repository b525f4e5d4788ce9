package main

import (
	"fmt"
	"slices"
	"testing"

	"github.com/google/go-cmp/cmp"
	corev1 "k8s.io/api/core/v1"
	networkingv1 "k8s.io/api/networking/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/labels"
	"k8s.io/apimachinery/pkg/runtime"
)

// policyOf returns the only network policy about the pods of a workload.
func policyOf(t *testing.T, all []runtime.Object, w workload, namespace string) *networkingv1.NetworkPolicy {
	t.Helper()
	var found []*networkingv1.NetworkPolicy
	for _, o := range all {
		p, ok := o.(*networkingv1.NetworkPolicy)
		if !ok || p.Namespace != namespace {
			continue
		}
		selector, err := metav1.LabelSelectorAsSelector(&p.Spec.PodSelector)
		if err != nil {
			t.Fatal(err)
		}
		if selector.Matches(labels.Set(w.template.Labels)) {
			found = append(found, p)
		}
	}
	if len(found) != 1 {
		t.Fatalf("%d network policies are about %s", len(found), w)
	}
	return found[0]
}

// TestNetworkPoliciesLetInWhatIsServed, and nothing else: every port of every part
// on the pod network, and out the API server alone, where the part has rights there.
func TestNetworkPoliciesLetInWhatIsServed(t *testing.T) {
	for name, set := range everyPart {
		all := objects(t, rendered(t, append(slices.Clone(set), "--set", "networkPolicy.enabled=true,extender.hostNetwork=false")...))
		for _, w := range workloads(all) {
			spec := w.template.Spec
			if spec.HostNetwork {
				continue
			}
			namespace := "divvy-system"
			if w.name == webhooks {
				namespace = "bwki"
			}
			policy := policyOf(t, all, w, namespace).Spec
			if !slices.Equal(policy.PolicyTypes, []networkingv1.PolicyType{networkingv1.PolicyTypeIngress, networkingv1.PolicyTypeEgress}) {
				t.Errorf("%s with %s: it is about %v", w, name, policy.PolicyTypes)
			}
			var served, open []string
			for _, c := range spec.Containers {
				for _, p := range c.Ports {
					served = append(served, fmt.Sprint(p.ContainerPort))
				}
			}
			for _, rule := range policy.Ingress {
				for _, p := range rule.Ports {
					open = append(open, p.Port.String())
				}
			}
			slices.Sort(served)
			slices.Sort(open)
			if diff := cmp.Diff(served, open); diff != "" {
				t.Errorf("%s with %s: ports (-served +open):\n%s", w, name, diff)
			}
			speaks := spec.AutomountServiceAccountToken != nil && *spec.AutomountServiceAccountToken
			if speaks != (len(policy.Egress) > 0) {
				t.Errorf("%s with %s: it speaks to the API server: %t; egress %v", w, name, speaks, policy.Egress)
			}
		}
	}
}

// TestNetworkPoliciesNameWhoAsks, as the values say.
func TestNetworkPoliciesNameWhoAsks(t *testing.T) {
	all := objects(t, rendered(t,
		"--set", "networkPolicy.enabled=true,pool.enabled=true,networkPolicy.apiServer.cidrs={10.0.0.1/32},"+
			"networkPolicy.apiServer.ports={8443},networkPolicy.kubeScheduler={10.0.0.2/32}",
		"--set-json", `networkPolicy.prometheus=[{"namespaceSelector":{"matchLabels":{"a":"b"}}}]`))
	from := func(rules []networkingv1.NetworkPolicyIngressRule) map[string][]string {
		out := map[string][]string{}
		for _, r := range rules {
			for _, p := range r.From {
				text := fmt.Sprint(p.NamespaceSelector)
				switch {
				case p.IPBlock != nil:
					text = p.IPBlock.CIDR
				case p.NamespaceSelector != nil:
					text = metav1.FormatLabelSelector(p.NamespaceSelector)
				case p.PodSelector != nil: // of the release that is rendered
					text = "app.kubernetes.io/name=" + p.PodSelector.MatchLabels["app.kubernetes.io/name"]
				}
				out[r.Ports[0].Port.String()] = append(out[r.Ports[0].Port.String()], text)
			}
		}
		return out
	}
	for name, want := range map[string]map[string][]string{
		"divvy-extender": {"32766": {"10.0.0.2/32"},
			"32765": {"10.0.0.2/32", "10.0.0.1/32", "app.kubernetes.io/name=divvy-extender"}, "9401": {"a=b"}},
		"bitfusion-webhook":       {"8443": {"10.0.0.1/32"}, "9403": {"a=b"}},
		"divvy-node":              {"9400": {"a=b"}},
		"bitfusion-device-plugin": {"9402": {"a=b"}},
	} {
		policy := one[*networkingv1.NetworkPolicy](t, all, name).Spec
		if diff := cmp.Diff(want, from(policy.Ingress)); diff != "" {
			t.Errorf("%s (-want +got):\n%s", name, diff)
		}
		if name == "bitfusion-device-plugin" {
			continue
		}
		egress := policy.Egress[0]
		if len(egress.To) != 1 || egress.To[0].IPBlock.CIDR != "10.0.0.1/32" || egress.Ports[0].Port.String() != "8443" ||
			*egress.Ports[0].Protocol != corev1.ProtocolTCP {
			t.Errorf("%s: the API server is reached by %+v", name, egress)
		}
	}
	for _, o := range objects(t, rendered(t, "--set", "pool.enabled=true")) {
		if _, ok := o.(*networkingv1.NetworkPolicy); ok {
			t.Errorf("%s is made without being asked for", nameOf(t, o))
		}
	}
}
