package pins

import (
	"context"
	"fmt"
	"os"
	"os/exec"
	"path"
	"strings"

	"github.com/google/go-containerregistry/pkg/authn"
	"github.com/google/go-containerregistry/pkg/name"
	"github.com/google/go-containerregistry/pkg/v1/remote"
)

// Resolver asks registries and git repositories.
type Resolver struct {
	// Git is what stands before an action's owner and repository: https://github.com.
	Git string
	// Platforms are those that an image has to have, such as linux/amd64.
	Platforms []string
}

// Resolve returns the references with a pin each. Those that have one keep it.
func (s Resolver) Resolve(ctx context.Context, references []Reference) ([]Reference, error) {
	resolved := make([]Reference, len(references))
	known := map[string]string{}
	for i, r := range references {
		resolved[i] = r
		if r.Pin != "" {
			continue
		}
		pin, found := known[r.String()]
		if !found {
			ask := s.image
			if r.Kind == Action {
				ask = s.action
			}
			var err error
			if pin, err = ask(ctx, r.Name); err != nil {
				return nil, fmt.Errorf("%s:%d: resolve %s: %w", r.File, r.Line, r, err)
			}
			known[r.String()] = pin
		}
		resolved[i].Pin = pin
	}
	return resolved, nil
}

// image returns the digest of an index. The index is fetched by that digest once more,
// and so compared with it.
func (s Resolver) image(ctx context.Context, reference string) (string, error) {
	options := []remote.Option{remote.WithContext(ctx), remote.WithAuthFromKeychain(authn.DefaultKeychain)}
	tag, err := name.ParseReference(reference)
	if err != nil {
		return "", err
	}
	head, err := remote.Head(tag, options...)
	if err != nil {
		return "", err
	}
	index, err := remote.Index(tag.Context().Digest(head.Digest.String()), options...)
	if err != nil {
		return "", err
	}
	manifest, err := index.IndexManifest()
	if err != nil {
		return "", err
	}
	platforms := map[string]bool{}
	for _, m := range manifest.Manifests {
		if m.Platform != nil {
			platforms[m.Platform.OS+"/"+m.Platform.Architecture] = true
		}
	}
	for _, p := range s.Platforms {
		if !platforms[p] {
			return "", fmt.Errorf("%s has no image for %s", head.Digest, p)
		}
	}
	return head.Digest.String(), nil
}

// action returns the commit of a tag. The commit is fetched, which git compares with
// its name, and has to have an action.
func (s Resolver) action(ctx context.Context, reference string) (string, error) {
	action, tag, _ := strings.Cut(reference, "@")
	parts := strings.SplitN(action, "/", 3)
	if len(parts) < 2 {
		return "", fmt.Errorf("%s has no owner and repository", action)
	}
	dir := ""
	if len(parts) == 3 {
		dir = parts[2]
	}
	work, err := os.MkdirTemp("", "divvy-pins-")
	if err != nil {
		return "", err
	}
	defer os.RemoveAll(work) //nolint:errcheck // a temporary folder
	git := func(args ...string) (string, error) {
		cmd := exec.CommandContext(ctx, "git", append([]string{"-C", work}, args...)...)
		cmd.Env = append(os.Environ(), "GIT_TERMINAL_PROMPT=0")
		out, err := cmd.CombinedOutput()
		if err != nil {
			return "", fmt.Errorf("git %s: %w: %s", args[0], err, strings.TrimSpace(string(out)))
		}
		return strings.TrimSpace(string(out)), nil
	}
	if _, err := git("init", "--bare", "--quiet"); err != nil {
		return "", err
	}
	if _, err := git("fetch", "--quiet", "--depth=1", s.Git+"/"+parts[0]+"/"+parts[1], "refs/tags/"+tag); err != nil {
		return "", err
	}
	id, err := git("rev-parse", "FETCH_HEAD^{commit}")
	if err != nil {
		return "", err
	}
	listed, err := git("ls-tree", "--name-only", id, path.Join(dir, "action.yml"), path.Join(dir, "action.yaml"))
	if err != nil {
		return "", err
	}
	if listed == "" || !commit.MatchString(id) {
		return "", fmt.Errorf("commit %s has no action in %q", id, dir)
	}
	return id, nil
}
