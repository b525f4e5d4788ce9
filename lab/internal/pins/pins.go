// Package pins finds the base images and actions that the repository names, resolves
// them to digests and commits, and writes these into the files. A reference is pinned
// when it has one; the list of those that are not is kept in a file, so that a new one
// does not come unnoticed.
package pins

import (
	"bytes"
	"fmt"
	"os"
	"path/filepath"
	"regexp"
	"slices"
	"strings"
)

// Kind says what a reference names.
type Kind string

// The kinds.
const (
	Image  Kind = "image"
	Action Kind = "action"
)

// Reference names an image or an action.
type Reference struct {
	Kind Kind
	// Name is what stands in the file without the pin, such as golang:1.26-bookworm or
	// actions/checkout@v5.
	Name string
	// Pin is the digest of the image or the commit of the action; "" for none.
	Pin string
	// File is relative to the root, with Line from 1.
	File string
	Line int
}

// String is the reference in the list of those that are not pinned.
func (r Reference) String() string { return string(r.Kind) + " " + r.Name }

// UnpinnedFile lists the references that are not pinned, relative to the root.
const UnpinnedFile = "build/unpinned.txt"

var (
	digest = regexp.MustCompile(`^sha256:[0-9a-f]{64}$`)
	commit = regexp.MustCompile(`^[0-9a-f]{40}$`)

	// What a line names is the first group; of an action, its tag is in the second.
	imageLine  = regexp.MustCompile(`^(?:# syntax=|FROM (?:--platform=\S+ )?|COPY --from=)(\S+)`)
	stageLine  = regexp.MustCompile(`^FROM .* AS (\S+)$`)
	actionLine = regexp.MustCompile(`^\s*(?:- )?uses: (\S+)(?: # (\S+))?$`)
	otherLine  = regexp.MustCompile(`(?:^|[\s{,])"?(?:uses|image|container)"?:`)
)

// files returns the Dockerfile and the workflows.
func files(root string) ([]string, error) {
	found, err := filepath.Glob(filepath.Join(root, ".github", "workflows", "*.y*ml"))
	if err != nil {
		return nil, fmt.Errorf("look for workflows: %w", err)
	}
	return append([]string{filepath.Join(root, "build", "Dockerfile")}, found...), nil
}

// Find returns all references, in the order of files and lines.
func Find(root string) ([]Reference, error) {
	paths, err := files(root)
	if err != nil {
		return nil, err
	}
	var all []Reference
	for _, path := range paths {
		content, err := os.ReadFile(path)
		if err != nil {
			return nil, fmt.Errorf("look for images and actions: %w", err)
		}
		name, err := filepath.Rel(root, path)
		if err != nil {
			return nil, fmt.Errorf("look for images and actions: %w", err)
		}
		found, err := inFile(name, string(content))
		if err != nil {
			return nil, err
		}
		all = append(all, found...)
	}
	return all, nil
}

func inFile(name, content string) ([]Reference, error) {
	var found []Reference
	stages := []string{"scratch"}
	for i, line := range strings.Split(content, "\n") {
		r := Reference{File: filepath.ToSlash(name), Line: i + 1}
		if m := imageLine.FindStringSubmatch(line); len(m) > 1 && !slices.Contains(stages, m[1]) {
			r.Kind = Image
			r.Name, r.Pin, _ = strings.Cut(m[1], "@")
			if r.Pin != "" && !digest.MatchString(r.Pin) {
				return nil, fmt.Errorf("%s:%d: %s is no digest of an image", r.File, r.Line, r.Pin)
			}
		}
		if m := stageLine.FindStringSubmatch(line); m != nil {
			stages = append(stages, m[1])
		}
		switch m := actionLine.FindStringSubmatch(line); {
		case len(m) > 1 && strings.HasPrefix(m[1], "./"):
		case m != nil:
			action, version, _ := strings.Cut(m[1], "@")
			if r.Kind = Action; commit.MatchString(version) {
				version, r.Pin = m[2], version
			}
			if version == "" {
				return nil, fmt.Errorf("%s:%d: %s has no version; a commit needs its tag as a comment: # v1", r.File, r.Line, m[1])
			}
			r.Name = action + "@" + version
		case otherLine.MatchString(line) && strings.HasPrefix(r.File, ".github/"):
			return nil, fmt.Errorf("%s:%d: this names an image or an action in a form that is not looked for: %s", r.File, r.Line,
				strings.TrimSpace(line))
		}
		if r.Kind != "" {
			found = append(found, r)
		}
	}
	return found, nil
}

// Write writes the pins of references into their files, and the list of those that
// have none.
func Write(root string, references []Reference) error {
	byFile := map[string][]Reference{}
	for _, r := range references {
		byFile[r.File] = append(byFile[r.File], r)
	}
	for file, all := range byFile {
		path := filepath.Join(root, filepath.FromSlash(file))
		content, err := os.ReadFile(path)
		if err != nil {
			return fmt.Errorf("write pins: %w", err)
		}
		lines := strings.Split(string(content), "\n")
		for _, r := range all {
			if line := &lines[r.Line-1]; r.Pin != "" && !strings.Contains(*line, r.Pin) {
				*line = pinned(*line, r)
			}
		}
		if err := replace(path, []byte(strings.Join(lines, "\n"))); err != nil {
			return err
		}
	}
	return replace(filepath.Join(root, filepath.FromSlash(UnpinnedFile)), list(references))
}

// pinned is a line with the pin of its reference.
func pinned(line string, r Reference) string {
	if r.Kind == Image {
		return strings.Replace(line, r.Name, r.Name+"@"+r.Pin, 1)
	}
	action, version, _ := strings.Cut(r.Name, "@")
	return strings.Replace(line, r.Name, action+"@"+r.Pin+" # "+version, 1)
}

func replace(path string, content []byte) error {
	if old, err := os.ReadFile(path); err == nil && bytes.Equal(old, content) {
		return nil
	}
	if err := os.WriteFile(path, content, 0o644); err != nil {
		return fmt.Errorf("write pins: %w", err)
	}
	return nil
}

const listHeader = `# Base images and actions that are named by tag. "make pin" resolves them, writes
# digests and commits into the files and takes them off this list; it needs a network.
# A test fails where a reference is neither pinned nor listed here.
`

func list(references []Reference) []byte {
	var names []string
	for _, r := range references {
		if r.Pin == "" {
			names = append(names, r.String()+"\n")
		}
	}
	slices.Sort(names)
	return []byte(listHeader + strings.Join(slices.Compact(names), ""))
}

// Record says of each reference what it is pinned to, a line each.
func Record(references []Reference) []byte {
	var lines []string
	for _, r := range references {
		lines = append(lines, fmt.Sprintf("%s %s\n", r, r.Pin))
	}
	slices.Sort(lines)
	return []byte(strings.Join(slices.Compact(lines), ""))
}
