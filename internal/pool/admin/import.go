// Package admin is what an administrator of a remote pool does with its token: import it into the
// cluster's secrets, and check whether its servers can be used.
package admin

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"io"
	"maps"
	"slices"
	"strings"
	"time"

	corev1 "k8s.io/api/core/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/util/validation"
	"k8s.io/client-go/kubernetes"

	"github.com/divvy-gpu/divvy/internal/pool"
	"github.com/divvy-gpu/divvy/internal/pool/secrets"
	"github.com/divvy-gpu/divvy/internal/pool/token"
)

// DefaultNamespace is where the pool's secrets are, as the guides have it.
const DefaultNamespace = secrets.DefaultSourceNamespace

// ImportedLabel is "true" on secrets that Import has made.
const ImportedLabel = "divvy.dev/pool-import"

// DryRunClient says what an import would do.
const DryRunClient = "client"

// How far an import goes otherwise.
const (
	dryRunNone   = "none"
	dryRunServer = "server"
)

// ImportOptions are what a person may choose.
type ImportOptions struct {
	// Namespace is where the secrets are made.
	Namespace string
	// ClientVersions are the versions of the client that pods will use.
	ClientVersions []string
	// Reachable adds "reachable" to servers.conf whatever the versions.
	Reachable bool
	// DryRun is none, client (nothing is sent but questions) or server (the API
	// server checks everything and stores nothing).
	DryRun string
	// Force overwrites secrets that somebody else has made.
	Force bool
}

// DefaultImportOptions returns the defaults.
func DefaultImportOptions() ImportOptions {
	return ImportOptions{Namespace: DefaultNamespace, DryRun: dryRunNone}
}

// Validate reports all mistakes at once.
func (o ImportOptions) Validate() error {
	errs := []error{checkNamespace("--namespace", o.Namespace)}
	if !slices.Contains([]string{dryRunNone, DryRunClient, dryRunServer}, o.DryRun) {
		errs = append(errs, fmt.Errorf("--dry-run %q: must be %s, %s or %s", o.DryRun, dryRunNone, DryRunClient, dryRunServer))
	}
	for _, v := range o.ClientVersions {
		if v == "" || strings.Trim(v, "0123456789.") != "" {
			errs = append(errs, fmt.Errorf("--client-version %q: must be a version as pods write it, such as 350 or 450", v))
		}
	}
	return errors.Join(errs...)
}

func checkNamespace(flag, name string) error {
	if problems := validation.IsDNS1123Label(name); len(problems) > 0 {
		return fmt.Errorf("%s %q: must be the name of a namespace, such as %s", flag, name, DefaultNamespace)
	}
	return nil
}

// ReadToken reads, repairs and checks a token, and prints what it is.
func ReadToken(name string, o ImportOptions, now time.Time, out, errOut io.Writer) (*token.Token, error) {
	t, err := token.Read(name)
	if err != nil {
		return nil, err
	}
	// Warnings and errors are about what was downloaded, before it is mended.
	warnings, err := t.Check(now)
	for _, w := range warnings {
		fmt.Fprintln(errOut, "warning:", w)
	}
	if err != nil {
		return nil, fmt.Errorf("token %s: %w", name, err)
	}
	fixed, changes, err := token.Repair(t.Servers, o.Reachable || slices.ContainsFunc(o.ClientVersions, token.NeedsReachable))
	if err != nil {
		return nil, fmt.Errorf("token %s: %w", name, err)
	}
	t.Servers = fixed
	servers, err := token.ParseServers(fixed)
	if err != nil {
		return nil, fmt.Errorf("token %s: %w", name, err)
	}
	fmt.Fprintf(out, "token %s: %s\n", name, describe(servers))
	for _, change := range changes {
		fmt.Fprintf(out, "%s, %s\n", pool.ServersKey, change)
	}
	return t, nil
}

const maxAddresses = 8

func describe(s token.Servers) string {
	addresses := s.Addresses()
	more := ""
	if n := len(addresses); n > maxAddresses {
		addresses, more = addresses[:maxAddresses], fmt.Sprintf(" and %d more", n-maxAddresses)
	}
	noun := "servers"
	if len(s.List) == 1 {
		noun = "server"
	}
	return fmt.Sprintf("%d %s, at %s%s", len(s.List), noun, strings.Join(addresses, ", "), more)
}

type step struct {
	name string
	// verb is created, updated or unchanged.
	verb   string
	secret *corev1.Secret
	// note is what the user should know about it; "" for nothing.
	note string
}

