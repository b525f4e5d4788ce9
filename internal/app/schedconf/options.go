package schedconf

import (
	"errors"
	"fmt"
	"net/url"
	"os"
	"slices"
	"strings"
	"time"

	"github.com/spf13/pflag"

	"github.com/divvy-gpu/divvy/internal/app/flags"
	"github.com/divvy-gpu/divvy/internal/install/schedconf"
	"github.com/divvy-gpu/divvy/internal/install/schedconf/host"
	"github.com/divvy-gpu/divvy/internal/platform/logging"
)

// Names that the chart gives to what the extender publishes, in the namespace of
// its Service.
const (
	caConfigMap  = "divvy-extender-ca"
	clientSecret = "divvy-extender-client" //nolint:gosec // the name of a Secret
	caKey        = "ca.crt"
	certKey      = "tls.crt"
	keyKey       = "tls.key"
)

// route is the prefix of the extender's verbs.
const route = "/gcushare-scheduler"

// defaultResource is that of GCUShare.
const defaultResource = "enflame.com/gcu-memory"

// Options are the settings of all subcommands. A flag wins over its environment
// variable, and that over the default.
type Options struct {
	// Manifest, Dir, HostPaths and KubeVersion are those of host.Config.
	Manifest, Dir string
	HostPaths     []string
	KubeVersion   string
	// Kubeconfig is a file; "" for the pod's service account, or else what
	// kubeadm leaves on a control-plane node.
	Kubeconfig string
	// NodeName is the name of this node; "" for the machine's.
	NodeName string
	// ExtenderURL is the prefix of the verbs' routes as kube-scheduler reaches
	// it; "" for the address of ExtenderService, which is namespace/name.
	ExtenderURL, ExtenderService string
	// ExtenderProxy is host:port of the local proxy on this node, which takes the place
	// of the Service's address for a kube-scheduler on the node's network; "" for none.
	ExtenderProxy string
	// ServerName is the name in the extender's certificate; "" for the Service's.
	ServerName string
	// CAFile, CertFile and KeyFile are PEM. Without them, with ExtenderService,
	// they are read from the API server.
	CAFile, CertFile, KeyFile string
	// Resources are the extended resources whose pods the extender places; none
	// for those that the scheduler asks about already, or else defaultResource.
	Resources []string
	// Weight is how many times the extender's scores count.
	Weight int
	// ExtenderTimeout is how long kube-scheduler waits for an answer.
	ExtenderTimeout time.Duration
	// Timeout and Settle are those of host.MirrorConfig, PodLogDir its LogDir.
	Timeout, Settle time.Duration
	PodLogDir       string
	// Listen is where watch, and uninstall --stay, tell how they are; "" for
	// nowhere.
	Listen string
	// Resync is how often watch looks although nothing seems to have changed.
	Resync time.Duration
	// Again, Stay and Uninstall are for install, uninstall and plan.
	Again, Stay, Uninstall bool

	Log flags.Log
}

// DefaultOptions returns the defaults.
func DefaultOptions() Options {
	return Options{
		Manifest:        host.DefaultManifest,
		Dir:             host.DefaultDir,
		ExtenderService: "divvy-system/divvy-extender",
		ExtenderTimeout: 10 * time.Second,
		Weight:          1,
		Timeout:         host.DefaultTimeout,
		Settle:          host.DefaultSettle,
		PodLogDir:       host.DefaultLogDir,
		Resync:          30 * time.Second,
		Log:             flags.DefaultLog(),
	}
}

// addHostFlags adds the flags of every subcommand.
func (o *Options) addHostFlags(fs *pflag.FlagSet) {
	fs.StringVar(&o.Manifest, "manifest", o.Manifest, "manifest of the static pod of kube-scheduler")
	fs.StringVar(&o.Dir, "kubernetes-dir", o.Dir, "folder for the backup and the scheduler's configuration; must not be that of the "+
		"manifest")
	fs.StringSliceVar(&o.HostPaths, "host-path", o.HostPaths,
		"further folders of the host that are mounted in this container at the same path; empty when run on the host itself")
	fs.StringVar(&o.KubeVersion, "kube-version", o.KubeVersion,
		"version of kube-scheduler, such as v1.31.4; taken from its image tag if empty")
	fs.StringVar(&o.Kubeconfig, "kubeconfig", o.Kubeconfig, "kubeconfig file; if empty, the pod's service account, or else "+
		strings.Join(kubeconfigs, " or "))
	fs.StringVar(&o.NodeName, "node-name", o.NodeName, "name of this node in the cluster; if empty, $NODE_NAME or else the host name")
	fs.DurationVar(&o.Timeout, "timeout", o.Timeout,
		"how long kube-scheduler may take to become healthy after a change before the change is rolled back")
	fs.DurationVar(&o.Settle, "settle", o.Settle, "how long kube-scheduler must stay healthy before a change is considered successful")
	fs.StringVar(&o.PodLogDir, "pod-log-dir", o.PodLogDir,
		"kubelet's folder of pod logs, to report why kube-scheduler exited; empty to disable")
	o.Log.AddFlags(fs)
}

