package dra

import (
	"cmp"
	"fmt"
	"maps"
	"slices"
	"strings"

	corev1 "k8s.io/api/core/v1"
	"k8s.io/dynamic-resource-allocation/resourceclaim"

	"github.com/divvy-gpu/divvy/internal/core/accel"
	"github.com/divvy-gpu/divvy/internal/core/wire"
	"github.com/divvy-gpu/divvy/internal/node/alloc"
	"github.com/divvy-gpu/divvy/internal/platform/kube"
)

// Use is what a container of a pod of this node uses of ResourceClaims, whatever their drivers.
type Use struct {
	Namespace, Pod, PodUID, Container string
	// Requests are those that it references.
	Requests []UsedRequest
	// Around is how its pod gets around limits in the driver, "" if it does not.
	Around string
	// Units are the resources of which it requests units of kubelet, by vendor.
	Units map[string]accel.Resource
}

// UsedRequest is a request of a claim, or all of them if Request is "".
type UsedRequest struct{ Claim, Request string }

// Uses returns what the containers of a pod use of claims, as kubelet reads it
// (Manager.GetResources in its pkg/kubelet/cm/dra).
func Uses(pod *corev1.Pod) []Use {
	claims := kube.ClaimsOf(pod)
	var out []Use
	for _, c := range slices.Concat(pod.Spec.InitContainers, pod.Spec.Containers) {
		use := Use{Namespace: pod.Namespace, Pod: pod.Name, PodUID: string(pod.UID), Container: c.Name}
		for _, r := range c.Resources.Claims {
			if claim, ok := claims[r.Name]; ok {
				use.Requests = append(use.Requests, UsedRequest{claim, r.Request})
			}
		}
		if s := pod.Status.ExtendedResourceClaimStatus; s != nil {
			for _, m := range s.RequestMappings {
				if m.ContainerName == c.Name {
					use.Requests = append(use.Requests, UsedRequest{s.ResourceClaimName, m.RequestName})
				}
			}
		}
		if len(use.Requests) > 0 {
			out = append(out, use)
		}
	}
	return out
}

// ref names a request of a claim that holds something.
type ref struct {
	claim   alloc.ClaimKey
	request string
}

// arrangement is what the CDI devices of the claims of one vendor have to give containers. Each
// names all devices of its container in the vendor's variable, of which one value counts: the
// devices of all requests that the container uses.
type arrangement struct {
	claims []alloc.Claim
	// namesakes counts the claims by namespace/name.
	namesakes map[string]int
	// own is what each request has, and values what containers with it have in all.
	own, values map[ref][]alloc.Portion
	// wrong are the uses whose containers would have anything else, with what they have in
	// common with another one, which decides.
	wrong []clash
}

// clash is a container that cannot have what it uses, because of another one.
type clash struct{ use, other Use }

// arrange arranges what claims of one vendor hold for the containers that use them. Each request has
// one value, and so all containers that use it must have the same in all. Where they do not, a claim that
// was prepared keeps its value if that is right for one of them, and the first container has its way
// otherwise. Amounts of memory count if sized is true.
//
// Claims that uses name and that are not among these have no device of the vendor, or none yet.
func arrange(claims []alloc.Claim, uses []Use, sized bool) *arrangement {
	a := &arrangement{claims: claims, namesakes: map[string]int{}, own: map[ref][]alloc.Portion{}, values: map[ref][]alloc.Portion{}}
	users := map[ref][]int{} // positions in uses
	for _, c := range claims {
		a.namesakes[c.Namespace+"/"+c.Name]++
		for i := range c.Parts {
			r := ref{c.Key(), baseOf(&c.Parts[i])}
			a.own[r] = merge(a.own[r], portionsOf(&c.Parts[i])...)
		}
	}
	total := make([][]alloc.Portion, len(uses))
	for i := range uses {
		for _, r := range a.refs(&uses[i]) {
			users[r], total[i] = append(users[r], i), merge(total[i], a.own[r]...)
		}
	}
	for i := range claims {
		c := &claims[i]
		for _, r := range refsOf(c) {
			a.values[r] = a.own[r]
			if len(users[r]) == 0 {
				continue
			}
			at := -1
			if c.Prepared {
				given := a.given(c, r)
				at = slices.IndexFunc(users[r], func(j int) bool { return same(total[j], given, sized) })
			}
			a.values[r] = total[users[r][max(at, 0)]]
		}
	}
	for i := range uses {
		for _, r := range a.refs(&uses[i]) {
			if same(a.values[r], total[i], sized) {
				continue
			}
			at := slices.IndexFunc(users[r], func(j int) bool { return same(a.values[r], total[j], sized) })
			if at < 0 {
				at = slices.IndexFunc(users[r], func(j int) bool { return !same(total[i], total[j], sized) })
			}
			a.wrong = append(a.wrong, clash{uses[i], uses[users[r][max(at, 0)]]})
			break
		}
	}
	return a
}

// Holders returns a function that returns what a container has of the claims, by vendor. Access beside the holders
// is not among it.
func Holders(claims []alloc.Claim) func(use Use) map[string][]alloc.Portion {
	mine := make([]alloc.Claim, len(claims))
	for i := range claims {
		mine[i] = claims[i]
		mine[i].Parts = slices.DeleteFunc(slices.Clone(claims[i].Parts), func(p alloc.ClaimPart) bool { return p.Admin })
	}
	a := arrange(mine, nil, false)
	return func(use Use) map[string][]alloc.Portion {
		out := map[string][]alloc.Portion{}
		for _, r := range a.refs(&use) {
			out[r.claim.Vendor] = merge(out[r.claim.Vendor], a.own[r]...)
		}
		return out
	}
}