// Import makes or updates the four secrets of a token that was checked. All are
// read before the first is written, so that a secret that must not be
// overwritten leaves all as they are. Running it again continues where it was
// interrupted.
func Import(ctx context.Context, o ImportOptions, client kubernetes.Interface, t *token.Token, out io.Writer) error {
	if err := o.Validate(); err != nil {
		return err
	}
	steps, err := plan(ctx, o, client, t)
	if err != nil {
		return err
	}
	said, dryRun := "", []string(nil)
	switch o.DryRun {
	case DryRunClient:
		said = " (dry run)"
	case dryRunServer:
		said, dryRun = " (server dry run)", []string{metav1.DryRunAll}
	}
	api := client.CoreV1().Secrets(o.Namespace)
	for _, s := range steps {
		var err error
		switch {
		case o.DryRun == DryRunClient || s.verb == "unchanged":
		case s.verb == "created":
			_, err = api.Create(ctx, s.secret, metav1.CreateOptions{DryRun: dryRun})
		default:
			_, err = api.Update(ctx, s.secret, metav1.UpdateOptions{DryRun: dryRun})
		}
		if err != nil {
			return writeError(o.Namespace, s.name, err)
		}
		fmt.Fprintf(out, "secret/%s in %s %s%s\n", s.name, o.Namespace, s.verb, said)
		if s.note != "" {
			fmt.Fprintln(out, s.note)
		}
	}
	if o.DryRun == dryRunNone {
		fmt.Fprintln(out, "Copies in the namespaces of pods are updated automatically. Next: kubectl divvy pool check"+
			otherwise("--from", o.Namespace))
	}
	return nil
}

// plan reads the secrets that there are and decides what to do. It reports all
// that stands in the way at once.
func plan(ctx context.Context, o ImportOptions, client kubernetes.Interface, t *token.Token) ([]step, error) {
	all := t.Secrets()
	var steps []step
	var errs []error
	for _, name := range []string{pool.CASecret, pool.ClientSecret, pool.ServersSecret, pool.SingleSecret} {
		data := all[name]
		old, err := client.CoreV1().Secrets(o.Namespace).Get(ctx, name, metav1.GetOptions{})
		if apierrors.IsNotFound(err) {
			steps = append(steps, step{name: name, verb: "created", secret: &corev1.Secret{
				ObjectMeta: metav1.ObjectMeta{Namespace: o.Namespace, Name: name, Labels: map[string]string{ImportedLabel: "true"}},
				Type:       corev1.SecretTypeOpaque, Data: data}})
			continue
		}
		if err != nil {
			return nil, fmt.Errorf("read secret %s in %s: %w", name, o.Namespace, err)
		}
		if err := overwritable(old, data, o); err != nil {
			errs = append(errs, err)
			continue
		}
		if same(old.Data, data) {
			steps = append(steps, step{name: name, verb: "unchanged"})
			continue
		}
		secret := old.DeepCopy()
		if secret.Labels == nil {
			secret.Labels = map[string]string{}
		}
		secret.Labels[ImportedLabel] = "true"
		if secret.Data == nil {
			secret.Data = map[string][]byte{}
		}
		maps.Copy(secret.Data, data)
		note := ""
		if name == pool.ServersSecret && reachable(old.Data[pool.ServersKey]) && !reachable(t.Servers) {
			note = fmt.Sprintf("note: %s had entries \"reachable\" before but has none now; if pods use clients 3.5, import again with "+
				"--client-version 350", pool.ServersKey)
		}
		steps = append(steps, step{name, "updated", secret, note})
	}
	return steps, errors.Join(errs...)
}

// reachable reports whether a servers.conf has entries "reachable".
func reachable(data []byte) bool {
	servers, _ := token.ParseServers(data) // what can be read of it is enough
	return slices.ContainsFunc(servers.List, func(s token.Server) bool { return s.Reachable != "" })
}

// overwritable says why a secret must not be overwritten with other content.
func overwritable(old *corev1.Secret, data map[string][]byte, o ImportOptions) error {
	switch {
	case old.Labels[secrets.ManagedByLabel] == secrets.ManagedBy:
		return fmt.Errorf("secret %s in %s is a copy that Divvy updates from its source; import into the namespace of the source, "+
			"usually %s", old.Name, old.Namespace, DefaultNamespace)
	case old.DeletionTimestamp != nil:
		return fmt.Errorf("secret %s in %s is being deleted; wait until it is deleted", old.Name, old.Namespace)
	case same(old.Data, data):
		return nil
	case old.Immutable != nil && *old.Immutable:
		return fmt.Errorf("secret %s in %s is immutable; delete it first with: kubectl delete secret -n %s %s", old.Name, old.Namespace,
			old.Namespace, old.Name)
	case old.Labels[ImportedLabel] != "true" && !o.Force:
		return fmt.Errorf("secret %s in %s has different content and was not created by this command; use --force to overwrite it",
			old.Name, old.Namespace)
	}
	return nil
}

// same reports whether a secret holds the data; other entries do not matter.
func same(old, data map[string][]byte) bool {
	for key, value := range data {
		if there, ok := old[key]; !ok || !bytes.Equal(there, value) {
			return false
		}
	}
	return true
}

// writeError says what to do about a secret that could not be written. The
// error of the API server holds no data of a secret.
func writeError(namespace, name string, err error) error {
	switch {
	case apierrors.IsNotFound(err):
		return fmt.Errorf("secret %s: namespace %s does not exist, or the secret was deleted meanwhile: %w", name, namespace, err)
	case apierrors.IsConflict(err), apierrors.IsAlreadyExists(err):
		return fmt.Errorf("secret %s in %s was changed concurrently; run this command again: %w", name, namespace, err)
	case apierrors.IsForbidden(err):
		return fmt.Errorf("secret %s in %s: permission to get, create and update secrets there is required: %w", name, namespace, err)
	}
	return fmt.Errorf("write secret %s in %s: %w", name, namespace, err)
}
