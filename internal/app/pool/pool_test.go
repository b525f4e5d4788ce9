package pool

import (
	"archive/tar"
	"bytes"
	"context"
	"crypto/ecdsa"
	"crypto/elliptic"
	"crypto/rand"
	"crypto/tls"
	"crypto/x509"
	"crypto/x509/pkix"
	"encoding/json"
	"encoding/pem"
	"errors"
	"fmt"
	"math/big"
	"net"
	"net/http"
	"net/http/httptest"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"
	corev1 "k8s.io/api/core/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/client-go/kubernetes/fake"
	kubetesting "k8s.io/client-go/testing"

	"github.com/divvy-gpu/divvy/internal/pool/admin"
	"github.com/divvy-gpu/divvy/internal/pool/probe"
	"github.com/divvy-gpu/divvy/internal/pool/secrets"
	"github.com/divvy-gpu/divvy/internal/pool/token"
)

const (
	clientYAML = "token: s3cret-of-the-pool\n"
	oldYAML    = "token: s3cret-of-before\n"
)

// certificate is self-signed and of an authority, for 127.0.0.1.
func certificate(t *testing.T, until time.Time) (ca []byte, server tls.Certificate) {
	t.Helper()
	key, err := ecdsa.GenerateKey(elliptic.P256(), rand.Reader)
	if err != nil {
		t.Fatal(err)
	}
	template := &x509.Certificate{SerialNumber: big.NewInt(1), Subject: pkix.Name{CommonName: "pool"}, IsCA: true,
		BasicConstraintsValid: true,
		NotBefore:             until.AddDate(-1, 0, 0), NotAfter: until, IPAddresses: []net.IP{net.IPv4(127, 0, 0, 1)}}
	der, err := x509.CreateCertificate(rand.Reader, template, template, key.Public(), key)
	if err != nil {
		t.Fatal(err)
	}
	return pem.EncodeToMemory(&pem.Block{Type: "CERTIFICATE", Bytes: der}), tls.Certificate{Certificate: [][]byte{der}, PrivateKey: key}
}

// poolServer is a server of a pool as far as TLS goes.
func poolServer(t *testing.T, cert tls.Certificate) (address string) {
	t.Helper()
	l, err := tls.Listen("tcp", "127.0.0.1:0", &tls.Config{Certificates: []tls.Certificate{cert}, MinVersion: tls.VersionTLS12})
	if err != nil {
		t.Fatal(err)
	}
	var all sync.WaitGroup
	all.Go(func() {
		for {
			conn, err := l.Accept()
			if err != nil {
				return
			}
			all.Go(func() {
				defer conn.Close() //nolint:errcheck // the test is over for it
				if secure, ok := conn.(*tls.Conn); ok {
					_ = secure.Handshake() // the client tells
				}
			})
		}
	})
	t.Cleanup(func() {
		l.Close() //nolint:errcheck // the test is over for it
		all.Wait()
	})
	return l.Addr().String()
}

// nobody is an address where nothing listens.
func nobody(t *testing.T) string {
	t.Helper()
	l, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	defer l.Close() //nolint:errcheck // the test is over for it
	return l.Addr().String()
}

func conf(addresses ...string) string {
	var b strings.Builder
	b.WriteString("servers:\n")
	for _, a := range addresses {
		fmt.Fprintf(&b, "- addresses:\n  - %s\n", a)
	}
	return b.String()
}

func archive(t *testing.T, files map[string]string) (path string) {
	t.Helper()
	var b bytes.Buffer
	w := tar.NewWriter(&b)
	for _, name := range token.Names() {
		if err := w.WriteHeader(&tar.Header{Name: name, Size: int64(len(files[name])), Mode: 0o600}); err != nil {
			t.Fatal(err)
		}
		if _, err := w.Write([]byte(files[name])); err != nil {
			t.Fatal(err)
		}
	}
	if err := w.Close(); err != nil {
		t.Fatal(err)
	}
	path = filepath.Join(t.TempDir(), "CA7WPsj.tar")
	if err := os.WriteFile(path, b.Bytes(), 0o600); err != nil {
		t.Fatal(err)
	}
	return path
}

