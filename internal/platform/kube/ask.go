package kube

import (
	"errors"
	"fmt"
	"slices"
	"strconv"
	"strings"
	"unicode/utf8"

	"github.com/divvy-gpu/divvy/internal/core/accel"
	"github.com/divvy-gpu/divvy/internal/core/place"
	"github.com/divvy-gpu/divvy/internal/core/wire"
)

// Bounds of the annotations: a pod's are at most 256 KiB together, and what is
// looked for on every device of thousands of nodes should be short.
const (
	maxNames     = 64
	maxNameBytes = 256
)

// AskError is the error of a pod whose annotations cannot be followed. Such a pod
// cannot be placed until it is created again with other ones.
type AskError struct {
	// Key is the annotation.
	Key string
	Err error
}

func (e *AskError) Error() string { return fmt.Sprintf("annotation %s: %v", e.Key, e.Err) }

// Unwrap returns the cause.
func (e *AskError) Unwrap() error { return e.Err }

// ask is what the annotations of a pod say, for all that it requests.
type ask struct {
	devices   int
	selection *accel.Selection
	policy    string
}

// readAsk reads the annotations by which a pod chooses devices. The error is a
// join of *AskError, one for each mistake.
func readAsk(annotations map[string]string) (ask, error) {
	var a ask
	if len(annotations) == 0 {
		return a, nil
	}
	var errs []error
	mistake := func(key string, err error) {
		if err != nil {
			errs = append(errs, &AskError{Key: key, Err: err})
		}
	}
	if text, ok := annotations[wire.CountAnnotation]; ok && !wire.IsHeld(text) {
		n, err := strconv.Atoi(text)
		if err != nil || n < 1 || n > wire.MaxDevices {
			mistake(wire.CountAnnotation, fmt.Errorf("%s is not a number of devices from 1 to %d", quote(text), wire.MaxDevices))
		} else {
			a.devices = n
		}
	}
	var s accel.Selection
	for _, list := range []struct {
		key  string
		into *[]string
	}{
		{wire.UseModelsAnnotation, &s.UseModels}, {wire.AvoidModelsAnnotation, &s.AvoidModels},
		{wire.UseDevicesAnnotation, &s.UseIDs}, {wire.AvoidDevicesAnnotation, &s.AvoidIDs},
	} {
		text, ok := annotations[list.key]
		if !ok {
			continue
		}
		names, err := ParseNames(text)
		mistake(list.key, err)
		*list.into = names
		a.selection = &s
	}
	if m, twice := common(s.UseModels, s.AvoidModels, strings.EqualFold); twice {
		mistake(wire.AvoidModelsAnnotation, fmt.Errorf("model %s is in %s too", quote(m), wire.UseModelsAnnotation))
	} else if len(s.UseModels) > 0 && !slices.ContainsFunc(s.UseModels, func(use string) bool { return !covered(use, s.AvoidModels) }) {
		mistake(wire.AvoidModelsAnnotation, fmt.Errorf("it excludes all models in %s", wire.UseModelsAnnotation))
	}
	if d, twice := common(s.UseIDs, s.AvoidIDs, func(x, y string) bool { return x == y }); twice {
		mistake(wire.AvoidDevicesAnnotation, fmt.Errorf("device %s is in %s too", quote(d), wire.UseDevicesAnnotation))
	}
	if n := len(s.UseIDs); n > 0 && n < a.devices {
		mistake(wire.UseDevicesAnnotation, fmt.Errorf("%s requests %d devices, but the names in it allow only %d", wire.CountAnnotation,
			a.devices, n))
	}
	percent, err := ComputePercentOf(annotations)
	errs = append(errs, err)
	tier, err := IsolationOf(annotations)
	if percent > 0 && tier != accel.TierNone && tier != accel.TierCooperative {
		mistake(wire.ComputeAnnotation, fmt.Errorf("only devices at tier %s have such shares, and %s requires %s", accel.TierCooperative,
			wire.IsolationAnnotation, tier))
	}
	if errs = append(errs, err); tier != accel.TierNone {
		s.Isolation, a.selection = tier, &s
	}
	// Every extender has all policies, whichever is the cluster's.
	if text, ok := annotations[wire.PolicyAnnotation]; ok {
		if !slices.Contains(place.Names(), text) {
			mistake(wire.PolicyAnnotation, fmt.Errorf("%s is not a placement policy; use one of %s", quote(text),
				strings.Join(place.Names(), ", ")))
		} else {
			a.policy = text
		}
	}
	return a, errors.Join(errs...)
}

