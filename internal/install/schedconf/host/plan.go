package host

import (
	"bytes"
	"crypto/sha256"
	"errors"
	"fmt"
	"io/fs"
	"regexp"
	"strings"

	"github.com/pmezard/go-difflib/difflib"

	"github.com/divvy-gpu/divvy/internal/install/schedconf"
)

// Plan returns what Install would change, or with uninstall what Uninstall would,
// as unified diffs without keys, and schedconf's notes. Nothing is written, and
// no lock is taken. The diff is "" when there is nothing to do.
func (h *Host) Plan(e schedconf.Extender, uninstall bool) (diff string, notes []string, err error) {
	m, err := h.files.readManifest()
	if err != nil {
		return "", nil, err
	}
	var change schedconf.Change
	j, err := h.files.loadJournal()
	if err != nil {
		return "", nil, err
	}
	if uninstall {
		_, original, err := h.files.readBackup(j)
		if err != nil {
			return "", nil, err
		}
		var remove []string
		if change, remove, err = schedconf.Unwire(h.files.input(m.content), original); err != nil {
			return "", nil, err
		}
		for _, path := range remove {
			notes = append(notes, path+" is removed.")
		}
	} else {
		if change, err = schedconf.Wire(h.files.input(m.content), e); err != nil {
			return "", nil, err
		}
		refused, err := h.wouldRefuse(j, m, change)
		if err != nil {
			return "", nil, err
		}
		if refused != nil {
			notes = append(notes, "Install would reject this: "+refused.Error()+".")
		}
	}
	var b strings.Builder
	for _, file := range append(change.Files, schedconf.File{Path: h.files.paths.Manifest, Content: change.Manifest}) {
		old, err := h.files.fs.ReadFile(file.Path)
		from := file.Path
		if errors.Is(err, fs.ErrNotExist) {
			from, err = "/dev/null", nil
		}
		if err != nil {
			return "", nil, err
		}
		text, err := difflib.GetUnifiedDiffString(difflib.UnifiedDiff{
			A: lines(withoutKey(file.Path, old)), B: lines(withoutKey(file.Path, file.Content)),
			FromFile: from, ToFile: file.Path, Context: 3,
		})
		if err != nil {
			return "", nil, fmt.Errorf("compare %s: %w", file.Path, err)
		}
		b.WriteString(text)
	}
	return b.String(), append(change.Notes, notes...), nil
}

// withoutKey is the content of a file without keys.
func withoutKey(path string, content []byte) string {
	if strings.HasSuffix(path, "/"+schedconf.KeyFile) {
		return redacted(string(content))
	}
	return Redact(string(content))
}

// wouldRefuse returns what keeps Install from a change.
func (h *Host) wouldRefuse(j *journal, m manifest, change schedconf.Change) (refused, err error) {
	if bytes.Equal(change.Manifest, m.content) && len(change.Files) == 0 {
		return nil, nil
	}
	now, err := schedconf.Inspect(h.files.input(m.content))
	if err != nil {
		return nil, err
	}
	if now.Wired {
		if err := h.files.adopt(j); err != nil {
			return nil, err
		}
	}
	_, refused = h.files.obstacle(j, m, change, now)
	return refused, nil
}

func lines(text string) []string {
	if text == "" {
		return nil
	}
	if !strings.HasSuffix(text, "\n") {
		text += "\n\\ No newline at end of file\n"
	}
	all := strings.SplitAfter(text, "\n")
	return all[:len(all)-1]
}

// Some decoders do not care about the case of a key's letters.
var (
	keyLine  = regexp.MustCompile(`(?i)^(\s*(?:- )?)["']?keyData["']?\s*:\s*(.*)$`)
	keyValue = regexp.MustCompile(`(?i)(["']?keyData["']?\s*:\s*)("(?:[^"\\]|\\.)*"|'[^']*'|[^,\s}\]]+)`)
)

// Redact returns a configuration without the private keys in it: of each only the
// beginning of a digest is left, so that one sees whether it changes.
func Redact(text string) string {
	var out []string
	for all := strings.Split(text, "\n"); len(all) > 0; {
		line := all[0]
		all = all[1:]
		match := keyLine.FindStringSubmatch(line)
		if match == nil {
			out = append(out, keyValue.ReplaceAllStringFunc(line, func(s string) string {
				part := keyValue.FindStringSubmatch(s)
				return part[1] + redacted(part[2])
			}))
			continue
		}
		// A value may go on in lines that are indented further.
		value := match[2]
		for len(all) > 0 && (strings.TrimSpace(all[0]) == "" && len(all) > 1 || indentation(all[0]) > len(match[1])) {
			value += strings.TrimSpace(all[0])
			all = all[1:]
		}
		comma := ""
		if strings.HasSuffix(value, ",") {
			comma = ","
		}
		out = append(out, line[:strings.Index(line, ":")+1]+" "+redacted(strings.TrimSuffix(value, ","))+comma)
	}
	return strings.Join(out, "\n")
}

func redacted(value string) string {
	if strings.Trim(value, `"'`) == "" {
		return value
	}
	sum := sha256.Sum256([]byte(strings.Trim(value, `"'`)))
	return fmt.Sprintf("REDACTED-%x", sum[:4])
}

func indentation(line string) int { return len(line) - len(strings.TrimLeft(line, " ")) }
