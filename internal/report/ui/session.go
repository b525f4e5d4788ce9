package ui

import (
	"crypto/rand"
	"crypto/sha256"
	"crypto/subtle"
	"errors"
	"fmt"
	"io"
	"net/http"
	"strings"
	"sync/atomic"
)

// ErrOpenedAgain says that the address was opened in a second browser. Other users of the machine can
// see it while the first is started with it, so one of the two may be theirs.
var ErrOpenedAgain = errors.New("the address was opened in a second browser, or by another user of this machine; start the command again")

// session is how the one person who started the program is recognized. Other users of the machine
// can reach the port, and any page in the browser can send requests to it.
type session struct {
	// host is what requests must be addressed to. A name that an attacker's DNS points to a
	// loopback address is another one.
	host string
	// base is the path below which all is served. It is not guessed, and the cookie is for it alone:
	// browsers send cookies to all ports of an address.
	base string
	// token is in the address that the program prints. It is exchanged once, so it is worth nothing
	// in the history of the browser. cookie is what it is exchanged for.
	token, cookie string
	used          atomic.Bool
	// again is closed when the token comes again without the cookie: the session ends.
	again chan struct{}
	ended atomic.Bool
	// notices is where the person reads that the page was opened.
	notices io.Writer
}

func newSession(host string, notices io.Writer) *session {
	return &session{host: host, base: "/" + rand.Text() + "/", token: rand.Text(), cookie: rand.Text(), // 130 bits each
		again: make(chan struct{}), notices: notices}
}

const cookieName = "divvy-ui"

// equal compares without a hint in its time at how much is right.
func equal(a, b string) bool {
	x, y := sha256.Sum256([]byte(a)), sha256.Sum256([]byte(b))
	return subtle.ConstantTimeCompare(x[:], y[:]) == 1
}

// known reports whether a request has the cookie, of a session that has not ended.
func (s *session) known(r *http.Request) bool {
	if s.ended.Load() {
		return false
	}
	for _, c := range r.CookiesNamed(cookieName) {
		if equal(c.Value, s.cookie) {
			return true
		}
	}
	return false
}

// guard lets requests of the person through to next, which gets their paths below base.
func (s *session) guard(next http.Handler) http.Handler {
	next = http.StripPrefix(strings.TrimSuffix(s.base, "/"), next)
	return http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		protect(w.Header())
		token, exchange := r.URL.Query()["token"]
		switch site := r.Header.Get("Sec-Fetch-Site"); {
		case r.Host != s.host:
			refuse(w, "This address is not the one that kubectl divvy ui printed.", http.StatusMisdirectedRequest)
		case r.Method != http.MethodGet:
			w.Header().Set("Allow", http.MethodGet)
			refuse(w, "Nothing can be changed here.", http.StatusMethodNotAllowed)
		case site != "" && site != "none" && site != "same-origin":
			// Older browsers do not send the header; the cookie is not sent across sites either.
			refuse(w, foreign, http.StatusForbidden)
		case !s.own(r.Header.Get("Origin")):
			refuse(w, foreign, http.StatusForbidden)
		case r.URL.Path == s.base && exchange:
			s.exchange(w, r, token[0])
		case !strings.HasPrefix(r.URL.Path, s.base), !s.known(r):
			refuse(w, unknown, http.StatusForbidden)
		default:
			next.ServeHTTP(w, r)
		}
	})
}

// own reports whether an Origin is none or the page's. To browsers another port is of the same site,
// so the cookie is sent from there. From "null", which is no site, it is not.
func (s *session) own(origin string) bool {
	return origin == "" || origin == "null" || origin == "http://"+s.host
}

// refuse answers a request that is not the person's. Its connection ends, since there are few.
func refuse(w http.ResponseWriter, text string, status int) {
	w.Header().Set("Connection", "close")
	http.Error(w, text, status)
}

const foreign = "Another page may not read this one. Type the address into the browser."

const unknown = "Open the address that kubectl divvy ui printed. It works once: for another browser, start the command again."

// exchange answers the first request, which has the token. If the token comes again, from a browser
// without the cookie, it is not known which of the two is the person's, and the session ends.
func (s *session) exchange(w http.ResponseWriter, r *http.Request, token string) {
	switch {
	case s.known(r): // the page was opened from the history
	case !equal(token, s.token):
		refuse(w, unknown, http.StatusForbidden)
		return
	case !s.used.CompareAndSwap(false, true):
		if s.ended.CompareAndSwap(false, true) {
			close(s.again)
		}
		refuse(w, "This address was opened before. "+
			"If that was not you, another user of this machine may have read the page. Start kubectl divvy ui again.", http.StatusForbidden)
		return
	default:
		//nolint:gosec // without Secure: a loopback address has no TLS
		cookie := &http.Cookie{Name: cookieName, Value: s.cookie, Path: s.base, HttpOnly: true, SameSite: http.SameSiteStrictMode}
		http.SetCookie(w, cookie)
		_, _ = fmt.Fprintln(s.notices, "The page was opened. If that was not you, press Ctrl-C.")
	}
	http.Redirect(w, r, s.base, http.StatusSeeOther)
}

// policy allows files of this server alone: no text that comes from the cluster can become a script,
// a style or a request to elsewhere.
const policy = "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self'; connect-src 'self'; base-uri 'none'; " +
	"form-action 'none'; frame-ancestors 'none'; require-trusted-types-for 'script'; trusted-types 'none'"

// protect sets the headers of every answer.
func protect(h http.Header) {
	h.Set("Content-Security-Policy", policy)
	h.Set("X-Content-Type-Options", "nosniff")
	h.Set("Referrer-Policy", "no-referrer")
	h.Set("Cross-Origin-Opener-Policy", "same-origin")
	h.Set("Cross-Origin-Resource-Policy", "same-origin")
	h.Set("Cache-Control", "no-store")
}
