package scheduler

import (
	"context"
	"fmt"
	"maps"
	"time"

	resourceapi "k8s.io/api/resource/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/apimachinery/pkg/util/resourceversion"
	"k8s.io/apimachinery/pkg/util/wait"
	"k8s.io/client-go/kubernetes"

	"github.com/divvy-gpu/divvy/internal/platform/kube"
)

// listClaimsEvery is how often claims are read again while some are not in the cache: they may have been deleted.
const listClaimsEvery = time.Second

// awaitClaims returns nil when the scheduler's cache has every ResourceClaim at least as it was when this was
// called: two schedulers would give a device to two claims. Unlike for pods, no write proves it, since the program
// has no claim of its own and may create none; so the cache is compared with what the API server has.
func awaitClaims(ctx context.Context, client kubernetes.Interface,
	cached func(namespace, name string) (*resourceapi.ResourceClaim, error)) error {
	behind, err := listClaims(ctx, client)
	if err != nil {
		return err
	}
	known := func(context.Context) (bool, error) {
		for uid, claim := range behind {
			seen, err := cached(claim.namespace, claim.name)
			if err != nil {
				continue // it is not there yet
			}
			order, err := resourceversion.CompareResourceVersion(seen.ResourceVersion, claim.version)
			if err != nil {
				return false, fmt.Errorf("versions of ResourceClaims: %w", err)
			}
			if order >= 0 {
				delete(behind, uid)
			}
		}
		return len(behind) == 0, nil
	}
	for {
		err := wait.PollUntilContextTimeout(ctx, catchUpEvery, listClaimsEvery, true, known)
		if err == nil || !wait.Interrupted(err) {
			return err
		}
		if ctx.Err() != nil {
			return fmt.Errorf("wait until the scheduler's cache has the newest changes of %d ResourceClaims: %w", len(behind),
				context.Cause(ctx))
		}
		now, err := listClaims(ctx, client)
		if err != nil {
			return err
		}
		maps.DeleteFunc(behind, func(uid types.UID, _ claimVersion) bool {
			_, exists := now[uid]
			return !exists
		})
	}
}

// claimVersion is a claim as the API server has it.
type claimVersion struct{ namespace, name, version string }

// listClaims reads all claims, not from a cache of the API server that may be behind.
func listClaims(ctx context.Context, client kubernetes.Interface) (map[types.UID]claimVersion, error) {
	out := map[types.UID]claimVersion{}
	err := kube.EachItem(ctx, "ResourceClaims", metav1.ListOptions{}, client.ResourceV1().ResourceClaims(metav1.NamespaceAll).List,
		func(obj runtime.Object) {
			if c, ok := obj.(*resourceapi.ResourceClaim); ok {
				out[c.UID] = claimVersion{c.Namespace, c.Name, c.ResourceVersion}
			}
		})
	return out, err
}