func secret(namespace, name string, labels map[string]string, data ...string) *corev1.Secret {
	s := &corev1.Secret{ObjectMeta: metav1.ObjectMeta{Namespace: namespace, Name: name, Labels: labels}, Type: corev1.SecretTypeOpaque,
		Data: map[string][]byte{}}
	for i := 0; i < len(data); i += 2 {
		s.Data[data[i]] = []byte(data[i+1])
	}
	return s
}

const (
	ca      = "bitfusion-client-secret-ca.crt"
	client  = "bitfusion-client-secret-client.yml"
	servers = "bitfusion-client-secret-servers.conf"
	single  = "bitfusion-secret"
)

var imported = map[string]string{admin.ImportedLabel: "true"}

func goodToken() *token.Token {
	return &token.Token{CA: []byte("ca"), Client: []byte(clientYAML), Servers: []byte(conf("10.1.1.1:56001"))}
}

// contents are the secrets of a namespace, without what the API server adds.
func contents(t *testing.T, c *fake.Clientset, namespace string) map[string]map[string]string {
	t.Helper()
	list, err := c.CoreV1().Secrets(namespace).List(t.Context(), metav1.ListOptions{})
	if err != nil {
		t.Fatal(err)
	}
	out := map[string]map[string]string{}
	for _, s := range list.Items {
		out[s.Name] = map[string]string{"label": s.Labels[admin.ImportedLabel]}
		for key, value := range s.Data {
			out[s.Name][key] = string(value)
		}
	}
	return out
}

