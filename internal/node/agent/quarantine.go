package agent

import (
	"cmp"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"strings"
	"time"

	"k8s.io/apimachinery/pkg/types"
	"k8s.io/klog/v2"

	"github.com/divvy-gpu/divvy/internal/core/accel"
	"github.com/divvy-gpu/divvy/internal/core/wire"
	"github.com/divvy-gpu/divvy/internal/platform/events"
)

// publishQuarantine carries out what an administrator asks for in the node's object, and
// writes there which devices are in quarantine.
func (a *Agent) publishQuarantine(ctx context.Context) error {
	node, err := a.publisher.current()
	if err != nil {
		return err
	}
	before := node.Annotations[wire.QuarantineAnnotation]
	shown, err := wire.DecodeQuarantine(before)
	if err != nil {
		klog.FromContext(ctx).Error(err, "Writing the list of devices in quarantine again")
	}
	list := a.o.Quarantine
	list.Adopt(shown.Devices)
	if a.answered == (wire.RequestAnswer{}) {
		a.answered = shown.Answered
	}
	request, asked := node.Annotations[wire.DeviceRequestAnnotation]
	if asked = asked && a.lookedAtAll(); asked {
		r, err := wire.DecodeDeviceRequest(request)
		if err != nil || r.ID != a.answered.ID {
			a.answered = a.carryOut(ctx, r, err)
		}
	}
	a.metrics.quarantine(list.All(), list.Sync())
	value, err := wire.EncodeQuarantine(wire.QuarantineStatus{Devices: list.All(), Answered: a.answered})
	if err != nil {
		return err
	}
	var patch []map[string]any
	if asked {
		// One that was written in the meantime is for the next turn.
		path := annotationPath(wire.DeviceRequestAnnotation)
		patch = append(patch, map[string]any{"op": "test", "path": path, "value": request}, map[string]any{"op": "remove", "path": path})
	}
	switch path := annotationPath(wire.QuarantineAnnotation); {
	case value == before:
	case value == "":
		patch = append(patch, map[string]any{"op": "remove", "path": path})
	case len(node.Annotations) == 0: // there may be none at all
		patch = append(patch, map[string]any{"op": "add", "path": "/metadata/annotations",
			"value": map[string]string{wire.QuarantineAnnotation: value}})
	default:
		patch = append(patch, map[string]any{"op": "add", "path": path, "value": value})
	}
	if len(patch) == 0 {
		return nil
	}
	data, err := json.Marshal(patch)
	if err != nil {
		return err
	}
	if err := a.publisher.send(ctx, types.JSONPatchType, data); err != nil {
		return fmt.Errorf("write which devices are in quarantine: %w", err)
	}
	return nil
}

// annotationPath is an annotation in a JSON patch.
func annotationPath(key string) string {
	return "/metadata/annotations/" + strings.ReplaceAll(key, "/", "~1")
}

// lookedAtAll reports whether the devices of all vendors were looked for.
func (a *Agent) lookedAtAll() bool {
	a.mu.Lock()
	defer a.mu.Unlock()
	for _, v := range a.vendors {
		if !v.looked {
			return false
		}
	}
	return true
}

// devices are the node's devices that are known, also those that cannot be used.
func (a *Agent) devices() map[accel.DeviceID]accel.Quarantine {
	out := map[accel.DeviceID]accel.Quarantine{}
	a.mu.Lock()
	defer a.mu.Unlock()
	for vendor, v := range a.vendors {
		for _, d := range v.found.Devices {
			out[d.ID] = accel.Quarantine{Device: d.ID, Vendor: vendor, Index: d.Index}
		}
		for _, f := range v.found.Faults {
			if f.ID != "" {
				out[f.ID] = accel.Quarantine{Device: f.ID, Vendor: vendor, Index: f.Index}
			}
		}
	}
	return out
}

// carryOut does what a request says, or nothing of it, and returns the answer. Whoever
// may change nodes can write a request, so it counts for devices of this node alone.
func (a *Agent) carryOut(ctx context.Context, r wire.DeviceRequest, unreadable error) wire.RequestAnswer {
	err := unreadable
	known, list := a.devices(), a.o.Quarantine
	for _, id := range r.Devices {
		_, here := known[id]
		_, there := list.Of(id)
		switch {
		case r.Verb == wire.QuarantineDevices && !here && !there:
			err = errors.Join(err, fmt.Errorf("node %s has no device %s", a.o.Node, id))
		case r.Verb == wire.ReleaseDevices && !there:
			err = errors.Join(err, fmt.Errorf("device %s of node %s is not in quarantine", id, a.o.Node))
		}
	}
	if err != nil {
		text := strings.ReplaceAll(err.Error(), "\n", "; ")
		klog.FromContext(ctx).Error(err, "Rejected a device request", "verb", r.Verb, "devices", r.Devices)
		a.tell(events.DeviceRequestRejected, "the device request in the node's annotation "+wire.DeviceRequestAnnotation+" was rejected: "+
			text)
		return wire.RequestAnswer{ID: r.ID, Error: text}
	}
	for _, id := range r.Devices {
		if r.Verb == wire.QuarantineDevices {
			q := known[id]
			q.Cause, q.Reason = accel.CauseAdministrator, cmp.Or(r.Reason, "quarantined by an administrator")
			q.Since = time.Now().UTC().Truncate(time.Second)
			list.Add(q)
			continue
		}
		q, _ := list.Of(id)
		list.Release(id)
		a.tell(events.DeviceReleased, fmt.Sprintf("%s device %d (%s) was released from quarantine, which began at %s (%s); new pods are "+
			"placed on it once it is healthy",
			q.Vendor, q.Index, id, q.Since.Format(time.RFC3339), q.Reason))
	}
	answer := wire.RequestAnswer{ID: r.ID}
	if err := list.Sync(); err != nil {
		answer.Warning = "a restart of divvy-node reverts this until the state folder can be written: " + err.Error()
	}
	return answer
}
