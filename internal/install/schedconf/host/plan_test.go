package host

import (
	"encoding/base64"
	"encoding/json"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/divvy-gpu/divvy/internal/install/schedconf"
)

// secret stands for a private key.
const secret = "-----BEGIN EC PRIVATE KEY-----\nMHcCAQEEIIrYSSNQFaA2Hwf1duRSxKtLYX5CB04fSeQ6tF1aY/PuoAoGCCqGSM49\n-----END EC PRIVATE " +
	"KEY-----\n"

// certificate is one as far as its form goes.
const certificate = "-----BEGIN CERTIFICATE-----\nMIIB\n-----END CERTIFICATE-----\n"

func TestPlan(t *testing.T) {
	w := newWorld(t)
	e := extender(resourceA)
	e.URL, e.ServerName = "https://10.96.0.7:32765/gcushare-scheduler", "divvy-extender.divvy-system.svc"
	e.CA, e.ClientCert, e.ClientKey = []byte(certificate), []byte(certificate), []byte(secret)
	before := w.tree()
	w.disk = readOnly{}
	diff, _, err := w.host().Plan(e, false)
	must(t, err)
	w.wantTree(before)
	for _, want := range []string{
		"--- /dev/null\n+++ " + filepath.Join(w.dir, schedconf.ConfigFile), "--- " + w.manifest + "\n+++ " + w.manifest,
		"+    - --config=" + filepath.Join(w.dir, schedconf.ConfigFile), "urlPrefix: https://10.96.0.7:32765/gcushare-scheduler",
		"REDACTED-",
	} {
		if !strings.Contains(diff, want) {
			t.Errorf("the plan does not say %q:\n%s", want, diff)
		}
	}
	wantNoKey(t, diff)

	w.disk = Disk{hasty: true}
	_, err = w.host().Install(t.Context(), e, InstallOptions{})
	must(t, err)
	if diff, _, err := w.host().Plan(e, false); err != nil || diff != "" {
		t.Errorf("after it: %v\n%s", err, diff)
	}
	e.ClientKey = []byte(strings.Replace(secret, "MHc", "NHc", 1))
	diff, _, err = w.host().Plan(e, false)
	must(t, err)
	if strings.Count(diff, "REDACTED-") != 2 {
		t.Errorf("a changed key is not seen:\n%s", diff)
	}
	wantNoKey(t, diff)
	diff, notes, err := w.host().Plan(e, true)
	if err != nil || !strings.Contains(diff, "-    - --config=") || !strings.Contains(strings.Join(notes, " "), "is removed") {
		t.Errorf("of uninstalling: %v\n%s\n%v", err, diff, notes)
	}
	wantNoKey(t, diff)
	must(t, w.uninstall())
	w.wantTree(before)
}

// TestPlanTellsWhatIsInTheWay: the diff alone would be a promise.
func TestPlanTellsWhatIsInTheWay(t *testing.T) {
	for name, want := range map[string]string{
		BackupFile:           "it may be the original of GCUShare's config manager or of an administrator",
		schedconf.ConfigFile: "exists but was not written by Divvy", "": "",
	} {
		w := newWorld(t)
		if name != "" {
			w.make(filepath.Join(w.dir, name), "kind: Pod\n", 0o600)
		}
		diff, notes, err := w.host().Plan(extender(resourceA), false)
		if err != nil || diff == "" {
			t.Errorf("%s: %v, %q", name, err, diff)
		}
		if told := strings.Join(notes, " "); strings.Contains(told, "Install would reject this") != (want != "") ||
			!strings.Contains(told, want) {
			t.Errorf("%s: the notes are %s", name, told)
		}
	}
}

func wantNoKey(t *testing.T, text string) {
	t.Helper()
	for _, form := range []string{secret, base64.StdEncoding.EncodeToString([]byte(secret))} {
		// The beginning and the end are those of every PEM.
		for i := 48; i+60 <= len(form); i += 12 {
			if part := form[i : i+12]; strings.Contains(text, part) {
				t.Fatalf("a part of the key, %q, is in\n%s", part, text)
			}
		}
	}
}

// TestRedact: keys of other extenders, in whatever form they are written.
func TestRedact(t *testing.T) {
	key := base64.StdEncoding.EncodeToString([]byte(secret))
	quoted, err := json.Marshal(key)
	must(t, err)
	for name, text := range map[string]string{
		"plain":         "    tlsConfig:\n      certData: abc\n      keyData: " + key + "\n      serverName: a\n",
		"quoted":        "      keyData: \"" + key + "\"\n      serverName: a\n",
		"single quotes": "      'keyData': '" + key + "'\n      serverName: a\n",
		"folded":        "      keyData: >-\n        " + key[:40] + "\n        " + key[40:] + "\n      serverName: a\n",
		"continued":     "      keyData:\n        " + key[:40] + "\n\n        " + key[40:] + "\n      serverName: a\n",
		"in a list":     "  - keyData: " + key + "\n    serverName: a\n",
		"flow":          "    tlsConfig: {certData: abc, keyData: " + key + ", serverName: a}\n",
		"another case":  "    tlsConfig: {KEYDATA: " + key + ", serverName: a}\n",
		"JSON":          `{"tlsConfig":{"keyData":` + string(quoted) + `,"serverName":"a"}}` + "\n",
		"JSON, lines":   "{\n  \"tlsConfig\": {\n    \"keyData\": " + string(quoted) + ",\n    \"serverName\": \"a\"\n  }\n}\n",
	} {
		got := Redact(text)
		wantNoKey(t, got)
		if !strings.Contains(got, "REDACTED-") || !strings.Contains(got, "serverName") {
			t.Errorf("%s became %s", name, got)
		}
	}
	text := "a: b\n# keyData is said here\nc: keyDatabase\n"
	if got := Redact(text); got != text {
		t.Errorf("without a key it became %s", got)
	}
	if data, err := os.ReadFile("plan.go"); err != nil || Redact(string(data)) == "" {
		t.Error(err)
	}
}