func TestImport(t *testing.T) {
	right := map[string]map[string]string{
		ca:      {"label": "true", "ca.crt": "ca"},
		client:  {"label": "true", "client.yaml": clientYAML},
		servers: {"label": "true", "servers.conf": conf("10.1.1.1:56001")},
		single:  {"label": "true", "ca.crt": "ca", "client.yaml": clientYAML, "servers.conf": conf("10.1.1.1:56001")},
	}
	same := func(map[string]map[string]string) {}
	tests := map[string]struct {
		there  []runtime.Object
		change func(*admin.ImportOptions)
		// want changes right into what is expected; nil when nothing may change.
		want func(map[string]map[string]string)
		out  []string
		errs []string
	}{
		"into an empty namespace": {want: same, out: []string{"secret/" + ca + " in kube-system created\n",
			"secret/" + single + " in kube-system created\n", "pool check\n"}},
		"again": {there: []runtime.Object{secret("kube-system", ca, imported, "ca.crt", "ca")}, want: same,
			out: []string{ca + " in kube-system unchanged", client + " in kube-system created"}},
		"a new token": {there: []runtime.Object{secret("kube-system", client, imported, "client.yaml", oldYAML),
			secret("kube-system", single, imported, "ca.crt", "old")},
			want: same, out: []string{client + " in kube-system updated", single + " in kube-system updated"}},
		"a servers.conf that is not for clients 3.5 any more": {there: []runtime.Object{secret("kube-system", servers, imported,
			"servers.conf", "servers:\n- reachable:a:1\n  addresses: [a:1]\n")},
			want: same, out: []string{servers + " in kube-system updated\nnote: servers.conf had entries \"reachable\" before but has " +
				"none now"}},
		"somebody's, with the same content": {there: []runtime.Object{secret("kube-system", ca, nil, "ca.crt", "ca")},
			want: func(m map[string]map[string]string) { m[ca]["label"] = "" }, out: []string{ca + " in kube-system unchanged"}},
		"somebody's, with other content": {there: []runtime.Object{secret("kube-system", client, nil, "client.yaml", oldYAML),
			secret("kube-system", servers, map[string]string{"a": "b"}, "x", "y")},
			errs: []string{client + " in kube-system has different content and was not created by this command; use --force",
				servers + " in kube-system has different content"}},
		"somebody's, by force": {there: []runtime.Object{secret("kube-system", client, nil, "client.yaml", oldYAML, "more", "kept")},
			change: func(o *admin.ImportOptions) { o.Force = true },
			want:   func(m map[string]map[string]string) { m[client]["more"] = "kept" }, out: []string{client + " in kube-system updated"}},
		"a copy, even by force": {there: []runtime.Object{secret("kube-system", client,
			map[string]string{secrets.ManagedByLabel: secrets.ManagedBy},
			"client.yaml", oldYAML)}, change: func(o *admin.ImportOptions) { o.Force = true },
			errs: []string{"is a copy that Divvy updates from its source"}},
		"immutable, even by force": {there: []runtime.Object{func() runtime.Object {
			s := secret("kube-system", client, imported, "client.yaml", oldYAML)
			yes := true
			s.Immutable = &yes
			return s
		}()}, change: func(o *admin.ImportOptions) { o.Force = true },
			errs: []string{"is immutable; delete it first with: kubectl delete secret -n kube-system " + client}},
		"another namespace": {change: func(o *admin.ImportOptions) { o.Namespace = "pool" }, want: same,
			out: []string{"in pool created", "pool check --from pool\n"}},
		"only said": {change: func(o *admin.ImportOptions) { o.DryRun = "client" },
			out: []string{ca + " in kube-system created (dry run)"}},
		"bad options": {change: func(o *admin.ImportOptions) {
			o.Namespace, o.DryRun, o.ClientVersions = "A b", "yes", []string{"latest", ""}
		},
			errs: []string{`--namespace "A b": must be the name of a namespace`, `--dry-run "yes": must be none, client or server`,
				`--client-version "latest"`, `--client-version ""`}},
	}
	for name, tt := range tests {
		t.Run(name, func(t *testing.T) {
			c := fake.NewClientset(tt.there...)
			o := admin.DefaultImportOptions()
			if tt.change != nil {
				tt.change(&o)
			}
			namespace := o.Namespace
			if tt.errs != nil {
				namespace = admin.DefaultNamespace
			}
			before := contents(t, c, namespace)
			var out bytes.Buffer
			err := admin.Import(t.Context(), o, c, goodToken(), &out)
			if (err != nil) != (len(tt.errs) > 0) {
				t.Fatalf("error %v, want %q", err, tt.errs)
			}
			for _, want := range tt.errs {
				if !strings.Contains(err.Error(), want) {
					t.Errorf("error %q, want %q in it", err, want)
				}
			}
			for _, want := range tt.out {
				if !strings.Contains(out.String(), want) {
					t.Errorf("said %q, want %q in it", out.String(), want)
				}
			}
			want := before
			if tt.want != nil {
				body, err := json.Marshal(right)
				if err != nil {
					t.Fatal(err)
				}
				want = nil
				if err := json.Unmarshal(body, &want); err != nil {
					t.Fatal(err)
				}
				tt.want(want)
			}
			if diff := cmp.Diff(want, contents(t, c, namespace)); diff != "" {
				t.Errorf("secrets (-want +got):\n%s", diff)
			}
			if all := out.String() + fmt.Sprint(err); strings.Contains(all, "s3cret") {
				t.Errorf("the token was printed: %s", all)
			}
		})
	}
}

// A second run after an interruption does what is left.
func TestImportContinuesAfterAFailure(t *testing.T) {
	c := fake.NewClientset()
	broken := true
	c.PrependReactor("create", "secrets", func(a kubetesting.Action) (bool, runtime.Object, error) {
		if create, ok := a.(kubetesting.CreateAction); ok && broken {
			if s, ok := create.GetObject().(*corev1.Secret); ok && s.Name == servers {
				return true, nil, apierrors.NewForbidden(corev1.Resource("secrets"), servers, errors.New("no"))
			}
		}
		return false, nil, nil
	})
	var out bytes.Buffer
	err := admin.Import(t.Context(), admin.DefaultImportOptions(), c, goodToken(), &out)
	if err == nil || !strings.Contains(err.Error(),
		"secret "+servers+" in kube-system: permission to get, create and update secrets there is required") {
		t.Errorf("error %v", err)
	}
	broken = false
	out.Reset()
	if err := admin.Import(t.Context(), admin.DefaultImportOptions(), c, goodToken(), &out); err != nil {
		t.Fatal(err)
	}
	if !strings.Contains(out.String(), ca+" in kube-system unchanged") ||
		!strings.Contains(out.String(), servers+" in kube-system created") {
		t.Errorf("said %q", out.String())
	}
}

