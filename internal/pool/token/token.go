package token

import (
	"bytes"
	"crypto/x509"
	"encoding/pem"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"slices"
	"strings"
	"time"

	yaml "go.yaml.in/yaml/v3"

	"github.com/divvy-gpu/divvy/internal/pool"
)

// Token holds the contents of the three files, as they are.
type Token struct {
	// CA is ca.crt, Client is client.yaml, Servers is servers.conf.
	CA, Client, Servers []byte
}

// names are the files of a token, in the order in which they are spoken of.
var names = []string{pool.CAKey, pool.ClientKey, pool.ServersKey}

// Names returns the names of the files that a token is made of.
func Names() []string { return slices.Clone(names) }

// Set puts content into a file of the token. It is false for a name that is none.
func (t *Token) Set(name string, content []byte) bool {
	switch name {
	case pool.CAKey:
		t.CA = content
	case pool.ClientKey:
		t.Client = content
	case pool.ServersKey:
		t.Servers = content
	default:
		return false
	}
	return true
}

// Format implements fmt.Formatter: a token is printed by no verb.
func (t Token) Format(s fmt.State, _ rune) { io.WriteString(s, "(token)") } //nolint:errcheck // fmt looks at the writer itself

// LogValue implements slog.LogValuer: a token is not logged.
func (t Token) LogValue() slog.Value { return slog.StringValue("(token)") }

// MarshalJSON implements json.Marshaler: a token is not written.
func (t Token) MarshalJSON() ([]byte, error) { return []byte(`"(token)"`), nil }

// Check reads all three files and reports all mistakes at once, each naming the
// file. Warnings are about what may work and probably will not: certificates
// that are not valid at the time of now, paths that pods do not have.
func (t *Token) Check(now time.Time) (warnings []string, err error) {
	var errs []error
	certs, err := Certificates(t.CA)
	if err != nil {
		errs = append(errs, err)
	}
	for _, c := range certs {
		warnings = append(warnings, certificateWarnings(c, now)...)
	}
	some, err := checkClient(t.Client)
	if err != nil {
		errs = append(errs, err)
	}
	warnings = append(warnings, some...)
	servers, err := ParseServers(t.Servers)
	if err != nil {
		errs = append(errs, err)
	}
	return append(warnings, servers.Warnings...), errors.Join(errs...)
}

// Certificates reads a ca.crt: one certificate or more in PEM, and no key.
func Certificates(ca []byte) ([]*x509.Certificate, error) {
	var certs []*x509.Certificate
	for rest := ca; ; {
		var block *pem.Block
		if block, rest = pem.Decode(rest); block == nil {
			break
		}
		if block.Type != "CERTIFICATE" {
			return nil, fmt.Errorf("%s contains a PEM block of type %q: it must contain only certificates, because every pod that uses "+
				"the pool can read it", pool.CAKey, Printable(block.Type))
		}
		cert, err := x509.ParseCertificate(block.Bytes)
		if err != nil {
			return nil, fmt.Errorf("%s: certificate %d cannot be read: %w", pool.CAKey, len(certs)+1, err)
		}
		certs = append(certs, cert)
	}
	switch {
	case len(certs) > 0:
		return certs, nil
	case len(bytes.TrimSpace(ca)) == 0:
		return nil, fmt.Errorf("%s is empty: it must contain the certificate of the pool's authority in PEM", pool.CAKey)
	case bytes.Contains(ca, []byte("-----BEGIN")):
		return nil, fmt.Errorf("%s contains a PEM block that cannot be parsed, perhaps truncated: it must contain a certificate, from "+
			"-----BEGIN CERTIFICATE----- to -----END CERTIFICATE-----", pool.CAKey)
	}
	return nil, fmt.Errorf("%s is not a certificate: it must contain PEM, beginning with -----BEGIN CERTIFICATE-----", pool.CAKey)
}

// Roots returns the certificates as what servers are verified with.
func Roots(certs []*x509.Certificate) *x509.CertPool {
	roots := x509.NewCertPool()
	for _, c := range certs {
		roots.AddCert(c)
	}
	return roots
}

