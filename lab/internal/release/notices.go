package release

import (
	"context"
	"debug/buildinfo"
	"fmt"
	"io/fs"
	"os"
	"os/exec"
	"path"
	"path/filepath"
	"regexp"
	"slices"
	"strings"
)

// notice is the name of a file with terms that have to go with a program.
var notice = regexp.MustCompile(`(?i)^(licen[cs]e|copying|notice|patents|copyright)([.-].*)?$`)

// notices returns the licenses and notices of all that a program was compiled
// from, as the program tells: Divvy's, Go's, and each module's below its path. The
// modules are those that the go command has for the program's module, in a folder of the
// checkout.
func notices(ctx context.Context, repository, folder, program string) ([]file, error) {
	info, err := buildinfo.ReadFile(program)
	if err != nil {
		return nil, fmt.Errorf("ask %s what it was built from: %w", program, err)
	}
	args := []string{"list", "-m", "-f", "{{.Path}}\t{{.Dir}}"}
	for _, m := range info.Deps {
		if m.Path != module && !strings.HasPrefix(m.Path, module+"/") { // Divvy's is the repository's
			args = append(args, m.Path)
		}
	}
	cmd := exec.CommandContext(ctx, "go", args...)
	cmd.Dir = filepath.Join(repository, folder)
	cmd.Env = append(os.Environ(), "GOFLAGS=", "GOWORK=off")
	out, err := cmd.Output()
	if err != nil {
		return nil, fmt.Errorf("ask go for the modules of %s: %w", filepath.Base(program), err)
	}
	root, err := output(ctx, "go", "env", "GOROOT")
	if err != nil {
		return nil, fmt.Errorf("ask go where it is: %w", err)
	}
	folders := map[string]string{"": repository, "std": strings.TrimSpace(string(root))}
	for line := range strings.Lines(string(out)) {
		module, dir, _ := strings.Cut(strings.TrimRight(line, "\n"), "\t")
		folders[module] = dir
	}
	var all []file
	for module, dir := range folders {
		entries, err := os.ReadDir(dir)
		if err != nil {
			return nil, fmt.Errorf("read the license of module %s: %w", module, err)
		}
		found := false
		for _, entry := range entries {
			if !entry.Type().IsRegular() || !notice.MatchString(entry.Name()) {
				continue
			}
			content, err := os.ReadFile(filepath.Join(dir, entry.Name()))
			if err != nil {
				return nil, fmt.Errorf("read the license of module %s: %w", module, err)
			}
			found = true
			all = append(all, file{path.Join(module, entry.Name()), content, fs.FileMode(0o644)})
		}
		if !found {
			return nil, fmt.Errorf("module %s has no license in %s: it must not be passed on like that", module, dir)
		}
	}
	slices.SortFunc(all, func(a, b file) int { return strings.Compare(a.name, b.name) })
	return all, nil
}
