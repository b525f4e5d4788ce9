package schedconf

import (
	"cmp"
	"errors"
	"reflect"
	"slices"
	"strings"

	"go.yaml.in/yaml/v3"
)

type config struct {
	doc        *document
	apiVersion string
	// copied is set for what a comment is to say that it is a copy.
	copied bool
}

// readConfig reads a configuration that some version of kube-scheduler takes.
func readConfig(name string, data []byte) (*config, error) {
	doc, err := read(name, data)
	if err != nil {
		return nil, err
	}
	c := &config{doc: doc}
	kind := scalarAt(c.doc.root, "kind")
	c.apiVersion = scalarAt(c.doc.root, "apiVersion")
	if kind != "KubeSchedulerConfiguration" || !strings.HasPrefix(c.apiVersion, APIGroup+"/") {
		return nil, c.doc.errorf("holds %s of apiVersion %s, not a KubeSchedulerConfiguration of %s",
			orNothing(kind), orNothing(c.apiVersion), APIGroup)
	}
	if _, err := c.doc.mappings("extenders"); err != nil {
		return nil, err
	}
	return c, nil
}

// checkVersion rejects a configuration that no kube-scheduler from 1.29 on serves.
func (c *config) checkVersion() error {
	if c.apiVersion != apiVersion {
		return c.doc.errorf("kube-scheduler does not serve apiVersion %s; it serves %s. Convert the file first", c.apiVersion, apiVersion)
	}
	return nil
}

func (c *config) split() (ours []int, all []*yaml.Node, err error) {
	if all, err = c.doc.mappings("extenders"); err != nil {
		return nil, nil, err
	}
	for i, n := range all {
		if isOurs(scalarAt(n, "urlPrefix")) {
			ours = append(ours, i)
		}
	}
	return ours, all, nil
}

func managed(n *yaml.Node) []string {
	var out []string
	if list := get(n, "managedResources"); list != nil {
		for _, r := range list.Content {
			if r = resolve(r); r.Kind == yaml.MappingNode {
				out = append(out, scalarAt(r, "name"))
			}
		}
	}
	return out
}

// add puts our extender in. Entries of ours that are there already make place for it.
func (c *config) add(e Extender) error {
	if e.Program != nil {
		return c.plug(e)
	}
	if err := c.unplug(); err != nil {
		return err
	}
	ours, all, err := c.split()
	if err != nil {
		return err
	}
	for i, n := range all {
		if slices.Contains(ours, i) {
			continue
		}
		other := scalarAt(n, "urlPrefix")
		if scalarAt(n, "bindVerb") != "" {
			return c.doc.errorf("line %d: the extender %s binds pods, and kube-scheduler allows only one such extender. "+
				"Use a dedicated scheduler for Divvy (scheduler.mode=dedicated)", n.Line, other)
		}
		for _, r := range managed(n) {
			if slices.Contains(e.Resources, r) {
				return c.doc.errorf("line %d: the extender %s already manages %s, and kube-scheduler allows only one extender per "+
					"resource. Remove the resource from one of the two", n.Line, other, r)
			}
		}
	}
	entry, err := nodeOf(e.entry())
	if err != nil {
		return err
	}
	for _, i := range slices.Backward(ours) {
		if i == ours[0] && equal(all[i], entry) {
			return nil
		}
		if i != ours[0] {
			err = c.doc.remove("extenders", i)
		} else if list, e := c.doc.owned(yaml.SequenceNode, "extenders"); e != nil {
			err = e
		} else {
			entry.HeadComment = strings.Join(surroundings(list.Content[i]), "\n")
			list.Content[i] = entry
		}
		if err != nil {
			return err
		}
	}
	if len(ours) == 0 {
		return c.doc.insert([]any{"extenders"}, -1, entry)
	}
	return nil
}

// strip takes out what add or plug put in.
func (c *config) strip() error {
	ours, _, err := c.split()
	for _, i := range slices.Backward(ours) {
		if err := c.doc.remove("extenders", i); err != nil {
			return err
		}
	}
	return errors.Join(err, c.unplug())
}

// within reports whether another configuration holds all of this one; it may be
// of another API version.
func (c *config) within(o *config) bool {
	var a, b map[string]any
	if c.doc.root.Decode(&a) != nil || o.doc.root.Decode(&b) != nil {
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

func (c *config) profiles() []string {
	var out []string
	if n := c.doc.at("profiles"); n != nil && n.Kind == yaml.SequenceNode {
		for _, p := range n.Content {
			out = append(out, cmp.Or(scalarAt(p, "schedulerName"), defaultScheduler))
		}
	}
	if len(out) == 0 {
		out = []string{defaultScheduler}
	}
	return out
}

const defaultScheduler = "default-scheduler"
