package deptest

import (
	"cmp"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"os/exec"
	"slices"
	"strings"
	"testing"

	gocmp "github.com/google/go-cmp/cmp"
)

const module = "github.com/divvy-gpu/divvy"

// A rule limits what packages may import. Patterns are paths below the module
// ("internal/core"), or full import paths ("k8s.io/client-go"); "/..." at the
// end stands for the package and all below it. "std" is the standard library.
type rule struct {
	// packages are those that the rule speaks of; each pattern must match one.
	packages []string
	// except are packages that the rule does not speak of although packages
	// matches them.
	except []string
	// only, when set, lists everything that they may import directly.
	only []string
	// never lists what they may not depend on, directly or through others, and
	// notThemselves what they may not import directly.
	never, notThemselves []string
	// why is printed with a violation.
	why string
}

var rules = []rule{
	{
		packages: []string{"internal/core/..."},
		except:   []string{"internal/core/fragmentation"},
		only:     []string{"std", "internal/core/..."},
		why: "the core decides who gets which device; without clients, clocks and logging it can be tabled, fuzzed and " +
			"benchmarked alone, and every program can use it",
	},
	{
		packages: []string{"internal/core/fragmentation"},
		only:     []string{"std", "internal/core/...", "gonum.org/v1/gonum/mat", "gonum.org/v1/gonum/optimize/convex/lp"},
		why:      "this part of the core solves a linear program, and a simplex of its own would be worse; else as above",
	},
	{
		packages:      []string{"internal/core/..."},
		except:        []string{"internal/core/fragmentation"}, // gonum imports more
		never:         []string{"net", "os/exec", "log", "log/slog"},
		notThemselves: []string{"os"},
		why:           "the standard library has clients and loggers as well; the core uses none",
	},
	{
		packages: []string{"internal/node/alloc"},
		only:     []string{"std", "internal/core/..."},
		never:    []string{"net", "os", "os/exec", "log", "log/slog", "internal/core/ledger"},

		notThemselves: []string{"sync"},
		why: "what a node offers and which devices a container gets is decided on values; without clients, files, logging and locks a " +
			"model can play a million steps of it",
	},
	{
		packages: []string{"internal/node/state"},
		never:    []string{"internal/node/backend/...", "internal/node/deviceplugin", "k8s.io/..."},
		why:      "state files keep values of the engine and know nothing of vendors and kubelet",
	},
	{
		packages: []string{"internal/node/backend/..."},
		never: []string{
			"internal/core/ledger", "internal/core/place", "internal/core/sharing", "internal/node/agent", "internal/node/alloc",
			"internal/node/deviceplugin", "internal/node/nodeconfig", "internal/node/podresources", "internal/node/state", "k8s.io/...",
		},
		why: "a vendor is discovery, health and what a container needs; it knows nothing of sharing, kubelet or scheduling, " +
			"so a new vendor is one package",
	},
	{
		packages: []string{"internal/node/cgroup", "internal/node/usage"},
		only:     []string{"std", "internal/core/accel", "internal/core/wire", "internal/node/backend", "internal/node/cgroup"},
		never:    []string{"net/http", "k8s.io/client-go/..."},
		why: "what containers use is found from the vendors' libraries, the kernel and what the caller knows of pods; without an API " +
			"server it can be tabled and benchmarked on files",
	},
	{
		packages: []string{"internal/node/limits"},
		only: []string{"std", "internal/core/accel", "internal/node/backend", "internal/node/cgroup",
			"internal/platform/atomicfile"},
		never: []string{"net/http", "k8s.io/client-go/..."},
		why:   "the hook of each container starts with it, and whether a limit holds is decided on values; both need no API server",
	},
	{
		packages: []string{"internal/node/mps"},
		only: []string{"std", "internal/core/accel", "internal/node/limits", "internal/platform/atomicfile",
			"github.com/cyphar/filepath-securejoin", "golang.org/x/sys/unix"},
		never: []string{"net/http", "k8s.io/client-go/..."},
		why: "the service of MPS outlives the node's daemon and needs no API server; whether MPS serves a device is decided on " +
			"values",
	},
	{
		packages: []string{"cmd/divvy-hook", "internal/app/hook", "internal/node/backend/nvidia/memlimit"},
		never:    []string{"net/http", "k8s.io/...", "github.com/spf13/..."},
		why:      "the hook starts while the creation of a container waits, on hosts with any C library",
	},
	{
		packages: []string{"internal/node/deviceplugin", "internal/node/podresources"},
		never: []string{
			"internal/node/backend/enflame", "internal/node/backend/iluvatar", "internal/node/backend/nvidia", "k8s.io/client-go/...",
		},
		why: "talking to kubelet is the same for every vendor and needs no API server",
	},
	{
		packages: []string{"internal/node/...", "internal/app/node", "cmd/divvy-node", "internal/platform/..."},
		never:    []string{"internal/core/ledger", "internal/scheduler/..."},
		why: "the node's daemon is privileged and decides from the node alone: it never links the ledger of the cluster, and what all " +
			"programs share does not either",
	},
	{
		packages: []string{"internal/scheduler/...", "internal/platform/...", "internal/report/inspect/...", "internal/core/ledger"},
		never:    []string{"internal/core/sharing", "internal/node/...", "github.com/ebitengine/purego/..."},
		why:      "the scheduler's side has no vendor code: it follows what nodes publish, so a new vendor changes nothing here",
	},
	{
		packages: []string{"internal/platform/..."},
		never: []string{"internal/install/...", "internal/node/...", "internal/pool/...", "internal/report/...",
			"internal/scheduler/..."},
		why: "what all programs share knows none of them",
	},
	{
		packages: []string{"internal/pool"},
		only: []string{
			"std", "k8s.io/api/...", "k8s.io/apimachinery/...", "go.yaml.in/yaml/v3", "mvdan.cc/sh/v3/syntax",
		},
		notThemselves: []string{"os", "os/exec", "net", "net/http", "log", "log/slog", "time"},
		why: "the contract of the remote pool is functions of values; without clients, files, clocks and logging it can be " +
			"tabled and fuzzed, and webhooks, kubectl-divvy and the node's daemon all use it",
	},
	{
		packages: []string{"internal/pool/..."},
		except:   []string{"internal/pool/admin", "internal/pool/secrets", "internal/pool/sources"},
		never: []string{
			"k8s.io/client-go/...", "internal/core/...", "internal/node/...", "internal/platform/certs", "internal/platform/kube",
			"internal/pool/secrets", "internal/scheduler/...",
		},
		why: "what becomes of a pod is decided from the pod, the catalog and what the caller knows of the cluster; deciding " +
			"reaches no API server, so it has no side effects and can be fuzzed against Kubernetes' own validation",
	},
	{
		packages: []string{"internal/platform/admissionreview", "internal/scheduler/admission"},
		never: []string{
			"k8s.io/client-go/...", "internal/node/...", "internal/platform/certs", "internal/platform/kube", "internal/pool/...",
			"internal/scheduler/extender",
		},
		why: "a review is decided from what it brings and what its program knows; reading reviews is the same for all programs",
	},
	{
		packages: []string{"internal/scheduler/claimreview"},
		never: []string{"internal/app/...", "internal/core/ledger", "internal/platform/certs", "internal/pool/...",
			"internal/scheduler/extender"},
		why: "claims are reviewed by what they ask for and by quotas, whichever program serves the reviews and whatever devices hold",
	},
	{
		packages: []string{"internal/scheduler/decision"},
		never:    []string{"internal/app/...", "internal/scheduler/extender"},
		notThemselves: []string{
			"k8s.io/client-go/...", "net", "net/http", "os",
		},
		why: "what is decided about a pod is the same through every door to kube-scheduler; each door has its own protocol",
	},
	{
		packages: []string{"internal/scheduler/plugin"},
		never:    []string{"internal/app/...", "internal/scheduler/extender", "k8s.io/kubernetes/..."},
		notThemselves: []string{
			"github.com/spf13/cobra/...", "k8s.io/client-go/kubernetes/...", "net", "net/http", "os",
		},
		why: "the plugin is compiled with each supported minor of kube-scheduler, so it knows the interfaces of the framework alone; " +
			"what it decides is package decision's",
	},
	{
		packages: []string{"internal/pool/admin", "internal/pool/sources"},
		never: []string{"internal/core/ledger", "internal/node/...", "internal/platform/certs", "internal/pool/admission",
			"internal/report/...", "internal/scheduler/..."},
		why: "the cluster, the catalog and the token are read beside the reviews, and know nothing of what is decided there",
	},
	{
		packages: []string{"internal/platform/certs", "internal/pool/secrets"},
		never: []string{"internal/core/...", "internal/node/...", "internal/pool/admission", "internal/report/...",
			"internal/scheduler/..."},
		why: "certificates and credentials are kept by programs beside the reviews; neither knows what is decided there",
	},
	{
		packages: []string{"internal/install/schedconf"},
		only:     []string{"std", "go.yaml.in/yaml/v3", "sigs.k8s.io/yaml"},
		notThemselves: []string{
			"os", "os/exec", "net/http", "log", "log/slog", "path/filepath",
		},
		why: "what becomes of a scheduler's manifest and configuration is decided on bytes, so that it is the same on every machine and " +
			"can " +
			"be compared, fuzzed and shown before anything is done",
	},
	{
		packages: []string{"internal/install/schedconf/..."},
		never: []string{
			"internal/core/...", "internal/node/...", "internal/platform/certs", "internal/platform/kube", "internal/pool/...",
			"internal/scheduler/...",
		},
		why: "wiring kube-scheduler is about its files; it needs to know of the extender no more than its address and certificates",
	},
	{
		packages: []string{"internal/install/uninstall"},
		never: []string{"internal/core/ledger", "internal/install/schedconf/...", "internal/node/...", "internal/platform/certs",
			"internal/platform/kube", "internal/scheduler/..."},
		why: "what an installation leaves is found by what is written on objects, not by the code that wrote it",
	},
	{
		packages: []string{"internal/report/grid", "internal/report/usagereport"},
		only:     []string{"std", "internal/core/accel", "internal/core/wire", "internal/report/grid"},
		why:      "the node's daemon prints its report as kubectl-divvy does, and links no client or ledger for that",
	},
	{
		packages:      []string{"internal/report/simulate"},
		only:          []string{"std", "internal/core/...", "golang.org/x/sync/errgroup"},
		never:         []string{"net", "os/exec"},
		notThemselves: []string{"os", "log", "log/slog"},
		why: "a simulation is decided by values and a seed, on the core that the extender uses; files, clusters and flags are the " +
			"command's",
	},
	{
		packages: []string{"internal/report/devices"},
		never: []string{"internal/core/ledger", "internal/install/...", "internal/node/...", "internal/platform/certs", "internal/pool/...",
			"internal/scheduler/..."},
		why: "devices are listed and put into quarantine by what is written on node objects, with the rights of the person who asks",
	},
	{
		packages: []string{"internal/report/simulate/live"},
		never:    []string{"internal/install/...", "internal/node/...", "internal/pool/...", "internal/scheduler/..."},
		why:      "a simulation starts from what nodes publish and pods request, not from what a program makes of it",
	},
	{
		packages: []string{"internal/report/why"},
		never: []string{
			"internal/install/...", "internal/node/...", "internal/pool/admin", "internal/pool/admission", "internal/pool/probe",
			"internal/pool/secrets", "internal/pool/sources", "internal/pool/token", "internal/scheduler/extender",
		},
		notThemselves: []string{
			"k8s.io/client-go/...", "os", "os/exec", "net", "net/http", "log", "log/slog",
		},
		why: "why a pod waits, and which pods to move, is decided on a snapshot, with the extender's own state and ledger and without " +
			"clients, so that advice can be tried on thousands of random clusters",
	},
	{
		packages: []string{"internal/report/ui/..."},
		never:    []string{"internal/install/...", "internal/node/...", "internal/scheduler/extender"},
		why: "the page shows what nodes publish and pods carry, with the rights of the person who asks; no part of a program that runs " +
			"in the cluster belongs to it",
	},
	{
		packages: []string{"internal/report/ui/picture"},
		notThemselves: []string{
			"k8s.io/client-go/...", "os", "os/exec", "net", "net/http", "log", "log/slog",
		},
		why: "what is drawn is decided from objects, so it can be tabled and measured without an API server and a browser",
	},
	{
		packages: []string{"internal/report/doctor"},
		never: []string{
			"internal/install/...", "internal/node/...", "internal/platform/certs", "internal/pool/admission", "internal/pool/secrets",
			"internal/scheduler/...",
		},
		notThemselves: []string{"os", "os/exec"},
		why: "the doctor judges an installation by what the API server shows of it; if it shared the programs' own code it would " +
			"repeat their mistakes, and it runs nothing: people do",
	},
	{
		packages: []string{"internal/app/..."},
		except:   []string{"internal/app/hook", "internal/app/node"},
		never:    []string{"internal/node/backend/...", "internal/node/deviceplugin", "github.com/ebitengine/purego/..."},
		why:      "these programs run where there are no devices and must not need a vendor's library or C",
	},
	{
		packages: []string{"..."},
		except: []string{
			"internal/node/backend/nvidia", "internal/node/backend/nvidia/cdispec", "internal/node/backend/vendors",
			"internal/node/supervisor", "internal/app/node", "cmd/divvy-node",
			"hack/reference", // which reads all flags
		},
		never: []string{"github.com/NVIDIA/..."},
		why: "NVIDIA's binding needs C, has one library per process, and ends the process when a function is missing; " +
			"its one user looks each function up first, and the node's daemon alone is built with C",
	},
	{
		packages:      []string{"..."},
		except:        []string{"internal/node/backend/nvidia/cdispec"},
		notThemselves: []string{"github.com/NVIDIA/nvidia-container-toolkit/...", "github.com/NVIDIA/go-nvlib/..."},
		why: "the library that generates CDI specifications uses NVML as it likes, so it runs in a process of its own; what starts " +
			"that process knows its request and its answer alone",
	},
	{
		packages: []string{"internal/node/backend/nvidia/cdispec"},
		never:    []string{"internal/core/...", "internal/node/alloc", "internal/node/agent", "internal/platform/...", "k8s.io/..."},
		why:      "the generator's process has no part of the daemon: a request in, an answer out",
	},
	{
		packages: []string{"..."},
		except:   []string{"internal/testing/...", "internal/node/backend/backendtest"},
		never:    []string{"internal/testing/...", "internal/node/backend/backendtest", "testing"},
		why:      "stand-ins and test suites belong to tests and the lab, never into a program that users run",
	},
	{
		packages: []string{"cmd/..."},
		only:     []string{"std", "internal/app/...", "internal/platform/version", "github.com/spf13/cobra"},
		why:      "a main says which role it runs; all else is behind internal/app, where tests reach it",
	},
	{
		packages: []string{"internal/..."},
		// The framework's interfaces, and the selectors of device classes, depend on a package of flags.
		except: []string{"internal/app/...", "internal/scheduler/plugin", "internal/scheduler/claims"},
		never:  []string{"internal/app/...", "github.com/spf13/cobra/..."},
		why:    "imports point inward: programs know their parts, no part knows a program or its flags",
	},
	{
		packages: []string{"api/..."},
		only:     []string{"std", "go.yaml.in/yaml/v3"},
		why:      "whoever generates a configuration file imports these types and should get nothing else with them",
	},
}

