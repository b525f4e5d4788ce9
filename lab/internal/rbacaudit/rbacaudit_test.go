package rbacaudit

import (
	"strings"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"
)

const manifests = `
apiVersion: v1
kind: ServiceAccount
metadata: {name: a, namespace: home}
---
# Source: something without an object
---
apiVersion: admissionregistration.k8s.io/v1
kind: ValidatingAdmissionPolicy
metadata: {name: p}
rules: what it likes
---
apiVersion: rbac.authorization.k8s.io/v1
kind: ClusterRole
metadata: {name: a}
rules:
- {apiGroups: [""], resources: [nodes, nodes/status], verbs: [patch]}
- {apiGroups: [""], resources: [pods], verbs: [list]}
- {apiGroups: [""], resources: [secrets], resourceNames: [x, z], verbs: [get, update]}
- {nonResourceURLs: [/metrics], verbs: [get]}
---
apiVersion: rbac.authorization.k8s.io/v1
kind: ClusterRoleBinding
metadata: {name: a}
roleRef: {kind: ClusterRole, name: a}
subjects: [{kind: ServiceAccount, name: a, namespace: home}]
---
apiVersion: rbac.authorization.k8s.io/v1
kind: ClusterRoleBinding
metadata: {name: a-scheduler}
roleRef: {kind: ClusterRole, name: "system:kube-scheduler"}
subjects: [{kind: ServiceAccount, name: a, namespace: home}]
---
apiVersion: rbac.authorization.k8s.io/v1
kind: Role
metadata: {name: a, namespace: home}
rules:
- {apiGroups: [coordination.k8s.io], resources: [leases], verbs: [create]}
---
apiVersion: rbac.authorization.k8s.io/v1
kind: RoleBinding
metadata: {name: a, namespace: home}
roleRef: {kind: Role, name: a}
subjects: [{kind: ServiceAccount, name: a, namespace: home}]
`

// event is a line of the log, as kube-apiserver 1.37 writes it.
func event(account, agent, verb, uri, ref, decision string) string {
	if ref != "" {
		ref = `"objectRef":` + ref + `,`
	}
	return `{"kind":"Event","apiVersion":"audit.k8s.io/v1","level":"Metadata","auditID":"2f8c7c9d-0d0b-4b6c-9f57-6a6e30cdd1f5",` +
		`"stage":"ResponseComplete","requestURI":"` + uri + `","verb":"` + verb + `","user":{"username":"` + account + `",` +
		`"groups":["system:serviceaccounts"]},"sourceIPs":["10.244.0.7"],"userAgent":"` + agent + `",` + ref +
		`"responseStatus":{"metadata":{},"code":200},"requestReceivedTimestamp":"2026-01-02T03:04:05.000006Z",` +
		`"stageTimestamp":"2026-01-02T03:04:05.100000Z","annotations":{"authorization.k8s.io/decision":"` + decision + `"}}` + "\n"
}

// at is the line of another time.
func at(clock, line string) string {
	return strings.Replace(line, "2026-01-02T03:04:05.000006Z", "2026-01-02T"+clock+".000000Z", 1)
}

const (
	account = "system:serviceaccount:home:a"
	agent   = "divvy-a/v0.0.0 (linux/amd64) kubernetes/$Format"
)

// did are the lines of all that the manifests allow.
var did = []string{
	event(account, agent, "patch", "/api/v1/nodes/n", `{"resource":"nodes","name":"n","apiVersion":"v1"}`, "allow"),
	event(account, agent, "patch", "/api/v1/nodes/n/status", `{"resource":"nodes","name":"n","apiVersion":"v1","subresource":"status"}`,
		"allow"),
	event(account, agent, "list", "/api/v1/pods?limit=500", `{"resource":"pods","apiVersion":"v1"}`, "allow"),
	event(account, agent, "get", "/api/v1/namespaces/home/secrets/x",
		`{"resource":"secrets","namespace":"home","name":"x","apiVersion":"v1"}`, "allow"),
	event(account, agent, "update", "/api/v1/namespaces/n/secrets/z", `{"resource":"secrets","namespace":"n","name":"z","apiVersion":"v1"}`,
		"allow"),
	event(account, agent, "get", "/api/v1/namespaces/n/secrets/x", `{"resource":"secrets","namespace":"n","name":"x","apiVersion":"v1"}`,
		"allow"),
	event(account, agent, "update", "/api/v1/namespaces/home/secrets/z",
		`{"resource":"secrets","namespace":"home","name":"z","apiVersion":"v1"}`, "allow"),
	event(account, agent, "get", "/metrics?x=y", "", "allow"),
	event(account, agent, "create", "/apis/coordination.k8s.io/v1/namespaces/home/leases",
		`{"resource":"leases","namespace":"home","apiGroup":"coordination.k8s.io","apiVersion":"v1"}`, "allow"),
}

