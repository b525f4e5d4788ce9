// Package docs holds no code but tests: they keep the pages in step with the
// chart and the configuration types, and their links alive.
package docs

import (
	"fmt"
	"io/fs"
	"net/url"
	"os"
	"path/filepath"
	"reflect"
	"regexp"
	"slices"
	"strconv"
	"strings"
	"testing"

	yaml "go.yaml.in/yaml/v3"

	"github.com/divvy-gpu/divvy/api/config/v1alpha1"
	"github.com/divvy-gpu/divvy/internal/core/fragmentation"
	"github.com/divvy-gpu/divvy/internal/platform/metrics"
)

const root = ".."

func read(t *testing.T, path string) string {
	t.Helper()
	data, err := os.ReadFile(filepath.Join(root, path))
	if err != nil {
		t.Fatal(err)
	}
	return string(data)
}

// freeForm are values whose content is Kubernetes' or the administrator's; the
// page names them as a whole.
var freeForm = []string{
	"node.nodeSelector", "node.tolerations", "node.affinity", "node.libraries", "node.extraEnv", "node.resources", "node.podAnnotations",
	"node.vendors", "node.configs",
	"extender.nodeSelector", "extender.tolerations", "extender.affinity", "extender.extraEnv", "extender.resources",
	"extender.podAnnotations", "image.pullSecrets",
	"scheduler.profile", "scheduler.nodeSelector", "scheduler.tolerations", "scheduler.affinity", "scheduler.resources",
	"scheduler.podAnnotations",
	"pool.webhook.nodeSelector", "pool.webhook.tolerations", "pool.webhook.affinity", "pool.webhook.resources",
	"pool.webhook.podAnnotations",
	"pool.webhook.extraEnv", "pool.node.nodeSelector", "pool.node.tolerations", "pool.node.resources", "pool.node.podAnnotations",
	"pool.node.extraEnv",
	"uninstall.resources",
}

func TestEveryChartValueIsDocumented(t *testing.T) {
	page := read(t, "docs/configuration.md")
	var values map[string]any
	if err := yaml.Unmarshal([]byte(read(t, "charts/divvy/values.yaml")), &values); err != nil {
		t.Fatal(err)
	}
	reference := read(t, "docs/reference/values.md")
	// A value is told on the page that explains, or in the reference, there
	// perhaps together with others of the same kind: pod resources as a whole.
	documented := func(name string) {
		for told := name; ; {
			if strings.Contains(page, "| `"+told+"` |") || strings.Contains(reference, "| `"+told+"` |") {
				return
			}
			i := strings.LastIndex(told, ".")
			if i < 0 || !strings.Contains(told[:i], ".") {
				break
			}
			told = told[:i]
		}
		t.Errorf("neither docs/configuration.md nor docs/reference/values.md has a row for the value %s; run \"make generate\"", name)
	}
	var walk func(prefix string, value any)
	walk = func(prefix string, value any) {
		switch v := value.(type) {
		case map[string]any:
			if slices.Contains(freeForm, prefix) {
				documented(prefix)
				return
			}
			for key, inner := range v {
				walk(strings.TrimPrefix(prefix+"."+key, "."), inner)
			}
		case []any:
			documented(prefix)
			for _, item := range v {
				if _, ok := item.(map[string]any); ok && !slices.Contains(freeForm, prefix) {
					walk(prefix+"[]", item)
				}
			}
		default:
			documented(prefix)
		}
	}
	walk("", values)
}

func TestEveryConfigurationKeyIsDocumented(t *testing.T) {
	_, section, ok := strings.Cut(read(t, "docs/configuration.md"), "## The configuration file of divvy-node")
	if !ok {
		t.Fatal("docs/configuration.md has no section on the configuration file")
	}
	for prefix, typ := range map[string]reflect.Type{
		"":             reflect.TypeFor[v1alpha1.NodeConfig](),
		"resources[].": reflect.TypeFor[v1alpha1.Resource](),
		"usage.":       reflect.TypeFor[v1alpha1.Usage](),
	} {
		for field := range typ.Fields() {
			key := prefix + field.Tag.Get("yaml")
			if !strings.Contains(section, "| `"+key+"` |") {
				t.Errorf("docs/configuration.md has no row for the key %s", key)
			}
		}
	}
}

