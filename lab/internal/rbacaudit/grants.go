package rbacaudit

import (
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"slices"
	"strings"

	rbacv1 "k8s.io/api/rbac/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/util/yaml"
)

// Grant is one rule of a role that is bound to an account.
type Grant struct {
	// Account is NAMESPACE/NAME of the service account.
	Account string
	// Role is kind and name of the role, for messages.
	Role string
	// Namespace is where the rule holds, "" for everywhere.
	Namespace string
	Rule      rbacv1.PolicyRule
}

// Roles is what manifests say about rights.
type Roles struct {
	// Accounts are the service accounts that the manifests make, as
	// NAMESPACE/NAME, sorted.
	Accounts []string
	Grants   []Grant
}

// Read returns the rights in manifests, each a text of YAML documents. Equal
// rules of several manifests count once. It is an error when a role is bound to
// nobody, or a binding names a role that is neither in the manifests nor one of
// Kubernetes' own.
func Read(manifests ...string) (Roles, error) {
	var all Roles
	for _, text := range manifests {
		roles, err := read(text)
		if err != nil {
			return Roles{}, err
		}
		all.Accounts = append(all.Accounts, roles.Accounts...)
		for _, g := range roles.Grants {
			if !slices.ContainsFunc(all.Grants, g.equal) {
				all.Grants = append(all.Grants, g)
			}
		}
	}
	slices.Sort(all.Accounts)
	all.Accounts = slices.Compact(all.Accounts)
	return all, nil
}

func (g Grant) equal(other Grant) bool {
	return g.Account == other.Account && g.Role == other.Role && g.Namespace == other.Namespace && g.Rule.String() == other.Rule.String()
}

// object is what is read of each document; Role, ClusterRole and their bindings
// share one form.
type object struct {
	metav1.TypeMeta   `json:",inline"`
	metav1.ObjectMeta `json:"metadata"`

	Rules    json.RawMessage  `json:"rules"` // those of an admission policy have another form
	RoleRef  rbacv1.RoleRef   `json:"roleRef"`
	Subjects []rbacv1.Subject `json:"subjects"`
}

func read(text string) (Roles, error) {
	var out Roles
	roles := map[string][]rbacv1.PolicyRule{}
	var bindings []object
	for decoder := yaml.NewYAMLOrJSONDecoder(strings.NewReader(text), 4096); ; {
		var o object
		if err := decoder.Decode(&o); errors.Is(err, io.EOF) {
			break
		} else if err != nil {
			return Roles{}, fmt.Errorf("read the manifests: %w", err)
		}
		switch o.Kind {
		case "ServiceAccount":
			out.Accounts = append(out.Accounts, o.Namespace+"/"+o.Name)
		case "Role", "ClusterRole":
			var rules []rbacv1.PolicyRule
			if err := json.Unmarshal(o.Rules, &rules); err != nil {
				return Roles{}, fmt.Errorf("read %s %s: %w", o.Kind, o.Name, err)
			}
			roles[roleKey(o.Kind, o.Namespace, o.Name)] = rules
		case "RoleBinding", "ClusterRoleBinding":
			bindings = append(bindings, o)
		}
	}
	bound := map[string]bool{}
	for _, b := range bindings {
		namespace := ""
		if b.RoleRef.Kind == "Role" {
			namespace = b.Namespace
		}
		key := roleKey(b.RoleRef.Kind, namespace, b.RoleRef.Name)
		rules, ok := roles[key]
		if !ok {
			if ofKubernetes(b.RoleRef.Name) {
				continue
			}
			return Roles{}, fmt.Errorf("%s %s binds %s, which is not there", b.Kind, b.Name, key)
		}
		bound[key] = true
		for _, s := range b.Subjects {
			if s.Kind != rbacv1.ServiceAccountKind {
				return Roles{}, fmt.Errorf("%s %s binds the %s %s; rights are for service accounts", b.Kind, b.Name, s.Kind, s.Name)
			}
			for _, rule := range rules {
				out.Grants = append(out.Grants, Grant{Account: s.Namespace + "/" + s.Name, Role: key, Namespace: b.Namespace, Rule: rule})
			}
		}
	}
	for key := range roles {
		if !bound[key] {
			return Roles{}, fmt.Errorf("%s is bound to nobody", key)
		}
	}
	return out, nil
}

func roleKey(kind, namespace, name string) string {
	if namespace != "" {
		name = namespace + "/" + name
	}
	return kind + " " + name
}

// ofKubernetes reports whether the API server makes a role of that name.
func ofKubernetes(role string) bool {
	return strings.HasPrefix(role, "system:") || role == "extension-apiserver-authentication-reader"
}