// pkg is what `go list` says of a package.
type pkg struct {
	ImportPath string
	Standard   bool
	Imports    []string
}

// graph holds packages by import path.
type graph map[string]pkg

func TestImportRules(t *testing.T) {
	for _, violation := range check(load(t), rules) {
		t.Error(violation)
	}
}

// TestEveryPackageHasARule: a package of the product that only the rules about everything
// name may import what it likes.
func TestEveryPackageHasARule(t *testing.T) {
	general := []string{"...", "internal/..."}
	for path := range load(t) {
		name, own := strings.CutPrefix(path, module+"/")
		if !own || matchAny([]string{"docs", "hack/...", "internal/testing/..."}, name) {
			continue
		}
		if !slices.ContainsFunc(rules, func(r rule) bool {
			return !slices.Contains(general, r.packages[0]) && matchAny(r.packages, path)
		}) {
			t.Errorf("no rule is about %s", name)
		}
	}
}

// load asks the go command for every package of the module and all that they
// depend on, tests left out.
func load(t *testing.T) graph {
	t.Helper()
	cmd := exec.Command("go", "list", "-deps", "-json=ImportPath,Standard,Imports", module+"/...")
	var stderr strings.Builder
	cmd.Stderr = &stderr
	out, err := cmd.Output()
	if err != nil {
		t.Fatalf("%v: %v\n%s", cmd, err, &stderr)
	}
	g := graph{}
	for dec := json.NewDecoder(strings.NewReader(string(out))); ; {
		var p pkg
		err := dec.Decode(&p)
		if errors.Is(err, io.EOF) {
			return g
		}
		if err != nil {
			t.Fatalf("decode the answer of go list: %v", err)
		}
		g[p.ImportPath] = p
	}
}