func TestCompare(t *testing.T) {
	roles, err := Read(manifests, manifests)
	if err != nil {
		t.Fatal(err)
	}
	if diff := cmp.Diff([]string{"home/a"}, roles.Accounts); diff != "" || len(roles.Grants) != 5 {
		t.Fatalf("%d grants, accounts %s", len(roles.Grants), diff)
	}
	swap := func(i int, line string) string {
		lines := append([]string{}, did...)
		lines[i] = line
		return strings.Join(lines, "")
	}
	all := strings.Join(did, "")
	tests := map[string]struct {
		log  string
		want []string // in this order; none: everything agrees
	}{
		"all is used": {log: all},
		"a resource beside another": {
			swap(1, ""), []string{"home/a by ClusterRole a: patch nodes/status was never used"},
		},
		"what another account did does not count": {
			swap(2, event("system:serviceaccount:home:b", agent, "list", "/api/v1/pods", `{"resource":"pods","apiVersion":"v1"}`, "allow")),
			[]string{"home/a by ClusterRole a: list pods was never used"},
		},
		"nor what a test did as this one": {
			swap(2, event(account, "e2e.test/v0.0.0 (linux/amd64)", "list", "/api/v1/pods", `{"resource":"pods","apiVersion":"v1"}`,
				"allow")),
			[]string{"home/a by ClusterRole a: list pods was never used"},
		},
		"nor what was refused": {
			swap(2, event(account, agent, "list", "/api/v1/pods", `{"resource":"pods","apiVersion":"v1"}`, "forbid")),
			[]string{
				"home/a by ClusterRole a: list pods was never used",
				`home/a may not list pods, and "` + agent + `" asked for it at 03:04:05.000`,
			},
		},
		"a watch in place of a list": {
			log: swap(2, event(account, agent, "watch", "/api/v1/pods?sendInitialEvents=true", `{"resource":"pods","apiVersion":"v1"}`,
				"allow")),
		},
		"a name": {
			strings.ReplaceAll(all, `"name":"z"`, `"name":"x"`), []string{"home/a by ClusterRole a: nothing was done with secrets named z"},
		},
		"a verb on names": {
			strings.ReplaceAll(all, `"verb":"update"`, `"verb":"get"`),
			[]string{"home/a by ClusterRole a: update secrets x,z was never used"},
		},
		"a path": {
			swap(7, ""), []string{"home/a by ClusterRole a: get /metrics was never used"},
		},
		"the same elsewhere": {
			swap(8, event(account, agent, "create", "/apis", `{"resource":"leases","namespace":"other","apiGroup":"coordination.k8s.io"}`,
				"allow")),
			[]string{"home/a by Role home/a: create leases.coordination.k8s.io in home was never used"},
		},
		"one namespace of all": {
			strings.ReplaceAll(all, `"namespace":"n"`, `"namespace":"home"`),
			[]string{
				"home/a by ClusterRole a: get secrets x,z was used in home alone; make it a Role there",
				"home/a by ClusterRole a: update secrets x,z was used in home alone; make it a Role there",
			},
		},
		"refused twice": {
			all + strings.Repeat(event(account, agent, "delete", "/api/v1/namespaces/n/pods/p",
				`{"resource":"pods","namespace":"n","name":"p"}`, "forbid"), 2),
			[]string{`home/a may not delete pods p in n, and "` + agent + `" asked for it at 03:04:05.000`},
		},
		"refused while the API server starts": {
			log: all + at("03:06:00", event(account, agent, "list", "/api/v1/pods", `{"resource":"pods","apiVersion":"v1"}`, "forbid")) +
				at("03:06:02", event(account, agent, "list", "/api/v1/pods", `{"resource":"pods","apiVersion":"v1"}`, "allow")),
		},
		"a list refused then, and watched again": {
			log: all + at("03:06:00", event(account, agent, "list", "/api/v1/pods", `{"resource":"pods","apiVersion":"v1"}`, "forbid")) +
				at("03:06:02", event(account, agent, "watch", "/api/v1/pods", `{"resource":"pods","apiVersion":"v1"}`, "allow")),
		},
		"another watch": {
			all + at("03:06:00", event(account, agent, "list", "/api/v1/pods", `{"resource":"pods","apiVersion":"v1"}`, "forbid")) +
				at("03:06:02", event(account, agent, "watch", "/api/v1/nodes", `{"resource":"nodes","apiVersion":"v1"}`, "allow")),
			[]string{`home/a may not list pods, and "` + agent + `" asked for it at 03:06:00.000`},
		},
		"and not soon allowed": {
			all + at("03:06:00", event(account, agent, "list", "/api/v1/pods", `{"resource":"pods","apiVersion":"v1"}`, "forbid")) +
				at("03:06:31", event(account, agent, "list", "/api/v1/pods", `{"resource":"pods","apiVersion":"v1"}`, "allow")),
			[]string{`home/a may not list pods, and "` + agent + `" asked for it at 03:06:00.000`},
		},
		"refused while the rights are not there": {
			log: all + at("03:06:00", event("admin", "helm/3", "delete", "/x",
				`{"resource":"rolebindings","apiGroup":"rbac.authorization.k8s.io","namespace":"home","name":"divvy-a"}`, "allow")) +
				at("03:06:01", event(account, agent, "delete", "/x", `{"resource":"pods","namespace":"n","name":"p"}`, "forbid")),
		},
		"which is no use": {
			swap(2, at("03:06:00", event("admin", "helm/3", "delete", "/x",
				`{"resource":"rolebindings","apiGroup":"rbac.authorization.k8s.io","namespace":"home","name":"divvy-a"}`, "allow"))+
				at("03:06:01", event(account, agent, "list", "/api/v1/pods", `{"resource":"pods","apiVersion":"v1"}`, "forbid"))),
			[]string{"home/a by ClusterRole a: list pods was never used"},
		},
		"refused long after": {
			all + at("03:06:00", event("admin", "helm/3", "delete", "/x",
				`{"resource":"rolebindings","apiGroup":"rbac.authorization.k8s.io","namespace":"home","name":"divvy-a"}`, "allow")) +
				at("03:07:01", event(account, agent, "delete", "/x", `{"resource":"pods","namespace":"n","name":"p"}`, "forbid")),
			[]string{`home/a may not delete pods p in n, and "` + agent + `" asked for it at 03:07:01.000`},
		},
		"refused when they are there again": {
			all + at("03:06:00", event("admin", "helm/3", "delete", "/x",
				`{"resource":"clusterrolebindings","apiGroup":"rbac.authorization.k8s.io","name":"bitfusion-a"}`, "allow")) +
				at("03:06:01", event("admin", "helm/3", "create", "/x",
					`{"resource":"clusterrolebindings","apiGroup":"rbac.authorization.k8s.io","name":"bitfusion-a"}`, "allow")) +
				at("03:06:02", event(account, agent, "delete", "/x", `{"resource":"pods","namespace":"n","name":"p"}`, "forbid")),
			[]string{`home/a may not delete pods p in n, and "` + agent + `" asked for it at 03:06:02.000`},
		},
		"refused while those of others are not there": {
			all + at("03:06:00", event("admin", "helm/3", "delete", "/x",
				`{"resource":"rolebindings","apiGroup":"rbac.authorization.k8s.io","namespace":"home","name":"other"}`, "allow")) +
				at("03:06:01", event(account, agent, "delete", "/x", `{"resource":"pods","namespace":"n","name":"p"}`, "forbid")),
			[]string{`home/a may not delete pods p in n, and "` + agent + `" asked for it at 03:06:01.000`},
		},
		"a line that is being written": {log: all + `{"kind":"Ev`},
	}
	for name, tt := range tests {
		t.Run(name, func(t *testing.T) {
			uses, err := readLog(strings.NewReader(tt.log), time.Time{})
			if err != nil {
				t.Fatal(err)
			}
			got := ""
			if err := Compare(roles, uses, "home/a"); err != nil {
				got = err.Error()
			}
			if diff := cmp.Diff(strings.Join(tt.want, "\n"), got); diff != "" {
				t.Errorf("(-want +got):\n%s", diff)
			}
		})
	}
	uses, err := readLog(strings.NewReader(all), time.Date(2027, 1, 1, 0, 0, 0, 0, time.UTC))
	if err != nil || len(uses) != 0 {
		t.Errorf("what was before: %v, %v", uses, err)
	}
	if err := Compare(roles, nil, "home/unknown"); err == nil ||
		!strings.Contains(err.Error(), "makes no account home/unknown; it makes home/a") {
		t.Errorf("an account that is not there: %v", err)
	}
}

