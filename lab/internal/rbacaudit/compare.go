package rbacaudit

import (
	"errors"
	"fmt"
	"slices"
	"strings"
	"time"
)

// Compare returns an error that names every right which an account has and did
// not use, and every request that it was refused. Accounts say whose rights are
// looked at, as NAMESPACE/NAME; each must be one of the roles'.
//
// A rule is used when each of its verbs was used on each of its resources, and
// each of the names that it is limited to occurred. One that holds everywhere
// and was used in a single namespace of its own should be a Role there.
func Compare(roles Roles, uses []Use, accounts ...string) error {
	var findings []error
	for _, account := range accounts {
		if !slices.Contains(roles.Accounts, account) {
			findings = append(findings, fmt.Errorf("the chart makes no account %s; it makes %s", account,
				strings.Join(roles.Accounts, ", ")))
		}
	}
	for _, g := range roles.Grants {
		if slices.Contains(accounts, g.Account) {
			findings = append(findings, g.check(uses)...)
		}
	}
	return errors.Join(append(findings, Refusals(uses, accounts...))...)
}

// starting is how long an API server that starts may refuse what it allows once it has
// read all roles. Programs ask again at once.
const starting = 30 * time.Second

// passed reports whether a request like this one was allowed soon after it. A reflector
// that may not watch lists, and watches again.
func (u Use) passed(uses []Use) bool {
	return slices.ContainsFunc(uses, func(v Use) bool {
		after, verb := v.At.Sub(u.At), v.Verb
		v.Verb = u.Verb
		return !v.Refused && after >= 0 && after < starting && v.Account == u.Account && serves(u.Verb, verb) && v.String() == u.String()
	})
}

// Refusals returns an error that names every request of the accounts that no role
// allowed, each kind once. What was allowed soon after is none.
func Refusals(uses []Use, accounts ...string) error {
	var findings []error
	seen := map[string]bool{}
	for _, u := range uses {
		text := fmt.Sprintf("%s may not %s", u.Account, u)
		if u.Refused && slices.Contains(accounts, u.Account) && !seen[text] && !u.passed(uses) {
			seen[text] = true
			findings = append(findings, fmt.Errorf("%s, and %q asked for it at %s", text, u.Agent, u.At.Format("15:04:05.000")))
		}
	}
	return errors.Join(findings...)
}

// check returns what of the grant is too much.
func (g Grant) check(uses []Use) []error {
	var findings []error
	tell := func(format string, args ...any) {
		findings = append(findings, fmt.Errorf("%s by %s: "+format, append([]any{g.Account, g.Role}, args...)...))
	}
	if slices.Contains(g.Rule.Verbs, "*") || slices.Contains(g.Rule.Resources, "*") || slices.Contains(g.Rule.APIGroups, "*") ||
		slices.ContainsFunc(g.Rule.NonResourceURLs, func(u string) bool { return strings.Contains(u, "*") }) {
		tell("a rule with a wildcard: %s", g.Rule.String())
		return findings
	}
	names := map[string]bool{}
	for _, verb := range g.Rule.Verbs {
		for _, path := range g.Rule.NonResourceURLs {
			if !slices.ContainsFunc(uses, func(u Use) bool {
				return !u.Refused && u.Account == g.Account && u.Verb == verb &&
					u.Path == path
			}) {
				tell("%s %s was never used", verb, path)
			}
		}
		for _, group := range g.Rule.APIGroups {
			for _, resource := range g.Rule.Resources {
				places := map[string]bool{}
				for _, u := range uses {
					if !u.Refused && g.covers(u) && serves(verb, u.Verb) && u.Group == group && u.Resource == resource {
						places[u.Namespace] = true
						names[u.Name] = true
					}
				}
				right := Use{Verb: verb, Group: group, Resource: resource, Name: strings.Join(g.Rule.ResourceNames, ","),
					Namespace: g.Namespace}
				home, _, _ := strings.Cut(g.Account, "/")
				switch {
				case len(places) == 0:
					tell("%s was never used", right)
				case g.Namespace == "" && len(places) == 1 && places[home]:
					tell("%s was used in %s alone; make it a Role there", right, home)
				}
			}
		}
	}
	if len(names) > 0 {
		for _, name := range g.Rule.ResourceNames {
			if !names[name] {
				tell("nothing was done with %s named %s", strings.Join(g.Rule.Resources, ","), name)
			}
		}
	}
	return findings
}

// serves reports whether a request shows that a verb is needed. Whoever watches has
// to list where the API server cannot stream what is there, which it can from
// Kubernetes 1.34 on.
func serves(verb, used string) bool { return used == verb || verb == "list" && used == "watch" }

// covers reports whether the grant is about the account, the place and the name
// of a request.
func (g Grant) covers(u Use) bool {
	return u.Account == g.Account && (g.Namespace == "" || g.Namespace == u.Namespace) &&
		(len(g.Rule.ResourceNames) == 0 || slices.Contains(g.Rule.ResourceNames, u.Name))
}
