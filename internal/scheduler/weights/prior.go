package weights

import (
	"bytes"
	"cmp"
	"encoding/json"
	"errors"
	"fmt"
	"math"
	"reflect"
	"slices"
	"strings"

	"k8s.io/apimachinery/pkg/api/resource"

	"github.com/divvy-gpu/divvy/internal/core/accel"
	"github.com/divvy-gpu/divvy/internal/core/demand"
	"github.com/divvy-gpu/divvy/internal/core/wire"
	"github.com/divvy-gpu/divvy/internal/platform/kube"
)

const (
	// priorPods is how many pods the expected demand counts like: enough to be
	// believed from the start, and outweighed after as many pods that really came.
	priorPods = 1000
	// maxPrior bounds the entries of the expected demand; a trace of a large company
	// has a few hundred kinds of pods.
	maxPrior = 1000
	mebibyte = 1 << 20
)

// demandEntry is a kind of pods in --demand.
type demandEntry struct {
	Resource    string          `json:"resource"`
	Units       int64           `json:"units"`
	Devices     int             `json:"devices"`
	CPU         json.RawMessage `json:"cpu"`
	Memory      json.RawMessage `json:"memory"`
	Models      []string        `json:"models"`
	AvoidModels []string        `json:"avoidModels"`
	Share       float64         `json:"share"`
}

// ParsePrior reads the expected demand, a list in JSON, by resource. Shares of a resource are
// scaled to priorPods. It reports all mistakes, each with the number of its entry, from 1 on.
func ParsePrior(text string, managed []accel.Resource) (map[accel.Resource][]demand.Count, error) {
	if text == "" {
		return nil, nil
	}
	var entries []json.RawMessage
	if err := json.Unmarshal([]byte(text), &entries); err != nil {
		return nil, fmt.Errorf(`must be a list in JSON, such as [{"units":16,"share":1}]: %w`, err)
	}
	if len(entries) > maxPrior {
		return nil, fmt.Errorf("%d entries, at most %d", len(entries), maxPrior)
	}
	out, sums := map[accel.Resource][]demand.Count{}, map[accel.Resource]float64{}
	var errs []error
	for i, raw := range entries {
		name, count, err := parseEntry(raw, managed)
		if err != nil {
			for _, one := range parts(err) {
				errs = append(errs, fmt.Errorf("entry %d: %w", i+1, one))
			}
			continue
		}
		out[name] = append(out[name], count)
		sums[name] += count.Pods
	}
	for name, counts := range out {
		for i := range counts {
			counts[i].Pods *= priorPods / sums[name]
		}
	}
	return out, errors.Join(errs...)
}

// parts are the errors that were joined to one.
func parts(err error) []error {
	if joined, ok := err.(interface{ Unwrap() []error }); ok {
		return joined.Unwrap()
	}
	return []error{err}
}

func parseEntry(raw json.RawMessage, managed []accel.Resource) (accel.Resource, demand.Count, error) {
	var e demandEntry
	d := json.NewDecoder(bytes.NewReader(raw))
	d.DisallowUnknownFields()
	if err := d.Decode(&e); err != nil {
		return "", demand.Count{}, fmt.Errorf("%s; valid keys are resource, units, devices, cpu, memory, models, avoidModels, share",
			explain(err))
	}
	var errs []error
	mistake := func(key, format string, args ...any) {
		errs = append(errs, fmt.Errorf("%s: %w", key, fmt.Errorf(format, args...)))
	}
	name := accel.Resource(e.Resource)
	switch {
	case e.Resource == "" && len(managed) == 1:
		name = managed[0]
	case e.Resource == "":
		mistake("resource", "is required, because several resources are managed: %s", accel.JoinResources(managed))
	case !slices.Contains(managed, name):
		mistake("resource", "%q is not managed; managed: %s", e.Resource, accel.JoinResources(managed))
	}
	count := demand.Count{Pods: e.Share}
	if !(e.Share > 0) || math.IsInf(e.Share, 0) {
		mistake("share", "%v: must be above 0, such as 1 for all entries, or the percentage of pods", e.Share)
	}
	if e.Units < 0 || accel.Units(e.Units) > accel.MaxUnits {
		mistake("units", "%d: must be from 0 to %d", e.Units, accel.MaxUnits)
	}
	switch devices := max(e.Devices, 1); {
	case e.Devices < 0 || e.Devices > wire.MaxDevices:
		mistake("devices", "%d: must be from 1 to %d", e.Devices, wire.MaxDevices)
	case e.Devices > 0 && e.Units == 0:
		mistake("devices", "%d devices without units: units is the request of a pod on all its devices", e.Devices)
	case e.Units%int64(devices) != 0:
		above := e.Units - e.Units%int64(devices) + int64(devices)
		mistake("units", "%d cannot be divided equally among %d devices; use %d", e.Units, devices, above)
	case e.Units > 0:
		count.Devices, count.Units = devices, accel.Units(e.Units)/accel.Units(devices)
	}
	amount := func(key, such string, raw json.RawMessage, times float64) int64 {
		text := strings.Trim(string(raw), `"`)
		if text == "" || text == "null" {
			return 0
		}
		q, err := resource.ParseQuantity(text)
		if err != nil || q.Sign() < 0 {
			mistake(key, "%s is not a quantity such as %s", raw, such)
			return 0
		}
		return int64(min(math.Ceil(q.AsApproximateFloat64()*times), float64(accel.MaxUnits)))
	}
	count.CPU = amount("cpu", "4 or 500m", e.CPU, 1000)
	count.Memory = amount("memory", "16Gi", e.Memory, 1./mebibyte)
	if len(e.Models)+len(e.AvoidModels) > 0 {
		s := &accel.Selection{}
		for _, list := range []struct {
			key  string
			from []string
			into *[]string
		}{{"models", e.Models, &s.UseModels}, {"avoidModels", e.AvoidModels, &s.AvoidModels}} {
			if len(list.from) == 0 {
				continue
			}
			var err error
			if *list.into, err = kube.ParseNames(strings.Join(list.from, ",")); err != nil {
				mistake(list.key, "%w", err)
			}
		}
		for _, m := range s.UseModels {
			if slices.ContainsFunc(s.AvoidModels, func(other string) bool { return strings.EqualFold(m, other) }) {
				mistake("avoidModels", "model %q is in models, too", m)
			}
		}
		if e.Units == 0 {
			mistake("models", "a pod without units has no device")
		}
		count.Models = s
	}
	if e.Units == 0 && count.CPU == 0 && count.Memory == 0 && len(errs) == 0 {
		mistake("units", "empty request; set units, or cpu or memory of pods without a device")
	}
	return name, count, errors.Join(errs...)
}

// explain says what is wrong with the JSON of an entry in words of the entry.
func explain(err error) string {
	var kind *json.UnmarshalTypeError
	switch {
	case errors.As(err, &kind) && kind.Field != "":
		belongs := map[reflect.Kind]string{reflect.Int: "whole number", reflect.Int64: "whole number",
			reflect.Float64: "number", reflect.Slice: "list of names"}[kind.Type.Kind()]
		return fmt.Sprintf("%s: got %s, want a %s", kind.Field, kind.Value, cmp.Or(belongs, "text"))
	case errors.As(err, &kind):
		return "got " + kind.Value + ", want an object"
	}
	return strings.TrimPrefix(err.Error(), "json: ")
}
