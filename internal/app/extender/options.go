package extender

import (
	"cmp"
	"errors"
	"fmt"
	"net"
	"net/netip"
	"os"
	"slices"
	"time"

	"github.com/spf13/pflag"
	"k8s.io/apimachinery/pkg/util/validation"

	"github.com/divvy-gpu/divvy/internal/app/flags"
	"github.com/divvy-gpu/divvy/internal/core/accel"
	"github.com/divvy-gpu/divvy/internal/core/fragmentation"
	"github.com/divvy-gpu/divvy/internal/core/ledger"
	"github.com/divvy-gpu/divvy/internal/core/place"
	"github.com/divvy-gpu/divvy/internal/platform/certs"
	"github.com/divvy-gpu/divvy/internal/scheduler/claimreview"
	"github.com/divvy-gpu/divvy/internal/scheduler/cluster"
	"github.com/divvy-gpu/divvy/internal/scheduler/leader"
	"github.com/divvy-gpu/divvy/internal/scheduler/weights"
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

// Options are the settings of the extender. A flag wins over its environment variable,
// and that over the default.
type Options struct {
	flags.Server

	TLS       TLS
	Placement Placement
	Election  Election
	Eviction  Eviction
	// ClaimUnits are the resources of units of memory that claims stand for, as claimreview.ParseUnit reads
	// them; none for no reviews of claims.
	ClaimUnits []string
	// MetricsDevices shows the units of each device among the metrics.
	MetricsDevices bool
	// ReportsOnly leaves the placement of pods to another program.
	ReportsOnly bool
	// AllowBindFrom are networks, in CIDR notation, that may ask for a bind
	// besides the extender's own host.
	AllowBindFrom []string
	// GrantKeyFile holds the key that grants are signed with.
	GrantKeyFile string
	// ReservationTTL is how long a reservation waits for its pod to be seen
	// bound.
	ReservationTTL time.Duration
	// MaxBindDelay is how long what filter promised a pod stays reserved for its bind.
	MaxBindDelay time.Duration

	embedding *Embedding // see Embed
}

// DefaultOptions returns the defaults.
func DefaultOptions() Options {
	return Options{
		Server: flags.Server{Listen: ":32766", MetricsListen: ":9401", Log: flags.DefaultLog()},
		TLS: TLS{ //nolint:gosec // names of Secrets are no secrets
			Listen:           ":32765",
			Service:          "divvy-extender",
			Secret:           "divvy-extender-certs",
			ClientSecret:     "divvy-extender-client",
			ConfigMap:        "divvy-extender-ca",
			Overlap:          14 * 24 * time.Hour,
			ValidatingConfig: "divvy-config",
		},
		Placement: Placement{
			Policy:     place.Binpack.Name(),
			ChooseNode: true,
			Resources:  []string{"enflame.com/gcu-memory"},
			NodeLabel:  "enflame.com/gcushare=true",
		},
		Election:       Election{Name: "divvy-extender", Duration: leader.DefaultDuration},
		Eviction:       Eviction{Grace: 2 * time.Minute, MaxPerHour: 3, Exempt: []string{"kube-system"}},
		MetricsDevices: true,
		GrantKeyFile:   "/etc/divvy/grant/key",
		ReservationTTL: ledger.DefaultReservationTTL,
		MaxBindDelay:   ledger.DefaultMaxBindDelay,
	}
}

// AddFlags adds a flag for every option, with its present value as default.
func (o *Options) AddFlags(fs *pflag.FlagSet) {
	o.Server.AddFlags(fs, "address to serve kube-scheduler on", "how long to keep serving admission reviews after SIGTERM")
	o.TLS.addFlags(fs)
	o.Placement.addFlags(fs)
	o.Election.addFlags(fs)
	o.Eviction.addFlags(fs)
	fs.StringSliceVar(&o.ClaimUnits, "claim-units", o.ClaimUnits,
		"resources whose units of memory ResourceClaims can stand for, as resource=vendor:size with the size of a unit in GB, such as "+
			"enflame.com/gcu-memory=enflame:0.1; enables the reviews of pods and claims")
	fs.StringSliceVar(&o.AllowBindFrom, "allow-bind-from", o.AllowBindFrom,
		"networks, such as 10.0.0.0/24, from which kube-scheduler may bind pods over plain HTTP; the extender's own host is always allowed")
	fs.BoolVar(&o.MetricsDevices, "metrics-devices", o.MetricsDevices, "export metrics of each device, three series per device")
	fs.BoolVar(&o.ReportsOnly, "reports-only", o.ReportsOnly, "serve reports and admission reviews only: another program places pods "+
		"(scheduler.mode=replace)")
	fs.StringVar(&o.GrantKeyFile, "grant-key-file", o.GrantKeyFile,
		"file with the key, 32 bytes or more, that signs planned allocations; reloaded when it changes")
	fs.DurationVar(&o.ReservationTTL, "reservation-ttl", o.ReservationTTL,
		"how long capacity stays reserved after bind for a pod that is not observed as bound")
	fs.DurationVar(&o.MaxBindDelay, "max-bind-delay", o.MaxBindDelay,
		"how long capacity stays reserved between filter and bind, for example while kube-scheduler waits for volumes")
}

// Validate reports all mistakes at once.
func (o Options) Validate() error {
	m := mistakes{o.Server.Validate()}
	if o.TLS.Listen != "" {
		m.add("tls-listen", o.checkTLSListen())
		o.TLS.validate(&m)
	}
	_, err := o.claimUnits()
	m.add("claim-units", err)
	_, err = o.bindFrom()
	m.add("allow-bind-from", err)
	if o.GrantKeyFile == "" {
		m.add("grant-key-file", errors.New("must name a file"))
	}
	o.Placement.parse(&m)
	if o.ReservationTTL < minReservationTTL {
		m.add("reservation-ttl", fmt.Errorf("%s: must be at least %s", o.ReservationTTL, minReservationTTL))
	}
	if o.MaxBindDelay < minBindDelay || o.MaxBindDelay > maxBindDelay {
		m.add("max-bind-delay", fmt.Errorf("%s: must be from %s to %s", o.MaxBindDelay, minBindDelay, maxBindDelay))
	}
	if o.Election.Enabled {
		o.Election.validate(&m)
	}
	if o.Eviction.Enabled {
		o.Eviction.validate(&m)
	}
	return errors.Join(m...)
}

type mistakes []error

func (m *mistakes) add(flag string, err error) { *m = append(*m, flags.Mistake(flag, err)) }

func (o Options) checkTLSListen() error {
	switch o.TLS.Listen {
	case o.Listen:
		return fmt.Errorf("%s is the address of --listen", o.TLS.Listen)
	case o.MetricsListen:
		return fmt.Errorf("%s is the address of --metrics-listen", o.TLS.Listen)
	}
	return flags.CheckAddress(o.TLS.Listen)
}

func (o Options) claimUnits() ([]claimreview.Unit, error) {
	var out []claimreview.Unit
	var errs []error
	if len(o.ClaimUnits) > 0 && o.TLS.Listen == "" {
		errs = append(errs, errors.New("reviews are served over TLS; set --tls-listen"))
	}
	for _, text := range o.ClaimUnits {
		unit, err := claimreview.ParseUnit(text)
		errs = append(errs, err, flags.CheckResource(string(unit.Resource)))
		if slices.ContainsFunc(out, func(u claimreview.Unit) bool { return u.Resource == unit.Resource }) {
			errs = append(errs, fmt.Errorf("%s is named twice", unit.Resource))
		}
		out = append(out, unit)
	}
	return out, errors.Join(errs...)
}

func (o Options) bindFrom() ([]netip.Prefix, error) {
	var out []netip.Prefix
	var errs []error
	for _, text := range o.AllowBindFrom {
		prefix, err := netip.ParsePrefix(text)
		if err != nil {
			errs = append(errs, fmt.Errorf("%q: must be a network in CIDR notation, such as 10.0.0.0/24", text))
		}
		out = append(out, prefix)
	}
	return out, errors.Join(errs...)
}

// TLS says where the same answers are served over TLS, with the API server's reviews, and
// where what that needs is kept.
type TLS struct {
	// Listen is host:port; empty for no TLS.
	Listen string
	// Namespace is that of all objects but configurations; that of the pod when empty.
	Namespace string
	// Service is the Service whose name the certificate is for.
	Service string
	// Secret holds the CA and the certificate, ClientSecret the certificate of
	// kube-scheduler, and ConfigMap the CA for it. The last two may be empty.
	Secret, ClientSecret, ConfigMap string
	// Overlap is how long kube-scheduler may take to follow each step of a change of CA.
	Overlap time.Duration
	// MutatingConfig and ValidatingConfig name the webhook configurations that get
	// the CA; empty for none.
	MutatingConfig, ValidatingConfig string
	// SchedulerName is the scheduler that pods are given to by the review of pods;
	// empty for no such review.
	SchedulerName string
}

func (t *TLS) addFlags(fs *pflag.FlagSet) {
	fs.StringVar(&t.Listen, "tls-listen", t.Listen,
		"address to serve kube-scheduler and admission reviews on, with TLS; empty to disable")
	fs.StringVar(&t.Namespace, "tls-namespace", t.Namespace,
		"namespace of the TLS Secrets and ConfigMap; the pod's namespace (POD_NAMESPACE) if empty")
	fs.StringVar(&t.Service, "tls-service", t.Service, "Service that the certificate is issued for")
	fs.StringVar(&t.Secret, "tls-secret", t.Secret,
		"Secret for the CA and the serving certificate, which are created and renewed automatically")
	fs.StringVar(&t.ClientSecret, "tls-client-secret", t.ClientSecret,
		"Secret for kube-scheduler's client certificate, which permits it to bind from any address; empty to disable")
	fs.StringVar(&t.ConfigMap, "tls-ca-configmap", t.ConfigMap,
		"ConfigMap to publish the CA in, for kube-scheduler; empty to disable")
	fs.DurationVar(&t.Overlap, "tls-overlap", t.Overlap, "how long each step of a CA rotation waits for kube-scheduler to follow")
	fs.StringVar(&t.MutatingConfig, "mutating-config", t.MutatingConfig,
		"MutatingWebhookConfiguration to write the CA into; empty to disable")
	fs.StringVar(&t.SchedulerName, "scheduler-name", t.SchedulerName,
		"scheduler name that the pod webhook sets on pods that request a managed resource; empty to disable the webhook")
	fs.StringVar(&t.ValidatingConfig, "validating-config", t.ValidatingConfig,
		"ValidatingWebhookConfiguration to write the CA into; empty to disable")
}

func (t TLS) validate(m *mistakes) {
	if t.namespace() == "" {
		m.add("tls-namespace", errors.New("is required if POD_NAMESPACE is not set; --tls-listen= disables TLS"))
	}
	if t.Service == "" {
		m.add("tls-service", errors.New("must not be empty"))
	}
	switch t.Secret {
	case "":
		m.add("tls-secret", errors.New("must not be empty"))
	case t.ClientSecret:
		m.add("tls-client-secret", fmt.Errorf("%s is the Secret of the CA, whose keys kube-scheduler must not see", t.Secret))
	}
	if wrong := validation.IsDNS1123Subdomain(t.SchedulerName); t.SchedulerName != "" && len(wrong) > 0 {
		m.add("scheduler-name", fmt.Errorf("%q: %s", t.SchedulerName, wrong[0]))
	}
	if t.Overlap < 0 || t.Overlap > maxOverlap {
		m.add("tls-overlap", fmt.Errorf("%s: must be from 0 to %s", t.Overlap, maxOverlap))
	}
}

func (t TLS) namespace() string { return cmp.Or(t.Namespace, os.Getenv("POD_NAMESPACE")) }

// serverName is the name by which clients of all replicas know them.
func (t TLS) serverName() string { return t.Service + "." + t.namespace() + ".svc" }

// Placement says what is placed, and how.
type Placement struct {
	// Policy is the name of a placement policy.
	Policy string
	// Demand is what pods are expected to ask for, until more is known from those that
	// came; see weights.ParsePrior.
	Demand string
	// ChooseNode names the best node alone to kube-scheduler where a pod leaves the
	// choice to the policy.
	ChooseNode bool
	// Resources are the extended resources that are managed.
	Resources []string
	// NodeLabel, as key=value, is the label that a node needs for its inventory
	// to count; of several, joined by commas, any one is enough. "" for none.
	NodeLabel string
}

func (p *Placement) addFlags(fs *pflag.FlagSet) {
	fs.StringVar(&p.Policy, "policy", p.Policy, "placement policy for devices and nodes: "+place.About())
	fs.StringVar(&p.Demand, "demand", p.Demand, "expected requests for the policy fragmentation, used until enough pods have been "+
		"observed; a JSON list such as "+`[{"units":8,"cpu":"4","share":70},{"units":32,"devices":2,"share":30}]`)
	fs.BoolVar(&p.ChooseNode, "choose-node", p.ChooseNode, "return only the best feasible node to kube-scheduler, unless the pod has "+
		"node or pod preferences or kube-scheduler retries; if false, score all feasible nodes")
	fs.StringSliceVar(&p.Resources, "resources", p.Resources,
		"extended resources to manage; inspect shows enflame.com/gcu-memory, or the first one, by default")
	fs.StringVar(&p.NodeLabel, "node-label", p.NodeLabel,
		"labels, as key=value separated by commas, of which a node needs at least one to be considered; empty for all nodes")
}

type placement struct {
	policy    place.Policy
	weights   *weights.Policy
	resources []accel.Resource
	labels    map[accel.Resource]cluster.Labels
}

func (p Placement) parse(m *mistakes) placement {
	var out placement
	if len(p.Resources) == 0 {
		m.add("resources", errors.New("must name at least one"))
	}
	seen := map[string]bool{}
	for _, name := range p.Resources {
		m.add("resources", flags.CheckResource(name))
		if seen[name] {
			m.add("resources", fmt.Errorf("%s is named twice", name))
		}
		seen[name] = true
		out.resources = append(out.resources, accel.Resource(name))
	}
	prior, err := weights.ParsePrior(p.Demand, out.resources)
	m.add("demand", err)
	out.weights = weights.New(out.resources, prior, p.Policy == fragmentation.Name)
	out.policy, err = place.Parse(p.Policy, out.weights)
	m.add("policy", err)
	if p.NodeLabel != "" {
		labels, err := cluster.ParseLabels(p.NodeLabel)
		m.add("node-label", err)
		out.labels = map[accel.Resource]cluster.Labels{}
		for _, r := range out.resources {
			out.labels[r] = labels
		}
	}
	return out
}

// Election lets one of several replicas answer.
type Election struct {
	Enabled bool
	// Shared says that kube-scheduler takes part in the election as well.
	Shared bool
	// The Lease is named Name and is in Namespace, which is the pod's own when empty.
	Name, Namespace string
	// Duration is how long a Lease that is not renewed lasts, in whole seconds: a leader
	// that died is followed after it.
	Duration time.Duration
}

func (e *Election) addFlags(fs *pflag.FlagSet) {
	fs.BoolVar(&e.Enabled, "leader-elect", e.Enabled,
		"use leader election; required for more than one replica. The leader answers requests, the other replicas forward to it")
	fs.StringVar(&e.Name, "leader-elect-name", e.Name, "name of the Lease for leader election")
	fs.BoolVar(&e.Shared, "leader-elect-shared", e.Shared, "the Lease is kube-scheduler's as well: after a kube-scheduler has held "+
		"it, wait for its duration, because writes may be in flight")
	fs.StringVar(&e.Namespace, "leader-elect-namespace", e.Namespace,
		"namespace of the Lease and of the pod; POD_NAMESPACE if empty")
	fs.DurationVar(&e.Duration, "leader-elect-duration", e.Duration,
		"how long a Lease is valid without renewal, in whole seconds; another replica takes over after that if the leader crashes")
}

func (e Election) validate(m *mistakes) {
	if e.Name == "" {
		m.add("leader-elect-name", errors.New("must not be empty"))
	}
	if e.namespace() == "" {
		m.add("leader-elect-namespace", errors.New("is required if POD_NAMESPACE is not set"))
	}
	if os.Getenv("POD_NAME") == "" {
		m.add("leader-elect", errors.New("POD_NAME must be set to the name of this pod"))
	}
	m.add("leader-elect-duration", leader.CheckDuration(e.Duration))
}

func (e Election) namespace() string { return cmp.Or(e.Namespace, os.Getenv("POD_NAMESPACE")) }

// replica is this replica's pod, and where the others reach it over TLS, "" for nowhere.
type replica struct{ pod, address string }

func (o Options) replica() replica {
	r := replica{pod: os.Getenv("POD_NAME")}
	if ip := os.Getenv("POD_IP"); ip != "" && o.TLS.Listen != "" {
		if _, port, err := net.SplitHostPort(o.TLS.Listen); err == nil {
			r.address = net.JoinHostPort(ip, port)
		}
	}
	return r
}
