package schedconf

import (
	"errors"
	"fmt"
	"slices"
	"strconv"
	"strings"
	"time"

	"github.com/divvy-gpu/divvy/internal/install/schedconf/yamledit"
)

// A carried flag is one that kube-scheduler does not read any more once it has a
// configuration, with the field that does the same.
type carried struct {
	flag    string
	section string // empty for the top
	field   string
	kind    kind
}

type kind int

const (
	text kind = iota
	boolean
	number
	duration
)

// carriedOver are the flags of all versions, by cmd/kube-scheduler/app/options
// of the releases from 1.29 to 1.37. Those of leader election
// count beside a configuration; what is the same in both does no harm.
// --pod-max-in-unschedulable-pods-duration, --master, --feature-gates and those
// about serving and logging count beside it in every version.
var carriedOver = []carried{
	{flag: "kubeconfig", section: "clientConnection", field: "kubeconfig"},
	{flag: "kube-api-content-type", section: "clientConnection", field: "contentType"},
	{flag: "kube-api-qps", section: "clientConnection", field: "qps", kind: number},
	{flag: "kube-api-burst", section: "clientConnection", field: "burst", kind: number},
	{flag: "leader-elect", section: "leaderElection", field: "leaderElect", kind: boolean},
	{flag: "leader-elect-lease-duration", section: "leaderElection", field: "leaseDuration", kind: duration},
	{flag: "leader-elect-renew-deadline", section: "leaderElection", field: "renewDeadline", kind: duration},
	{flag: "leader-elect-retry-period", section: "leaderElection", field: "retryPeriod", kind: duration},
	{flag: "leader-elect-resource-lock", section: "leaderElection", field: "resourceLock"},
	{flag: "leader-elect-resource-name", section: "leaderElection", field: "resourceName"},
	{flag: "leader-elect-resource-namespace", section: "leaderElection", field: "resourceNamespace"},
	{flag: "profiling", field: "enableProfiling", kind: boolean},
	{flag: "contention-profiling", field: "enableContentionProfiling", kind: boolean},
}

// generate returns the configuration of a scheduler that had none: what its
// command line said that does not count any more.
func generate(name string, c command) (*config, []string, error) {
	sections := map[string]yamledit.Map{}
	var top yamledit.Map
	var moved []string
	var notes []string
	for _, f := range carriedOver {
		given, ok := c.flag(f.flag)
		if !ok {
			continue
		}
		if given.unclear != "" {
			return nil, nil, fmt.Errorf("--%s must be moved into the configuration, but %s; set it explicitly", f.flag, given.unclear)
		}
		value, err := f.value(given.value)
		if err != nil {
			return nil, nil, fmt.Errorf("--%s=%s: %w", f.flag, given.value, err)
		}
		moved = append(moved, "--"+f.flag)
		put := yamledit.Field{Key: f.field, Value: value}
		if f.section == "" {
			top = append(top, put)
			continue
		}
		s := sections[f.section]
		if i := slices.IndexFunc(s, func(o yamledit.Field) bool { return o.Key == f.field }); i >= 0 {
			s[i] = put
			continue
		}
		sections[f.section] = append(s, put)
	}
	election := sections["leaderElection"]
	if !slices.ContainsFunc(election, func(f yamledit.Field) bool { return f.Key == "leaderElect" }) {
		election = append(yamledit.Map{{Key: "leaderElect", Value: true}}, election...)
	}
	m := yamledit.Map{{Key: "apiVersion", Value: apiVersion}, {Key: "kind", Value: "KubeSchedulerConfiguration"}}
	if s := sections["clientConnection"]; len(s) > 0 {
		m = append(m, yamledit.Field{Key: "clientConnection", Value: s})
	}
	m = append(m, yamledit.Field{Key: "leaderElection", Value: election})
	m = append(m, top...)
	header := madeBy + " from kube-scheduler's command line, part of which does not count\n" +
		"# beside --config. `divvy-control schedconf uninstall` goes back to the command line alone.\n"
	out, err := readConfig(name, append([]byte(header), yamledit.Encode(m)...))
	if err != nil {
		return nil, nil, err
	}
	if len(moved) > 0 {
		notes = append(notes, "Moved from the command line, where it is ignored with --config: "+strings.Join(moved, ", ")+".")
	}
	return out, notes, nil
}

// value returns what a flag was given as a value of the configuration.
func (f carried) value(s string) (any, error) {
	switch f.kind {
	case boolean:
		b, err := strconv.ParseBool(s)
		if err != nil {
			return nil, errors.New("not true or false")
		}
		return b, nil
	case number:
		if _, err := strconv.ParseFloat(s, 32); err != nil {
			return nil, errors.New("not a number")
		}
		return yamledit.Number(s), nil
	case duration:
		if _, err := time.ParseDuration(s); err != nil {
			return nil, errors.New("not a duration such as 15s")
		}
	}
	return s, nil
}
