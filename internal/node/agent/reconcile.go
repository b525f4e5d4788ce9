package agent

import (
	"context"
	"errors"
	"fmt"
	"maps"
	"slices"
	"time"

	corev1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/util/cache"
	"k8s.io/klog/v2"

	"github.com/divvy-gpu/divvy/internal/core/accel"
	"github.com/divvy-gpu/divvy/internal/core/wire"
	"github.com/divvy-gpu/divvy/internal/platform/events"
	"github.com/divvy-gpu/divvy/internal/platform/kube"
)

// corrector writes into the pods of this node what they really hold. Only one
// goroutine uses it.
type corrector struct {
	node    string
	pods    *podWriter
	keys    *kube.Keyring
	metrics *metrics
	// event tells the users of a pod.
	event func(pod *corev1.Pod, kind events.Kind, message string)
	// written has what was written within shownWithin, by the UIDs of the pods.
	written *cache.Expiring
}

// shownWithin is how long the watch may show a pod as it was before a write. The same correction is
// not written, counted and reported once more meanwhile.
const shownWithin = 2 * time.Second

// correction is a grant that was written in place of an annotation.
type correction struct {
	replaced string
	grant    accel.Grant
}

// reconcile corrects what the annotations say of the pods that hold units of
// the pool. An error means that it is to be tried again.
func (c *corrector) reconcile(ctx context.Context, p *pool) error {
	truth := p.facts(ctx)
	var failed []error
	for _, t := range truth {
		if err := c.correct(ctx, p.Resource, t); err != nil {
			failed = append(failed, err)
		}
	}
	return errors.Join(failed...)
}

// correct patches one pod if its annotations do not say what it holds.
func (c *corrector) correct(ctx context.Context, resource accel.Resource, f fact) error {
	uid, shown := string(f.pod.UID), f.pod.Annotations[wire.GrantAnnotation]
	before, err := c.keys.DecodeGrant(uid, shown)
	valid := err == nil && before.Node == c.node && before.Resource == resource
	want := accel.Grant{
		Resource:    resource,
		Node:        c.node,
		Device:      f.devices[0].ID,
		Index:       f.devices[0].Index,
		DeviceUnits: f.devices[0].Units,
		Units:       kube.RequestOf(f.pod, resource).Peak(),
		At:          grantedAt(time.Now(), before, valid),
		Confirmed:   true,
	}
	for _, d := range f.devices[1:] {
		want.More = append(want.More, accel.GrantedDevice{Device: d.ID, Index: d.Index, DeviceUnits: d.Units})
	}
	// There is room for one grant. The extender refuses pods of several resources
	// of memory; of one that came past it the first that was written stays.
	if err == nil && before.Node == c.node && before.Confirmed && !valid && len(kube.RequestOf(f.pod, before.Resource).Containers) > 0 {
		return nil
	}
	legacy := wire.LegacyAnnotations(want)
	signer, err := c.keys.Signer()
	if err != nil {
		return fmt.Errorf("pod %s: %w", klog.KObj(f.pod), err)
	}
	// A grant that was signed with the key before is signed anew: a program that
	// starts from now on does not know that key.
	_, outdated := signer.DecodeGrant(uid, shown)
	if valid && outdated == nil && sameGrant(before, want) && hasAll(f.pod.Annotations, legacy) {
		return nil
	}
	if value, recent := c.written.Get(uid); recent {
		if last, ok := value.(correction); ok && last.replaced == shown && sameGrant(last.grant, want) {
			return nil
		}
	}
	grant, err := signer.EncodeGrant(uid, want)
	if err != nil {
		return fmt.Errorf("pod %s: %w", klog.KObj(f.pod), err)
	}
	annotations := maps.Clone(legacy)
	if annotations == nil {
		annotations = map[string]string{}
	}
	annotations[wire.GrantAnnotation] = grant
	if written, err := c.pods.write(ctx, f.pod, annotations); err != nil || !written {
		return err
	}
	c.written.Set(uid, correction{shown, want}, shownWithin)
	log := klog.FromContext(ctx).WithValues("pod", klog.KObj(f.pod), "devices", want.Devices())
	if valid && slices.Equal(before.Devices(), want.Devices()) {
		if !before.Confirmed {
			c.metrics.confirmations.WithLabelValues(string(resource)).Inc()
		}
		log.Info("Confirmed a planned allocation")
		return nil
	}
	kind, event, message := grantMoved, events.GrantCorrected, fmt.Sprintf("%s %s was planned, but kubelet allocated", resource,
		devicesOf(before))
	switch {
	case valid:
	case shown == "":
		kind, event, message = grantMissing, events.GrantMissing, "the pod was not placed by divvy-extender; kubelet allocated"
	default:
		kind, event, message = grantInvalid, events.GrantInvalid,
			"the pod's planned allocation is not valid on this node; kubelet allocated"
	}
	c.metrics.corrections.WithLabelValues(string(resource), kind).Inc()
	c.event(f.pod, event, fmt.Sprintf("%s %d units of %s %s", message, want.Units, resource, devicesOf(want)))
	log.Info("Corrected the recorded allocation of a pod", "granted", devicesOf(before), "kind", kind)
	return nil
}

// devicesOf is the devices of a grant, for people: "device 0 (a)", "devices 0 (a)
// and 2 (c)".
func devicesOf(g accel.Grant) string {
	if g.Device == "" {
		return "no device"
	}
	text := fmt.Sprintf("%d (%s)", g.Index, g.Device)
	if len(g.More) == 0 {
		return "device " + text
	}
	for i, d := range g.More {
		join := ", "
		if i == len(g.More)-1 {
			join = " and "
		}
		text += fmt.Sprintf("%s%d (%s)", join, d.Index, d.Device)
	}
	return "devices " + text
}

// sameGrant compares what the ledger needs; the index and size of a device follow
// its id but may change with the hardware.
func sameGrant(a, b accel.Grant) bool {
	return a.Resource == b.Resource && a.Node == b.Node && a.Device == b.Device && a.Index == b.Index && a.DeviceUnits == b.DeviceUnits &&
		a.Units == b.Units && slices.Equal(a.More, b.More) && a.Confirmed == b.Confirmed
}

func hasAll(have, want map[string]string) bool {
	for k, v := range want {
		if have[k] != v {
			return false
		}
	}
	return true
}

// grantedAt is when a pod that is found without a grant is said to have got its
// device.
func grantedAt(now time.Time, g accel.Grant, valid bool) time.Time {
	if valid && !g.At.IsZero() {
		return g.At
	}
	return now
}
