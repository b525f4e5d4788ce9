package schedconf

import (
	"cmp"
	"errors"
	"fmt"
	"net/url"
	"os"
	"strings"
	"time"

	"github.com/spf13/pflag"
	"k8s.io/client-go/kubernetes"

	"github.com/divvy-gpu/divvy/internal/app/flags"
	"github.com/divvy-gpu/divvy/internal/install/schedconf"
	"github.com/divvy-gpu/divvy/internal/install/schedconf/host"
	"github.com/divvy-gpu/divvy/internal/install/schedconf/wiring"
)

// Options are the settings of all subcommands. A flag wins over its environment
// variable, and that over the default.
type Options struct {
	// Node has no client, and the machine's name if Name is "".
	Node     wiring.Node
	Extender wiring.Source
	// Kubeconfig is a file; "" for the pod's service account, or else what
	// kubeadm leaves on a control-plane node.
	Kubeconfig string
	// Listen is where watch, and uninstall --stay, serve probes; "" for nowhere.
	Listen string
	// Resync is how often watch looks although nothing seems to have changed.
	Resync time.Duration

	Log flags.Log
	add func(*pflag.FlagSet)
}

// DefaultOptions returns the defaults.
func DefaultOptions() Options {
	return Options{
		Node: wiring.Node{
			Manifest: host.DefaultManifest, Dir: host.DefaultDir,
			Timeout: host.DefaultTimeout, Settle: host.DefaultSettle, PodLogDir: host.DefaultLogDir,
		},
		Extender: wiring.Source{Service: "divvy-system/divvy-extender", Timeout: 10 * time.Second, Weight: 1},
		Resync:   30 * time.Second,
		Log:      flags.DefaultLog(),
	}
}

// AddFlags adds the flags of the subcommand.
func (o *Options) AddFlags(fs *pflag.FlagSet) {
	o.addHostFlags(fs)
	o.add(fs)
}

func (o *Options) addHostFlags(fs *pflag.FlagSet) {
	n := &o.Node
	fs.StringVar(&n.Manifest, "manifest", n.Manifest, "manifest of the static pod of kube-scheduler")
	fs.StringVar(&n.Dir, "kubernetes-dir", n.Dir, "folder for the backup and the scheduler's configuration; must not be that of the "+
		"manifest")
	fs.StringSliceVar(&n.HostPaths, "host-path", n.HostPaths,
		"further folders of the host that are mounted in this container at the same path; empty when run on the host itself")
	fs.StringVar(&n.KubeVersion, "kube-version", n.KubeVersion,
		"version of kube-scheduler, such as v1.31.4; taken from its image tag if empty")
	fs.StringVar(&o.Kubeconfig, "kubeconfig", o.Kubeconfig, "kubeconfig file; if empty, the pod's service account, or else "+
		strings.Join(kubeconfigs, " or "))
	fs.StringVar(&n.Name, "node-name", n.Name, "name of this node in the cluster; if empty, $NODE_NAME or else the host name")
	fs.DurationVar(&n.Timeout, "timeout", n.Timeout,
		"how long kube-scheduler may take to become healthy after a change before the change is rolled back")
	fs.DurationVar(&n.Settle, "settle", n.Settle, "how long kube-scheduler must stay healthy before a change is considered successful")
	fs.StringVar(&n.PodLogDir, "pod-log-dir", n.PodLogDir,
		"kubelet's folder of pod logs, to report why kube-scheduler exited; empty to disable")
	o.Log.AddFlags(fs)
}

func (o *Options) addExtenderFlags(fs *pflag.FlagSet) {
	e := &o.Extender
	fs.StringVar(&e.URL, "extender-url", e.URL, "URL of the extender as kube-scheduler reaches it, such as "+
		"http://127.0.0.1:32766"+wiring.Route+"; the address of --extender-service if empty")
	fs.StringVar(&e.Service, "extender-service", e.Service, "namespace/name of the extender's Service")
	fs.StringVar(&e.Proxy, "extender-proxy", e.Proxy, "address of \"divvy-control proxy\" on this node, such as "+
		"127.0.0.1:32764, which a kube-scheduler in the host network uses instead of the Service; empty to disable")
	fs.StringVar(&e.ServerName, "server-name", e.ServerName,
		"server name in the extender's certificate; if empty, that of the Service or the host of --extender-url")
	fs.StringVar(&e.CAFile, "ca-file", e.CAFile, "CA of the extender's certificate; if empty, from the ConfigMap "+wiring.CAConfigMap+
		" in the Service's namespace")
	fs.StringVar(&e.CertFile, "client-cert-file", e.CertFile,
		"client certificate of kube-scheduler for the extender; if empty, from the Secret "+wiring.ClientSecret+
			" in the Service's namespace")
	fs.StringVar(&e.KeyFile, "client-key-file", e.KeyFile, "private key of --client-cert-file")
	fs.StringSliceVar(&e.Resources, "resources", e.Resources,
		"extended resources that the extender manages; if empty, those already configured, or else "+wiring.DefaultResource)
	fs.IntVar(&e.Weight, "weight", e.Weight, "weight of the extender's node scores relative to those of kube-scheduler's plugins; with "+
		"200 the extender decides whenever its scores differ")
	fs.StringVar(&e.Image, "replace-image", e.Image, "image of divvy-scheduler, which then runs in place of kube-scheduler; "+
		schedconf.Minor+" in it stands for kube-scheduler's minor version, such as 1.37. Empty to keep kube-scheduler")
	fs.StringArrayVar(&e.Args, "replace-flag", e.Args, "flag of divvy-scheduler with --replace-image; may be repeated")
	fs.StringVar(&e.GrantKeyFile, "grant-key-file", e.GrantKeyFile, "file with the key that signs planned allocations; required with "+
		"--replace-image")
	fs.DurationVar(&e.Timeout, "extender-timeout", e.Timeout, "kube-scheduler's timeout for calls to the extender")
}

