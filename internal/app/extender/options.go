package extender

import (
	"errors"
	"fmt"
	"net"
	"net/netip"
	"os"
	"time"

	"github.com/spf13/pflag"
	"k8s.io/apimachinery/pkg/util/validation"

	"github.com/divvy-gpu/divvy/internal/app/flags"
	"github.com/divvy-gpu/divvy/internal/core/accel"
	"github.com/divvy-gpu/divvy/internal/core/fragmentation"
	"github.com/divvy-gpu/divvy/internal/core/ledger"
	"github.com/divvy-gpu/divvy/internal/core/place"
	"github.com/divvy-gpu/divvy/internal/platform/certs"
	"github.com/divvy-gpu/divvy/internal/platform/logging"
	"github.com/divvy-gpu/divvy/internal/scheduler/cluster"
	"github.com/divvy-gpu/divvy/internal/scheduler/leader"
)

// minReservationTTL is above the time that a bind may take, with the question what
// became of it, so that no reservation expires under a bind that is under way.
const minReservationTTL = 15 * time.Second

// Bounds of MaxBindDelay: kube-scheduler may be that slow by itself, and none waits
// that long.
const (
	minBindDelay = 5 * time.Second
	maxBindDelay = 24 * time.Hour
)

// maxOverlap is a tenth of a CA's life.
const maxOverlap = certs.DefaultCALifetime / 10

// Options are the settings of the extender. A flag wins over its environment
// variable, and that over the default.
type Options struct {
	// Listen and MetricsListen are host:port; the host may be empty. An empty
	// MetricsListen serves no metrics.
	Listen, MetricsListen string
	// MetricsDevices shows the units of each device among the metrics.
	MetricsDevices bool
	// TLSListen is host:port for the same answers over TLS, and for the API server's
	// reviews; empty for none.
	TLSListen string
	// TLSNamespace is where what TLS needs is kept; that of the pod when empty.
	TLSNamespace string
	// TLSService is the Service whose name the certificate is for.
	TLSService string
	// TLSSecret holds the CA and the certificate, TLSClientSecret the certificate of
	// kube-scheduler, and TLSConfigMap the CA for it. The last two may be empty.
	TLSSecret, TLSClientSecret, TLSConfigMap string
	// TLSOverlap is how long kube-scheduler may take to follow each step of a change
	// of CA.
	TLSOverlap time.Duration
	// MutatingConfig and ValidatingConfig name the webhook configurations that get
	// the CA; empty for none.
	MutatingConfig, ValidatingConfig string
	// SchedulerName is the scheduler that pods are given to by the review of pods;
	// empty for no such review.
	SchedulerName string
	// AllowBindFrom are networks, in CIDR notation, that may ask for a bind
	// besides the extender's own host.
	AllowBindFrom []string
	// Kubeconfig is a file, "" for the pod's service account.
	Kubeconfig string
	// Policy is the name of a placement policy.
	Policy string
	// Demand is what pods are expected to ask for, a list in JSON, until more is
	// known from those that came; see demandEntry.
	Demand string
	// ChooseNode names the best node alone to kube-scheduler where a pod leaves the
	// choice to the policy.
	ChooseNode bool
	// GrantKeyFile holds the key that grants are signed with.
	GrantKeyFile string
	// Resources are the extended resources that are managed.
	Resources []string
	// NodeLabel, as key=value, is the label that a node needs for its inventory
	// to count; of several, joined by commas, any one is enough. "" for none.
	NodeLabel string
	// ReservationTTL is how long a reservation waits for its pod to be seen
	// bound.
	ReservationTTL time.Duration
	// MaxBindDelay is how long what filter promised a pod stays reserved for its bind.
	MaxBindDelay time.Duration
	// ShutdownDelay is how long reviews are still answered after the program was
	// told to end.
	ShutdownDelay time.Duration

	Log flags.Log

	// LeaderElect lets one of several replicas answer. The Lease is named
	// LeaderElectName and is in LeaderElectNamespace, which is the pod's own
	// when empty.
	LeaderElect                           bool
	LeaderElectName, LeaderElectNamespace string
	// LeaderElectDuration is how long a Lease that is not renewed lasts, in whole
	// seconds: a leader that died is followed after it.
	LeaderElectDuration time.Duration
}

