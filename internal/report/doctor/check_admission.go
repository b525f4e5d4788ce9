package doctor

import (
	"cmp"
	"crypto/tls"
	"crypto/x509"
	"errors"
	"fmt"
	"maps"
	"slices"
	"time"

	admissionv1 "k8s.io/api/admissionregistration/v1"
	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	certutil "k8s.io/client-go/util/cert"
)

// webhook is one of the release's.
type webhook struct {
	kind, configuration, name string
	client                    admissionv1.WebhookClientConfig
	// fails is true when the API server refuses what the webhook does not answer.
	fails bool
}

func (w webhook) object() string { return fmt.Sprintf("%s %s, %s", w.kind, w.configuration, w.name) }

// webhooks returns those of the release.
func (s *Snapshot) webhooks() []webhook {
	r := s.Release()
	if r == nil {
		return nil
	}
	var out []webhook
	fails := func(p *admissionv1.FailurePolicyType) bool { return p == nil || *p == admissionv1.Fail }
	for i := range s.Admission.Mutating {
		c := &s.Admission.Mutating[i]
		for _, w := range c.Webhooks {
			if r.of(c) {
				out = append(out, webhook{"MutatingWebhookConfiguration", c.Name, w.Name, w.ClientConfig, fails(w.FailurePolicy)})
			}
		}
	}
	for i := range s.Admission.Validating {
		c := &s.Admission.Validating[i]
		for _, w := range c.Webhooks {
			if r.of(c) {
				out = append(out, webhook{"ValidatingWebhookConfiguration", c.Name, w.Name, w.ClientConfig, fails(w.FailurePolicy)})
			}
		}
	}
	return out
}

func checkWebhooks(s *Snapshot, f *findings) {
	for _, w := range s.webhooks() {
		severity, meaning := Warning, "the API server ignores the failure"
		if w.fails {
			severity, meaning = Error, "the API server rejects the requests it should review"
		}
		if w.client.Service == nil {
			continue // at an address of the administrator's own
		}
		namespace, name := w.client.Service.Namespace, w.client.Service.Name
		service := lookup(s.Objects.Services, namespace, name)
		workload := s.behind(service)
		switch {
		case service == nil:
			remedy, commands := s.restore("")
			f.add(severity, w.object(), fmt.Sprintf("its Service %s/%s is missing: %s", namespace, name, meaning), remedy, commands...)
			continue
		case s.readyEndpoints(namespace, name) == 0:
			f.add(severity, w.object(), fmt.Sprintf("no ready pod is behind its Service %s/%s: %s", namespace, name, meaning),
				"Fix the problem reported for Deployment "+cmp.Or(workload, name)+".").Transient = true
		}
		remedy, commands := "Restart the program that writes it.", []string(nil)
		if workload != "" {
			commands = []string{fmt.Sprintf("kubectl rollout restart deployment/%s -n %s", workload, namespace)}
		}
		roots, err := certutil.ParseCertsPEM(w.client.CABundle)
		switch {
		case len(w.client.CABundle) == 0:
			f.add(severity, w.object(), "its caBundle is empty, so the API server does not trust its certificate: "+meaning, remedy,
				commands...).Transient = true
		case err != nil:
			f.add(severity, w.object(), "its caBundle cannot be parsed ("+err.Error()+"): "+meaning, remedy, commands...)
		default:
			if why := s.untrusted(service, roots); why != "" {
				f.add(severity, w.object(), "its caBundle does not contain the CA of the serving certificate ("+why+"): "+meaning, remedy,
					commands...)
			}
		}
	}
}

// behind is the Deployment whose pods a service selects, "" when none is known.
func (s *Snapshot) behind(service *corev1.Service) string {
	if service == nil || len(service.Spec.Selector) == 0 {
		return ""
	}
	selector := metav1.FormatLabelSelector(&metav1.LabelSelector{MatchLabels: service.Spec.Selector})
	for i := range s.Deployments {
		d := &s.Deployments[i]
		if d.Namespace == service.Namespace && contains(d.Spec.Template.Labels, service.Spec.Selector) && selector != "" {
			return d.Name
		}
	}
	return ""
}

func contains(have, want map[string]string) bool {
	for k, v := range want {
		if have[k] != v {
			return false
		}
	}
	return true
}

// untrusted says why no certificate for the service's name in any Secret beside
// it leads to one of the roots; "" when one does, and when there is none: what is
// served is not known then.
func (s *Snapshot) untrusted(service *corev1.Service, roots []*x509.Certificate) string {
	host := service.Name + "." + service.Namespace + ".svc"
	why := ""
	for i := range s.Objects.Secrets {
		secret := &s.Objects.Secrets[i]
		if secret.Namespace != service.Namespace {
			continue
		}
		served, err := certutil.ParseCertsPEM(secret.Data[corev1.TLSCertKey])
		if err != nil || served[0].VerifyHostname(host) != nil {
			continue
		}
		if err = signedBy(served[0], roots); err == nil {
			return ""
		}
		why = err.Error()
	}
	return why
}