// rejects returns why a container of a new claim cannot have it, whatever others use: it has devices of the
// vendor in another way, or gets around the limits that a part of a device's memory has, if sized is true.
func (a *arrangement) rejects(use *Use, sized bool) error {
	for _, r := range a.refs(use) {
		if resource := use.Units[r.claim.Vendor]; resource != "" {
			return alloc.Reject(alloc.Other, "%s requests %s and uses %s: a container has all its devices of %s in one variable; use "+
				"claims for all of them, or units", use.name(), resource, use.requests(), wire.Driver(r.claim.Vendor))
		}
		if sized && use.Around != "" && slices.ContainsFunc(a.own[r], func(p alloc.Portion) bool { return p.Bytes > 0 }) {
			return alloc.Reject(alloc.Isolation, "%s: %s, which gets around the limits of the node's devices; request a whole device",
				use.name(), use.Around)
		}
	}
	return nil
}

// given is what containers with a request of a prepared claim have.
func (a *arrangement) given(c *alloc.Claim, r ref) []alloc.Portion {
	if value, ok := c.Together[r.request]; ok {
		return value
	}
	return a.own[r]
}

// refs are the requests of a container that hold something, in the order of the claims.
func (a *arrangement) refs(use *Use) []ref {
	var out []ref
	for i := range a.claims {
		c := &a.claims[i]
		if c.Namespace != use.Namespace || a.namesakes[c.Namespace+"/"+c.Name] > 1 && !slices.Contains(c.Pods, use.PodUID) {
			continue // a claim of the name that is gone may still be held
		}
		for _, r := range refsOf(c) {
			if slices.ContainsFunc(use.Requests, func(u UsedRequest) bool {
				return u.Claim == c.Name && (u.Request == "" || u.Request == r.request)
			}) {
				out = append(out, r)
			}
		}
	}
	return out
}

// changed are the claims that are to be described otherwise than they were, as they are to be: those
// that were not prepared, and those whose requests have other values.
func (a *arrangement) changed() []alloc.Claim {
	var out []alloc.Claim
	for _, c := range a.claims {
		together := map[string][]alloc.Portion{}
		same := c.Prepared
		for _, r := range refsOf(&c) {
			if !slices.Equal(a.values[r], a.own[r]) {
				together[r.request] = a.values[r]
			}
			same = same && slices.Equal(a.values[r], a.given(&c, r))
		}
		if !same {
			if c.Together = together; len(together) == 0 {
				c.Together = nil
			}
			out = append(out, c)
		}
	}
	return out
}

// uses reports whether a container uses one of the claims.
func (a *arrangement) uses(use *Use, claims map[alloc.ClaimKey]bool) bool {
	return slices.ContainsFunc(a.refs(use), func(r ref) bool { return claims[r.claim] })
}

// Error says what is wrong with a container, and what would be right.
func (c *clash) Error(driver string) error {
	return alloc.Reject(alloc.Other, "%s uses %s, and %s uses %s: a container has all its devices of %s in one variable, whose value is "+
		"the same in all containers that have a request in common; let both use the same requests, or give them claims of their own",
		c.use.name(), c.use.requests(), c.other.name(), c.other.requests(), driver)
}

func (u *Use) name() string {
	return fmt.Sprintf("container %s of pod %s/%s", u.Container, u.Namespace, u.Pod)
}

func (u *Use) requests() string {
	var out []string
	for _, r := range u.Requests {
		out = append(out, cmp.Or(r.Request, "all requests")+" of claim "+r.Claim)
	}
	return strings.Join(out, " and ")
}

// refsOf are the requests of a claim, each once.
func refsOf(c *alloc.Claim) []ref {
	var out []ref
	for i := range c.Parts {
		if r := (ref{c.Key(), baseOf(&c.Parts[i])}); !slices.Contains(out, r) {
			out = append(out, r)
		}
	}
	return out
}

// baseOf is the request of a part. Of the alternatives of a request, one was allocated.
func baseOf(part *alloc.ClaimPart) string { return resourceclaim.BaseRequestRef(part.Request) }

func portionsOf(part *alloc.ClaimPart) []alloc.Portion {
	var out []alloc.Portion
	for _, chip := range part.Card.Chips {
		out = append(out, alloc.Portion{Chip: chip, Bytes: part.Bytes})
	}
	return out
}

// merge adds portions. A container that has the whole chip has no limit.
func merge(a []alloc.Portion, more ...alloc.Portion) []alloc.Portion {
	out := slices.Clone(a)
	for _, p := range more {
		i := slices.IndexFunc(out, func(q alloc.Portion) bool { return q.Chip == p.Chip })
		switch {
		case i < 0:
			out = append(out, p)
		case out[i].Bytes == 0 || p.Bytes == 0:
			out[i].Bytes = 0
		default:
			out[i].Bytes += p.Bytes
		}
	}
	return out
}

// same reports whether containers have the same chips, and if sized is true the same of each.
func same(a, b []alloc.Portion, sized bool) bool {
	amounts := func(portions []alloc.Portion) map[string]int64 {
		out := map[string]int64{}
		for _, p := range portions {
			if !sized {
				p.Bytes = 0
			}
			out[string(p.Chip)] = p.Bytes
		}
		return out
	}
	return maps.Equal(amounts(a), amounts(b))
}
