//go:build e2e

package e2e

import (
	"bufio"
	"context"
	"fmt"
	"net/http"
	"net/url"
	"os"
	"os/exec"
	"strings"
	"sync"
	"testing"

	"github.com/chromedp/chromedp/kb"
	rbacv1 "k8s.io/api/rbac/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	"github.com/divvy-gpu/divvy/lab/internal/browser"
	"github.com/divvy-gpu/divvy/lab/internal/layout"
)

// serveUI runs kubectl divvy ui as a person does until the test ends, and returns the address that it
// prints, and a function that waits until it ends with an error.
func serveUI(t *testing.T, args ...string) (address string, fails func()) {
	t.Helper()
	// It is interrupted, as a person does, and not killed with the test's context.
	cmd := exec.CommandContext(context.WithoutCancel(t.Context()), lab.CLI.Cluster.Program("kubectl"),
		append([]string{"divvy", "ui"}, args...)...)
	cmd.Env = lab.CLI.Environment()
	cmd.Stderr = t.Output()
	out, err := cmd.StdoutPipe()
	must(t, err)
	must(t, cmd.Start())
	wait, failed := sync.OnceValue(cmd.Wait), false
	t.Cleanup(func() {
		_ = cmd.Process.Signal(os.Interrupt)
		if err := wait(); err != nil && !failed {
			t.Errorf("kubectl divvy ui ends with %v", err)
		}
	})
	address, err = bufio.NewReader(out).ReadString('\n')
	must(t, err)
	return strings.TrimSpace(address), func() {
		t.Helper()
		failed = true
		if wait() == nil {
			t.Error("kubectl divvy ui ends without an error")
		}
	}
}

// TestUI opens the page in a browser while pods come, wait and go. What takes no cluster is tested
// by package browser.
func TestUI(t *testing.T) {
	ctx := begin(t, guide)
	address, fails := serveUI(t)
	p := browser.Open(t, 1400, 800)
	p.Go(address)
	p.Until("document.querySelectorAll('.tile').length === 1 && document.querySelectorAll('.cell').length === 8")
	for _, text := range []string{layout.NodeName, "0 / 16", "enflame.com/gcu-memory in units of 1 GB", "No pod waits for a device."} {
		p.Text(text)
	}

	// A pod comes while the page is open, and its device is opened by keyboard.
	start(t, one("comes", 6))
	p.Text("6 / 16")
	p.Keys("/comes" + kb.Escape + kb.Enter)
	p.Text(namespace + "/comes")
	p.Text("6 of 16, 10 free")

	// A pod that waits is explained.
	waits := create(t, one("waits", 20))[0]
	pending(t, waits, noRoom)
	p.Keys(kb.Escape + "/" + kb.Backspace + kb.Escape + "w")
	p.Text("20 units of enflame.com/gcu-memory (20 GB) are more than any device has")
	p.Keys("w" + kb.Enter)
	p.Text("largerThanDevice")
	p.Text(fmt.Sprintf("kubectl annotate pod -n %s waits divvy.dev/devices=2", namespace))

	// The command that the page shows, and what the page shows then.
	_, err := lab.CLI.Kubectl(ctx, "annotate", "pod", "-n", namespace, "waits", "divvy.dev/devices=2")
	must(t, err)
	running(t, "waits")
	p.Text("Nothing keeps this pod waiting.")
	p.Keys(kb.Escape)
	p.Text("No pod waits for a device.")
	p.Until("[...document.querySelectorAll('.cell')].filter((e) => e.innerText.includes('waits')).length === 2")
	must(t, lab.Pods.Delete(ctx, "comes"))
	p.Until("!document.body.innerText.includes('comes')")

	t.Run("a client without the cookie", func(t *testing.T) {
		u, err := url.Parse(address)
		must(t, err)
		for _, tt := range []struct {
			name, path, host string
			status           int
		}{
			{"no token", u.Path, u.Host, http.StatusForbidden},
			{"the stream", u.Path + "api/stream", u.Host, http.StatusForbidden},
			{"another path", "/?" + u.RawQuery, u.Host, http.StatusForbidden},
			{"another host", u.RequestURI(), "evil.example", http.StatusMisdirectedRequest},
			{"the address, again", u.RequestURI(), u.Host, http.StatusForbidden}, // which ends the command
		} {
			r, err := http.NewRequestWithContext(ctx, http.MethodGet, "http://"+u.Host+tt.path, http.NoBody)
			must(t, err)
			r.Host = tt.host
			answer, err := http.DefaultClient.Do(r)
			must(t, err)
			must(t, answer.Body.Close())
			if answer.StatusCode != tt.status {
				t.Errorf("%s: status %d, want %d", tt.name, answer.StatusCode, tt.status)
			}
		}
		fails()
	})
	t.Run("a person with few rights", func(t *testing.T) {
		const user = "limited"
		role := &rbacv1.Role{ObjectMeta: metav1.ObjectMeta{Name: user, Namespace: namespace},
			Rules: []rbacv1.PolicyRule{{APIGroups: []string{""}, Resources: []string{"pods"}, Verbs: []string{"list", "watch"}}}}
		binding := &rbacv1.RoleBinding{ObjectMeta: role.ObjectMeta, RoleRef: rbacv1.RoleRef{APIGroup: rbacv1.GroupName, Kind: "Role",
			Name: user},
			Subjects: []rbacv1.Subject{{Kind: rbacv1.UserKind, Name: user}}}
		_, err := lab.Client.RbacV1().Roles(namespace).Create(ctx, role, metav1.CreateOptions{})
		must(t, err)
		_, err = lab.Client.RbacV1().RoleBindings(namespace).Create(ctx, binding, metav1.CreateOptions{})
		must(t, err)
		start(t, one("mine", 4))
		create(t, one("stuck", 20))
		p := browser.Open(t, 1400, 800)
		limited, _ := serveUI(t, "--as", user, "-n", namespace)
		p.Go(limited)
		for _, text := range []string{"You may not list and watch nodes", "only those of namespace " + namespace + " are shown", "4 / 16",
			"mine", "stuck"} {
			p.Text(text)
		}
		p.Keys("w" + kb.Enter)
		p.Text("could not be read, so the answer may be incomplete")
	})
}
