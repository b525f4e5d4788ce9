package kubectl

import (
	"os"
	"path/filepath"
	"testing"

	"github.com/spf13/pflag"
)

func TestName(t *testing.T) {
	path := filepath.Join(t.TempDir(), "config")
	if err := os.WriteFile(path, []byte(`{"apiVersion":"v1","kind":"Config","current-context":"here",`+
		`"clusters":[{"name":"c","cluster":{"server":"http://c"}},{"name":"d","cluster":{"server":"http://d"}}],`+
		`"contexts":[{"name":"here","context":{"cluster":"c"}},{"name":"there","context":{"cluster":"d"}}]}`), 0o600); err != nil {
		t.Fatal(err)
	}
	for name, tt := range map[string]struct {
		args []string
		want string
	}{
		"the context":                      {nil, "here"},
		"a context that is chosen":         {[]string{"--context", "there"}, "there"},
		"another cluster than the context": {[]string{"--cluster", "d"}, "here, at http://d"},
		"another server than the context":  {[]string{"--server", "http://e"}, "here, at http://e"},
	} {
		t.Run(name, func(t *testing.T) {
			c := New()
			flags := pflag.NewFlagSet("", pflag.ContinueOnError)
			c.AddFlags(flags)
			if err := flags.Parse(append(tt.args, "--kubeconfig", path)); err != nil {
				t.Fatal(err)
			}
			if got, err := c.Name(); got != tt.want || err != nil {
				t.Errorf("%q, %v; want %q", got, err, tt.want)
			}
		})
	}
	c := New()
	c.rules.ExplicitPath = filepath.Join(t.TempDir(), "missing")
	if got, err := c.Name(); err == nil {
		t.Errorf("%q without a kubeconfig", got)
	}
}