var link = regexp.MustCompile(`\]\(([^)\s]+)\)`)

func TestLinksLeadSomewhere(t *testing.T) {
	pages := 0
	err := filepath.WalkDir(root, func(path string, d fs.DirEntry, err error) error {
		if err != nil {
			return err
		}
		if d.IsDir() && slices.Contains([]string{".git", "bin", "dist"}, d.Name()) {
			return filepath.SkipDir
		}
		if filepath.Ext(path) != ".md" {
			return nil
		}
		pages++
		data, err := os.ReadFile(path)
		if err != nil {
			return err
		}
		for _, m := range link.FindAllStringSubmatch(string(data), -1) {
			if err := follow(path, m[1]); err != nil {
				t.Errorf("%s: link %s: %v", strings.TrimPrefix(path, root+"/"), m[1], err)
			}
		}
		return nil
	})
	if err != nil {
		t.Fatal(err)
	}
	if pages < 5 {
		t.Errorf("only %d pages were found", pages)
	}
}

// follow checks a link inside the repository, with the heading that it names.
func follow(from, target string) error {
	u, err := url.Parse(target)
	if err != nil || u.Scheme != "" {
		return err
	}
	path := from
	if u.Path != "" {
		path = filepath.Join(filepath.Dir(from), filepath.FromSlash(u.Path))
	}
	data, err := os.ReadFile(path)
	if err != nil {
		if info, statErr := os.Stat(path); statErr == nil && info.IsDir() {
			return nil
		}
		return err
	}
	if u.Fragment == "" {
		return nil
	}
	for line := range strings.Lines(string(data)) {
		if heading := strings.TrimLeft(line, "#"); heading != line && anchor(heading) == u.Fragment {
			return nil
		}
	}
	return fmt.Errorf("no heading %q", u.Fragment)
}

var notInAnchors = regexp.MustCompile(`[^\p{L}\p{N} _-]`)

// anchor is the name that a heading has in links.
func anchor(heading string) string {
	text := notInAnchors.ReplaceAllString(strings.ToLower(strings.TrimSpace(heading)), "")
	return strings.ReplaceAll(text, " ", "-")
}

// guard is a test: its package, its function and perhaps the name of a subtest as
// the go command prints it.
var guard = regexp.MustCompile("`([a-z0-9/]+)\\.((?:Test|Benchmark)[A-Za-z0-9]+)(?:/([^`]+))?`")