// A server dry run is marked as one in every write.
func TestServerDryRun(t *testing.T) {
	c := fake.NewClientset(secret("kube-system", ca, imported, "ca.crt", "old"))
	var writes [][]string
	c.PrependReactor("*", "secrets", func(a kubetesting.Action) (bool, runtime.Object, error) {
		switch a := a.(type) {
		case kubetesting.CreateActionImpl:
			writes = append(writes, a.CreateOptions.DryRun)
		case kubetesting.UpdateActionImpl:
			writes = append(writes, a.UpdateOptions.DryRun)
		default:
			return false, nil, nil
		}
		return true, &corev1.Secret{}, nil
	})
	o := admin.DefaultImportOptions()
	o.DryRun = "server"
	var out bytes.Buffer
	if err := admin.Import(t.Context(), o, c, goodToken(), &out); err != nil {
		t.Fatal(err)
	}
	if want := slices.Repeat([][]string{{"All"}}, 4); !cmp.Equal(want, writes) {
		t.Errorf("writes %q", writes)
	}
	if !strings.Contains(out.String(), ca+" in kube-system updated (server dry run)") {
		t.Errorf("said %q", out.String())
	}
}

func TestReadToken(t *testing.T) {
	good, _ := certificate(t, time.Now().AddDate(0, 6, 0))
	old, _ := certificate(t, time.Now().AddDate(0, 0, -1))
	tests := map[string]struct {
		files   map[string]string
		options admin.ImportOptions
		servers string
		out     []string
		errOut  string
		err     string
	}{
		"as it is": {files: map[string]string{"servers.conf": conf("10.1.1.1:56001", "10.1.1.2:56001")},
			servers: conf("10.1.1.1:56001", "10.1.1.2:56001"), out: []string{"2 servers, at 10.1.1.1:56001, 10.1.1.2:56001\n"}},
		"for clients 3.5": {files: map[string]string{"servers.conf": conf("10.1.1.1:56001")},
			options: admin.ImportOptions{ClientVersions: []string{"450", "350"}},
			servers: "servers:\n- reachable: 10.1.1.1:56001\n  addresses:\n  - 10.1.1.1:56001\n",
			out:     []string{`servers.conf, server 1: "reachable: 10.1.1.1:56001" was added`}},
		"for others": {files: map[string]string{"servers.conf": conf("10.1.1.1:56001")},
			options: admin.ImportOptions{ClientVersions: []string{"450"}}, servers: conf("10.1.1.1:56001")},
		"others, when told": {files: map[string]string{"servers.conf": conf("10.1.1.1:56001")},
			options: admin.ImportOptions{Reachable: true},
			servers: "servers:\n- reachable: 10.1.1.1:56001\n  addresses:\n  - 10.1.1.1:56001\n"},
		"as the guide says": {files: map[string]string{"servers.conf": "servers:\n- reachable:10.1.1.1:56001\n  addresses:\n  - " +
			"10.1.1.1:56001\n"},
			servers: "servers:\n- reachable: 10.1.1.1:56001\n  addresses:\n  - 10.1.1.1:56001\n",
			out:     []string{"1 server, at 10.1.1.1:56001\n", "servers.conf, line 2: added the required blank"}},
		"expired": {files: map[string]string{"ca.crt": string(old), "servers.conf": conf("10.1.1.1:56001")},
			servers: conf("10.1.1.1:56001"), errOut: "warning: ca.crt: the certificate"},
		"bad": {files: map[string]string{"ca.crt": "x", "servers.conf": "servers: []"}, err: "ca.crt is not a certificate"},
	}
	for name, tt := range tests {
		t.Run(name, func(t *testing.T) {
			files := map[string]string{"ca.crt": string(good), "client.yaml": clientYAML}
			for k, v := range tt.files {
				files[k] = v
			}
			path := archive(t, files)
			var out, errOut bytes.Buffer
			got, err := admin.ReadToken(path, tt.options, time.Now(), &out, &errOut)
			if (err != nil) != (tt.err != "") || err != nil && (!strings.Contains(err.Error(), tt.err) ||
				!strings.Contains(err.Error(), path)) {
				t.Fatalf("error %v, want %q", err, tt.err)
			}
			if all := out.String() + errOut.String() + fmt.Sprint(err); strings.Contains(all, "s3cret") {
				t.Errorf("the token was printed: %s", all)
			}
			if err != nil {
				return
			}
			if string(got.Servers) != tt.servers {
				t.Errorf("servers.conf %q, want %q", got.Servers, tt.servers)
			}
			for _, want := range tt.out {
				if !strings.Contains(out.String(), want) {
					t.Errorf("said %q, want %q in it", out.String(), want)
				}
			}
			if !strings.Contains(errOut.String(), tt.errOut) || (tt.errOut == "") != (errOut.Len() == 0) {
				t.Errorf("warned %q, want %q", errOut.String(), tt.errOut)
			}
		})
	}
}

