// Package devices lists the devices of nodes, puts some into quarantine and releases them. It asks
// the daemon of the node through an annotation of the node's object.
package devices

import (
	"context"
	"crypto/rand"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"slices"
	"strings"
	"time"

	corev1 "k8s.io/api/core/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/client-go/kubernetes"

	"github.com/divvy-gpu/divvy/internal/core/accel"
	"github.com/divvy-gpu/divvy/internal/core/wire"
)

const (
	// poll is how often the node's object is looked at for the daemon's answer.
	poll = 300 * time.Millisecond
	// withdrawal is how long taking a request back may take.
	withdrawal = 5 * time.Second
	// attempts to write a request are made while others change the node's object.
	attempts = 10
)

// Request is what the daemon of a node is asked to do with devices.
type Request struct {
	// Verb is one of package wire.
	Verb   string
	Reason string
	// Timeout is how long to wait for the daemon.
	Timeout time.Duration
}

// Run asks and prints what came of it.
func (r Request) Run(ctx context.Context, client kubernetes.Interface, node string, uuids []string, out, errOut io.Writer) error {
	request := wire.DeviceRequest{ID: rand.Text(), Verb: r.Verb, Reason: r.Reason}
	for _, uuid := range uuids {
		if id := accel.DeviceID(uuid); !slices.Contains(request.Devices, id) {
			request.Devices = append(request.Devices, id)
		}
	}
	text, err := wire.EncodeDeviceRequest(request)
	if err != nil {
		return err
	}
	if err := r.write(ctx, client, node, request, text); err != nil {
		return err
	}
	answer, err := r.await(ctx, client, node, request.ID, text)
	switch {
	case err != nil:
		return err
	case answer.Error != "":
		return errors.New(answer.Error)
	case answer.Warning != "":
		fmt.Fprintln(errOut, "Warning:", answer.Warning)
	}
	for _, id := range request.Devices {
		if r.Verb == wire.QuarantineDevices {
			fmt.Fprintf(out, "device %s of node %s is in quarantine; to release it, run: kubectl divvy device release %[2]s %[1]s\n", id,
				node)
		} else {
			fmt.Fprintf(out, "device %s of node %s was released from quarantine; new pods are placed on it once it is healthy\n", id, node)
		}
	}
	return nil
}

// write writes the request into the node's object if it makes sense as far as that
// says.
func (r Request) write(ctx context.Context, client kubernetes.Interface, name string, request wire.DeviceRequest, text string) error {
	for attempt := 1; ; attempt++ {
		node, err := get(ctx, client, name)
		if err != nil {
			return err
		}
		if err := check(node, request); err != nil {
			return err
		}
		patch, err := json.Marshal(map[string]any{"metadata": map[string]any{
			// Another request, or another change of the node's object, must not be overwritten.
			"resourceVersion": node.ResourceVersion,
			"annotations":     map[string]string{wire.DeviceRequestAnnotation: text},
		}})
		if err != nil {
			return err
		}
		_, err = client.CoreV1().Nodes().Patch(ctx, name, types.MergePatchType, patch, metav1.PatchOptions{FieldManager: "kubectl-divvy"})
		switch {
		case err == nil:
			return nil
		case apierrors.IsForbidden(err):
			return fmt.Errorf("patch node %s: permission to patch nodes is required: %w", name, err)
		case !apierrors.IsConflict(err) || attempt == attempts:
			return fmt.Errorf("write device request to node %s: %w", name, err)
		}
	}
}

func get(ctx context.Context, client kubernetes.Interface, name string) (*corev1.Node, error) {
	node, err := client.CoreV1().Nodes().Get(ctx, name, metav1.GetOptions{})
	switch {
	case apierrors.IsNotFound(err):
		return nil, fmt.Errorf("node %s not found", name)
	case err != nil:
		return nil, fmt.Errorf("read node %s: %w", name, err)
	}
	return node, nil
}

