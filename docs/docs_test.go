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
	"strings"
	"testing"

	yaml "go.yaml.in/yaml/v3"

	"github.com/divvy-gpu/divvy/api/config/v1alpha1"
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
}

func TestEveryChartValueIsDocumented(t *testing.T) {
	page := read(t, "docs/configuration.md")
	var values map[string]any
	if err := yaml.Unmarshal([]byte(read(t, "charts/divvy/values.yaml")), &values); err != nil {
		t.Fatal(err)
	}
	documented := func(name string) {
		if !strings.Contains(page, "| `"+name+"` |") {
			t.Errorf("docs/configuration.md has no row for the value %s", name)
		}
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
