package release

import (
	"bytes"
	"cmp"
	"context"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"slices"
	"strings"

	"sigs.k8s.io/kustomize/kyaml/kio"
	"sigs.k8s.io/kustomize/kyaml/yaml"
)

// Namespace is where the manifests install Divvy, and grantSecret the Secret with
// the key that grants are signed with, which they expect there.
const (
	Namespace   = "divvy-system"
	grantSecret = "divvy-grant-key"
)

// minKubernetes is the oldest Kubernetes that the chart is for. Manifests are
// rendered for it and so hold for all.
const minKubernetes = "1.30.0"

// newerKubernetes has the files of values whose objects older ones do not have.
var newerKubernetes = map[string]string{"dra.yaml": "1.34.0", "dra-units.yaml": "1.36.0", "replace.yaml": "1.35.0"}

// Manifests are a chart rendered for people without helm.
type Manifests struct {
	// Install has everything but hooks, the namespace first.
	Install []byte
	// Before and After are what "helm uninstall" runs before and after it removes
	// what Install has.
	Before, After []byte
}

// hookAnnotation says when helm runs an object of a chart.
const hookAnnotation = "helm.sh/hook"

// Render renders the chart of a checkout with a file of values over its default
// values; with none when values is empty. name is what the commands in the
// comments call the files, without ".yaml". images are what pods run, by digest.
func Render(ctx context.Context, helm, repository, values, name string, s Stamp, images []Built) (Manifests, error) {
	args := []string{
		"template", "divvy", filepath.Join(repository, "charts", "divvy"), "--namespace", Namespace, "--kube-version",
		cmp.Or(newerKubernetes[filepath.Base(values)], minKubernetes),
		"--set-string", "image.tag=" + s.Version,
		// A key in a file that everybody can read is none, and one that is made anew by
		// each rendering would make the grants of running pods void.
		"--set-string", "grantKey.existingSecret=" + grantSecret,
	}
	from := "the chart's default values"
	if values != "" {
		args = append(args, "--values", values)
		from = filepath.Base(values) + " of the examples"
	}
	out, err := output(ctx, helm, args...)
	if err != nil {
		return Manifests{}, fmt.Errorf("render the chart with %s: %w", from, err)
	}
	for _, i := range images {
		plain := regexp.MustCompile(regexp.QuoteMeta(i.Name+":"+i.Tag) + `\b`)
		out = plain.ReplaceAll(out, []byte(i.Reference()))
	}
	objects, err := (&kio.ByteReader{Reader: bytes.NewReader(out), OmitReaderAnnotations: true}).Read()
	if err != nil {
		return Manifests{}, fmt.Errorf("read the chart rendered with %s: %w", from, err)
	}
	namespace, err := namespaceObject()
	if err != nil {
		return Manifests{}, err
	}
	install, before, after := []*yaml.RNode{namespace}, []*yaml.RNode(nil), []*yaml.RNode{namespace}
	for _, o := range objects {
		hooks := strings.Split(o.GetAnnotations()[hookAnnotation], ",")
		if err := withoutHelm(o, s.Version); err != nil {
			return Manifests{}, fmt.Errorf("read the chart rendered with %s: %w", from, err)
		}
		if hooks[0] == "" {
			install = append(install, o)
		}
		if slices.Contains(hooks, "pre-delete") {
			before = append(before, o)
		}
		if slices.Contains(hooks, "post-delete") {
			after = append(after, o)
		}
	}
	m := Manifests{}
	text, err := write(install)
	if err != nil {
		return Manifests{}, err
	}
	key, scheduler := bytes.Contains(text, []byte("secretName: "+grantSecret)),
		bytes.Contains(text, []byte("/kube-scheduler:v"+minKubernetes))
	m.Install = append(installHeader(s, name, from, key, scheduler), text...)
	if text, err = write(before); err != nil {
		return Manifests{}, err
	}
	m.Before = append(uninstallHeader(s, name, "before"), text...)
	if text, err = write(after); err != nil {
		return Manifests{}, err
	}
	m.After = append(uninstallHeader(s, name, "after"), text...)
	return m, nil
}

// withoutHelm takes away what an object that helm has not installed must not say,
// and has it say the version of the release, as the packed chart does.
func withoutHelm(o *yaml.RNode, version string) error {
	for name := range o.GetAnnotations() {
		if strings.HasPrefix(name, "helm.sh/") {
			if err := o.PipeE(yaml.ClearAnnotation(name)); err != nil {
				return err
			}
		}
	}
	if err := yaml.ClearEmptyAnnotations(o); err != nil {
		return err
	}
	for _, fields := range [][]string{{"metadata", "labels"}, {"spec", "template", "metadata", "labels"}} {
		labels, err := o.Pipe(yaml.Lookup(fields...))
		if err != nil || labels == nil {
			continue
		}
		for _, name := range []string{"helm.sh/chart", "app.kubernetes.io/managed-by"} {
			if err := labels.PipeE(yaml.Clear(name)); err != nil {
				return err
			}
		}
		const label = "app.kubernetes.io/version"
		if labels.Field(label) != nil {
			if err := labels.PipeE(yaml.SetField(label, yaml.NewStringRNode(version))); err != nil {
				return err
			}
		}
	}
	return nil
}