func TestBadManifestsAndLogs(t *testing.T) {
	for name, tt := range map[string]struct{ text, want string }{
		"no role": {strings.Replace(manifests, "kind: Role\n", "kind: Rule\n", 1),
			"RoleBinding a binds Role home/a, which is not there"},
		"no binding": {strings.Replace(manifests, "kind: RoleBinding", "kind: Other", 1), "Role home/a is bound to nobody"},
		"a person": {strings.Replace(manifests, "[{kind: ServiceAccount, name: a, namespace: home}]", "[{kind: User, name: me}]", 1),
			"binds the User me"},
		"no YAML": {"a: [", "read the manifests"},
	} {
		if _, err := Read(tt.text); err == nil || !strings.Contains(err.Error(), tt.want) {
			t.Errorf("%s: %v, want %q", name, err, tt.want)
		}
	}
	if _, err := readLog(strings.NewReader("{}\nnonsense\n"), time.Time{}); err == nil || !strings.Contains(err.Error(), "line 2") {
		t.Errorf("a log that is none: %v", err)
	}
	for _, rule := range []string{`resources: [pods], verbs: ["*"]`, `resources: ["*"], verbs: [list]`} {
		roles, err := Read(strings.Replace(manifests, "resources: [pods], verbs: [list]", rule, 1))
		if err != nil {
			t.Fatal(err)
		}
		if err := Compare(roles, nil, "home/a"); err == nil || !strings.Contains(err.Error(), "a rule with a wildcard") {
			t.Errorf("%s: %v", rule, err)
		}
	}
}
