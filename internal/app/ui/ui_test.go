package ui

import (
	"bytes"
	"context"
	"errors"
	"net"
	"net/http"
	"net/http/httptest"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"
)

// kubeconfig writes one for an API server.
func kubeconfig(t *testing.T, server string) string {
	t.Helper()
	path := filepath.Join(t.TempDir(), "config")
	text := `{"apiVersion":"v1","kind":"Config","current-context":"here","clusters":[{"name":"c","cluster":{"server":"` + server + `"}}],` +
		`"contexts":[{"name":"here","context":{"cluster":"c","user":"u","namespace":"team-a"}}],"users":[{"name":"u","user":{}}]}`
	if err := os.WriteFile(path, []byte(text), 0o600); err != nil {
		t.Fatal(err)
	}
	return path
}

func TestMistakes(t *testing.T) {
	taken, err := net.Listen("tcp", "127.0.0.1:0") //nolint:noctx // of a test
	if err != nil {
		t.Fatal(err)
	}
	defer func() { _ = taken.Close() }()
	_, port, err := net.SplitHostPort(taken.Addr().String())
	if err != nil {
		t.Fatal(err)
	}
	forbids := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, _ *http.Request) {
		w.Header().Set("Content-Type", "application/json")
		_, _ = w.Write([]byte(`{"apiVersion":"authorization.k8s.io/v1","kind":"SelfSubjectAccessReview","status":{"allowed":false}}`))
	}))
	defer forbids.Close()
	for name, tt := range map[string]struct {
		args []string
		want []string
	}{
		"flags": {[]string{"--port", "70000", "-n", "A", "--divvy-namespace", ""},
			[]string{"--port 70000: must be from 0 to 65535", `--namespace "A"`, "--divvy-namespace must not be empty"}},
		"an argument":   {[]string{"x"}, []string{"unknown command"}},
		"no kubeconfig": {[]string{"--kubeconfig", "/nonexistent"}, []string{"/nonexistent"}},
		"no API server": {[]string{"--kubeconfig", kubeconfig(t, "http://127.0.0.1:1")}, []string{"ask for the right to list nodes",
			"connection refused"}},
		"a port that is taken": {[]string{"--kubeconfig", kubeconfig(t, forbids.URL), "--port", port}, []string{"listen for the page",
			"address already in use"}},
	} {
		t.Run(name, func(t *testing.T) {
			cmd := Command()
			cmd.SetArgs(tt.args)
			cmd.SilenceUsage, cmd.SilenceErrors = true, true
			var out bytes.Buffer
			cmd.SetOut(&out)
			err := cmd.ExecuteContext(t.Context())
			if err == nil {
				t.Fatal("no error")
			}
			for _, want := range tt.want {
				if !strings.Contains(err.Error(), want) {
					t.Errorf("error %q, want %q in it", err, want)
				}
			}
			if strings.Contains(out.String(), "token") {
				t.Errorf("it prints an address: %s", &out)
			}
		})
	}
}

// TestAddress: the address alone is on standard output, and works until the person ends the command.
func TestAddress(t *testing.T) {
	server := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, _ *http.Request) {
		w.Header().Set("Content-Type", "application/json")
		_, _ = w.Write([]byte(`{"apiVersion":"authorization.k8s.io/v1","kind":"SelfSubjectAccessReview","status":{"allowed":false}}`))
	}))
	defer server.Close()
	out, in, err := os.Pipe()
	if err != nil {
		t.Fatal(err)
	}
	defer func() { _ = errors.Join(out.Close(), in.Close()) }()
	cmd := Command()
	cmd.SetArgs([]string{"--kubeconfig", kubeconfig(t, server.URL), "--usage"})
	cmd.SetOut(in)
	cmd.SetErr(&bytes.Buffer{})
	ctx, cancel := context.WithCancel(t.Context())
	ended := make(chan error, 1)
	go func() { ended <- cmd.ExecuteContext(ctx) }()
	line := make([]byte, 200)
	n, err := out.Read(line)
	if err != nil {
		t.Fatal(err)
	}
	address := strings.TrimSpace(string(line[:n]))
	answer, err := http.Get(address) //nolint:noctx // the client keeps no cookie, so it may not read the page
	if err != nil {
		t.Fatal(err)
	}
	_ = answer.Body.Close()
	if answer.StatusCode != http.StatusForbidden || !strings.HasPrefix(address, "http://127.0.0.1:") ||
		!strings.HasPrefix(address, answer.Request.URL.String()+"?token=") {
		t.Errorf("%s has status %d", address, answer.StatusCode)
	}
	cancel()
	select {
	case err := <-ended:
		if err != nil {
			t.Error(err)
		}
	case <-time.After(2 * time.Minute):
		t.Error("it does not end")
	}
}