func namespaceObject() (*yaml.RNode, error) {
	// The node daemon is privileged.
	o, err := yaml.Parse("apiVersion: v1\nkind: Namespace\nmetadata:\n  name: " + Namespace + "\n  labels:\n" +
		"    app.kubernetes.io/part-of: divvy\n    pod-security.kubernetes.io/enforce: privileged\n")
	if err != nil {
		return nil, fmt.Errorf("write the namespace: %w", err)
	}
	return o, nil
}

func write(objects []*yaml.RNode) ([]byte, error) {
	var b bytes.Buffer
	if err := (kio.ByteWriter{Writer: &b}).Write(objects); err != nil {
		return nil, fmt.Errorf("write a manifest: %w", err)
	}
	return b.Bytes(), nil
}

func installHeader(s Stamp, name, from string, key, scheduler bool) []byte {
	var b strings.Builder
	fmt.Fprintf(&b, "# Divvy %s, rendered with %s. For a cluster without helm:\n#\n#   kubectl apply -f %s.yaml\n", s.Version, from, name)
	if key {
		fmt.Fprintf(&b, "#   kubectl create secret generic %s -n %s --from-literal=key=\"$(head -c 48 /dev/urandom | base64 | tr -d "+
			"'\\n')\"\n#\n"+
			"# The second command makes the key that grants of memory are signed with. Pods wait until\n"+
			"# it is there. It is made once: an upgrade is the first command alone.\n", grantSecret, Namespace)
	}
	if scheduler {
		b.WriteString("#\n# The image of kube-scheduler has to be of the cluster's version, which \"kubectl version\" shows:\n# write " +
			"that in the place of v" + minKubernetes + ".\n")
	}
	fmt.Fprintf(&b, "#\n# %s-uninstall.yaml says how to remove it.\n---\n", name)
	return []byte(b.String())
}

func uninstallHeader(s Stamp, name, when string) []byte {
	var b strings.Builder
	fmt.Fprintf(&b, "# What removes Divvy %s without helm, part \"%s\". All of it:\n#\n", s.Version, when)
	for _, line := range uninstallCommands(name) {
		fmt.Fprintf(&b, "#   %s\n", line)
	}
	b.WriteString("---\n")
	return []byte(b.String())
}

// uninstallCommands are what a person without helm types to remove what the files
// of a manifest installed.
func uninstallCommands(name string) []string {
	return []string{
		fmt.Sprintf("kubectl apply -f %s-uninstall.yaml", name),
		fmt.Sprintf("kubectl wait -n %s --for=condition=complete --timeout=5m job/divvy-uninstall", Namespace),
		fmt.Sprintf("kubectl delete --ignore-not-found -f %[1]s-uninstall.yaml -f %[1]s.yaml", name),
		fmt.Sprintf("kubectl apply -f %s-uninstall-after.yaml", name),
		fmt.Sprintf("kubectl wait -n %s --for=condition=complete --timeout=10m job/divvy-uninstall-after", Namespace),
		fmt.Sprintf("kubectl delete -f %s-uninstall-after.yaml", name),
	}
}

func output(ctx context.Context, program string, args ...string) ([]byte, error) {
	cmd := exec.CommandContext(ctx, program, args...)
	var stderr bytes.Buffer
	cmd.Stderr = &stderr
	out, err := cmd.Output()
	if err != nil {
		return nil, fmt.Errorf("%s %s: %w: %s", filepath.Base(program), args[0], err, strings.TrimSpace(stderr.String()))
	}
	return out, nil
}

// writeManifests writes the chart rendered with its default values and with each of
// the examples, and the kustomize base of each.
func writeManifests(ctx context.Context, o Options, images []Built) error {
	examples, err := filepath.Glob(filepath.Join(o.Repository, "examples", "values", "*.yaml"))
	if err != nil {
		return fmt.Errorf("look for examples of values: %w", err)
	}
	for _, values := range append([]string{""}, examples...) {
		name, base := "divvy", "base"
		if values != "" {
			base = strings.TrimSuffix(filepath.Base(values), ".yaml")
			name = "divvy-" + base
		}
		m, err := Render(ctx, o.Helm, o.Repository, values, name, o.Stamp, images)
		if err != nil {
			return err
		}
		kustomization, err := os.ReadFile(filepath.Join(o.Repository, "deploy", "kustomize", "base", "kustomization.yaml"))
		if err != nil {
			return fmt.Errorf("read the kustomize base: %w", err)
		}
		for file, content := range map[string][]byte{
			name + ".yaml":                                         m.Install,
			name + "-uninstall.yaml":                               m.Before,
			name + "-uninstall-after.yaml":                         m.After,
			filepath.Join("kustomize", base, "divvy.yaml"):         m.Install,
			filepath.Join("kustomize", base, "kustomization.yaml"): kustomization,
		} {
			if err := writeFile(filepath.Join(o.Dir, file), content); err != nil {
				return err
			}
		}
	}
	overlays := filepath.Join("kustomize", "overlays")
	if err := os.CopyFS(filepath.Join(o.Dir, overlays), os.DirFS(filepath.Join(o.Repository, "deploy", overlays))); err != nil {
		return fmt.Errorf("copy kustomize overlays: %w", err)
	}
	return nil
}

func writeFile(path string, content []byte) error {
	err := os.MkdirAll(filepath.Dir(path), 0o755)
	if err == nil {
		err = os.WriteFile(path, content, 0o644)
	}
	if err != nil {
		return fmt.Errorf("write a file of the release: %w", err)
	}
	return nil
}

var errNoHelm = errors.New("the release needs helm: run make release, which builds it")