// check returns one sentence per violation, in a fixed order.
func check(g graph, rules []rule) []string {
	var own []string
	for path := range g {
		if path == module || strings.HasPrefix(path, module+"/") {
			own = append(own, path)
		}
	}
	slices.Sort(own)

	var out []string
	for _, r := range rules {
		var subjects []string
		for _, pattern := range r.packages {
			found := false
			for _, path := range own {
				if !match(pattern, path) {
					continue
				}
				found = true
				if !matchAny(r.except, path) {
					subjects = append(subjects, path)
				}
			}
			if !found {
				out = append(out, fmt.Sprintf("a rule names %s, which matches no package: fix or remove the rule (%s)", pattern, r.why))
			}
		}
		for _, path := range subjects {
			for _, imported := range g[path].Imports {
				if r.only != nil && !matchAny(r.only, imported) && !(slices.Contains(r.only, "std") && g[imported].Standard) {
					out = append(out, fmt.Sprintf("%s imports %s; it may import %s only: %s",
						short(path), short(imported), strings.Join(r.only, ", "), r.why))
				}
				if matchAny(r.notThemselves, imported) {
					out = append(out, fmt.Sprintf("%s imports %s: %s", short(path), short(imported), r.why))
				}
			}
			for _, chain := range reach(g, path, r.never) {
				out = append(out, fmt.Sprintf("%s depends on %s (%s): %s",
					short(path), short(chain[len(chain)-1]), strings.Join(shorten(chain), " -> "), r.why))
			}
		}
	}
	return out
}

