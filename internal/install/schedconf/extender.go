package schedconf

import (
	"cmp"
	"encoding/base64"
	"encoding/pem"
	"errors"
	"fmt"
	"net/url"
	"path"
	"regexp"
	"slices"
	"strconv"
	"strings"
	"time"

	"go.yaml.in/yaml/v3"
)

// routes is where Divvy's extender serves, as GCUShare's did. By it an entry is
// known to be ours, or that of a GCUShare that was there before.
const routes = "gcushare-scheduler"

const defaultTimeout = 10 * time.Second

// MaxWeight keeps sums of scores far from overflow in every kube-scheduler.
const MaxWeight = 10_000

// extendedResource is what Kubernetes' validation asks of a resource's name.
var extendedResource = regexp.MustCompile(`^[a-z0-9]([a-z0-9.-]*[a-z0-9])?/[A-Za-z0-9]([A-Za-z0-9._-]*[A-Za-z0-9])?$`)

func isOurs(urlPrefix string) bool {
	u, err := url.Parse(urlPrefix)
	return err == nil && path.Base(u.Path) == routes
}

func (e Extender) check() error {
	if e.Program != nil {
		return errors.Join(e.Program.check(), e.checkResources())
	}
	u, err := url.Parse(e.URL)
	switch {
	case err != nil:
		return fmt.Errorf("the extender's URL: %w", err)
	case u.Scheme != "http" && u.Scheme != "https" || u.Host == "":
		return fmt.Errorf("the extender's URL %q is not of the form https://ADDRESS:PORT/%s", e.URL, routes)
	case path.Base(u.Path) != routes || u.RawQuery != "" || u.Fragment != "":
		return fmt.Errorf("the extender's URL %q does not end in /%s, below which its routes are", e.URL, routes)
	case e.Timeout < 0:
		return fmt.Errorf("the extender's timeout %v is negative", e.Timeout)
	case (len(e.ClientCert) == 0) != (len(e.ClientKey) == 0):
		return errors.New("the extender has a client's certificate without its key, or a key without its certificate")
	case u.Scheme == "http" && len(e.CA)+len(e.ClientCert) > 0:
		return fmt.Errorf("the extender's URL %q is http, for which there are no certificates", e.URL)
	}
	if err := e.checkResources(); err != nil {
		return err
	}
	for _, part := range []struct {
		name string
		data []byte
	}{{"CA", e.CA}, {"client's certificate", e.ClientCert}, {"client's key", e.ClientKey}} {
		if block, _ := pem.Decode(part.data); len(part.data) > 0 && block == nil {
			return fmt.Errorf("the extender's %s is not PEM", part.name)
		}
	}
	return nil
}

func (e Extender) checkResources() error {
	switch {
	case len(e.Resources) == 0:
		return errors.New("the extender has no resources, so it would be called for every pod")
	case e.Weight < 0 || e.Weight > MaxWeight:
		return fmt.Errorf("the extender's weight %d is not from 1 to %d", e.Weight, MaxWeight)
	}
	seen := map[string]bool{}
	for _, r := range e.Resources {
		domain, _, _ := strings.Cut(r, "/")
		switch {
		case !extendedResource.MatchString(r) || domain == "kubernetes.io" || strings.HasSuffix(domain, ".kubernetes.io"):
			return fmt.Errorf("the extender's resource %q is not an extended resource such as enflame.com/gcu-memory", r)
		case seen[r]:
			return fmt.Errorf("the extender's resource %q is listed twice", r)
		}
		seen[r] = true
	}
	return nil
}

// An entry is an extender as it stands in a configuration.
type entry struct {
	URLPrefix        string            `yaml:"urlPrefix"`
	FilterVerb       string            `yaml:"filterVerb"`
	PreemptVerb      string            `yaml:"preemptVerb"`
	PrioritizeVerb   string            `yaml:"prioritizeVerb"`
	Weight           int               `yaml:"weight"`
	BindVerb         string            `yaml:"bindVerb"`
	EnableHTTPS      bool              `yaml:"enableHTTPS,omitempty"`
	TLSConfig        map[string]string `yaml:"tlsConfig,omitempty"`
	HTTPTimeout      string            `yaml:"httpTimeout"`
	NodeCacheCapable bool              `yaml:"nodeCacheCapable"`
	Ignorable        bool              `yaml:"ignorable"`
	ManagedResources []managedResource `yaml:"managedResources"`
}

type managedResource struct {
	Name               string `yaml:"name"`
	IgnoredByScheduler bool   `yaml:"ignoredByScheduler"`
}

func (e Extender) entry() entry {
	out := entry{
		URLPrefix: e.URL, FilterVerb: "filter", PreemptVerb: "preempt", PrioritizeVerb: "prioritize", BindVerb: "bind",
		Weight: max(e.Weight, 1), HTTPTimeout: cmp.Or(e.Timeout, defaultTimeout).String(), NodeCacheCapable: true,
	}
	if strings.HasPrefix(e.URL, "https:") {
		out.EnableHTTPS, out.TLSConfig = true, map[string]string{}
		for key, value := range map[string]string{
			"serverName": e.ServerName, "caData": base64.StdEncoding.EncodeToString(e.CA),
			"certData": base64.StdEncoding.EncodeToString(e.ClientCert), "keyData": base64.StdEncoding.EncodeToString(e.ClientKey),
		} {
			if value != "" {
				out.TLSConfig[key] = value
			}
		}
	}
	for _, r := range slices.Sorted(slices.Values(e.Resources)) {
		out.ManagedResources = append(out.ManagedResources, managedResource{Name: r})
	}
	return out
}

// readExtender reads an entry of a configuration, which may not be Divvy's.
func readExtender(n *yaml.Node) *Extender {
	data := func(key string) []byte {
		b, err := base64.StdEncoding.DecodeString(scalarAt(n, "tlsConfig", key))
		if err != nil || len(b) == 0 {
			return nil
		}
		return b
	}
	e := &Extender{URL: scalarAt(n, "urlPrefix"), ServerName: scalarAt(n, "tlsConfig", "serverName"), CA: data("caData"),
		ClientCert: data("certData"), ClientKey: data("keyData"), Resources: managed(n)}
	if weight, err := strconv.Atoi(scalarAt(n, "weight")); err == nil {
		e.Weight = weight
	}
	timeout := scalarAt(n, "httpTimeout")
	if d, err := time.ParseDuration(timeout); err == nil {
		e.Timeout = d
	} else if ns, err := strconv.ParseInt(timeout, 10, 64); err == nil {
		e.Timeout = time.Duration(ns)
	}
	return e
}