// TestGuardsOfOldFaultsExist: docs/compatibility.md promises for each fault of
// the programs that Divvy takes the place of that a test would fail if it came
// back, and docs/gpu-operator.md that each way to set up a node has a test.
func TestGuardsOfOldFaultsExist(t *testing.T) {
	page := read(t, "docs/compatibility.md")
	operator := read(t, "docs/gpu-operator.md")
	sources := map[string]string{}
	source := func(pkg string) string {
		if text, ok := sources[pkg]; ok {
			return text
		}
		files, err := filepath.Glob(filepath.Join(root, filepath.FromSlash(pkg), "*_test.go"))
		if err != nil || len(files) == 0 {
			t.Errorf("%s has no tests: %v", pkg, err)
		}
		var all strings.Builder
		for _, f := range files {
			data, err := os.ReadFile(f)
			if err != nil {
				t.Fatal(err)
			}
			all.Write(data)
		}
		sources[pkg] = all.String()
		return sources[pkg]
	}
	// The suite that every vendor passes is no test file.
	suite := read(t, "internal/node/backend/backendtest/backendtest.go")
	for _, m := range guard.FindAllStringSubmatch(page+operator, -1) {
		if !strings.Contains(source(m[1]), "\nfunc "+m[2]+"(") {
			t.Errorf("there is no %s in %s", m[2], m[1])
		}
		for part := range strings.SplitSeq(strings.ReplaceAll(m[3], "_", " "), "/") {
			if name := strconv.Quote(part); part != "" && !strings.Contains(source(m[1])+suite, name) {
				t.Errorf("there is no %s in %s.%s", name, m[1], m[2])
			}
		}
	}
	for heading, rows := range map[string][]string{
		"### NVIDIA's device plugin":   numbers(21),
		"### Iluvatar's device plugin": append(numbers(26), "12b"),
		"### Bitfusion on Kubernetes": slices.Concat(lettered("W", 35), lettered("S", 7), lettered("V", 5),
			lettered("D", 10), lettered("P", 15)),
		"### What a better plugin should be able to show": numbers(12),
	} {
		_, section, found := strings.Cut(page, heading+"\n")
		if !found {
			t.Errorf("docs/compatibility.md has no section %q", heading)
			continue
		}
		section, _, _ = strings.Cut(section, "\n##")
		for _, number := range rows {
			_, row, found := strings.Cut(section, "\n| "+number+" |")
			if row, _, _ = strings.Cut(row, "\n"); !found || !guard.MatchString(row) {
				t.Errorf("%s: no test guards number %s", heading, number)
			}
		}
	}
}

// numbers are 1 to n, as text.
func numbers(n int) []string {
	var out []string
	for i := range n {
		out = append(out, strconv.Itoa(i+1))
	}
	return out
}

// lettered are numbers with a letter before them: W1, W2 and so on.
func lettered(letter string, n int) []string {
	out := numbers(n)
	for i := range out {
		out[i] = letter + out[i]
	}
	return out
}

// TestExamplesAskForWhatTheValuesOffer, and examples/README.md lists them all.
func TestExamplesAskForWhatTheValuesOffer(t *testing.T) {
	page := read(t, "examples/README.md")
	files := func(pattern string) []string {
		found, err := filepath.Glob(filepath.Join(root, filepath.FromSlash(pattern)))
		if err != nil || len(found) == 0 {
			t.Fatalf("%s: no files, %v", pattern, err)
		}
		for _, f := range found {
			name, err := filepath.Rel(filepath.Join(root, "examples"), f)
			if err != nil {
				t.Fatal(err)
			}
			if listed := strings.Contains(page, "("+filepath.ToSlash(name)+")"); !listed && !fourPods.MatchString(name) {
				t.Errorf("examples/README.md does not list %s", name)
			}
		}
		return found
	}
	offered, mixed := map[string]bool{}, false
	for _, f := range files("examples/values/*.yaml") {
		var values struct {
			SharedResources []struct{ Name string } `yaml:"sharedResources"`
			Node            struct {
				Vendors struct {
					NVIDIA struct {
						MIGStrategy string `yaml:"migStrategy"`
					} `yaml:"nvidia"`
				} `yaml:"vendors"`
			} `yaml:"node"`
		}
		if err := yaml.Unmarshal([]byte(read(t, strings.TrimPrefix(f, root+"/"))), &values); err != nil {
			t.Fatal(err)
		}
		for _, r := range values.SharedResources {
			offered[r.Name] = true
		}
		mixed = mixed || values.Node.Vendors.NVIDIA.MIGStrategy == "mixed"
	}
	files("examples/dra/*.yaml") // a class is every vendor's, whatever the values
	for _, f := range files("examples/*.yaml") {
		asked := asks.FindAllStringSubmatch(read(t, strings.TrimPrefix(f, root+"/")), -1)
		if len(asked) == 0 {
			t.Errorf("%s asks for nothing", f)
		}
		for _, m := range asked {
			if !offered[m[1]] && !(mixed && strings.HasPrefix(m[1], "nvidia.com/mig-")) {
				t.Errorf("%s asks for %s, which no file in examples/values offers", f, m[1])
			}
		}
	}
}

