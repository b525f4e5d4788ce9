package schedconf

import (
	"errors"
	"fmt"
	"net"
	"slices"
	"strconv"
	"strings"
	"time"

	"github.com/divvy-gpu/divvy/internal/schedconf/yamledit"
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
// of the releases from 1.18 to 1.37. From 1.23 on, those of leader election
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
	{flag: "lock-object-name", section: "leaderElection", field: "resourceName"},
	{flag: "lock-object-namespace", section: "leaderElection", field: "resourceNamespace"},
	{flag: "profiling", field: "enableProfiling", kind: boolean},
	{flag: "contention-profiling", field: "enableContentionProfiling", kind: boolean},
}

// insecurePort is what schedulers before 1.23 serve health and metrics on,
// without encryption, unless they are told not to.
const insecurePort = "10251"

// generate returns the configuration of a scheduler that had none: what its
// command line said that does not count any more.
func generate(name string, c command, v version) (*config, []string, error) {
	api := v.serves()[0]
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
			return nil, nil, fmt.Errorf("--%s has to go into the configuration, but %s; write it out", f.flag, given.unclear)
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
	if v <= 22 {
		address, more, err := insecureAddress(c)
		if err != nil {
			return nil, nil, err
		}
		notes = append(notes, more...)
		if address != "" {
			moved = append(moved, "--address and --port")
			top = append(top, yamledit.Field{Key: "healthzBindAddress", Value: address}, yamledit.Field{Key: "metricsBindAddress", Value: address})
		}
	}
	if v <= 21 {
		profile, flags, err := onlyProfile(c)
		if err != nil {
			return nil, nil, err
		}
		if len(profile) > 0 {
			moved = append(moved, flags...)
			top = append(top, yamledit.Field{Key: "profiles", Value: yamledit.List{profile}})
		}
	}
	if provider, ok := c.flag("algorithm-provider"); ok && v == 18 && provider.value != "DefaultProvider" {
		return nil, nil, fmt.Errorf("--algorithm-provider=%s does not count in kube-scheduler %v beside --config; "+
			"write a configuration with the plugins that are wanted, and name it with --config", provider.value, v)
	}
	m := yamledit.Map{{Key: "apiVersion", Value: api}, {Key: "kind", Value: "KubeSchedulerConfiguration"}}
	if s := sections["clientConnection"]; len(s) > 0 {
		m = append(m, yamledit.Field{Key: "clientConnection", Value: s})
	}
	m = append(m, yamledit.Field{Key: "leaderElection", Value: election})
	m = append(m, top...)
	header := madeBy + " from kube-scheduler's command line, part of which does not count\n" +
		"# beside --config. `divvy-control schedconf uninstall` goes back to the command line alone.\n"
	out, err := readConfig(name, append([]byte(header), yamledit.Encode(m)...), false)
	if err != nil {
		return nil, nil, err
	}
	if len(moved) > 0 {
		notes = append(notes, "Carried over from the command line, where it does not count beside --config: "+strings.Join(moved, ", ")+".")
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

// insecureAddress returns where a scheduler before 1.23 is to serve without
// encryption, or nothing for its default.
func insecureAddress(c command) (string, []string, error) {
	host, hasHost := c.flag("address")
	port, hasPort := c.flag("port")
	if !hasHost && !hasPort {
		return "", nil, nil
	}
	if host.unclear != "" || port.unclear != "" {
		return "", nil, fmt.Errorf("--address and --port have to go into the configuration, but %s; write them out", host.unclear+port.unclear)
	}
	if !hasPort {
		port.value = insecurePort
	}
	if !hasHost {
		host.value = "0.0.0.0"
	}
	if net.ParseIP(host.value) == nil {
		return "", nil, fmt.Errorf("--address=%s: not an IP address", host.value)
	}
	n, err := strconv.Atoi(port.value)
	if err != nil || n < 0 || n > 65535 {
		return "", nil, fmt.Errorf("--port=%s: not a port", port.value)
	}
	if n > 0 {
		return net.JoinHostPort(host.value, port.value), nil, nil
	}
	// Validation refuses port 0, and what is empty becomes the default, which is
	// every address of the node.
	return net.JoinHostPort("127.0.0.1", insecurePort), []string{
		"kube-scheduler before 1.23 cannot be told in a configuration to leave its insecure port closed, as --port=0 did; " +
			"it is open on 127.0.0.1:" + insecurePort + " only.",
	}, nil
}

// onlyProfile returns what flags before 1.22 said of the one profile there was.
func onlyProfile(c command) (yamledit.Map, []string, error) {
	var m yamledit.Map
	var flags []string
	if name, ok := c.flag("scheduler-name"); ok && name.value != "default-scheduler" {
		if name.unclear != "" {
			return nil, nil, fmt.Errorf("--scheduler-name has to go into the configuration, but %s; write it out", name.unclear)
		}
		m = append(m, yamledit.Field{Key: "schedulerName", Value: name.value})
		flags = append(flags, "--scheduler-name")
	}
	if weight, ok := c.flag("hard-pod-affinity-symmetric-weight"); ok && weight.value != "1" {
		n, err := strconv.Atoi(weight.value)
		if err != nil || n < 0 || n > 100 {
			return nil, nil, fmt.Errorf("--hard-pod-affinity-symmetric-weight=%s: not a number from 0 to 100", weight.value)
		}
		m = append(m, yamledit.Field{Key: "pluginConfig", Value: yamledit.List{yamledit.Map{
			{Key: "name", Value: "InterPodAffinity"},
			{Key: "args", Value: yamledit.Map{{Key: "hardPodAffinityWeight", Value: n}}},
		}}})
		flags = append(flags, "--hard-pod-affinity-symmetric-weight")
	}
	return m, flags, nil
}
