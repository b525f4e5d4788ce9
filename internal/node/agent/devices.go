package agent

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"slices"

	corev1 "k8s.io/api/core/v1"
	"k8s.io/klog/v2"

	"github.com/divvy-gpu/divvy/internal/core/wire"
	"github.com/divvy-gpu/divvy/internal/node/alloc"
)

// annotator writes wire.HeldAnnotation. Only one goroutine uses it.
type annotator struct{ pods *podWriter }

// annotate writes into the pods what they hold of the pools.
func (a *annotator) annotate(ctx context.Context, pods []*corev1.Pod, pools []*pool) error {
	held := map[alloc.PodKey]map[string][]string{}
	for _, p := range pools {
		for key, ids := range see(p, (*alloc.Engine).Usage).Slots {
			if held[key] == nil {
				held[key] = map[string][]string{}
			}
			ids = slices.Concat(held[key][string(p.Resource)], ids)
			slices.Sort(ids)
			held[key][string(p.Resource)] = slices.Compact(ids)
		}
	}
	var failed []error
	for _, pod := range pods {
		devices := held[keyOf(pod)]
		if devices == nil || terminal(pod) {
			continue
		}
		want, err := json.Marshal(devices)
		if err != nil {
			return fmt.Errorf("encode what pod %s holds: %w", klog.KObj(pod), err)
		}
		if pod.Annotations[wire.HeldAnnotation] == string(want) {
			continue
		}
		_, err = a.pods.write(ctx, pod, map[string]string{wire.HeldAnnotation: string(want)})
		failed = append(failed, err)
	}
	return errors.Join(failed...)
}
