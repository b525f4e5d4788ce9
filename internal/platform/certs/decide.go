package certs

import (
	"crypto/tls"
	"crypto/x509"
	"slices"
	"time"
)

// served is a certificate that is served, and the CA that clients trust it by.
type served struct {
	leaf *tls.Certificate
	ca   *x509.Certificate
}

// situation is all that a decision is made from.
type situation struct {
	now    time.Time
	secret content
	// remembered is what this replica serves; nil when nothing.
	remembered *served
	// inBundles are the CAs that configurations hold now.
	inBundles []*x509.Certificate
	// steady is for how long, as far as this replica knows, the Secret has said
	// what it says and the configurations have held its CAs.
	steady time.Duration
	// rotateCert and rotateCA say that somebody asked for it.
	rotateCert, rotateCA bool
}

type step struct {
	content content
	why     string
	// abrupt says that the certificate is of a CA that no configuration holds yet.
	abrupt bool
	// doneCert and doneCA say that a request to rotate is answered by it.
	doneCert, doneCA bool
}

// policy decides. It is pure but for the keys that it makes.
type policy struct {
	issuer
	propagation time.Duration
	// overlap is how much longer each step of a change of CA lasts; 0 where all
	// clients follow within propagation.
	overlap time.Duration
}

// decide returns the next step, or how long to wait for one at most.
func (p policy) decide(s situation) (*step, time.Duration, error) {
	st, wait, err := p.next(s)
	if err != nil || p.overlap == 0 {
		return st, wait, err
	}
	if st == nil {
		if c := s.secret; c.next == nil && c.previous == nil || !c.since.IsZero() {
			return nil, wait, nil
		}
		st = &step{content: s.secret, why: "the start of the CA rotation was not recorded"}
	}
	switch c := &st.content; {
	case c.next == nil && c.previous == nil:
		c.since = time.Time{}
	case c.since.IsZero() || !c.next.same(s.secret.next) || !c.previous.same(s.secret.previous):
		c.since = s.now.Truncate(time.Second) // as it is written
	}
	return st, wait, err
}

// remaining is how long a change of CA stays where it is.
func (p policy) remaining(s situation) time.Duration {
	remaining := p.propagation - s.steady
	switch since := s.secret.since; {
	case p.overlap == 0:
	case since.IsZero():
		remaining = max(remaining, p.overlap)
	case !since.After(s.now): // one to come was written by a clock that is wrong
		remaining = max(remaining, since.Add(p.overlap).Sub(s.now))
	}
	return remaining
}

// next is decide without the note since when a change of CA is where it is.
func (p policy) next(s situation) (*step, time.Duration, error) {
	if st, err := p.mend(s); st != nil || err != nil {
		if st != nil {
			st.abrupt = !slices.ContainsFunc(s.inBundles, st.content.ca.cert.Equal)
		}
		return st, 0, err
	}
	c := s.secret // From here on it has a CA, and a certificate of it.

	renewal := s.now.Sub(renewAt(c.leaf.Leaf)) >= 0
	if (renewal || s.rotateCert) && c.ca.key != nil {
		why := "the certificate has reached two thirds of its lifetime"
		if !renewal {
			why = "a new certificate was requested"
		}
		return p.reissue(c, s.now, why)
	}

	switch {
	case c.next != nil:
		wait := p.remaining(s)
		if renewal {
			wait = p.propagation - s.steady // nobody but the next CA can renew the certificate
		}
		if wait > 0 {
			return nil, wait, nil
		}
		return p.promote(c, s.now, "the next CA is trusted everywhere")
	case c.previous != nil:
		if wait := p.remaining(s); wait > 0 {
			return nil, wait, nil
		}
		c.previous = nil
		return &step{content: c, why: "the previous CA is no longer used"}, 0, nil
	case c.ca.key == nil:
		return p.announce(c, s.now, "the key of the CA is missing")
	case s.rotateCA:
		st, wait, err := p.announce(c, s.now, "a new CA was requested")
		if st != nil {
			st.doneCA = true
		}
		return st, wait, err
	case !s.now.Before(renewAt(c.ca.cert)):
		return p.announce(c, s.now, "the CA has reached two thirds of its lifetime")
	}
	return nil, min(renewAt(c.leaf.Leaf).Sub(s.now), renewAt(c.ca.cert).Sub(s.now)), nil
}

func (p policy) reissue(c content, now time.Time, why string) (*step, time.Duration, error) {
	leaf, err := p.newLeaf(c.ca, now)
	if err != nil {
		return nil, 0, err
	}
	c.leaf = leaf
	return &step{content: c, why: why, doneCert: true}, 0, nil
}