func TestCheck(t *testing.T) {
	good, cert := certificate(t, time.Now().AddDate(0, 6, 0))
	old, oldCert := certificate(t, time.Now().AddDate(0, 0, -1))
	other, _ := certificate(t, time.Now().AddDate(0, 6, 0))
	up, out := poolServer(t, cert), poolServer(t, oldCert)
	down := nobody(t)
	tests := map[string]struct {
		ca, servers string
		verdicts    []probe.Verdict
		problems    int
		cases       []string
		text        []string
		err         string
	}{
		"all is well": {servers: conf(up, up), verdicts: []probe.Verdict{probe.OK},
			text: []string{up + "  ok", "Every server responds with a valid certificate of the pool", "context deadline exceeded"}},
		"one is down": {servers: conf(up, down), verdicts: []probe.Verdict{probe.OK, probe.Refused}, cases: []string{"6.3"},
			text: []string{down + "  refused", "The servers cannot be reached over the network (guide, section 6.3).", "i/o timeout"},
			err:  "1 of 2 server addresses cannot be used"},
		"another authority": {ca: string(other), servers: conf(up), verdicts: []probe.Verdict{probe.UnknownAuthority},
			cases: []string{"6.1"},
			text:  []string{"which is not the authority in ca.crt", "(guide, section 6.1)", "1. Check in the pool's administration"},
			err:   "1 of 1 server addresses"},
		"all expired": {ca: string(old), servers: conf(out), verdicts: []probe.Verdict{probe.Expired}, cases: []string{"6.1"},
			text: []string{"warning: ca.crt: the certificate of"}, err: "1 of 1"},
		"no certificate, but addresses": {ca: "x", servers: conf(up), verdicts: []probe.Verdict{probe.UnknownAuthority}, problems: 1,
			cases: []string{"6.1"},
			text:  []string{"problem: ca.crt is not a certificate"}, err: "1 of 1"},
		"an address without port": {servers: conf(up, "10.1.1.1"), verdicts: []probe.Verdict{probe.OK, probe.Malformed}, problems: 1,
			cases: []string{"6.2"},
			text:  []string{"10.1.1.1", "malformed", "has no port: write 10.1.1.1:56001", "(guide, section 6.2)"}, err: "1 of 2"},
		// Clients cannot read it, although it is clear what is meant.
		"the guide's form": {servers: "servers:\n- reachable:" + up + "\n  addresses:\n  - " + up + "\n",
			verdicts: []probe.Verdict{probe.OK}, problems: 1, cases: []string{"6.2"},
			text: []string{"problem: servers.conf, line 2: added the required blank", "with --client-version 350"},
			err:  "the token cannot be used"},
		"no servers.conf to speak of": {servers: "hello", verdicts: nil, problems: 1, cases: []string{"6.2"},
			text: []string{"problem: servers.conf is text"}, err: "the token cannot be used"},
		"all three": {ca: string(other), servers: conf(up, down, "10.1.1.1"), verdicts: []probe.Verdict{probe.UnknownAuthority,
			probe.Refused, probe.Malformed}, problems: 1,
			cases: []string{"6.1", "6.2", "6.3"}, err: "3 of 3"},
	}
	for name, tt := range tests {
		t.Run(name, func(t *testing.T) {
			k := &token.Token{CA: good, Client: []byte(clientYAML), Servers: []byte(tt.servers)}
			if tt.ca != "" {
				k.CA = []byte(tt.ca)
			}
			o := admin.DefaultCheckOptions()
			o.Timeout = time.Minute
			var text, body bytes.Buffer
			err := admin.Check(t.Context(), o, k, "a test", []string{"look here"}, &text)
			if (err != nil) != (tt.err != "") || err != nil && !strings.Contains(err.Error(), tt.err) {
				t.Errorf("error %v, want %q", err, tt.err)
			}
			for _, want := range append(tt.text, "a test", "warning: look here") {
				if !strings.Contains(text.String(), want) {
					t.Errorf("%q is not in\n%s", want, text.String())
				}
			}
			o.Output = "json"
			again := admin.Check(t.Context(), o, k, "a test", nil, &body)
			if fmt.Sprint(again) != fmt.Sprint(err) {
				t.Errorf("error %v with json, %v without", again, err)
			}
			var r admin.Report
			if err := json.Unmarshal(body.Bytes(), &r); err != nil {
				t.Fatalf("%v in %s", err, &body)
			}
			var verdicts []probe.Verdict
			for _, s := range r.Servers {
				verdicts = append(verdicts, s.Verdict)
			}
			var sections []string
			for _, c := range r.Cases {
				sections = append(sections, c.Section)
			}
			if diff := cmp.Diff(tt.verdicts, verdicts); diff != "" {
				t.Errorf("verdicts (-want +got):\n%s", diff)
			}
			if diff := cmp.Diff(tt.cases, sections); diff != "" {
				t.Errorf("cases (-want +got):\n%s", diff)
			}
			if len(r.Problems) != tt.problems || r.OK != (tt.err == "") {
				t.Errorf("problems %q, ok %v", r.Problems, r.OK)
			}
			if strings.Contains(text.String()+body.String(), "s3cret") {
				t.Errorf("the token was printed: %s", &text)
			}
		})
	}
	o := admin.DefaultCheckOptions()
	o.From, o.Timeout, o.Parallel, o.Output = "", 0, 0, "xml"
	err := admin.Check(t.Context(), o, &token.Token{}, "", nil, &bytes.Buffer{})
	for _, want := range []string{"--from", "--timeout 0s: must be above zero", "--parallel 0: must be from 1 to 256",
		`output format "xml"`} {
		if err == nil || !strings.Contains(err.Error(), want) {
			t.Errorf("error %v, want %q in it", err, want)
		}
	}
	ended, cancel := context.WithCancel(t.Context())
	cancel()
	read := &token.Token{CA: good, Client: []byte(clientYAML), Servers: []byte(conf(up))}
	if err := admin.Check(ended, admin.DefaultCheckOptions(), read, "", nil,
		&bytes.Buffer{}); !errors.Is(err, context.Canceled) {
		t.Errorf("error %v", err)
	}
}

