package admin

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"slices"
	"strings"
	"text/tabwriter"
	"time"

	corev1 "k8s.io/api/core/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/fields"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/client-go/kubernetes"
	"k8s.io/client-go/tools/pager"

	"github.com/divvy-gpu/divvy/internal/pool"
	"github.com/divvy-gpu/divvy/internal/pool/probe"
	"github.com/divvy-gpu/divvy/internal/pool/secrets"
	"github.com/divvy-gpu/divvy/internal/pool/token"
)

// Formats of the output of a check.
const (
	formatTable = "table"
	formatJSON  = "json"
)

// CheckOptions are what a person may choose.
type CheckOptions struct {
	// From is the namespace of the secrets, when no token is given.
	From string
	// Timeout bounds the time for each address.
	Timeout time.Duration
	// Parallel bounds how many addresses are asked at once.
	Parallel int
	// ServerName is the name that the servers' certificates must have; "" for
	// the host of each address.
	ServerName string
	// Output is table or json.
	Output string
}

// DefaultCheckOptions returns the defaults.
func DefaultCheckOptions() CheckOptions {
	return CheckOptions{From: DefaultNamespace, Timeout: probe.DefaultTimeout, Parallel: probe.DefaultParallel, Output: formatTable}
}

const maxParallel = 256

// Validate reports all mistakes at once.
func (o CheckOptions) Validate() error {
	errs := []error{checkNamespace("--from", o.From)}
	if o.Timeout <= 0 {
		errs = append(errs, fmt.Errorf("--timeout %s: must be above zero", o.Timeout))
	}
	if o.Parallel < 1 || o.Parallel > maxParallel {
		errs = append(errs, fmt.Errorf("--parallel %d: must be from 1 to %d", o.Parallel, maxParallel))
	}
	if o.Output != formatTable && o.Output != formatJSON {
		errs = append(errs, fmt.Errorf("output format %q: must be %s or %s", o.Output, formatTable, formatJSON))
	}
	return errors.Join(errs...)
}

// Report is what a check found.
type Report struct {
	// Source is where the token was read.
	Source string `json:"source"`
	// OK is true when every server can be used and nothing is wrong with the
	// token.
	OK bool `json:"ok"`
	// Problems are what is wrong with the token itself, Warnings what may be.
	Problems []string `json:"problems"`
	Warnings []string `json:"warnings"`
	// Servers are the addresses, in the order of servers.conf.
	Servers []probe.Result `json:"servers"`
	// Cases are those of the guide that explain what is wrong.
	Cases []probe.Case `json:"cases"`
}

// Check asks the servers of a token and prints the report. Its error says that
// not all is well. source says where the token was read, warnings what was
// noticed there.
func Check(ctx context.Context, o CheckOptions, t *token.Token, source string, warnings []string, out io.Writer) error {
	if err := o.Validate(); err != nil {
		return err
	}
	report := Report{Source: source, Warnings: append([]string{}, warnings...), Problems: []string{}, Cases: []probe.Case{}}
	found, err := t.Check(time.Now())
	report.Warnings = append(report.Warnings, found...)
	sections := map[string]bool{}
	if err != nil {
		report.Problems = lines(err)
	}
	servers, err := token.ParseServers(t.Servers)
	if err != nil || len(servers.Mended) > 0 {
		sections[probe.CaseServers] = true
	}
	for _, mended := range servers.Mended {
		report.Problems = append(report.Problems, pool.ServersKey+", "+mended)
	}
	certs, err := token.Certificates(t.CA)
	if err != nil {
		sections[probe.CaseToken] = true
	}
	for _, c := range certs {
		sections[probe.CaseToken] = sections[probe.CaseToken] || time.Now().After(c.NotAfter)
	}
	report.Servers = probe.Check(ctx, probe.Config{
		Roots: token.Roots(certs), ServerName: o.ServerName, Timeout: o.Timeout, Parallel: o.Parallel,
	}, servers.Addresses())
	if err := ctx.Err(); err != nil {
		return err
	}
	bad := 0
	for _, r := range report.Servers {
		if r.Verdict != probe.OK {
			bad++
		}
		if section := r.Verdict.Section(); section != "" {
			sections[section] = true
		}
	}
	for _, section := range []string{probe.CaseToken, probe.CaseServers, probe.CaseNetwork} {
		if sections[section] {
			report.Cases = append(report.Cases, probe.Explain(section))
		}
	}
	report.OK = bad == 0 && len(report.Problems) == 0
	if err := report.print(out, o.Output); err != nil {
		return err
	}
	switch {
	case bad > 0:
		return fmt.Errorf("%d of %d server addresses cannot be used", bad, len(report.Servers))
	case !report.OK:
		return errors.New("the token cannot be used")
	}
	return nil
}

