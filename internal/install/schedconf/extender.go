package schedconf

import (
	"encoding/base64"
	"encoding/pem"
	"errors"
	"fmt"
	"net/url"
	"path"
	"regexp"
	"slices"
	"strings"
	"time"

	"github.com/divvy-gpu/divvy/internal/install/schedconf/yamledit"
)

// routes is where Divvy's extender serves, as GCUShare's did. By it an entry is
// known to be ours, or that of a GCUShare that was there before.
const routes = "gcushare-scheduler"

// defaultTimeout is that of a call of the extender.
const defaultTimeout = 10 * time.Second

// MaxWeight keeps sums of scores far from overflow in every kube-scheduler.
const MaxWeight = 10_000

// extendedResource is what Kubernetes' validation asks of a resource's name.
var extendedResource = regexp.MustCompile(`^[a-z0-9]([a-z0-9.-]*[a-z0-9])?/[A-Za-z0-9]([A-Za-z0-9._-]*[A-Za-z0-9])?$`)

// isOurs reports whether an extender's URL is that of Divvy or GCUShare.
func isOurs(urlPrefix string) bool {
	u, err := url.Parse(urlPrefix)
	return err == nil && path.Base(u.Path) == routes
}

// check says what is wrong with an extender.
func (e Extender) check() error {
	u, err := url.Parse(e.URL)
	switch {
	case err != nil:
		return fmt.Errorf("the extender's URL: %w", err)
	case u.Scheme != "http" && u.Scheme != "https" || u.Host == "":
		return fmt.Errorf("the extender's URL %q is not of the form https://ADDRESS:PORT/%s", e.URL, routes)
	case path.Base(u.Path) != routes || u.RawQuery != "" || u.Fragment != "":
		return fmt.Errorf("the extender's URL %q does not end in /%s, below which its routes are", e.URL, routes)
	case len(e.Resources) == 0:
		return errors.New("the extender has no resources, so it would be called for every pod")
	case e.Weight < 0 || e.Weight > MaxWeight:
		return fmt.Errorf("the extender's weight %d is not from 1 to %d", e.Weight, MaxWeight)
	case e.Timeout < 0:
		return fmt.Errorf("the extender's timeout %v is negative", e.Timeout)
	case (len(e.ClientCert) == 0) != (len(e.ClientKey) == 0):
		return errors.New("the extender has a client's certificate without its key, or a key without its certificate")
	case u.Scheme == "http" && len(e.CA)+len(e.ClientCert) > 0:
		return fmt.Errorf("the extender's URL %q is http, for which there are no certificates", e.URL)
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

// entry returns the extender as it stands in a configuration.
func (e Extender) entry() yamledit.Map {
	timeout := e.Timeout
	if timeout == 0 {
		timeout = defaultTimeout
	}
	m := yamledit.Map{
		{Key: "urlPrefix", Value: e.URL},
		{Key: "filterVerb", Value: "filter"},
		{Key: "preemptVerb", Value: "preempt"},
		{Key: "prioritizeVerb", Value: "prioritize"},
		{Key: "weight", Value: max(e.Weight, 1)},
		{Key: "bindVerb", Value: "bind"},
	}
	if strings.HasPrefix(e.URL, "https:") {
		tls := yamledit.Map{}
		if e.ServerName != "" {
			tls = append(tls, yamledit.Field{Key: "serverName", Value: e.ServerName})
		}
		for _, f := range []struct {
			key  string
			data []byte
		}{{"caData", e.CA}, {"certData", e.ClientCert}, {"keyData", e.ClientKey}} {
			if len(f.data) > 0 {
				tls = append(tls, yamledit.Field{Key: f.key, Value: base64.StdEncoding.EncodeToString(f.data)})
			}
		}
		m = append(m, yamledit.Field{Key: "enableHTTPS", Value: true})
		if len(tls) > 0 {
			m = append(m, yamledit.Field{Key: "tlsConfig", Value: tls})
		}
	}
	var managed yamledit.List
	for _, r := range slices.Sorted(slices.Values(e.Resources)) {
		managed = append(managed, yamledit.Map{{Key: "name", Value: r}, {Key: "ignoredByScheduler", Value: false}})
	}
	return append(m,
		yamledit.Field{Key: "httpTimeout", Value: timeout.String()},
		yamledit.Field{Key: "nodeCacheCapable", Value: true},
		yamledit.Field{Key: "ignorable", Value: false},
		yamledit.Field{Key: "managedResources", Value: managed})
}
