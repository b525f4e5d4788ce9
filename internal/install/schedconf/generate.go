package schedconf

import (
	"errors"
	"fmt"
	"strconv"
	"strings"
	"time"

	"go.yaml.in/yaml/v3"
)

// A carried flag is one that kube-scheduler does not read any more once it has a
// configuration, with the field that does the same.
type carried struct {
	flag    string
	section []any // nil for the top
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

var client, election = []any{"clientConnection"}, []any{"leaderElection"}

// carriedOver are the flags of all versions, by cmd/kube-scheduler/app/options
// of the releases from 1.29 to 1.37. Those of leader election
// count beside a configuration; what is the same in both does no harm.
// --pod-max-in-unschedulable-pods-duration, --master, --feature-gates and those
// about serving and logging count beside it in every version.
var carriedOver = []carried{
	{flag: "kubeconfig", section: client, field: "kubeconfig"},
	{flag: "kube-api-content-type", section: client, field: "contentType"},
	{flag: "kube-api-qps", section: client, field: "qps", kind: number},
	{flag: "kube-api-burst", section: client, field: "burst", kind: number},
	{flag: "leader-elect", section: election, field: "leaderElect", kind: boolean},
	{flag: "leader-elect-lease-duration", section: election, field: "leaseDuration", kind: duration},
	{flag: "leader-elect-renew-deadline", section: election, field: "renewDeadline", kind: duration},
	{flag: "leader-elect-retry-period", section: election, field: "retryPeriod", kind: duration},
	{flag: "leader-elect-resource-lock", section: election, field: "resourceLock"},
	{flag: "leader-elect-resource-name", section: election, field: "resourceName"},
	{flag: "leader-elect-resource-namespace", section: election, field: "resourceNamespace"},
	{flag: "profiling", field: "enableProfiling", kind: boolean},
	{flag: "contention-profiling", field: "enableContentionProfiling", kind: boolean},
}

// generate returns the configuration of a scheduler that had none: what its
// command line said that does not count any more.
func generate(name string, c command) (*config, []string, error) {
	out, err := readConfig(name, []byte(madeBy+" from kube-scheduler's command line, part of which does not count\n"+
		"# beside --config. `divvy-control schedconf uninstall` goes back to the command line alone.\n"+
		"apiVersion: "+apiVersion+"\nkind: KubeSchedulerConfiguration\n"))
	if err != nil {
		return nil, nil, err
	}
	var moved []string
	for _, f := range carriedOver {
		given, ok := c.flag(f.flag)
		switch {
		case ok:
			moved = append(moved, "--"+f.flag)
		case f.flag == "leader-elect":
			given.value = "true"
		default:
			continue
		}
		if given.unclear != "" {
			return nil, nil, fmt.Errorf("--%s must be moved into the configuration, but %s; set it explicitly", f.flag, given.unclear)
		}
		value, err := f.value(given.value)
		if err != nil {
			return nil, nil, fmt.Errorf("--%s=%s: %w", f.flag, given.value, err)
		}
		if err := out.doc.put(f.section, f.field, value); err != nil {
			return nil, nil, err
		}
	}
	if len(moved) == 0 {
		return out, nil, nil
	}
	return out, []string{"Moved from the command line, where it is ignored with --config: " + strings.Join(moved, ", ") + "."}, nil
}

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
		return &yaml.Node{Kind: yaml.ScalarNode, Value: s}, nil
	case duration:
		if _, err := time.ParseDuration(s); err != nil {
			return nil, errors.New("not a duration such as 15s")
		}
	}
	return s, nil
}