// addExtenderFlags adds the flags that say what kube-scheduler is to ask.
func (o *Options) addExtenderFlags(fs *pflag.FlagSet) {
	fs.StringVar(&o.ExtenderURL, "extender-url", o.ExtenderURL, "URL of the extender as kube-scheduler reaches it, such as "+
		"http://127.0.0.1:32766"+route+"; the address of --extender-service if empty")
	fs.StringVar(&o.ExtenderService, "extender-service", o.ExtenderService, "namespace/name of the extender's Service")
	fs.StringVar(&o.ExtenderProxy, "extender-proxy", o.ExtenderProxy, "address of \"divvy-control proxy\" on this node, such as "+
		"127.0.0.1:32764, which a kube-scheduler in the host network uses instead of the Service; empty to disable")
	fs.StringVar(&o.ServerName, "server-name", o.ServerName,
		"server name in the extender's certificate; if empty, that of the Service or the host of --extender-url")
	fs.StringVar(&o.CAFile, "ca-file", o.CAFile, "CA of the extender's certificate; if empty, from the ConfigMap "+caConfigMap+
		" in the Service's namespace")
	fs.StringVar(&o.CertFile, "client-cert-file", o.CertFile,
		"client certificate of kube-scheduler for the extender; if empty, from the Secret "+clientSecret+" in the Service's namespace")
	fs.StringVar(&o.KeyFile, "client-key-file", o.KeyFile, "private key of --client-cert-file")
	fs.StringSliceVar(&o.Resources, "resources", o.Resources,
		"extended resources that the extender manages; if empty, those already configured, or else "+defaultResource)
	fs.IntVar(&o.Weight, "weight", o.Weight, "weight of the extender's node scores relative to those of kube-scheduler's plugins; with "+
		"200 the extender decides whenever its scores differ")
	fs.DurationVar(&o.ExtenderTimeout, "extender-timeout", o.ExtenderTimeout, "kube-scheduler's timeout for calls to the extender")
}

func (o *Options) addListenFlag(fs *pflag.FlagSet) {
	fs.StringVar(&o.Listen, "listen", o.Listen, "address to serve /healthz, /readyz and /metrics on, such as 127.0.0.1:9402; empty to "+
		"disable")
}

// Validate reports all mistakes, each with its flag.
func (o *Options) Validate() error {
	_, err := o.Log.Options()
	errs := []error{err}
	mistake := func(flag, format string, args ...any) {
		errs = append(errs, flags.Mistake(flag, fmt.Errorf(format, args...)))
	}
	for flag, path := range map[string]string{"manifest": o.Manifest, "kubernetes-dir": o.Dir} {
		if !strings.HasPrefix(path, "/") {
			mistake(flag, "%q: must be an absolute path", path)
		}
	}
	for flag, d := range map[string]time.Duration{"timeout": o.Timeout, "settle": o.Settle, "extender-timeout": o.ExtenderTimeout,
		"resync": o.Resync} {
		if d <= 0 {
			mistake(flag, "%s: must be longer than 0s", d)
		}
	}
	if o.Weight < 1 || o.Weight > schedconf.MaxWeight {
		mistake("weight", "%d: must be from 1 to %d", o.Weight, schedconf.MaxWeight)
	}
	if o.Settle >= o.Timeout {
		mistake("settle", "%s: must be shorter than --timeout, which is %s", o.Settle, o.Timeout)
	}
	if o.ExtenderURL != "" {
		if u, err := url.Parse(o.ExtenderURL); err != nil || u.Host == "" || u.Scheme != "http" && u.Scheme != "https" {
			mistake("extender-url", "%q: must be http://HOST:PORT%s or https://HOST:PORT%s", o.ExtenderURL, route, route)
		}
	} else if namespace, name, ok := strings.Cut(o.ExtenderService, "/"); !ok || namespace == "" || name == "" ||
		strings.Contains(name, "/") {
		mistake("extender-service", "%q: must be NAMESPACE/NAME", o.ExtenderService)
	}
	if o.ExtenderProxy != "" {
		errs = append(errs, flags.Mistake("extender-proxy", flags.CheckAddress(o.ExtenderProxy)))
		if o.ExtenderURL != "" {
			mistake("extender-proxy", "%s: cannot be combined with --extender-url", o.ExtenderProxy)
		}
	}
	if (o.CertFile == "") != (o.KeyFile == "") {
		mistake("client-cert-file", "requires --client-key-file")
	}
	for _, resource := range o.Resources {
		if err := flags.CheckResource(resource); err != nil {
			errs = append(errs, flags.Mistake("resources", err))
		}
	}
	if o.Listen != "" {
		errs = append(errs, flags.Mistake("listen", flags.CheckAddress(o.Listen)))
	}
	return errors.Join(errs...)
}

// settings are Options that are complete.
type settings struct {
	Options

	logging logging.Options
}

func (o Options) settings() (settings, error) {
	if err := o.Validate(); err != nil {
		return settings{}, err
	}
	s := settings{Options: o}
	var err error
	if s.logging, err = o.Log.Options(); err != nil {
		return s, err
	}
	// The order of resources says nothing; another one must not restart anybody.
	s.Resources = slices.Compact(slices.Sorted(slices.Values(o.Resources)))
	if s.NodeName == "" {
		s.NodeName = os.Getenv("NODE_NAME")
	}
	if s.NodeName == "" {
		name, err := os.Hostname()
		if err != nil {
			return s, fmt.Errorf("the name of this node: %w; set it with --node-name", err)
		}
		// As kubelet makes it.
		s.NodeName = strings.ToLower(strings.TrimSpace(name))
	}
	return s, nil
}