// IsolationOf returns the least tier of isolation that the devices of a pod with these
// annotations must have, TierNone for any. The error is an *AskError.
func IsolationOf(annotations map[string]string) (accel.Tier, error) {
	text, ok := annotations[wire.IsolationAnnotation]
	if !ok {
		return accel.TierNone, nil
	}
	tier, err := accel.ParseTier(text)
	if err != nil {
		return accel.TierNone, &AskError{Key: wire.IsolationAnnotation, Err: fmt.Errorf("%s is not a tier of isolation; use one of %s",
			quote(text), strings.Join(accel.TierNames(), ", "))}
	}
	return tier, nil
}

// ComputePercentOf returns the share of a device's multiprocessors that a pod with these
// annotations requests for each container, 0 for none. The error is an *AskError.
func ComputePercentOf(annotations map[string]string) (int, error) {
	text, ok := annotations[wire.ComputeAnnotation]
	if !ok {
		return 0, nil
	}
	n, err := strconv.Atoi(text)
	if err != nil || n < 1 || n > 100 {
		return 0, &AskError{Key: wire.ComputeAnnotation, Err: fmt.Errorf("%s is not a percentage from 1 to 100", quote(text))}
	}
	return n, nil
}

// ParseNames reads names of models or devices as the annotations have them: joined by
// commas and spaces, with * at the end for all that begin so. They come sorted, each once.
func ParseNames(text string) ([]string, error) {
	var names []string
	for name := range strings.SplitSeq(text, ",") {
		name = strings.TrimSpace(name)
		star := strings.IndexByte(name, '*')
		switch {
		case name == "":
			return nil, fmt.Errorf("%s contains an empty name; separate names with single commas", quote(text))
		case len(name) > maxNameBytes || !utf8.ValidString(name):
			return nil, fmt.Errorf("the name %s is longer than %d bytes or not valid UTF-8", quote(name), maxNameBytes)
		case star >= 0 && star < len(name)-1:
			return nil, fmt.Errorf("%s contains a * that is not at its end", quote(name))
		}
		names = append(names, name)
	}
	if len(names) > maxNames {
		return nil, fmt.Errorf("%d names, at most %d", len(names), maxNames)
	}
	slices.Sort(names)
	return slices.Compact(names), nil
}

// common returns the first of a that is also in b.
func common(a, b []string, same func(x, y string) bool) (string, bool) {
	for _, x := range a {
		if slices.ContainsFunc(b, func(y string) bool { return same(x, y) }) {
			return x, true
		}
	}
	return "", false
}

// covered reports whether one of the patterns, names that may end in *, is of every
// model that name, which may end so too, is of.
func covered(name string, patterns []string) bool {
	return slices.ContainsFunc(patterns, func(pattern string) bool {
		prefix, open := strings.CutSuffix(pattern, "*")
		if !open {
			return strings.EqualFold(name, pattern)
		}
		own := strings.TrimSuffix(name, "*")
		return len(own) >= len(prefix) && strings.EqualFold(own[:len(prefix)], prefix)
	})
}

// quote shows a text of a user in an event, which is short.
func quote(s string) string {
	const most = 60
	if len(s) > most {
		s = strings.ToValidUTF8(s[:most], "") + "..."
	}
	return strconv.Quote(s)
}

// put fills the request with what the annotations say. The error is an *AskError
// when the units of a container cannot be divided equally.
func (a *ask) put(r *accel.Request) error {
	r.Devices, r.Selection, r.Policy = a.devices, a.selection, a.policy
	if a.devices <= 1 {
		return nil
	}
	n := accel.Units(a.devices)
	for _, c := range r.Containers {
		if c.Units%n == 0 {
			continue
		}
		above := c.Units - c.Units%n + n
		right := fmt.Sprintf("%d", above)
		if below := above - n; below > 0 {
			right = fmt.Sprintf("%d or %d", below, above)
		}
		return &AskError{Key: wire.CountAnnotation, Err: fmt.Errorf(
			"container %s requests %d of %s, which cannot be divided equally among %d devices; use %s", c.Name, c.Units, r.Resource,
			a.devices, right)}
	}
	return nil
}