// DefaultOptions returns the defaults.
func DefaultOptions() Options {
	return Options{ //nolint:gosec // names of Secrets are no secrets
		Listen:           ":32766",
		TLSListen:        ":32765",
		TLSService:       "divvy-extender",
		TLSSecret:        "divvy-extender-certs",
		TLSClientSecret:  "divvy-extender-client",
		TLSConfigMap:     "divvy-extender-ca",
		TLSOverlap:       14 * 24 * time.Hour,
		ValidatingConfig: "divvy-config",
		MetricsListen:    ":9401",
		MetricsDevices:   true,
		Policy:           place.Binpack.Name(),
		ChooseNode:       true,
		GrantKeyFile:     "/etc/divvy/grant/key",
		Resources:        []string{"enflame.com/gcu-memory"},
		NodeLabel:        "enflame.com/gcushare=true",
		ReservationTTL:   ledger.DefaultReservationTTL,
		MaxBindDelay:     ledger.DefaultMaxBindDelay,
		Log:              flags.DefaultLog(),
		LeaderElectName:  "divvy-extender",

		LeaderElectDuration: leader.DefaultDuration,
	}
}

// AddFlags adds a flag for every option, with its present value as default.
func (o *Options) AddFlags(fs *pflag.FlagSet) {
	fs.StringVar(&o.Listen, "listen", o.Listen, "address to serve kube-scheduler on")
	fs.StringSliceVar(&o.AllowBindFrom, "allow-bind-from", o.AllowBindFrom,
		"networks, such as 10.0.0.0/24, from which kube-scheduler may bind pods over plain HTTP; the extender's own host is always allowed")
	fs.StringVar(&o.TLSListen, "tls-listen", o.TLSListen,
		"address to serve kube-scheduler and admission reviews on, with TLS; empty to disable")
	fs.StringVar(&o.TLSNamespace, "tls-namespace", o.TLSNamespace,
		"namespace of the TLS Secrets and ConfigMap; the pod's namespace (POD_NAMESPACE) if empty")
	fs.StringVar(&o.TLSService, "tls-service", o.TLSService, "Service that the certificate is issued for")
	fs.StringVar(&o.TLSSecret, "tls-secret", o.TLSSecret,
		"Secret for the CA and the serving certificate, which are created and renewed automatically")
	fs.StringVar(&o.TLSClientSecret, "tls-client-secret", o.TLSClientSecret,
		"Secret for kube-scheduler's client certificate, which permits it to bind from any address; empty to disable")
	fs.StringVar(&o.TLSConfigMap, "tls-ca-configmap", o.TLSConfigMap,
		"ConfigMap to publish the CA in, for kube-scheduler; empty to disable")
	fs.DurationVar(&o.TLSOverlap, "tls-overlap", o.TLSOverlap, "how long each step of a CA rotation waits for kube-scheduler to follow")
	fs.StringVar(&o.MutatingConfig, "mutating-config", o.MutatingConfig,
		"MutatingWebhookConfiguration to write the CA into; empty to disable")
	fs.StringVar(&o.SchedulerName, "scheduler-name", o.SchedulerName,
		"scheduler name that the pod webhook sets on pods that request a managed resource; empty to disable the webhook")
	fs.StringVar(&o.ValidatingConfig, "validating-config", o.ValidatingConfig,
		"ValidatingWebhookConfiguration to write the CA into; empty to disable")
	fs.StringVar(&o.MetricsListen, "metrics-listen", o.MetricsListen, "address to serve Prometheus metrics on; empty to disable")
	fs.BoolVar(&o.MetricsDevices, "metrics-devices", o.MetricsDevices, "export metrics of each device, three series per device")
	fs.StringVar(&o.Kubeconfig, "kubeconfig", o.Kubeconfig, "kubeconfig file; the pod's service account if empty")
	fs.StringVar(&o.Policy, "policy", o.Policy, "placement policy for devices and nodes: "+place.About())
	fs.StringVar(&o.Demand, "demand", o.Demand, "expected requests for the policy fragmentation, used until enough pods have been "+
		"observed; a JSON list such as "+`[{"units":8,"cpu":"4","share":70},{"units":32,"devices":2,"share":30}]`)
	fs.BoolVar(&o.ChooseNode, "choose-node", o.ChooseNode, "return only the best feasible node to kube-scheduler, unless the pod has "+
		"node or pod preferences or kube-scheduler retries; if false, score all feasible nodes")
	fs.StringVar(&o.GrantKeyFile, "grant-key-file", o.GrantKeyFile,
		"file with the key, 32 bytes or more, that signs planned allocations; reloaded when it changes")
	fs.StringSliceVar(&o.Resources, "resources", o.Resources,
		"extended resources to manage; inspect shows enflame.com/gcu-memory, or the first one, by default")
	fs.StringVar(&o.NodeLabel, "node-label", o.NodeLabel,
		"labels, as key=value separated by commas, of which a node needs at least one to be considered; empty for all nodes")
	fs.DurationVar(&o.ReservationTTL, "reservation-ttl", o.ReservationTTL,
		"how long capacity stays reserved after bind for a pod that is not observed as bound")
	fs.DurationVar(&o.MaxBindDelay, "max-bind-delay", o.MaxBindDelay,
		"how long capacity stays reserved between filter and bind, for example while kube-scheduler waits for volumes")
	fs.DurationVar(&o.ShutdownDelay, "shutdown-delay", o.ShutdownDelay, "how long to keep serving admission reviews after SIGTERM")
	o.Log.AddFlags(fs)
	fs.BoolVar(&o.LeaderElect, "leader-elect", o.LeaderElect,
		"use leader election; required for more than one replica. The leader answers requests, the other replicas forward to it")
	fs.StringVar(&o.LeaderElectName, "leader-elect-name", o.LeaderElectName, "name of the Lease for leader election")
	fs.StringVar(&o.LeaderElectNamespace, "leader-elect-namespace", o.LeaderElectNamespace,
		"namespace of the Lease and of the pod; POD_NAMESPACE if empty")
	fs.DurationVar(&o.LeaderElectDuration, "leader-elect-duration", o.LeaderElectDuration,
		"how long a Lease is valid without renewal, in whole seconds; another replica takes over after that if the leader crashes")
}

