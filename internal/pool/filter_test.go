package pool

import (
	"slices"
	"strings"
	"testing"
)

func TestFiltersOfTheGuide(t *testing.T) {
	for value, want := range map[string][]string{
		"":                            nil,
		" \t\n":                       nil,
		"server.addr=10.117.32.177":   {"server.addr=10.117.32.177"},
		"server.addr=2001:db8::1":     {"server.addr=2001:db8::1"},
		"server.hostname=bf-server":   {"server.hostname=bf-server"},
		"server.has-rdma=true":        {"server.has-rdma=true"},
		"server.cuda-version=11.2":    {"server.cuda-version=11.2"},
		"device.id=0":                 {"device.id=0"},
		"device.name=Tesla":           {"device.name=Tesla"},
		"device.phy-memory=16160":     {"device.phy-memory=16160"},
		`device.name="Tesla T4"`:      {"device.name=Tesla T4"}, // W13: a value with blanks
		` device.name='A100 80GB'  `:  {"device.name=A100 80GB"},
		`server.hostname="bf-server"`: {"server.hostname=bf-server"},
		// The guide spells one key wrong; the right one is given to the client.
		"server.dirver-version=460.73.01": {"server.driver-version=460.73.01"},
		"server.driver-version=460.73.01": {"server.driver-version=460.73.01"},
		// The guide's example of several, one key twice.
		"server.hostname=bf-server server.addr=192.168.1.1 server.hostname=bf-server2": {
			"server.hostname=bf-server", "server.addr=192.168.1.1", "server.hostname=bf-server2",
		},
		"device.id=0\n\tdevice.id=1": {"device.id=0", "device.id=1"},
	} {
		got, err := ParseFilter(value)
		if err != nil || !slices.Equal(got, want) {
			t.Errorf("%q: %q and %v, want %q", value, got, err, want)
		}
	}
}

// Guards W13 and V5.
func TestFiltersThatAreRefused(t *testing.T) {
	for value, says := range map[string]string{
		"a=b;id": `"a=b;id" has an unknown key; valid keys are server.addr, server.hostname, server.has-rdma, ` +
			`server.cuda-version, server.driver-version, device.id, device.name, device.phy-memory`,
		"bf-server":                        `"bf-server" is not a filter; write key=value, such as server.hostname=bf-server`,
		"=":                                "has an unknown key; valid keys are",
		"server.addr=":                     "server.addr: the value \"\" is not accepted; write an IP address, such as 10.117.32.177",
		"server.addr=1.2.3":                "write an IP address",
		"server.addr=fe80::1%eth0":         "write an IP address",
		"server.hostname=bf;id":            `server.hostname: the value "bf;id" is not accepted; write a host name`,
		"server.hostname=$(id)":            "write a host name",
		"server.hostname=-x":               "write a host name",
		"server.hostname=`id`":             "write a host name",
		"server.has-rdma=yes":              "write true or false",
		"server.cuda-version=11.":          "write a version of digits and dots",
		"server.dirver-version=460|id":     "server.driver-version: the value",
		"device.id=-1":                     "write a number, 0 or more",
		"device.name=a'b":                  "write a name",
		`device.name="Tesla`:               "the quote of",
		`device.name="Tesla"x`:             "no blank after the quotes of",
		`device.name="a" b`:                `"b" is not a filter`,
		`device.name="a;b"`:                "write a name",
		`device.name="a` + "\n" + `b"`:     "write a name",
		"device.phy-memory=0":              "write a number of MB",
		"device.phy-memory=16Gi":           "write a number of MB",
		"Server.Addr=1.1.1.1":              "has an unknown key; valid keys are",
		strings.Repeat("device.id=0 ", 65): "65 filters; write at most 64",
	} {
		got, err := ParseFilter(value)
		if err == nil || !strings.Contains(err.Error(), says) || !strings.HasPrefix(err.Error(), "annotation "+FilterAnnotation+": ") ||
			got != nil {
			t.Errorf("%q: %q and %v, want %q", value, got, err, says)
		}
	}
	_, err := ParseFilter("a=1 device.id=x b")
	if n := strings.Count(err.Error(), "annotation "); n != 3 {
		t.Errorf("%d problems told, want 3: %v", n, err)
	}
	if _, err := ParseFilter("x=" + strings.Repeat("y", 1<<17)); len(err.Error()) > 1000 {
		t.Errorf("the error repeats all of the value: %d bytes", len(err.Error()))
	}
}

func FuzzParseFilter(f *testing.F) {
	for _, seed := range []string{
		"", "server.addr=10.117.32.177", "server.hostname=bf  server.addr=1.1.1.1", `device.name="Tesla T4" device.id=0`,
		"server.dirver-version=460.73.01",
		"a=b;id", "server.hostname=$(id)", `device.name='`, `device.name=""`, "device.name=\"a\x00b\"", "=", " = ",
		"server.has-rdma=true\xff",
	} {
		f.Add(seed)
	}
	f.Fuzz(func(t *testing.T, value string) {
		filters, err := ParseFilter(value)
		if err != nil {
			if filters != nil || len(err.Error()) > 1<<16 {
				t.Errorf("%d filters beside an error of %d bytes", len(filters), len(err.Error()))
			}
			return
		}
		if len(filters) > maxFilters {
			t.Errorf("%d filters", len(filters))
		}
		for _, filter := range filters {
			if strings.ContainsAny(filter, "\"'`$\\;|&<>(){}[]*?!~#\n\r\t\x00") {
				t.Errorf("%q has a character that means something to a shell", filter)
			}
			key, v, ok := strings.Cut(filter, "=")
			if !ok || v == "" || !slices.ContainsFunc(filterKeys, func(k filterKey) bool { return k.name == key }) {
				t.Errorf("%q is not a filter", filter)
			}
			// What was read is read again.
			again, err := ParseFilter(key + `="` + v + `"`)
			if err != nil || !slices.Equal(again, []string{filter}) {
				t.Errorf("%q is read as %q again, and %v", filter, again, err)
			}
		}
	})
}

// Guards V5: a mode that is mistyped is no silent "none".
func TestModes(t *testing.T) {
	for mode, values := range map[Mode][]string{
		ModeAll:       {"all", "ALL", "y", "Yes", "true", "On", " all "},
		ModeInjection: {"injection", "Injection"},
		ModeNone:      {"none", "n", "No", "FALSE", "off", "", " "},
	} {
		for _, value := range values {
			if got, err := ParseMode(value); err != nil || got != mode {
				t.Errorf("%q: %q and %v, want %q", value, got, err, mode)
			}
		}
	}
	for _, value := range []string{"injecton", "al", "1", "all,injection", "\x00", strings.Repeat("x", 1<<17)} {
		_, err := ParseMode(value)
		if err == nil {
			t.Errorf("%q is accepted", short(value))
			continue
		}
		for _, says := range []string{ModeAnnotation, "all (also y, yes, true, on)", "injection", "none (also n, no, false, off)"} {
			if !strings.Contains(err.Error(), says) || len(err.Error()) > 400 {
				t.Errorf("%q: %v", short(value), err)
			}
		}
	}
}
