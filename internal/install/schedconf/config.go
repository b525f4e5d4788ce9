package schedconf

import (
	"bytes"
	"encoding/base64"
	"fmt"
	"reflect"
	"slices"
	"strconv"
	"strings"
	"time"

	"go.yaml.in/yaml/v3"

	"github.com/divvy-gpu/divvy/internal/install/schedconf/yamledit"
)

// A config is the configuration of a scheduler.
type config struct {
	name       string // of the file, for messages
	doc        *yamledit.Doc
	apiVersion string
	// copied is set for what a comment is to say that it is a copy.
	copied bool
}

func (c *config) errorf(format string, args ...any) error {
	return fmt.Errorf("%s: %w", c.name, fmt.Errorf(format, args...))
}

// readConfig reads a configuration that some version of kube-scheduler takes.
func readConfig(name string, data []byte) (*config, error) {
	c := &config{name: name}
	if len(data) > maxSize {
		return nil, c.errorf("%d bytes, but a configuration of kube-scheduler has at most %d", len(data), maxSize)
	}
	var err error
	if c.doc, err = yamledit.Parse(data); err != nil {
		return nil, c.errorf("%w", err)
	}
	kind := scalarOf(c.doc.At("kind"))
	c.apiVersion = scalarOf(c.doc.At("apiVersion"))
	if kind != "KubeSchedulerConfiguration" || !strings.HasPrefix(c.apiVersion, APIGroup+"/") {
		return nil, c.errorf("holds %s of apiVersion %s, not a KubeSchedulerConfiguration of %s", orNothing(kind), orNothing(c.apiVersion),
			APIGroup)
	}
	if _, err := c.extenders(); err != nil {
		return nil, err
	}
	return c, nil
}

// checkVersion rejects a configuration that no kube-scheduler from 1.29 on serves.
func (c *config) checkVersion() error {
	if c.apiVersion != apiVersion {
		return c.errorf("kube-scheduler does not serve apiVersion %s; it serves %s. Convert the file first", c.apiVersion, apiVersion)
	}
	return nil
}

func (c *config) extenders() ([]*yaml.Node, error) {
	n := c.doc.At("extenders")
	if yamledit.IsNull(n) {
		return nil, nil
	}
	if n.Kind != yaml.SequenceNode {
		return nil, c.errorf("line %d: extenders is not a list", n.Line)
	}
	out := make([]*yaml.Node, len(n.Content))
	for i := range n.Content {
		if out[i] = yamledit.Resolve(n.Content[i]); out[i].Kind != yaml.MappingNode {
			return nil, c.errorf("line %d: extenders[%d] is not a mapping", out[i].Line, i)
		}
	}
	return out, nil
}

// split returns which extenders are ours, and all.
func (c *config) split() (ours []int, all []*yaml.Node, err error) {
	all, err = c.extenders()
	for i, n := range all {
		if isOurs(scalarOf(yamledit.Get(n, "urlPrefix"))) {
			ours = append(ours, i)
		}
	}
	return ours, all, err
}

// managed returns the resources of an extender.
func managed(n *yaml.Node) []string {
	var out []string
	list := yamledit.Get(n, "managedResources")
	if list == nil {
		return nil
	}
	for _, r := range list.Content {
		if r = yamledit.Resolve(r); r.Kind == yaml.MappingNode {
			out = append(out, scalarOf(yamledit.Get(r, "name")))
		}
	}
	return out
}

