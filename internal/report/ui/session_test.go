package ui

import (
	"io"
	"net/http"
	"net/http/httptest"
	"strings"
	"testing"
)

const host = "127.0.0.1:4711"

// request is one to the page, with headers "Name: value".
func request(method, target string, headers ...string) *http.Request {
	r := httptest.NewRequest(method, "http://"+host+target, http.NoBody)
	for _, h := range headers {
		name, value, _ := strings.Cut(h, ": ")
		if name == "Host" {
			r.Host = value
			continue
		}
		r.Header.Add(name, value)
	}
	return r
}

func TestSession(t *testing.T) {
	var notices strings.Builder
	s := newSession(host, &notices)
	h := s.guard(http.HandlerFunc(func(w http.ResponseWriter, _ *http.Request) { _, _ = w.Write([]byte("the page")) }))
	ask := func(r *http.Request) *http.Response {
		w := httptest.NewRecorder()
		h.ServeHTTP(w, r)
		answer := w.Result()
		_ = answer.Body.Close() // only the header is looked at
		return answer
	}
	cookie := "Cookie: divvy-ui=" + s.cookie
	enter := s.base + "?token=" + s.token
	// The order matters: the token works once.
	for _, tt := range []struct {
		name   string
		r      *http.Request
		status int
	}{
		{"nothing", request("GET", s.base), http.StatusForbidden},
		{"a file without the cookie", request("GET", s.base+"app.js"), http.StatusForbidden},
		{"a wrong token", request("GET", s.base+"?token=x"), http.StatusForbidden},
		{"an empty token", request("GET", s.base+"?token="), http.StatusForbidden},
		{"the token for another path", request("GET", s.base+"api/stream?token="+s.token), http.StatusForbidden},
		{"the token for the root", request("GET", "/?token="+s.token), http.StatusForbidden},
		{"a host that an attacker's DNS points here", request("GET", enter, "Host: evil.example:4711"), http.StatusMisdirectedRequest},
		{"another port", request("GET", enter, "Host: 127.0.0.1:4712"), http.StatusMisdirectedRequest},
		{"no port", request("GET", enter, "Host: 127.0.0.1"), http.StatusMisdirectedRequest},
		{"the name of the address", request("GET", enter, "Host: localhost:4711"), http.StatusMisdirectedRequest},
		{"a link on another site", request("GET", enter, "Sec-Fetch-Site: cross-site"), http.StatusForbidden},
		{"a method that changes something", request("POST", enter), http.StatusMethodNotAllowed},
		{"HEAD, as programs that preview links send", request("HEAD", enter), http.StatusMethodNotAllowed},
		{"the token", request("GET", enter, "Sec-Fetch-Site: none"), http.StatusSeeOther},
		{"a wrong token, afterwards", request("GET", s.base+"?token=x"), http.StatusForbidden},
		{"the token in the browser that has the cookie", request("GET", enter, cookie), http.StatusSeeOther},
		{"the cookie", request("GET", s.base, cookie), http.StatusOK},
		{"the cookie, from the page", request("GET", s.base+"api/why", cookie, "Sec-Fetch-Site: same-origin"), http.StatusOK},
		{"the cookie, from another port", request("GET", s.base+"api/why", cookie, "Sec-Fetch-Site: same-site"), http.StatusForbidden},
		{"the cookie, from another site", request("GET", s.base, cookie, "Sec-Fetch-Site: cross-site"), http.StatusForbidden},
		{"the cookie, from the page, by its origin", request("GET", s.base+"api/why", cookie, "Origin: http://"+host), http.StatusOK},
		{"the cookie, from another port, by its origin", request("GET", s.base+"api/why", cookie, "Origin: http://127.0.0.1:1"),
			http.StatusForbidden},
		{"the cookie, for another path", request("GET", "/", cookie), http.StatusForbidden},
		{"the cookie, for the path of another session", request("GET", newSession(host, io.Discard).base, cookie), http.StatusForbidden},
		{"a wrong cookie", request("GET", s.base, "Cookie: divvy-ui=x"), http.StatusForbidden},
		{"a wrong cookie before the right one", request("GET", s.base, "Cookie: divvy-ui=x; divvy-ui="+s.cookie), http.StatusOK},
		{"the token as cookie", request("GET", s.base, "Cookie: divvy-ui="+s.token), http.StatusForbidden},
		{"the token, again", request("GET", enter, "Sec-Fetch-Site: none"), http.StatusForbidden},
		{"the cookie of the session that has ended", request("GET", s.base, cookie), http.StatusForbidden},
		{"the token of the session that has ended", request("GET", enter, cookie), http.StatusForbidden},
	} {
		answer := ask(tt.r) //nolint:bodyclose // ask has closed it
		if answer.StatusCode != tt.status {
			t.Errorf("%s: status %d, want %d", tt.name, answer.StatusCode, tt.status)
		}
		for name, want := range map[string]string{"Cache-Control": "no-store", "X-Content-Type-Options": "nosniff",
			"Referrer-Policy": "no-referrer", "Cross-Origin-Resource-Policy": "same-origin"} {
			if got := answer.Header.Get(name); got != want {
				t.Errorf("%s: %s is %q, want %q", tt.name, name, got, want)
			}
		}
		for _, part := range []string{"default-src 'none'", "script-src 'self'", "frame-ancestors 'none'", "trusted-types 'none'"} {
			if !strings.Contains(answer.Header.Get("Content-Security-Policy"), part) {
				t.Errorf("%s: the policy lacks %s", tt.name, part)
			}
		}
		if answer.Header.Get("Access-Control-Allow-Origin") != "" {
			t.Errorf("%s: other origins may read it", tt.name)
		}
		if refused := answer.StatusCode >= 400; refused != (answer.Header.Get("Connection") == "close") {
			t.Errorf("%s: status %d, Connection is %q", tt.name, answer.StatusCode, answer.Header.Get("Connection"))
		}
		select {
		case <-s.again:
			if !strings.HasSuffix(tt.name, "again") && !strings.HasSuffix(tt.name, "ended") {
				t.Errorf("%s: the session has ended", tt.name)
			}
		default:
			if tt.name == "the token, again" {
				t.Errorf("%s: the session goes on", tt.name)
			}
		}
		cookies := answer.Cookies()
		if set := tt.name == "the token"; set != (len(cookies) == 1) {
			t.Errorf("%s: it sets %d cookies", tt.name, len(cookies))
		}
		if answer.StatusCode == http.StatusSeeOther && answer.Header.Get("Location") != s.base {
			t.Errorf("%s: it leads to %q", tt.name, answer.Header.Get("Location"))
		}
		for _, c := range cookies {
			if c.Value != s.cookie || !c.HttpOnly || c.SameSite != http.SameSiteStrictMode || c.Domain != "" || c.Path != s.base ||
				c.MaxAge != 0 {
				t.Errorf("%s: the cookie is %v", tt.name, c)
			}
		}
	}
	if got := notices.String(); got != "The page was opened. If that was not you, press Ctrl-C.\n" {
		t.Errorf("the person reads %q", got)
	}
	if a, b := newSession(host, nil), newSession(host, nil); a.token == b.token || a.cookie == b.cookie || a.base == b.base ||
		a.token == a.cookie {
		t.Error("secrets are the same")
	}
}