// reach returns, for each package that matches a pattern and that path depends
// on, a shortest chain of imports to it. The standard library is not looked
// into: that net/http uses net is not what a rule about net means.
func reach(g graph, path string, patterns []string) [][]string {
	if len(patterns) == 0 {
		return nil
	}
	var chains [][]string
	seen := map[string]bool{path: true}
	for queue := [][]string{{path}}; len(queue) > 0; queue = queue[1:] {
		chain := queue[0]
		last := chain[len(chain)-1]
		if len(chain) > 1 && matchAny(patterns, last) && !matchSame(patterns, path, last) {
			chains = append(chains, chain)
			continue // What is behind it follows from it.
		}
		if g[last].Standard {
			continue
		}
		for _, imported := range g[last].Imports {
			if !seen[imported] {
				seen[imported] = true
				queue = append(queue, append(slices.Clone(chain), imported))
			}
		}
	}
	slices.SortFunc(chains, func(a, b []string) int { return cmp.Compare(a[len(a)-1], b[len(b)-1]) })
	return chains
}

// matchSame reports whether one pattern matches both: a package may import its
// own neighbours.
func matchSame(patterns []string, a, b string) bool {
	return slices.ContainsFunc(patterns, func(p string) bool { return match(p, a) && match(p, b) })
}