func (o *Options) addListenFlag(fs *pflag.FlagSet) {
	fs.StringVar(&o.Listen, "listen", o.Listen, "address to serve /healthz, /readyz and /metrics on, such as 127.0.0.1:9402; empty to "+
		"disable")
}

// Validate reports all mistakes, each with its flag.
func (o *Options) Validate() error {
	n, e := &o.Node, &o.Extender
	_, err := o.Log.Options()
	errs := []error{err}
	mistake := func(flag, format string, args ...any) {
		errs = append(errs, flags.Mistake(flag, fmt.Errorf(format, args...)))
	}
	for flag, path := range map[string]string{"manifest": n.Manifest, "kubernetes-dir": n.Dir} {
		if !strings.HasPrefix(path, "/") {
			mistake(flag, "%q: must be an absolute path", path)
		}
	}
	for flag, d := range map[string]time.Duration{"timeout": n.Timeout, "settle": n.Settle, "extender-timeout": e.Timeout,
		"resync": o.Resync} {
		if d <= 0 {
			mistake(flag, "%s: must be longer than 0s", d)
		}
	}
	if e.Weight < 1 || e.Weight > schedconf.MaxWeight {
		mistake("weight", "%d: must be from 1 to %d", e.Weight, schedconf.MaxWeight)
	}
	if n.Settle >= n.Timeout {
		mistake("settle", "%s: must be shorter than --timeout, which is %s", n.Settle, n.Timeout)
	}
	if e.URL != "" {
		if u, err := url.Parse(e.URL); err != nil || u.Host == "" || u.Scheme != "http" && u.Scheme != "https" {
			mistake("extender-url", "%q: must be http://HOST:PORT%s or https://HOST:PORT%s", e.URL, wiring.Route, wiring.Route)
		}
	} else if namespace, name, ok := strings.Cut(e.Service, "/"); !ok || namespace == "" || name == "" ||
		strings.Contains(name, "/") {
		mistake("extender-service", "%q: must be NAMESPACE/NAME", e.Service)
	}
	if e.Proxy != "" {
		errs = append(errs, flags.Mistake("extender-proxy", flags.CheckAddress(e.Proxy)))
		if e.URL != "" {
			mistake("extender-proxy", "%s: cannot be combined with --extender-url", e.Proxy)
		}
	}
	if (e.CertFile == "") != (e.KeyFile == "") {
		mistake("client-cert-file", "requires --client-key-file")
	}
	switch {
	case e.Image != "" && e.GrantKeyFile == "":
		mistake("replace-image", "requires --grant-key-file")
	case e.Image == "" && len(e.Args) > 0:
		mistake("replace-flag", "requires --replace-image")
	}
	for _, resource := range e.Resources {
		if err := flags.CheckResource(resource); err != nil {
			errs = append(errs, flags.Mistake("resources", err))
		}
	}
	if o.Listen != "" {
		errs = append(errs, flags.Mistake("listen", flags.CheckAddress(o.Listen)))
	}
	return errors.Join(errs...)
}

// node returns the node with the client, and with the machine's name if there is no other.
func (o *Options) node(client kubernetes.Interface) (wiring.Node, error) {
	n := o.Node
	n.Client, n.Name = client, cmp.Or(n.Name, os.Getenv("NODE_NAME"))
	if n.Name == "" {
		name, err := os.Hostname()
		if err != nil {
			return n, fmt.Errorf("the name of this node: %w; set it with --node-name", err)
		}
		// As kubelet makes it.
		n.Name = strings.ToLower(strings.TrimSpace(name))
	}
	return n, nil
}
