package main

import (
	"fmt"
	"maps"
	"os"
	"regexp"
	"slices"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"
	rbacv1 "k8s.io/api/rbac/v1"
	"k8s.io/apimachinery/pkg/runtime"
)

// rightsOf returns what the accounts of a rendered chart may do, one verb on one
// resource, or one name of it, in each: "list nodes in cluster".
func rightsOf(all []runtime.Object) map[string]map[string]bool {
	rules := map[string][]rbacv1.PolicyRule{}
	for _, o := range all {
		switch o := o.(type) {
		case *rbacv1.ClusterRole:
			rules["ClusterRole "+o.Name] = o.Rules
		case *rbacv1.Role:
			rules["Role "+o.Namespace+"/"+o.Name] = o.Rules
		}
	}
	out := map[string]map[string]bool{}
	add := func(subjects []rbacv1.Subject, role, where string) {
		for _, s := range subjects {
			if out[s.Name] == nil {
				out[s.Name] = map[string]bool{}
			}
			for _, rule := range rules[role] {
				for _, resource := range rule.Resources {
					if group := strings.Join(rule.APIGroups, ","); group != "" {
						resource += "." + group
					}
					for _, name := range append(rule.ResourceNames, "")[:max(1, len(rule.ResourceNames))] {
						for _, verb := range rule.Verbs {
							out[s.Name][strings.Join(strings.Fields(verb+" "+resource+" "+name+" in "+where), " ")] = true
						}
					}
				}
			}
		}
	}
	for _, o := range all {
		switch o := o.(type) {
		case *rbacv1.ClusterRoleBinding:
			add(o.Subjects, "ClusterRole "+o.RoleRef.Name, "cluster")
		case *rbacv1.RoleBinding:
			where := strings.Replace(o.Namespace, "divvy-system", "own", 1)
			if o.RoleRef.Kind == "ClusterRole" {
				add(o.Subjects, "ClusterRole "+o.RoleRef.Name, where)
			} else {
				add(o.Subjects, "Role "+o.Namespace+"/"+o.RoleRef.Name, where)
			}
		}
	}
	return out
}

// TestSecurityPageTellsEveryRight: the tables of docs/security.md are what the
// chart's roles say, in whichever way it is installed.
func TestSecurityPageTellsEveryRight(t *testing.T) {
	rights := map[string]map[string]bool{}
	for _, set := range everyPart {
		for account, of := range rightsOf(objects(t, rendered(t, set...))) {
			if rights[account] == nil {
				rights[account] = map[string]bool{}
			}
			maps.Copy(rights[account], of)
		}
	}
	page, err := os.ReadFile(root + "/docs/security.md")
	if err != nil {
		t.Fatal(err)
	}
	word := regexp.MustCompile("`([^`]+)`")
	told := map[string]map[string]bool{}
	account := ""
	for line := range strings.Lines(string(page)) {
		if title, ok := strings.CutPrefix(line, "### "); ok {
			account = strings.TrimSpace(title)
		} else if strings.HasPrefix(line, "## ") {
			account = ""
		}
		cells := strings.Split(strings.Trim(strings.TrimSpace(line), "|"), "|")
		if account == "" || len(cells) != 4 || !strings.Contains(cells[0], "`") {
			continue
		}
		var words []string
		for _, match := range word.FindAllStringSubmatch(cells[0], -1) {
			words = append(words, match[1])
		}
		if told[account] == nil {
			told[account] = map[string]bool{}
		}
		if strings.TrimSpace(cells[3]) == "" {
			t.Errorf("docs/security.md does not say why %s has%s on%s", account, cells[1], cells[0])
		}
		for _, name := range append(words[1:], "")[:max(1, len(words)-1)] {
			for verb := range strings.SplitSeq(cells[1], ",") {
				told[account][strings.Join(strings.Fields(fmt.Sprintf("%s %s %s in %s", verb, words[0], name, cells[2])), " ")] = true
			}
		}
	}
	for _, account := range slices.Sorted(maps.Keys(rights)) {
		for right := range rights[account] {
			verb, _, _ := strings.Cut(right, " ")
			if strings.Contains(right, "*") || slices.Contains([]string{"bind", "escalate", "impersonate", "deletecollection"}, verb) {
				t.Errorf("%s may %s", account, right)
			}
		}
		if diff := cmp.Diff(slices.Sorted(maps.Keys(told[account])), slices.Sorted(maps.Keys(rights[account]))); diff != "" {
			t.Errorf("docs/security.md about %s (-told +chart):\n%s", account, diff)
		}
		delete(told, account)
	}
	for account := range told {
		t.Errorf("docs/security.md tells of rights of %s, which has none", account)
	}
}
