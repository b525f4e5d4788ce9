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
	"github.com/divvy-gpu/divvy/internal/node/quarantine"
	"github.com/divvy-gpu/divvy/internal/platform/events"
)

// quarantineDesk carries out what an administrator asks for in the node's object, and writes
// there which devices are in quarantine. Only the agent's loop uses it.
type quarantineDesk struct {
	node        string
	list        *quarantine.List
	discoveries *discoveries
	metrics     *metrics
	event       func(kind events.Kind, message string)
	// answered is what became of the last request.
	answered wire.RequestAnswer
}

// publish does what is asked and writes the list and the answer.
func (q *quarantineDesk) publish(ctx context.Context, p *publisher) error {
	node, err := p.current()
	if err != nil {
		return err
	}
	before := node.Annotations[wire.QuarantineAnnotation]
	shown, err := wire.DecodeQuarantine(before)
	if err != nil {
		klog.FromContext(ctx).Error(err, "Writing the list of devices in quarantine again")
	}
	list := q.list
	list.Adopt(shown.Devices)
	if q.answered == (wire.RequestAnswer{}) {
		q.answered = shown.Answered
	}
	request, asked := node.Annotations[wire.DeviceRequestAnnotation]
	known, complete := q.discoveries.devices()
	if asked = asked && complete; asked {
		r, err := wire.DecodeDeviceRequest(request)
		if err != nil || r.ID != q.answered.ID {
			q.answered = q.carryOut(ctx, r, known, err)
		}
	}
	q.metrics.quarantine(list.All(), list.Sync())
	value, err := wire.EncodeQuarantine(wire.QuarantineStatus{Devices: list.All(), Answered: q.answered})
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
	if err := p.send(ctx, types.JSONPatchType, data); err != nil {
		return fmt.Errorf("write which devices are in quarantine: %w", err)
	}
	return nil
}

// annotationPath is an annotation in a JSON patch.
func annotationPath(key string) string {
	return "/metadata/annotations/" + strings.ReplaceAll(key, "/", "~1")
}

// carryOut does what a request says, or nothing of it, and returns the answer. Whoever
// may change nodes can write a request, so it counts for devices of this node alone.
func (q *quarantineDesk) carryOut(ctx context.Context, r wire.DeviceRequest, known map[accel.DeviceID]accel.Quarantine,
	unreadable error,
) wire.RequestAnswer {
	err, list := unreadable, q.list
	for _, id := range r.Devices {
		_, here := known[id]
		_, there := list.Of(id)
		switch {
		case r.Verb == wire.QuarantineDevices && !here && !there:
			err = errors.Join(err, fmt.Errorf("node %s has no device %s", q.node, id))
		case r.Verb == wire.ReleaseDevices && !there:
			err = errors.Join(err, fmt.Errorf("device %s of node %s is not in quarantine", id, q.node))
		}
	}
	if err != nil {
		text := strings.ReplaceAll(err.Error(), "\n", "; ")
		klog.FromContext(ctx).Error(err, "Rejected a device request", "verb", r.Verb, "devices", r.Devices)
		q.event(events.DeviceRequestRejected, "the device request in the node's annotation "+wire.DeviceRequestAnnotation+" was rejected: "+
			text)
		return wire.RequestAnswer{ID: r.ID, Error: text}
	}
	for _, id := range r.Devices {
		if r.Verb == wire.QuarantineDevices {
			d := known[id]
			d.Cause, d.Reason = accel.CauseAdministrator, cmp.Or(r.Reason, "quarantined by an administrator")
			d.Since = time.Now().UTC().Truncate(time.Second)
			list.Add(d)
			continue
		}
		d, _ := list.Of(id)
		list.Release(id)
		q.event(events.DeviceReleased, fmt.Sprintf("%s device %s (%s) was released from quarantine, which began at %s (%s); new pods are "+
			"placed on it once it is healthy",
			d.Vendor, accel.IndexText(d.Index), id, d.Since.Format(time.RFC3339), d.Reason))
	}
	answer := wire.RequestAnswer{ID: r.ID}
	if err := list.Sync(); err != nil {
		answer.Warning = "a restart of divvy-node reverts this until the state folder can be written: " + err.Error()
	}
	return answer
}