func matchAny(patterns []string, path string) bool {
	return slices.ContainsFunc(patterns, func(p string) bool { return match(p, path) })
}

// match reports whether an import path matches a pattern, which is tried as
// written and below the module.
func match(pattern, path string) bool {
	prefix, tree := strings.CutSuffix(pattern, "/...")
	if pattern == "..." {
		return path == module || strings.HasPrefix(path, module+"/")
	}
	for _, p := range []string{prefix, module + "/" + prefix} {
		if path == p || tree && strings.HasPrefix(path, p+"/") {
			return true
		}
	}
	return false
}

func short(path string) string { return strings.TrimPrefix(path, module+"/") }

func shorten(paths []string) []string {
	out := make([]string, len(paths))
	for i, p := range paths {
		out[i] = short(p)
	}
	return out
}

// TestCheckFindsViolations makes sure that the test above would notice.
func TestCheckFindsViolations(t *testing.T) {
	own := func(path string, imports ...string) pkg {
		return pkg{ImportPath: module + "/" + path, Imports: imports}
	}
	g := graph{}
	for _, p := range []pkg{
		own("core", "sort", "k8s.io/api"),
		own("shell", module+"/core", module+"/shell/inner", "net/http"),
		own("shell/inner", module+"/vendor1"),
		own("vendor1"),
		own("cmd/x", module+"/shell", "sort"),
		{ImportPath: "sort", Standard: true},
		{ImportPath: "net/http", Standard: true, Imports: []string{"net"}},
		{ImportPath: "net", Standard: true},
		{ImportPath: "k8s.io/api"},
	} {
		g[p.ImportPath] = p
	}
	tests := map[string]struct {
		rule rule
		want []string
	}{
		"an import that is not on the list": {
			rule: rule{packages: []string{"core"}, only: []string{"std"}, why: "pure"},
			want: []string{"core imports k8s.io/api; it may import std only: pure"},
		},
		"an import of the standard library that is not wanted": {
			rule: rule{packages: []string{"core", "vendor1"}, notThemselves: []string{"sort"}, why: "pure"},
			want: []string{"core imports sort: pure"},
		},
		"all imports on the list": {
			rule: rule{packages: []string{"cmd/..."}, only: []string{"std", "shell"}},
		},
		"a dependency through others, with the way to it": {
			rule: rule{packages: []string{"cmd/x"}, never: []string{"vendor1"}, why: "no vendors"},
			want: []string{"cmd/x depends on vendor1 (cmd/x -> shell -> shell/inner -> vendor1): no vendors"},
		},
		"a tree of another module": {
			rule: rule{packages: []string{"core"}, never: []string{"k8s.io/..."}, why: "pure"},
			want: []string{"core depends on k8s.io/api (core -> k8s.io/api): pure"},
		},
		"neighbours in one tree": {
			rule: rule{packages: []string{"shell"}, never: []string{"shell/..."}},
		},
		"an excepted package": {
			rule: rule{packages: []string{"..."}, except: []string{"core"}, never: []string{"k8s.io/api"}, why: "pure"},
			want: []string{
				"cmd/x depends on k8s.io/api (cmd/x -> shell -> core -> k8s.io/api): pure",
				"shell depends on k8s.io/api (shell -> core -> k8s.io/api): pure",
			},
		},
		"inside of the standard library": {
			rule: rule{packages: []string{"shell"}, never: []string{"net"}},
		},
		"a rule about nothing": {
			rule: rule{packages: []string{"gone/..."}, never: []string{"net"}, why: "old"},
			want: []string{"a rule names gone/..., which matches no package: fix or remove the rule (old)"},
		},
	}
	for name, tt := range tests {
		t.Run(name, func(t *testing.T) {
			if diff := gocmp.Diff(tt.want, check(g, []rule{tt.rule})); diff != "" {
				t.Errorf("(-want +got):\n%s", diff)
			}
		})
	}
}
