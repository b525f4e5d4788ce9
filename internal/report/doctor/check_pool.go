package doctor

import (
	"encoding/json"
	"errors"
	"fmt"
	"slices"
	"strings"

	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/labels"

	"github.com/divvy-gpu/divvy/internal/platform/kube"
	"github.com/divvy-gpu/divvy/internal/pool"
	"github.com/divvy-gpu/divvy/internal/pool/token"
)

const poolLabel = "divvy.dev/pool"

// source is the namespace of the pool's secrets.
func (s *Snapshot) source() string {
	if d := program(s.Release(), s.Deployments, namePoolHook); d != nil {
		if ns, ok := argument(&d.Spec.Template.Spec, "source-namespace"); ok {
			return ns
		}
	}
	return kubeSystem
}

// importing is the command by which a token is brought in.
func importing(namespace string) string {
	if namespace == kubeSystem {
		return "kubectl divvy pool import TOKEN.tar"
	}
	return "kubectl divvy pool import TOKEN.tar -n " + namespace
}

func checkPoolToken(s *Snapshot, f *findings) {
	ns := s.source()
	var missing []string
	t := &token.Token{}
	find := func(name string) *corev1.Secret {
		for i := range s.Token {
			if s.Token[i].Name == name {
				return &s.Token[i]
			}
		}
		return nil
	}
	for _, h := range []struct{ secret, key string }{
		{pool.CASecret, pool.CAKey}, {pool.ClientSecret, pool.ClientKey}, {pool.ServersSecret, pool.ServersKey},
	} {
		secret := find(h.secret)
		if secret == nil {
			missing = append(missing, h.secret)
			continue
		}
		t.Set(h.key, secret.Data[h.key])
	}
	object := "the pool's secrets in namespace " + ns
	remedy := "Import the token from the pool's administrator: " + importing(ns)
	if len(missing) > 0 {
		f.add(Error, object, list(missing)+" missing, so no pod can use the pool's servers", remedy)
		return
	}
	if find(pool.SingleSecret) == nil {
		f.add(Warning, object, pool.SingleSecret+" is missing, so pods with clients 2.5 do not start", remedy)
	}
	warnings, err := t.Check(s.Taken)
	if err != nil {
		f.add(Error, object, "the token is invalid: "+mistakes(err), remedy+"; kubectl divvy pool check explains the details")
	}
	for _, w := range warnings {
		f.add(Warning, object, w, remedy+"; kubectl divvy pool check explains the details")
	}
}

func checkPoolCopies(s *Snapshot, f *findings) {
	hook := program(s.Release(), s.Deployments, namePoolHook)
	selector := labels.SelectorFromSet(labels.Set{poolLabel: "allowed"})
	plain := true // the selector is the default
	if text, ok := argument(&hook.Spec.Template.Spec, "namespace-selector"); ok {
		var parsed metav1.LabelSelector
		if err := json.Unmarshal([]byte(text), &parsed); err == nil {
			if given, err := metav1.LabelSelectorAsSelector(&parsed); err == nil {
				plain = given.String() == selector.String()
				selector = given
			}
		}
	}
	ignored, _ := argument(&hook.Spec.Template.Spec, "ignored-namespaces")
	for i := range s.Namespaces {
		n := &s.Namespaces[i]
		value, labelled := n.Labels[poolLabel]
		switch {
		case !plain || !labelled:
		case value != "allowed":
			f.add(Warning, "Namespace "+n.Name, fmt.Sprintf("its label %s has the invalid value %q", poolLabel, value),
				"This command allows its pods to use the pool; otherwise remove the label.",
				"kubectl label namespace "+n.Name+" "+poolLabel+"=allowed --overwrite")
		case slices.Contains(strings.Split(ignored, ","), n.Name):
			f.add(Warning, "Namespace "+n.Name, "it is allowed to use the pool, but its pods are ignored: it is one of the ignored "+
				"namespaces", "Run these pods in another namespace, or change the value pool.ignoredNamespaces.")
		}
	}
	restart := fmt.Sprintf("kubectl rollout restart deployment/%s -n %s", hook.Name, hook.Namespace)
	for i := range s.Pods {
		p := &s.Pods[i]
		have, uses := s.Copies[p.Namespace]
		if p.Labels[pool.ConvertedLabel] != "true" || ended(p) || p.DeletionTimestamp != nil || !uses {
			continue
		}
		var missing []string
		for _, v := range p.Spec.Volumes {
			if v.Secret != nil && isPoolSecret(v.Secret.SecretName) && !slices.Contains(have, v.Secret.SecretName) {
				missing = append(missing, v.Secret.SecretName)
			}
		}
		if len(missing) == 0 {
			continue
		}
		object, problem := "Namespace "+p.Namespace, fmt.Sprintf("it lacks %s, which pod %s needs", list(missing), p.Name)
		n := slices.IndexFunc(s.Namespaces, func(n corev1.Namespace) bool { return n.Name == p.Namespace })
		if n >= 0 && !selector.Matches(labels.Set(s.Namespaces[n].Labels)) {
			remedy := "Set a label that matches the value pool.credentials.namespaceSelector."
			var commands []string
			if plain {
				remedy, commands = "Allow it.",
					[]string{"kubectl label namespace " + p.Namespace + " " + poolLabel + "=allowed --overwrite"}
			}
			f.add(Error, object, problem+", and it is not allowed to use the pool", remedy, commands...)
			continue
		}
		f.add(Error, object, problem,
			"The webhooks create the copies; see the check pool-token, and their log. This command restarts them.",
			restart).Transient = true
	}
}