// certificateWarnings says why servers with certificates of this authority may
// not be trusted.
func certificateWarnings(c *x509.Certificate, now time.Time) []string {
	var out []string
	name := Printable(c.Subject.String())
	if now.After(c.NotAfter) {
		out = append(out, fmt.Sprintf("%s: the certificate of %q expired on %s: download a new token", pool.CAKey, name,
			c.NotAfter.UTC().Format(time.RFC3339)))
	}
	if now.Before(c.NotBefore) {
		out = append(out, fmt.Sprintf("%s: the certificate of %q is not valid before %s: check the clock of this machine", pool.CAKey, name,
			c.NotBefore.UTC().Format(time.RFC3339)))
	}
	if c.BasicConstraintsValid && !c.IsCA {
		out = append(out, fmt.Sprintf("%s: the certificate of %q is not that of an authority; only a server with this very certificate "+
			"can be verified with it", pool.CAKey, name))
	}
	return out
}

// checkClient reads a client.yaml. Its errors tell no content.
func checkClient(data []byte) (warnings []string, err error) {
	if len(bytes.TrimSpace(data)) == 0 {
		return nil, fmt.Errorf("%s is empty: it must contain the client's configuration", pool.ClientKey)
	}
	root, err := document(data)
	if err != nil {
		return nil, fmt.Errorf("%s is not YAML: %w", pool.ClientKey, err)
	}
	if root.Kind != yaml.MappingNode || len(root.Content) == 0 {
		return nil, fmt.Errorf("%s must be a YAML mapping, lines of the form key: value; it is %s", pool.ClientKey, kindOf(root))
	}
	for i := 0; i+1 < len(root.Content); i += 2 {
		key, value := root.Content[i], root.Content[i+1]
		if strings.EqualFold(key.Value, "cacertpath") && value.Kind == yaml.ScalarNode && value.Value != pool.CAPath {
			warnings = append(warnings, fmt.Sprintf("%s, line %d: %s is not %s, where pods have the certificate", pool.ClientKey,
				value.Line, "cacertpath", pool.CAPath))
		}
	}
	return warnings, nil
}

// document reads the one YAML document in data, without resolving anything in
// it. Its errors hold nothing of the content.
func document(data []byte) (*yaml.Node, error) {
	d := yaml.NewDecoder(bytes.NewReader(data))
	var doc yaml.Node
	if err := d.Decode(&doc); errors.Is(err, io.EOF) {
		return nil, errors.New("it contains only comments")
	} else if err != nil {
		return nil, yamlError(data, err)
	}
	if err := d.Decode(new(yaml.Node)); !errors.Is(err, io.EOF) {
		return nil, errors.New("it contains more than one document: remove everything after the line ---")
	}
	if doc.Kind != yaml.DocumentNode || len(doc.Content) != 1 {
		return nil, errors.New("it is empty")
	}
	return doc.Content[0], nil
}

// yamlError leaves out of the error of the YAML reader what could be content.
func yamlError(data []byte, err error) error {
	text := strings.TrimPrefix(err.Error(), "yaml: ")
	switch {
	case strings.Contains(text, "anchor"):
		return errors.New("it has an alias (a value that begins with *): write the value itself, or quote it")
	case bytes.Contains(data, []byte("\n\t")) || bytes.Contains(data, []byte(" \t")):
		return fmt.Errorf("%s (it has tabs; YAML is indented with blanks)", text)
	}
	return errors.New(text)
}

func kindOf(n *yaml.Node) string {
	switch n.Kind {
	case yaml.MappingNode:
		if len(n.Content) == 0 {
			return "an empty mapping"
		}
		return "a mapping"
	case yaml.SequenceNode:
		if len(n.Content) == 0 {
			return "an empty list"
		}
		return "a list"
	case yaml.AliasNode:
		return "an alias"
	case yaml.ScalarNode:
		if n.Tag == "!!null" {
			return "nothing"
		}
		return "text"
	case yaml.DocumentNode:
	}
	return "nothing"
}

// maxPrinted bounds foreign text in messages, in bytes.
const maxPrinted = 200

// Printable bounds foreign text and makes it fit for a terminal.
func Printable(s string) string {
	if len(s) > maxPrinted {
		s = s[:maxPrinted] + "..."
	}
	return strings.Map(func(r rune) rune {
		if r < ' ' || r == 0x7f || (r >= 0x80 && r < 0xa0) {
			return '?'
		}
		return r
	}, strings.ToValidUTF8(s, "?"))
}