func TestTokenFromSecrets(t *testing.T) {
	full := []*corev1.Secret{secret("kube-system", ca, nil, "ca.crt", "ca"), secret("kube-system", client, nil, "client.yaml", clientYAML),
		secret("kube-system", servers, nil, "servers.conf", "s")}
	one := secret("kube-system", single, nil, "ca.crt", "ca", "client.yaml", clientYAML, "servers.conf", "s")
	managed := map[string]string{secrets.ManagedByLabel: secrets.ManagedBy}
	tests := map[string]struct {
		there    []*corev1.Secret
		source   string
		warnings []string
		err      string
	}{
		"three":    {there: full, source: "the secrets in namespace kube-system"},
		"all four": {there: append(full[:3:3], one), source: "the secrets in namespace kube-system"},
		"the single one": {there: []*corev1.Secret{one}, source: "secret bitfusion-secret in namespace kube-system",
			warnings: []string{"only the secret of clients 2.5 exists"}},
		"none": {err: "namespace kube-system lacks " + ca + ", " + client + ", " + servers +
			"; import the token with: kubectl divvy pool import TOKEN.tar"},
		"two":             {there: full[:2], err: "namespace kube-system lacks " + servers + "; import"},
		"two and the one": {there: append(full[:2:2], one), err: "lacks " + servers},
		"an entry by another name": {there: []*corev1.Secret{full[0], secret("kube-system", client, nil, "client.yml", "x"), full[2]},
			err: "secret " + client + " in kube-system has no entry client.yaml"},
		"the single one, without an entry": {there: []*corev1.Secret{secret("kube-system", single, nil, "ca.crt", "ca")},
			err: "secret bitfusion-secret in kube-system has no entry client.yaml"},
		"two generations": {there: append(full[:3:3], secret("kube-system", single, nil, "ca.crt", "ca", "client.yaml", oldYAML,
			"servers.conf", "s")), source: "the secrets",
			warnings: []string{"has a different client.yaml than " + client}},
		// The guide's 6.1: stale copies in each namespace.
		"old copies": {there: append(full[:3:3], secret("team-b", client, nil, "client.yaml", oldYAML),
			secret("team-a", client, nil, "client.yaml", oldYAML),
			secret("team-c", client, managed, "client.yaml", oldYAML), secret("team-d", client, nil, "client.yaml", clientYAML)),
			source: "the secrets",
			warnings: []string{"secret " + client + " in team-a differs from that in kube-system",
				"kubectl delete secret -n team-b " + client, "are outdated in team-c"}},
	}
	for name, tt := range tests {
		t.Run(name, func(t *testing.T) {
			c := fake.NewClientset()
			for _, s := range tt.there {
				if err := c.Tracker().Add(s.DeepCopy()); err != nil {
					t.Fatal(err)
				}
			}
			got, source, warnings, err := admin.FromSecrets(t.Context(), c, "kube-system")
			if (err != nil) != (tt.err != "") || err != nil && !strings.Contains(err.Error(), tt.err) {
				t.Fatalf("error %v, want %q", err, tt.err)
			}
			if all := fmt.Sprint(warnings, err); strings.Contains(all, "s3cret") {
				t.Errorf("the token was printed: %s", all)
			}
			if err != nil {
				return
			}
			if !strings.HasPrefix(source, tt.source) || string(got.CA) != "ca" || string(got.Client) != clientYAML ||
				string(got.Servers) != "s" {
				t.Errorf("read %q, %q and %q from %s", got.CA, got.Client, got.Servers, source)
			}
			if len(warnings) != len(tt.warnings) {
				t.Fatalf("warnings %q, want %q", warnings, tt.warnings)
			}
			for i, want := range tt.warnings {
				if !strings.Contains(warnings[i], want) {
					t.Errorf("warning %q, want %q in it", warnings[i], want)
				}
			}
		})
	}
	c := fake.NewClientset()
	for _, s := range full {
		if err := c.Tracker().Add(s.DeepCopy()); err != nil {
			t.Fatal(err)
		}
	}
	c.PrependReactor("list", "secrets", func(kubetesting.Action) (bool, runtime.Object, error) {
		return true, nil, apierrors.NewForbidden(corev1.Resource("secrets"), "", errors.New("not all namespaces are yours"))
	})
	if _, _, warnings, err := admin.FromSecrets(t.Context(), c, "kube-system"); err != nil || len(warnings) != 1 ||
		!strings.Contains(warnings[0], "outdated copies in namespaces were not checked: list secrets") {
		t.Errorf("warnings %q, error %v", warnings, err)
	}
}