// settings are options that were checked and turned into what they mean.
type settings struct {
	Options
	policy    place.Policy
	prices    *prices
	bindFrom  []netip.Prefix
	logging   logging.Options
	resources []accel.Resource
	labels    map[accel.Resource]cluster.Labels
	// pod is the name of the program's own pod, and address where the other replicas
	// reach it over TLS, "" for nowhere; with an election alone.
	pod, address string
}

// Validate reports all mistakes at once.
func (o Options) Validate() error {
	_, err := o.settings()
	return err
}

func (o Options) settings() (settings, error) {
	s := settings{Options: o}
	var errs []error
	check := func(flag string, err error) {
		errs = append(errs, flags.Mistake(flag, err))
	}

	check("listen", flags.CheckAddress(o.Listen))
	if o.MetricsListen != "" {
		check("metrics-listen", flags.CheckAddress(o.MetricsListen))
		if o.MetricsListen == o.Listen {
			check("metrics-listen", fmt.Errorf("%s is the address of --listen", o.MetricsListen))
		}
	}
	if o.TLSListen != "" {
		s.checkTLS(check)
	}
	for _, text := range o.AllowBindFrom {
		prefix, err := netip.ParsePrefix(text)
		if err != nil {
			check("allow-bind-from", fmt.Errorf("%q: must be a network in CIDR notation, such as 10.0.0.0/24", text))
			continue
		}
		s.bindFrom = append(s.bindFrom, prefix)
	}
	if o.GrantKeyFile == "" {
		check("grant-key-file", errors.New("must name a file"))
	}

	if len(o.Resources) == 0 {
		check("resources", errors.New("must name at least one"))
	}
	seen := map[string]bool{}
	for _, name := range o.Resources {
		check("resources", flags.CheckResource(name))
		if seen[name] {
			check("resources", fmt.Errorf("%s is named twice", name))
		}
		seen[name] = true
		s.resources = append(s.resources, accel.Resource(name))
	}
	prior, err := parseDemand(o.Demand, s.resources)
	for _, one := range parts(err) {
		check("demand", one)
	}
	s.prices = newPrices(s.resources, prior, o.Policy == fragmentation.Name)
	s.policy, err = place.Parse(o.Policy, s.prices)
	check("policy", err)
	if o.NodeLabel != "" {
		labels, err := cluster.ParseLabels(o.NodeLabel)
		check("node-label", err)
		s.labels = map[accel.Resource]cluster.Labels{}
		for _, r := range s.resources {
			s.labels[r] = labels
		}
	}
	if o.ReservationTTL < minReservationTTL {
		check("reservation-ttl", fmt.Errorf("%s: must be at least %s", o.ReservationTTL, minReservationTTL))
	}
	if o.MaxBindDelay < minBindDelay || o.MaxBindDelay > maxBindDelay {
		check("max-bind-delay", fmt.Errorf("%s: must be from %s to %s", o.MaxBindDelay, minBindDelay, maxBindDelay))
	}
	if o.ShutdownDelay < 0 {
		check("shutdown-delay", fmt.Errorf("%s: must not be negative", o.ShutdownDelay))
	}

	if s.logging, err = o.Log.Options(); err != nil {
		errs = append(errs, err)
	}

	if o.LeaderElect {
		if o.LeaderElectName == "" {
			check("leader-elect-name", errors.New("must not be empty"))
		}
		if s.LeaderElectNamespace == "" {
			s.LeaderElectNamespace = os.Getenv("POD_NAMESPACE")
		}
		if s.LeaderElectNamespace == "" {
			check("leader-elect-namespace", errors.New("is required if POD_NAMESPACE is not set"))
		}
		if s.pod = os.Getenv("POD_NAME"); s.pod == "" {
			check("leader-elect", errors.New("POD_NAME must be set to the name of this pod"))
		}
		check("leader-elect-duration", leader.CheckDuration(o.LeaderElectDuration))
		if ip := os.Getenv("POD_IP"); ip != "" && s.TLSListen != "" {
			if _, port, err := net.SplitHostPort(s.TLSListen); err == nil { // else it is told above
				s.address = net.JoinHostPort(ip, port)
			}
		}
	}
	return s, errors.Join(errs...)
}

