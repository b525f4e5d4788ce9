package flags

import (
	"log/slog"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"
	"github.com/spf13/pflag"

	"github.com/divvy-gpu/divvy/internal/platform/logging"
)

func environment(values map[string]string) func(string) (string, bool) {
	return func(name string) (string, bool) { v, ok := values[name]; return v, ok }
}

// A flag goes before its variable, that before the variable of another program,
// and that before the default. An empty variable of another program says nothing.
func TestTheNearestWordWins(t *testing.T) {
	theirs := map[string]string{"units": "RESOURCE_NUMS"}
	tests := map[string]struct {
		args []string
		env  map[string]string
		want int
	}{
		"default":                      {nil, nil, 7},
		"another program's":            {nil, map[string]string{"RESOURCE_NUMS": " 1 "}, 1},
		"another program's, but empty": {nil, map[string]string{"RESOURCE_NUMS": ""}, 7},
		"own":                          {nil, map[string]string{"RESOURCE_NUMS": "1", "DIVVY_UNITS": "2"}, 2},
		"flag":                         {[]string{"--units=3"}, map[string]string{"RESOURCE_NUMS": "1", "DIVVY_UNITS": "2"}, 3},
		"flag before variables that do not parse": {[]string{"--units=3"}, map[string]string{"RESOURCE_NUMS": "x", "DIVVY_UNITS": "y"}, 3},
	}
	for name, tt := range tests {
		t.Run(name, func(t *testing.T) {
			fs := pflag.NewFlagSet("test", pflag.ContinueOnError)
			units := fs.Int("units", 7, "")
			fs.Bool("version", false, "")
			if err := fs.Parse(tt.args); err != nil {
				t.Fatal(err)
			}
			if err := FromEnvironment(fs, environment(tt.env), theirs); err != nil {
				t.Fatal(err)
			}
			if *units != tt.want {
				t.Errorf("%d, want %d", *units, tt.want)
			}
		})
	}
}

// An error names the variable that the value came from.
func TestVariablesThatDoNotParseAreNamed(t *testing.T) {
	fs := pflag.NewFlagSet("test", pflag.ContinueOnError)
	fs.Int("units", 7, "")
	fs.Bool("leader-elect", false, "")
	err := FromEnvironment(fs, environment(map[string]string{"RESOURCE_NUMS": "many", "DIVVY_LEADER_ELECT": "perhaps"}),
		map[string]string{"units": "RESOURCE_NUMS"})
	for _, want := range []string{`environment variable RESOURCE_NUMS: `, `"many"`, `environment variable DIVVY_LEADER_ELECT: `} {
		if err == nil || !strings.Contains(err.Error(), want) {
			t.Errorf("error %v lacks %s", err, want)
		}
	}
}

func TestLog(t *testing.T) {
	l := DefaultLog()
	fs := pflag.NewFlagSet("test", pflag.ContinueOnError)
	l.AddFlags(fs)
	if err := fs.Parse([]string{"--log-file=/var/log/x", "--log-level=debug"}); err != nil {
		t.Fatal(err)
	}
	got, err := l.Options()
	if err != nil {
		t.Fatal(err)
	}
	if diff := cmp.Diff(logging.Options{File: "/var/log/x", Level: slog.LevelDebug, Format: logging.Text}, got); diff != "" {
		t.Errorf("(-want +got):\n%s", diff)
	}
	_, err = Log{Level: "loud", Format: "xml"}.Options()
	want := "--log-level: log level \"loud\": must be one of error, warn, info, debug, trace\n--log-format: log format \"xml\": must be " +
		"one of text, json"
	if err == nil || err.Error() != want {
		t.Errorf("error %v, want %s", err, want)
	}
}

func TestForms(t *testing.T) {
	for address, want := range map[string]string{
		":80": "", "127.0.0.1:0": "", "[::1]:65535": "",
		"80": "must be host:port", ":http": "the port must be a number", ":65536": "the port must be a number",
		":-1": "the port must be a number",
	} {
		if err := CheckAddress(address); (err == nil) != (want == "") || err != nil && !strings.Contains(err.Error(), want) {
			t.Errorf("address %s: %v, want %q", address, err, want)
		}
	}
	for name, want := range map[string]string{
		"bitfusion.io/gpu": "", "gpu": "must be an extended resource", "a.example/b c": "name part must consist of",
		"/gpu": "prefix part must be non-empty",
	} {
		if err := CheckResource(name); (err == nil) != (want == "") || err != nil && !strings.Contains(err.Error(), want) {
			t.Errorf("resource %s: %v, want %q", name, err, want)
		}
	}
}