func lines(err error) []string {
	var joined interface{ Unwrap() []error }
	if errors.As(err, &joined) && fmt.Sprint(err) == fmt.Sprint(joined) {
		var all []string
		for _, e := range joined.Unwrap() {
			all = append(all, lines(e)...)
		}
		return all
	}
	return []string{err.Error()}
}

func (r Report) print(out io.Writer, format string) error {
	if format == formatJSON {
		e := json.NewEncoder(out)
		e.SetEscapeHTML(false)
		e.SetIndent("", "    ")
		if err := e.Encode(r); err != nil {
			return fmt.Errorf("write the report: %w", err)
		}
		return nil
	}
	var b bytes.Buffer
	fmt.Fprintln(&b, "Checked from this machine:", r.Source)
	if len(r.Servers) > 0 {
		fmt.Fprintln(&b)
		w := tabwriter.NewWriter(&b, 0, 0, 2, ' ', 0)
		fmt.Fprintln(w, "ADDRESS\tVERDICT\tTIME\tDETAIL")
		for _, s := range r.Servers {
			fmt.Fprintf(w, "%s\t%s\t%d ms\t%s\n", token.Printable(s.Address), s.Verdict, s.Milliseconds, token.Printable(s.Detail))
		}
		w.Flush()
	}
	if len(r.Problems)+len(r.Warnings) > 0 {
		fmt.Fprintln(&b)
	}
	for _, p := range r.Problems {
		fmt.Fprintln(&b, "problem:", p)
	}
	for _, w := range r.Warnings {
		fmt.Fprintln(&b, "warning:", w)
	}
	for _, c := range r.Cases {
		fmt.Fprintf(&b, "\n%s (guide, section %s).\nPods print: %s\n", c.Title, c.Section, c.Pods)
		for i, step := range c.Do {
			fmt.Fprintf(&b, "%d. %s\n", i+1, strings.ReplaceAll(step, "\n", "\n   "))
		}
	}
	if r.OK {
		c := probe.Explain(probe.CaseToken)
		fmt.Fprintf(&b, "\nEvery server responds with a valid certificate of the pool. Only the servers know whether they still accept "+
			"the\n"+
			"token. If pods print \"%s\"\nnevertheless (guide, section %s):\n", c.Pods, c.Section)
		for i, step := range c.Do {
			fmt.Fprintf(&b, "%d. %s\n", i+1, step)
		}
	}
	if _, err := out.Write(b.Bytes()); err != nil {
		return fmt.Errorf("write the report: %w", err)
	}
	return nil
}

// holders are the secrets that hold each file of a token, in the order in which
// they are looked at.
var holders = []struct{ secret, key string }{
	{pool.CASecret, pool.CAKey}, {pool.ClientSecret, pool.ClientKey}, {pool.ServersSecret, pool.ServersKey},
}