// checkTLS checks what matters with TLS alone, and fills in the namespace.
func (s *settings) checkTLS(check func(flag string, err error)) {
	check("tls-listen", flags.CheckAddress(s.TLSListen))
	switch s.TLSListen {
	case s.Listen:
		check("tls-listen", fmt.Errorf("%s is the address of --listen", s.TLSListen))
	case s.MetricsListen:
		check("tls-listen", fmt.Errorf("%s is the address of --metrics-listen", s.TLSListen))
	}
	if s.TLSNamespace == "" {
		s.TLSNamespace = os.Getenv("POD_NAMESPACE")
	}
	if s.TLSNamespace == "" {
		check("tls-namespace", errors.New("is required if POD_NAMESPACE is not set; --tls-listen= disables TLS"))
	}
	if s.TLSService == "" {
		check("tls-service", errors.New("must not be empty"))
	}
	if s.TLSSecret == "" {
		check("tls-secret", errors.New("must not be empty"))
	}
	if s.TLSSecret == s.TLSClientSecret && s.TLSSecret != "" {
		check("tls-client-secret", fmt.Errorf("%s is the Secret of the CA, whose keys kube-scheduler must not see", s.TLSSecret))
	}
	if s.SchedulerName != "" {
		if wrong := validation.IsDNS1123Subdomain(s.SchedulerName); len(wrong) > 0 {
			check("scheduler-name", fmt.Errorf("%q: %s", s.SchedulerName, wrong[0]))
		}
	}
	if s.TLSOverlap < 0 || s.TLSOverlap > maxOverlap {
		check("tls-overlap", fmt.Errorf("%s: must be from 0 to %s", s.TLSOverlap, maxOverlap))
	}
}