var (
	asks = regexp.MustCompile(`(?m)^ +([a-z]+\.com/[0-9a-z.-]+): [0-9]+$`)
	// fourPods are listed by the first and the last.
	fourPods = regexp.MustCompile(`^gcushare-pod-[23]\.yaml$`)
)

// causeInCode is a cause of ill health: a constant, or an entry of the list of
// Iluvatar's bits.
var causeInCode = regexp.MustCompile(`(?m)^\s*(?:const )?(?:[cC]ause[A-Z]\w* *=|[0-9]+:) "([a-z-]+)",?(?: *//.*)?$`)

// TestEveryCauseIsDocumented: a cause that nobody knows can neither be ignored nor
// heeded.
func TestEveryCauseIsDocumented(t *testing.T) {
	page := read(t, "docs/health.md")
	found := 0
	for _, pattern := range []string{"internal/core/accel/*.go", "internal/node/backend/*/*.go"} {
		files, err := filepath.Glob(filepath.Join(root, filepath.FromSlash(pattern)))
		if err != nil {
			t.Fatal(err)
		}
		for _, f := range files {
			for _, m := range causeInCode.FindAllStringSubmatch(read(t, strings.TrimPrefix(f, root+"/")), -1) {
				found++
				if !strings.Contains(page, "| `"+m[1]+"` |") {
					t.Errorf("docs/health.md has no row for the cause %s of %s", m[1], f)
				}
			}
		}
	}
	if found < 10 {
		t.Errorf("only %d causes were found", found)
	}
}

var metricInText = regexp.MustCompile(`\bdivvy_[a-z]+(?:_[a-z]+)+\b`)

// TestMetricsOnPagesExist: pages, rules and dashboards name metrics that programs
// show.
func TestMetricsOnPagesExist(t *testing.T) {
	names := map[string]bool{}
	for _, m := range metrics.All() {
		names[m.Name] = true
		if m.Type == metrics.Histogram {
			names[m.Name+"_bucket"], names[m.Name+"_sum"], names[m.Name+"_count"] = true, true, true
		}
	}
	found := 0
	for _, pattern := range []string{"docs/*.md", "docs/design/*.md", "charts/divvy/files/*", "charts/divvy/templates/*"} {
		files, err := filepath.Glob(filepath.Join(root, filepath.FromSlash(pattern)))
		if err != nil {
			t.Fatal(err)
		}
		for _, f := range files {
			for _, name := range metricInText.FindAllString(read(t, strings.TrimPrefix(f, root+"/")), -1) {
				found++
				if !names[name] {
					t.Errorf("%s names %s, which no program shows", f, name)
				}
			}
		}
	}
	if found < 10 {
		t.Errorf("only %d metrics were found", found)
	}
}

// TestNamesOfGuidesHaveARow: what a guide of the former programs names has a row in
// docs/migrating.md that says what it is with Divvy.
func TestNamesOfGuidesHaveARow(t *testing.T) {
	page := read(t, "docs/migrating.md")
	var guides []map[string]any
	if err := yaml.Unmarshal([]byte(read(t, "docs/testdata/guide-names.yaml")), &guides); err != nil {
		t.Fatal(err)
	}
	if len(guides) < 4 {
		t.Fatalf("%d guides", len(guides))
	}
	for _, guide := range guides {
		_, section, found := strings.Cut(page, fmt.Sprintf("\n## %s\n", guide["section"]))
		if !found {
			t.Errorf("docs/migrating.md has no section %q", guide["section"])
			continue
		}
		section, _, _ = strings.Cut(section, "\n## ")
		answered := map[string]bool{}
		for _, row := range tableRow.FindAllStringSubmatch(section, -1) {
			for _, name := range code.FindAllStringSubmatch(row[1], -1) {
				answered[name[1]] = strings.TrimSpace(row[2]) != ""
			}
		}
		for kind, names := range guide {
			if kind == "section" {
				continue
			}
			for _, name := range names.([]any) {
				if !answered[name.(string)] {
					t.Errorf("docs/migrating.md, section %q, has no row for %q of the guide's %s", guide["section"], name, kind)
				}
			}
		}
	}
}