// FromSecrets reads the token of a cluster: from the three secrets, or from the
// single one where none of the three is there. Its warnings are about what is in
// other secrets.
func FromSecrets(ctx context.Context, client kubernetes.Interface, namespace string) (t *token.Token, source string, warnings []string,
	err error) {
	found := map[string]*corev1.Secret{}
	for _, name := range []string{pool.CASecret, pool.ClientSecret, pool.ServersSecret, pool.SingleSecret} {
		secret, err := client.CoreV1().Secrets(namespace).Get(ctx, name, metav1.GetOptions{})
		if apierrors.IsNotFound(err) {
			continue
		}
		if err != nil {
			return nil, "", nil, fmt.Errorf("read secret %s in %s: %w", name, namespace, err)
		}
		found[name] = secret
	}
	single := found[pool.SingleSecret]
	t = &token.Token{}
	var missing []string
	for _, h := range holders {
		secret := found[h.secret]
		if secret == nil {
			missing = append(missing, h.secret)
			continue
		}
		data, ok := secret.Data[h.key]
		if !ok {
			return nil, "", nil, fmt.Errorf("secret %s in %s has no entry %s; import the token with: kubectl divvy pool import TOKEN.tar%s",
				h.secret, namespace, h.key, otherwise("-n", namespace))
		}
		t.Set(h.key, data)
		if single != nil && !bytes.Equal(single.Data[h.key], data) {
			warnings = append(warnings, fmt.Sprintf("secret %s in %s, which clients 2.5 use, has a different %s than %s; import the "+
				"token again", pool.SingleSecret, namespace, h.key, h.secret))
		}
	}
	source = "the secrets in namespace " + namespace
	switch {
	case len(missing) == len(holders) && single != nil:
		source = fmt.Sprintf("secret %s in namespace %s", pool.SingleSecret, namespace)
		for _, name := range token.Names() {
			data, ok := single.Data[name]
			if !ok {
				return nil, "", nil, fmt.Errorf("secret %s in %s has no entry %s; import the token with: kubectl divvy pool import "+
					"TOKEN.tar%s", pool.SingleSecret, namespace, name, otherwise("-n", namespace))
			}
			t.Set(name, data)
		}
		warnings = append(warnings, fmt.Sprintf("only the secret of clients 2.5 exists; pods with later clients also need %s: import the "+
			"token", strings.Join(missing, ", ")))
	case len(missing) == len(holders) && namespace != DefaultNamespace:
		return nil, "", nil, fmt.Errorf("namespace %s has no secrets of the pool: Divvy creates copies for the first pod that uses the "+
			"pool, "+
			"if the namespace is allowed (kubectl label namespace %s divvy.dev/pool=allowed); the token itself is in namespace %s",
			namespace, namespace, DefaultNamespace)
	case len(missing) > 0:
		return nil, "", nil, fmt.Errorf("namespace %s lacks %s; import the token with: kubectl divvy pool import TOKEN.tar%s", namespace,
			strings.Join(missing, ", "), otherwise("-n", namespace))
	}
	return t, source, append(warnings, staleCopies(ctx, client, namespace, found)...), nil
}

// otherwise returns a flag that says which namespace, "" for the default.
func otherwise(flag, namespace string) string {
	if namespace == DefaultNamespace {
		return ""
	}
	return " " + flag + " " + namespace
}

// staleCopies names secrets in other namespaces with other content: pods there
// use an old token. Not everybody may look into all namespaces.
func staleCopies(ctx context.Context, client kubernetes.Interface, namespace string, sources map[string]*corev1.Secret) []string {
	var out []string
	for _, name := range []string{pool.CASecret, pool.ClientSecret, pool.ServersSecret, pool.SingleSecret} {
		source := sources[name]
		if source == nil {
			continue
		}
		list := func(ctx context.Context, o metav1.ListOptions) (runtime.Object, error) {
			o.FieldSelector = fields.OneTermEqualSelector(metav1.ObjectNameField, name).String()
			return client.CoreV1().Secrets(metav1.NamespaceAll).List(ctx, o)
		}
		var stale, late []string
		err := pager.New(list).EachListItem(ctx, metav1.ListOptions{}, func(obj runtime.Object) error {
			secret, ok := obj.(*corev1.Secret)
			switch {
			case !ok, secret.Name != name, secret.Namespace == namespace, same(secret.Data, source.Data):
			case secret.Labels[secrets.ManagedByLabel] == secrets.ManagedBy:
				late = append(late, secret.Namespace)
			default:
				stale = append(stale, secret.Namespace)
			}
			return nil
		})
		if err != nil {
			return append(out, fmt.Sprintf("outdated copies in namespaces were not checked: list secrets: %v", err))
		}
		slices.Sort(stale)
		for _, ns := range stale {
			out = append(out, fmt.Sprintf("secret %s in %s differs from that in %s, and Divvy does not update it; unless this is "+
				"intended, delete it with: kubectl delete secret -n %s %s", name, ns, namespace, ns, name))
		}
		if len(late) > 0 {
			slices.Sort(late)
			out = append(out, fmt.Sprintf("copies of secret %s are outdated in %s; if they stay outdated, check the log of "+
				"bitfusion-webhook-deployment", name, strings.Join(late, ", ")))
		}
	}
	return out
}