func isPoolSecret(name string) bool {
	return slices.Contains([]string{pool.CASecret, pool.ClientSecret, pool.ServersSecret, pool.SingleSecret}, name)
}

func checkPoolCatalog(s *Snapshot, f *findings) {
	const key = "bitfusion-client-config.yaml"
	hook := program(s.Release(), s.Deployments, namePoolHook)
	name := ""
	for _, v := range hook.Spec.Template.Spec.Volumes {
		if v.Name == "catalog" && v.ConfigMap != nil {
			name = v.ConfigMap.Name
		}
	}
	object := "ConfigMap " + hook.Namespace + "/" + name
	remedy, commands := s.restore(namePoolHook)
	if !s.Release().installed("ConfigMap", name) {
		remedy, commands = "Fix it; docs/pool-catalog.md describes the format.", nil
	}
	cm := lookup(s.Objects.ConfigMaps, hook.Namespace, name)
	if cm == nil {
		f.add(Error, object, "it is missing, so a webhook that starts now does not become ready", remedy, commands...)
		return
	}
	text, ok := cm.Data[key]
	if !ok {
		f.add(Error, object, "it has no entry "+key, remedy, commands...)
		return
	}
	var bad *pool.CatalogError
	switch _, err := pool.DecodeCatalog([]byte(text)); {
	case errors.As(err, &bad):
		f.add(Error, object, fmt.Sprintf("its catalog has %s: %s", count(len(bad.Mistakes), "mistake"), strings.Join(bad.Mistakes, "; ")),
			"The webhooks keep the last valid one. "+remedy, commands...)
	case err != nil:
		f.add(Error, object, "its catalog cannot be parsed: "+err.Error(), "The webhooks keep the last valid one. "+remedy, commands...)
	}
}

func checkPoolUnits(s *Snapshot, f *findings) {
	offering := 0
	d := program(s.Release(), s.DaemonSets, namePoolNode)
	for i := range s.Nodes {
		n := &s.Nodes[i]
		if amount(n.Status.Allocatable, pool.Resource) > 0 {
			offering++
			continue
		}
		if d == nil {
			continue
		}
		for _, p := range s.podsOf(d.Namespace, d.Spec.Selector) {
			if p.Spec.NodeName == n.Name && kube.PodReady(p) {
				f.add(Error, "Node "+n.Name, "its device plugin is ready but kubelet offers no "+pool.Resource,
					"Restart it, so that it registers with kubelet again.",
					"kubectl delete pod "+p.Name+" -n "+p.Namespace).Transient = true
			}
		}
	}
	if offering == 0 {
		f.add(Error, "nodes", "no node offers "+pool.Resource+", so pods that use the pool stay Pending",
			"See the check workloads for DaemonSet "+namePoolNode+".").Transient = true
	}
	for i := range s.Quotas {
		q := &s.Quotas[i]
		for name := range q.Spec.Hard {
			if base := strings.TrimPrefix(strings.TrimPrefix(string(name), "requests."), "limits."); strings.HasPrefix(base, pool.Prefix) &&
				base != pool.Resource {
				f.add(Warning, "ResourceQuota "+q.Namespace+"/"+q.Name,
					fmt.Sprintf("it limits %s, which the webhook removes from pods before quotas are counted", name),
					"Limit requests."+pool.Resource+", in hundredths of a GPU: docs/pool.md.")
			}
		}
	}
}