// with returns the configuration with our extender in it. Entries of ours that
// are there already make place for it.
func (c *config) with(e Extender) (*config, error) {
	ours, all, err := c.split()
	if err != nil {
		return nil, err
	}
	for i, n := range all {
		if slices.Contains(ours, i) {
			continue
		}
		other := scalarOf(yamledit.Get(n, "urlPrefix"))
		if scalarOf(yamledit.Get(n, "bindVerb")) != "" {
			return nil, c.errorf("line %d: the extender %s binds pods, and kube-scheduler allows only one such extender. "+
				"Use a dedicated scheduler for Divvy (scheduler.mode=dedicated)", n.Line, other)
		}
		for _, r := range managed(n) {
			if slices.Contains(e.Resources, r) {
				return nil, c.errorf("line %d: the extender %s already manages %s, and kube-scheduler allows only one extender per "+
					"resource. "+
					"Remove the resource from one of the two", n.Line, other, r)
			}
		}
	}
	entry := e.entry()
	doc := c.doc
	for _, i := range slices.Backward(ours) {
		switch {
		case i != ours[0]:
			doc, err = doc.Delete("extenders", i)
		case !yamledit.Equal(all[i], entry):
			doc, err = doc.Replace([]any{"extenders", i}, entry)
		}
		if err != nil {
			return nil, c.errorf("%w", err)
		}
	}
	if len(ours) == 0 {
		if doc, err = push(doc, []any{"extenders"}, entry); err != nil {
			return nil, c.errorf("%w", err)
		}
	}
	out := *c
	out.doc = doc
	return &out, nil
}

// without returns the configuration without our extender.
func (c *config) without() (*config, error) {
	ours, all, err := c.split()
	if err != nil || len(ours) == 0 {
		return c, err
	}
	doc := c.doc
	if len(ours) == len(all) {
		doc, err = doc.Delete("extenders")
	} else {
		for _, i := range slices.Backward(ours) {
			if err == nil {
				doc, err = doc.Delete("extenders", i)
			}
		}
	}
	if err != nil {
		return nil, c.errorf("%w", err)
	}
	out := *c
	out.doc = doc
	return &out, nil
}

// same reports whether two configurations hold the same.
func (c *config) same(o *config) bool {
	var a, b any
	if c.doc.Root().Decode(&a) != nil || o.doc.Root().Decode(&b) != nil {
		return false
	}
	x, errX := yaml.Marshal(a)
	y, errY := yaml.Marshal(b)
	return errX == nil && errY == nil && bytes.Equal(x, y)
}

// within reports whether another configuration holds all of this one; it may be
// of another API version.
func (c *config) within(o *config) bool {
	var a, b map[string]any
	if c.doc.Root().Decode(&a) != nil || o.doc.Root().Decode(&b) != nil {
		return false
	}
	delete(a, "apiVersion")
	return subset(a, b)
}

func subset(a, b map[string]any) bool {
	for k, v := range a {
		x, isX := v.(map[string]any)
		y, isY := b[k].(map[string]any)
		if isX && isY && subset(x, y) {
			continue
		}
		if !reflect.DeepEqual(v, b[k]) {
			return false
		}
	}
	return true
}

// profiles returns the names of the schedulers that the configuration makes.
func (c *config) profiles() []string {
	var out []string
	if n := c.doc.At("profiles"); n != nil && n.Kind == yaml.SequenceNode {
		for _, p := range n.Content {
			name := scalarOf(yamledit.Get(p, "schedulerName"))
			if name == "" {
				name = "default-scheduler"
			}
			out = append(out, name)
		}
	}
	if len(out) == 0 {
		out = []string{"default-scheduler"}
	}
	return out
}

// extender reads an entry of a configuration.
func extender(n *yaml.Node) *Extender {
	tls := yamledit.Get(n, "tlsConfig")
	data := func(key string) []byte {
		if tls == nil {
			return nil
		}
		b, err := base64.StdEncoding.DecodeString(scalarOf(yamledit.Get(tls, key)))
		if err != nil || len(b) == 0 {
			return nil
		}
		return b
	}
	e := &Extender{URL: scalarOf(yamledit.Get(n, "urlPrefix")), CA: data("caData"), ClientCert: data("certData"),
		ClientKey: data("keyData"), Resources: managed(n)}
	if tls != nil {
		e.ServerName = scalarOf(yamledit.Get(tls, "serverName"))
	}
	if weight, err := strconv.Atoi(scalarOf(yamledit.Get(n, "weight"))); err == nil {
		e.Weight = weight
	}
	timeout := scalarOf(yamledit.Get(n, "httpTimeout"))
	if d, err := time.ParseDuration(timeout); err == nil {
		e.Timeout = d
	} else if ns, err := strconv.ParseInt(timeout, 10, 64); err == nil {
		e.Timeout = time.Duration(ns)
	}
	return e
}
