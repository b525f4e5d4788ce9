package why

import (
	"fmt"
	"regexp"
	"slices"
	"strconv"
	"strings"

	v1 "k8s.io/api/core/v1"

	"github.com/divvy-gpu/divvy/internal/platform/events"
	"github.com/divvy-gpu/divvy/internal/pool"
)

// overQuota is what the API server says of a pod above a quota.
var overQuota = regexp.MustCompile(`exceeded quota: (\S+), requested: (\S+), used: (\S+), limited: (\S+)`)

// shortOf are the amounts that a quota lacks, from the API server's denial; "" where it says
// none. "2 more of requests.nvidia.com/gpu-memory in quota gpus".
func shortOf(message string) string {
	m := overQuota.FindStringSubmatch(message)
	if m == nil {
		return ""
	}
	amount := func(list, resource string) (n int64, ok bool) {
		for _, pair := range strings.Split(list, ",") {
			if value, is := strings.CutPrefix(pair, resource+"="); is {
				n, err := strconv.ParseInt(value, 10, 64)
				return n, err == nil
			}
		}
		return 0, false
	}
	var out []string
	for _, pair := range strings.Split(m[2], ",") {
		resource, _, _ := strings.Cut(pair, "=")
		requested, first := amount(m[2], resource)
		used, second := amount(m[3], resource)
		limit, third := amount(m[4], resource)
		if over := requested + used - limit; first && second && third && over > 0 {
			out = append(out, fmt.Sprintf("%d more of %s in quota %s", over, resource, m[1]))
		}
	}
	return strings.Join(out, ", ")
}

// poolWebhooks are the names of the webhooks of the remote pool, as denials quote them.
var poolWebhooks = []string{"bwkimua.bitfusion.io", "bwkival.bitfusion.io"}

// codeOfDenial is the code of a pod that was not created, by what the API server said.
func codeOfDenial(message string) Code {
	ofPool := slices.ContainsFunc(poolWebhooks, func(name string) bool { return strings.Contains(message, name) })
	switch {
	case ofPool && (strings.Contains(message, "annotation "+pool.VersionAnnotation) || strings.Contains(message,
		"annotation "+pool.OSAnnotation) ||
		strings.Contains(message, "annotations "+pool.VersionAnnotation)):
		return VersionUnknown
	case ofPool && strings.Contains(message, "but quota "), strings.Contains(message, "exceeded quota") && strings.Contains(message,
		pool.Resource):
		return PoolQuota
	case ofPool:
		return PoolRejected
	}
	return NotCreated
}

// allowing is the command in a text of the pool's programs that allows a namespace to use it.
var allowing = regexp.MustCompile(`kubectl label namespace \S+ [a-zA-Z0-9./_-]+=[a-zA-Z0-9._-]*`)

// allowPool is the change that lets a namespace use the pool, by what its programs say.
func allowPool(namespace, message string) (Change, bool) {
	command := allowing.FindString(message)
	words := strings.Fields(command)
	if len(words) != 5 || words[3] != namespace || !named(namespace) {
		return Change{}, false
	}
	key, value, _ := strings.Cut(words[4], "=")
	if !keyed(key) {
		return Change{}, false
	}
	c := Change{Kind: ChangeNode, By: administrator, Text: "allow namespace " + namespace + " to use the pool", Commands: []string{
		kubectl("label", "namespace", namespace, words[4]),
	}}
	c.patches("namespace", "", namespace, patchMerge, nested(value, "metadata", "labels", key))
	return c, true
}

// explainPoolStart says which of the pool's secrets keeps a pod on its node from starting.
func (b *bound) explainPoolStart(c *Cause) {
	p, e := b.a.pod, b.e
	if p.Labels[pool.ConvertedLabel] != "true" {
		return
	}
	for i := range b.snapshot.Events {
		ev := &b.snapshot.Events[i]
		if !isAbout(ev, p) {
			continue
		}
		switch {
		case ev.Reason == events.PoolNotAllowed.Reason:
			c.Code, c.Detail = PoolRejected, fmt.Sprintf("namespace %s is not allowed to use the pool, so the pod's secrets are missing",
				p.Namespace)
			if change, ok := allowPool(p.Namespace, ev.Message); ok {
				e.Changes = append(e.Changes, change)
			}
			return
		case ev.Reason == events.PoolCredentialsMissing.Reason, ev.Reason == events.PoolCredentialsFailed.Reason,
			ev.Reason == "FailedMount" && slices.ContainsFunc(poolSecrets, func(name string) bool {
				return strings.Contains(ev.Message, `"`+name+`" not found`)
			}):
			c.Code, c.Detail = SecretMissing, "the secrets of the pool that the pod mounts are missing: "+strings.TrimSuffix(ev.Message,
				".")
		}
	}
}

var poolSecrets = []string{pool.CASecret, pool.ClientSecret, pool.ServersSecret, pool.SingleSecret}

// explainUnconverted says if a pod requests what the webhook of the pool should have converted.
func explainUnconverted(e *Explanation, p *v1.Pod, name v1.ResourceName) bool {
	switch name {
	case pool.AmountResource, pool.PercentResource, pool.MemoryResource:
	default:
		return false
	}
	if slices.ContainsFunc(e.Causes, func(c Cause) bool { return c.Code == PoolRejected }) {
		return true
	}
	e.Causes = append(e.Causes, Cause{Code: PoolRejected, Object: podText(p), Evidence: []string{
		fmt.Sprintf("%s: %q", pool.ModeAnnotation, p.Annotations[pool.ModeAnnotation]),
	}, Detail: fmt.Sprintf("no node offers %s: the webhook of the pool did not convert the pod; create it again with annotation %s: %s, "+
		"in a namespace that the webhook serves", name, pool.ModeAnnotation, pool.ModeAll)})
	return true
}