// check says why the node's daemon could not carry out the request.
func check(node *corev1.Node, request wire.DeviceRequest) error {
	d, err := describe(node.Name, node.Annotations)
	switch {
	case err != nil:
		return err
	case len(d) == 0:
		return fmt.Errorf("node %s shares no devices: divvy-node has not published any", node.Name)
	}
	for _, c := range node.Status.Conditions {
		if c.Type == corev1.NodeReady && c.Status != corev1.ConditionTrue {
			return fmt.Errorf("node %s is not ready, so divvy-node cannot process the request; try again when it is ready (%s)", node.Name,
				c.Message)
		}
	}
	if _, pending := node.Annotations[wire.DeviceRequestAnnotation]; pending {
		return fmt.Errorf("another device request is pending on node %s; try again later, or withdraw it with: kubectl annotate node "+
			"%[1]s %s-",
			node.Name, wire.DeviceRequestAnnotation)
	}
	boards := slices.ContainsFunc(d, func(d device) bool { return d.chips > 1 }) // whose chips are not listed
	for _, id := range request.Devices {
		// A device that is cut into partitions is in no inventory.
		if request.Verb == wire.QuarantineDevices && slices.ContainsFunc(d, func(d device) bool { return d.parent == id && id != "" }) {
			continue
		}
		i := slices.IndexFunc(d, func(d device) bool { return d.UUID == id })
		switch {
		case i < 0 && (request.Verb == wire.ReleaseDevices || !boards):
			return fmt.Errorf("node %s has no device %s; to list its devices, run: kubectl divvy device list %[1]s", node.Name, id)
		case request.Verb == wire.ReleaseDevices && !d[i].entry:
			return fmt.Errorf("device %s of node %s is not in quarantine", id, node.Name)
		}
	}
	return nil
}

// await waits until the daemon has acted on the request and returns its answer. If it
// does not in time, the request is withdrawn.
func (r Request) await(ctx context.Context, client kubernetes.Interface, name, id, text string) (wire.RequestAnswer, error) {
	waiting, cancel := context.WithTimeout(ctx, r.Timeout)
	defer cancel()
	tick := time.NewTicker(poll)
	defer tick.Stop()
	for {
		node, err := get(waiting, client, name)
		if err == nil {
			if answer, done, err := answered(node, id); done || err != nil {
				return answer, err
			}
		}
		select {
		case <-tick.C:
			continue
		case <-waiting.Done():
		}
		return r.withdraw(context.WithoutCancel(ctx), client, name, id, text)
	}
}

// answered returns the daemon's answer to a request, false while it has given none.
func answered(node *corev1.Node, id string) (wire.RequestAnswer, bool, error) {
	status, err := wire.DecodeQuarantine(node.Annotations[wire.QuarantineAnnotation])
	if err != nil {
		return wire.RequestAnswer{}, false, fmt.Errorf("node %s: %w", node.Name, err)
	}
	if status.Answered.ID == id {
		return status.Answered, true, nil
	}
	if request, err := wire.DecodeDeviceRequest(node.Annotations[wire.DeviceRequestAnnotation]); err != nil || request.ID != id {
		return wire.RequestAnswer{}, false, fmt.Errorf("the request to node %s was withdrawn or replaced by another one; nothing was "+
			"changed", node.Name)
	}
	return wire.RequestAnswer{}, false, nil
}

// withdraw takes a request back that the daemon has not acted on; if it has in the
// meantime, its answer is returned.
func (r Request) withdraw(ctx context.Context, client kubernetes.Interface, name, id, text string) (wire.RequestAnswer, error) {
	ctx, cancel := context.WithTimeout(ctx, withdrawal)
	defer cancel()
	path := "/metadata/annotations/" + strings.ReplaceAll(wire.DeviceRequestAnnotation, "/", "~1")
	patch, err := json.Marshal([]map[string]string{{"op": "test", "path": path, "value": text}, {"op": "remove", "path": path}})
	if err != nil {
		return wire.RequestAnswer{}, err
	}
	_, err = client.CoreV1().Nodes().Patch(ctx, name, types.JSONPatchType, patch, metav1.PatchOptions{FieldManager: "kubectl-divvy"})
	if err == nil {
		return wire.RequestAnswer{}, fmt.Errorf("divvy-node on node %s did not process the request within %v, so the request was "+
			"withdrawn and nothing was changed; check whether divvy-node runs there: kubectl divvy doctor", name, r.Timeout)
	}
	if node, getErr := get(ctx, client, name); getErr == nil {
		if answer, done, err := answered(node, id); done {
			return answer, err
		}
	}
	return wire.RequestAnswer{}, fmt.Errorf("divvy-node on node %s did not process the request within %v, and the request could not be "+
		"withdrawn: %w; to withdraw it, run: kubectl annotate node %[1]s %s-",
		name, r.Timeout, err, wire.DeviceRequestAnnotation)
}