// signedBy returns nil when one of the CAs has signed the certificate. Whether both
// are still valid is another check's matter.
func signedBy(c *x509.Certificate, cas []*x509.Certificate) error {
	var errs []error
	for _, ca := range cas {
		err := c.CheckSignatureFrom(ca)
		if err == nil {
			return nil
		}
		errs = append(errs, err)
	}
	return errors.Join(errs...)
}

// keptCertificates are the Secrets that programs fill, with the services that
// their certificate is for.
var keptCertificates = map[string]string{
	"divvy-extender-certs": nameExtender,
	"bwki-webhook-certs":   "bwki-webhook-svc",
}

// Objects that hold what the extender publishes for kube-scheduler.
const (
	nameExtenderCA     = "divvy-extender-ca"
	nameExtenderClient = "divvy-extender-client"
	rotateAnnotation   = "divvy.dev/rotate"
)

func checkCertificates(s *Snapshot, f *findings) {
	r := s.Release()
	for i := range s.Objects.Secrets {
		secret := &s.Objects.Secrets[i]
		if service, kept := keptCertificates[secret.Name]; kept && r.of(secret) {
			checkKept(s, f, secret, service)
		}
	}
	certs := lookup(s.Objects.Secrets, r.Namespace, "divvy-extender-certs")
	if certs == nil || !r.of(certs) {
		return
	}
	restart := fmt.Sprintf("kubectl rollout restart deployment/%s -n %s", s.extenderWorkload(), r.Namespace)
	ca, err := certutil.ParseCertsPEM(certs.Data["ca.crt"])
	if err != nil {
		return // told above
	}
	if published := lookup(s.Objects.ConfigMaps, r.Namespace, nameExtenderCA); published != nil {
		there, err := certutil.ParseCertsPEM([]byte(published.Data["ca.crt"]))
		if err != nil || !slices.ContainsFunc(there, ca[0].Equal) {
			f.add(Error, "ConfigMap "+r.Namespace+"/"+nameExtenderCA,
				"it does not contain the CA of the extender, so kube-scheduler would not trust the extender",
				"Restart the extender, which publishes it.", restart).Transient = true
		}
	}
	if client := lookup(s.Objects.Secrets, r.Namespace, nameExtenderClient); client != nil {
		checkClient(s, f, client, certs, restart)
	}
}

// checkKept looks at a certificate that a program keeps.
func checkKept(s *Snapshot, f *findings, secret *corev1.Secret, service string) {
	object := "Secret " + secret.Namespace + "/" + secret.Name
	rotate := func(what string) string {
		return fmt.Sprintf("kubectl annotate secret %s -n %s %s=%s --overwrite", secret.Name, secret.Namespace, rotateAnnotation, what)
	}
	if len(secret.Data[corev1.TLSCertKey]) == 0 {
		f.add(Error, object, "it contains no certificate yet",
			"Its program writes the certificate once it runs; fix the problem reported for the program.").Transient = true
		return
	}
	remedy := "Request a new certificate; its program issues one within seconds while it runs."
	served, err := certutil.ParseCertsPEM(secret.Data[corev1.TLSCertKey])
	if err == nil {
		_, err = tls.X509KeyPair(secret.Data[corev1.TLSCertKey], secret.Data[corev1.TLSPrivateKeyKey])
	}
	if err != nil {
		f.add(Error, object, "its certificate is invalid: "+err.Error(), remedy, rotate("cert"))
		return
	}
	leaf := served[0]
	if why := expiry(leaf, s.Taken); why != "" {
		f.add(severityOf(leaf, s.Taken), object, "its certificate "+why, remedy, rotate("cert"))
	}
	host := service + "." + secret.Namespace + ".svc"
	if err := leaf.VerifyHostname(host); err != nil {
		f.add(Error, object, "its certificate is not for "+host+": "+err.Error(), remedy, rotate("cert"))
	}
	var trusted []*x509.Certificate
	for _, key := range []string{"ca.crt", "next-ca.crt", "previous-ca.crt"} {
		cas, err := certutil.ParseCertsPEM(secret.Data[key])
		if err != nil {
			if key == "ca.crt" {
				f.add(Error, object, "its CA is invalid: "+err.Error(),
					"Request a new one; certificates signed by the old one stay valid meanwhile.", rotate("ca"))
				return
			}
			continue
		}
		trusted = append(trusted, cas[0])
		if why := expiry(cas[0], s.Taken); why != "" && key == "ca.crt" {
			f.add(severityOf(cas[0], s.Taken), object, "its CA "+why, "Request a new one.", rotate("ca"))
		}
	}
	if err := signedBy(leaf, trusted); err != nil {
		f.add(Error, object, "its certificate is not signed by its CA: "+err.Error(), remedy, rotate("cert"))
	}
}