// announce makes the next CA, which signs nothing yet.
func (p policy) announce(c content, now time.Time, why string) (*step, time.Duration, error) {
	next, err := p.newAuthority(now)
	if err != nil {
		return nil, 0, err
	}
	c.next = next
	return &step{content: c, why: why}, 0, nil
}

// promote makes the next CA the present one.
func (p policy) promote(c content, now time.Time, why string) (*step, time.Duration, error) {
	c.previous = nil
	if c.ca != nil {
		c.previous = &authority{cert: c.ca.cert}
	}
	c.ca, c.next = c.next, nil
	return p.reissue(c, now, why)
}

// client returns the client certificate that is to take the place of present, or
// nil when that can stay. Once every replica accepts those of the next CA, it
// makes one of that, so that clients need to change once for both CAs.
func (p policy) client(c content, present *tls.Certificate, now time.Time, steady time.Duration) (*tls.Certificate, error) {
	if c.next != nil && p.signedClient(c.next.cert, present, now) {
		return nil, nil //nolint:nilnil // documented
	}
	signer := c.ca
	if c.next != nil && c.next.key != nil && steady >= p.propagation {
		signer = c.next
	}
	if signer == nil || p.signedClient(signer.cert, present, now) || signer.key == nil {
		return nil, nil //nolint:nilnil // documented; without a key there is a next CA soon
	}
	return p.newClient(signer, now)
}

// mend returns what is needed to have a CA and a certificate that it signed, or
// nil when both are there. As long as there is a certificate that clients trust,
// here or in the Secret, it stays in use, and what is lost is replaced in the
// steps of every change of CA.
func (p policy) mend(s situation) (*step, error) {
	c := s.secret
	c.broken = false
	if !usable(c.ca, s.now) {
		c.ca = nil
	}
	if !usable(c.next, s.now) || c.next.key == nil {
		c.next = nil
	}
	if !usable(c.previous, s.now) {
		c.previous = nil
	}

	// Whose is the certificate in the Secret? Its CA may be lost there and known
	// elsewhere.
	owner := func(leaf *tls.Certificate) *x509.Certificate {
		if leaf == nil {
			return nil
		}
		var candidates []*x509.Certificate
		for _, a := range []*authority{c.ca, c.previous} {
			if a != nil {
				candidates = append(candidates, a.cert)
			}
		}
		candidates = append(candidates, s.inBundles...)
		if s.remembered != nil {
			candidates = append(candidates, s.remembered.ca)
		}
		for _, ca := range candidates {
			if p.signed(ca, leaf, s.now) {
				return ca
			}
		}
		return nil
	}
	trusted := owner(c.leaf)
	if trusted == nil {
		c.leaf = nil
	}
	canSign := c.ca != nil && c.ca.key != nil
	if c.leaf == nil && s.remembered != nil && (!canSign || !slices.ContainsFunc(s.inBundles, c.ca.cert.Equal)) {
		// Nothing in the Secret gives a certificate that clients trust already.
		if ca := owner(s.remembered.leaf); ca != nil {
			c.leaf, trusted = s.remembered.leaf, ca
		}
	}

	switch {
	case c.leaf != nil && c.ca != nil && trusted.Equal(c.ca.cert):
		// All is there.
	case c.leaf != nil && c.previous != nil && trusted.Equal(c.previous.cert) && canSign:
		// Both are trusted by now, or will be when the certificate is served.
		if p.remaining(s) > 0 && s.now.Before(renewAt(c.leaf.Leaf)) {
			break
		}
		st, _, err := p.reissue(c, s.now, "the certificate was issued by the previous CA")
		return st, err
	case c.leaf != nil:
		// The certificate is good, and the CA beside it is another or gone.
		if c.next == nil && canSign {
			c.next = c.ca
		}
		c.ca, c.previous = &authority{cert: trusted}, nil
		if c.next == nil {
			st, _, err := p.announce(c, s.now, "the CA of the certificate is missing")
			return st, err
		}
		return &step{content: c, why: "the certificate was issued by a different CA"}, nil
	case canSign:
		st, _, err := p.reissue(c, s.now, "there is no valid certificate")
		return st, err
	case c.next != nil:
		st, _, err := p.promote(c, s.now, "there is neither a valid certificate nor a CA to issue one")
		return st, err
	default:
		ca, err := p.newAuthority(s.now)
		if err != nil {
			return nil, err
		}
		st, _, err := p.reissue(content{ca: ca}, s.now, "there is no valid certificate and no CA")
		if st != nil {
			st.doneCA = true
		}
		return st, err
	}
	if !c.same(s.secret) {
		return &step{content: c, why: "the Secret contains invalid data"}, nil
	}
	return nil, nil //nolint:nilnil // nothing to mend
}

// usable reports whether a CA can still be trusted.
func usable(a *authority, now time.Time) bool { return a != nil && validAt(a.cert, now) }