func answer(w http.ResponseWriter, object any) {
	_ = json.NewEncoder(w).Encode(object) // the client tells
}

// apiServer keeps the secrets that it is sent.
type apiServer struct {
	lock    sync.Mutex
	secrets map[string]*corev1.Secret
}

func (s *apiServer) ServeHTTP(w http.ResponseWriter, r *http.Request) {
	s.lock.Lock()
	defer s.lock.Unlock()
	const secrets = "/api/v1/namespaces/kube-system/secrets"
	w.Header().Set("Content-Type", "application/json")
	name := strings.TrimPrefix(strings.TrimPrefix(r.URL.Path, secrets), "/")
	switch {
	case r.Method == http.MethodGet && r.URL.Path == "/api/v1/secrets":
		answer(w, corev1.SecretList{TypeMeta: metav1.TypeMeta{APIVersion: "v1", Kind: "SecretList"}})
	case r.Method == http.MethodGet && s.secrets[name] != nil:
		answer(w, s.secrets[name])
	default:
		w.WriteHeader(http.StatusNotFound)
		answer(w, metav1.Status{TypeMeta: metav1.TypeMeta{APIVersion: "v1", Kind: "Status"},
			Status: "Failure", Reason: metav1.StatusReasonNotFound, Code: 404})
	}
}