var (
	// tableRow is the first two cells of a row.
	tableRow = regexp.MustCompile(`(?m)^\| ([^|]+) \| ([^|]*)`)
	code     = regexp.MustCompile("`([^`]+)`")
)

// TestSeveralDevicesAreInTheReadmes: a pod that requests memory may have several
// devices, which the READMEs denied.
func TestSeveralDevicesAreInTheReadmes(t *testing.T) {
	for _, page := range []string{"README.md", "README.zh.md"} {
		text := read(t, page)
		if n := strings.Count(text, "`divvy.dev/devices`"); n < 2 || !strings.Contains(text, "(docs/devices.md)") {
			t.Errorf("%s names divvy.dev/devices %d times; want it where a pod's containers share a device, and among the limits, with a "+
				"link to docs/devices.md", page, n)
		}
	}
}

// TestPlatformsAreThoseOfTheLab: docs/platforms.md calls "run" what the lab runs.
func TestPlatformsAreThoseOfTheLab(t *testing.T) {
	page, modules := read(t, "docs/platforms.md"), read(t, "lab/components/go.mod")
	for module, row := range map[string]string{
		"k8s.io/kubernetes":                   "| %s | **run** |",
		"github.com/containerd/containerd/v2": "| containerd %s with runc ",
		"github.com/opencontainers/runc":      " with runc %s | **run**",
	} {
		version := regexp.MustCompile(`(?m)^\s*` + regexp.QuoteMeta(module) + ` v(\S+)$`).FindStringSubmatch(modules)
		if version == nil {
			t.Errorf("lab/components/go.mod does not require %s", module)
		} else if want := fmt.Sprintf(row, version[1]); !strings.Contains(page, want) {
			t.Errorf("docs/platforms.md does not have %q; the lab runs %s %s", want, module, version[1])
		}
	}
}

func TestEveryPageIsListed(t *testing.T) {
	for list, pattern := range map[string]string{"docs/README.md": "docs/*.md", "docs/design/README.md": "docs/design/*.md"} {
		text := read(t, list)
		pages, err := filepath.Glob(filepath.Join(root, filepath.FromSlash(pattern)))
		if err != nil {
			t.Fatal(err)
		}
		for _, page := range pages {
			if name := filepath.Base(page); name != "README.md" && !strings.Contains(text, "("+name+")") {
				t.Errorf("%s does not list %s", list, name)
			}
		}
	}
}

var untilPods = regexp.MustCompile(`(?i)until ([0-9]+) (?:pods|of them) (?:are|were|have)\b`)

// TestPagesKnowFromWhenOnThePolicyLearned: from how many pods on the policy
// fragmentation differs from binpack is one constant, which pages repeat.
func TestPagesKnowFromWhenOnThePolicyLearned(t *testing.T) {
	found := 0
	for _, pattern := range []string{"docs/*.md", "docs/design/*.md", "examples/values/*.yaml", "charts/divvy/values.yaml"} {
		files, err := filepath.Glob(filepath.Join(root, filepath.FromSlash(pattern)))
		if err != nil {
			t.Fatal(err)
		}
		for _, f := range files {
			for _, match := range untilPods.FindAllStringSubmatch(read(t, strings.TrimPrefix(f, root+"/")), -1) {
				if found++; match[1] != strconv.Itoa(fragmentation.MinPods) {
					t.Errorf("%s: %q, and it is %d", f, match[0], fragmentation.MinPods)
				}
			}
		}
	}
	if found < 3 {
		t.Errorf("only %d pages say so", found)
	}
}