// checkClient looks at the certificate that kube-scheduler shows.
func checkClient(s *Snapshot, f *findings, client, certs *corev1.Secret, restart string) {
	object := "Secret " + client.Namespace + "/" + client.Name
	remedy := "Restart the extender, which creates it."
	shown, err := certutil.ParseCertsPEM(client.Data[corev1.TLSCertKey])
	if err == nil {
		_, err = tls.X509KeyPair(client.Data[corev1.TLSCertKey], client.Data[corev1.TLSPrivateKeyKey])
	}
	if err != nil {
		f.add(Error, object, "the certificate for kube-scheduler is invalid: "+err.Error(), remedy, restart).Transient = true
		return
	}
	if why := expiry(shown[0], s.Taken); why != "" {
		f.add(severityOf(shown[0], s.Taken), object, "the certificate for kube-scheduler "+why, remedy, restart)
	}
	var trusted []*x509.Certificate
	for _, key := range []string{"ca.crt", "next-ca.crt", "previous-ca.crt"} {
		if cas, err := certutil.ParseCertsPEM(certs.Data[key]); err == nil {
			trusted = append(trusted, cas[0])
		}
	}
	if err := signedBy(shown[0], trusted); err != nil {
		f.add(Error, object, "the certificate for kube-scheduler is not signed by the extender's CA: "+err.Error(), remedy, restart)
	}
}

// expiry says what is wrong with the time of a certificate; "" for nothing. They
// are renewed after two thirds of it, so one that has less than a quarter left was
// not.
func expiry(c *x509.Certificate, now time.Time) string {
	const day = "2006-01-02 15:04 MST"
	switch {
	case now.After(c.NotAfter):
		return "has expired at " + c.NotAfter.UTC().Format(day)
	case now.Before(c.NotBefore):
		return "is not valid before " + c.NotBefore.UTC().Format(day) + ": compare the clocks"
	case c.NotAfter.Sub(now) < c.NotAfter.Sub(c.NotBefore)/4:
		return "expires at " + c.NotAfter.UTC().Format(day) + " and should have been renewed before"
	}
	return ""
}

func severityOf(c *x509.Certificate, now time.Time) Severity {
	if now.After(c.NotAfter) || now.Before(c.NotBefore) {
		return Error
	}
	return Warning
}

func checkPolicies(s *Snapshot, f *findings) {
	r := s.Release()
	bound := map[string]bool{}
	for i := range s.Admission.Bindings {
		b := &s.Admission.Bindings[i]
		if !r.of(b) {
			continue
		}
		remedy, commands := s.restore(b.Labels[labelName])
		object := "ValidatingAdmissionPolicyBinding " + b.Name
		if lookup(s.Admission.Policies, "", b.Spec.PolicyName) == nil {
			f.add(Error, object, "its policy "+b.Spec.PolicyName+" is missing, so nothing is enforced", remedy, commands...)
		}
		if slices.Contains(b.Spec.ValidationActions, admissionv1.Deny) {
			bound[b.Spec.PolicyName] = true
		} else {
			f.add(Error, object, "it does not deny, so requests that the policy forbids are allowed", remedy, commands...)
		}
	}
	for i := range s.Admission.Policies {
		p := &s.Admission.Policies[i]
		if !r.of(p) {
			continue
		}
		object := "ValidatingAdmissionPolicy " + p.Name
		if !bound[p.Name] {
			remedy, commands := s.restore(p.Labels[labelName])
			f.add(Error, object, "it has no binding, so the API server does not enforce it", remedy, commands...)
		}
		if t := p.Status.TypeChecking; t != nil && len(t.ExpressionWarnings) > 0 {
			f.add(Warning, object, "the API server warns of an expression: "+t.ExpressionWarnings[0].FieldRef+": "+
				t.ExpressionWarnings[0].Warning,
				"Report this as a bug, with the version of Kubernetes.")
		}
	}
}

func checkAccess(s *Snapshot, f *findings) {
	type key struct{ account, role string }
	refused := map[key][]string{}
	for _, a := range s.Objects.Access {
		if a.Allowed {
			continue
		}
		text := a.Verb + " " + a.Resource
		if a.Name != "" {
			text += " " + a.Name
		}
		if a.Namespace != "" {
			text += " in " + a.Namespace
		}
		refused[key{a.Account, a.Role}] = append(refused[key{a.Account, a.Role}], text)
	}
	for _, k := range slices.SortedFunc(maps.Keys(refused), func(a, b key) int {
		return cmp.Or(cmp.Compare(a.account, b.account), cmp.Compare(a.role, b.role))
	}) {
		label := ""
		for _, o := range s.Release().Manifest {
			if (o.Kind == "ClusterRole" || o.Kind == "Role") && o.Name == k.role {
				label = o.label(labelName)
			}
		}
		remedy, commands := s.restore(label)
		f.add(Error, "ServiceAccount "+k.account, "it lacks permissions of role "+k.role+": "+list(refused[k]), remedy, commands...)
	}
}