// The commands, with kubectl's flags.
func TestCommands(t *testing.T) {
	good, cert := certificate(t, time.Now().AddDate(0, 6, 0))
	up := poolServer(t, cert)
	path := archive(t, map[string]string{"ca.crt": string(good), "client.yaml": clientYAML, "servers.conf": conf(up)})
	withType := func(s *corev1.Secret) *corev1.Secret {
		s.TypeMeta = metav1.TypeMeta{APIVersion: "v1", Kind: "Secret"}
		return s
	}
	api := httptest.NewServer(&apiServer{secrets: map[string]*corev1.Secret{
		ca:      withType(secret("kube-system", ca, nil, "ca.crt", string(good))),
		client:  withType(secret("kube-system", client, nil, "client.yaml", clientYAML)),
		servers: withType(secret("kube-system", servers, nil, "servers.conf", conf(up))),
	}})
	defer api.Close()
	for name, tt := range map[string]struct {
		args []string
		out  string
		err  string
	}{
		"import": {args: []string{"import", path, "--server", api.URL, "--dry-run"},
			out: "secret/bitfusion-secret in kube-system created (dry run)"},
		"import what is there": {args: []string{"import", path, "--server", api.URL, "--dry-run=client"},
			out: client + " in kube-system unchanged (dry run)"},
		"import nothing":      {args: []string{"import", "--server", api.URL}, err: "accepts 1 arg"},
		"import a bad option": {args: []string{"import", path, "--dry-run=maybe"}, err: "--dry-run"},
		"import no token":     {args: []string{"import", path + "x"}, err: "no such file"},
		"check the secrets":   {args: []string{"check", "--server", api.URL}, out: up + "  ok"},
		"check an archive":    {args: []string{"check", path, "--timeout", "1m"}, out: "token " + path},
		"check both":          {args: []string{"check", path, "--from", "x"}, err: "not both"},
		"check a bad option":  {args: []string{"check", path, "--timeout", "0s"}, err: "--timeout"},
		"check elsewhere": {args: []string{"check", "--server", api.URL, "--from", "other"},
			err: "namespace other has no secrets of the pool: Divvy creates copies"},
		"no such cluster": {args: []string{"check", "--kubeconfig", path + "x"}, err: "configuration of the Kubernetes client"},
		"help":            {args: nil, out: "import"},
	} {
		t.Run(name, func(t *testing.T) {
			cmd := Command()
			cmd.SilenceUsage, cmd.SilenceErrors = true, true
			cmd.SetArgs(append([]string{}, tt.args...))
			var out, errOut bytes.Buffer
			cmd.SetOut(&out)
			cmd.SetErr(&errOut)
			err := cmd.ExecuteContext(t.Context())
			if (err != nil) != (tt.err != "") || err != nil && !strings.Contains(err.Error(), tt.err) {
				t.Fatalf("error %v, want %q", err, tt.err)
			}
			if !strings.Contains(out.String(), tt.out) {
				t.Errorf("%q is not in\n%s", tt.out, &out)
			}
			if all := out.String() + errOut.String() + fmt.Sprint(err); strings.Contains(all, "s3cret") {
				t.Errorf("the token was printed: %s", all)
			}
		})
	}
}
