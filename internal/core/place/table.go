package place

import (
	"fmt"
	"slices"
	"strings"

	"github.com/divvy-gpu/divvy/internal/core/accel"
)

// Entry is a placement policy that users may choose.
type Entry struct {
	Name string
	// About says which device the policy prefers.
	About string
	// Policy is nil for one that learns: a program that lets it learn makes it.
	Policy Policy
}

// Fragmentation is the name of the policy of package fragmentation.
const Fragmentation = "fragmentation"

// Table holds the placement policies, the default first. Nothing changes it after
// the start of a program.
var Table = []Entry{
	{Name: Binpack.Name(), About: "the fullest that still fits", Policy: Binpack},
	{Name: Spread.Name(), About: "the emptiest", Policy: Spread},
	{Name: Fragmentation, About: "the one that leaves the most free capacity for typical requests, learned from past pods"},
}

// Policies returns the policies of the table, without those that learn.
func Policies() []Policy {
	var policies []Policy
	for _, e := range Table {
		if e.Policy != nil {
			policies = append(policies, e.Policy)
		}
	}
	return policies
}

// Names returns the names of the policies of the table, in its order.
func Names() []string {
	names := make([]string, len(Table))
	for i, e := range Table {
		names[i] = e.Name
	}
	return names
}

// About describes the policies of the table in one line, for help texts.
func About() string {
	words := make([]string, len(Table))
	for i, e := range Table {
		words[i] = fmt.Sprintf("%s (%s)", e.Name, e.About)
	}
	return accel.Or(words...)
}

// Parse returns the policy of that name among Policies and those that learn; the
// empty name is that of the first in the table.
func Parse(name string, learning ...Policy) (Policy, error) {
	if name == "" {
		name = Table[0].Name
	}
	for _, p := range slices.Concat(Policies(), learning) {
		if p.Name() == name {
			return p, nil
		}
	}
	return nil, fmt.Errorf("unknown placement policy %q; use one of %s", name, strings.Join(Names(), ", "))
}
