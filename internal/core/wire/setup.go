package wire

import (
	"errors"
	"fmt"
	"unicode/utf8"
)

// SetupAnnotation is the annotation of a Node that says how its containers get NVIDIA's GPUs,
// what the daemon found of the container runtime, and what an administrator should look at.
const SetupAnnotation = "divvy.dev/node-setup"

// SetupVersion is the version of the document in SetupAnnotation.
const SetupVersion = 1

const (
	maxSetupBytes = 32 << 10
	// maxFindings and maxFinding bound the findings and the bytes of a text; more is cut off.
	maxFindings, maxFinding = 16, 1 << 10
)

// NodeSetup is how a node's containers get NVIDIA's GPUs.
type NodeSetup struct {
	// Injection are the ways that are in use. Pinned is true if the configuration names them;
	// else they are what was Detected.
	Injection []string
	Pinned    bool
	// Detected is the way that the node's files call for, and Why the reason.
	Detected, Why string
	Findings      []SetupFinding
}

// Kinds of findings.
const (
	// ConflictingCDI: two CDI specifications of one folder define the same device, so the runtime
	// drops both.
	ConflictingCDI = "cdi-conflict"
	// StaleCDI: a CDI specification that another device plugin wrote and nothing keeps current.
	StaleCDI = "cdi-stale"
	// OpenEnvironment: any container gets the GPUs that its own environment names.
	OpenEnvironment = "environment"
)

// SetupFinding is something that an administrator should look at.
type SetupFinding struct {
	// Kind is one of the kinds above, or one of a later release.
	Kind string `json:"kind"`
	// What is a sentence about the node without a full stop.
	What string `json:"what"`
}

type setupDoc struct {
	Version   int            `json:"v"`
	Injection []string       `json:"injection"`
	Pinned    bool           `json:"pinned,omitempty"`
	Detected  string         `json:"detected"`
	Why       string         `json:"why"`
	Findings  []SetupFinding `json:"findings,omitempty"`
}

// EncodeSetup returns the annotation's value, "" for nil. Texts that are too long are cut off.
func EncodeSetup(s *NodeSetup) (string, error) {
	if s == nil {
		return "", nil
	}
	doc := setupDoc{Version: SetupVersion, Injection: s.Injection, Pinned: s.Pinned, Detected: s.Detected, Why: cut(s.Why)}
	for _, f := range s.Findings[:min(len(s.Findings), maxFindings)] {
		doc.Findings = append(doc.Findings, SetupFinding{Kind: f.Kind, What: cut(f.What)})
	}
	for {
		// JSON has up to six bytes for one of a text.
		text, err := encode("setup of the node", &doc, maxSetupBytes)
		if err == nil || len(doc.Findings) == 0 {
			return text, err
		}
		doc.Findings = doc.Findings[:len(doc.Findings)-1]
	}
}

// DecodeSetup reads the annotation's value, nil for "". Its errors are *SyntaxError.
func DecodeSetup(text string) (*NodeSetup, error) {
	if text == "" {
		return nil, nil //nolint:nilnil // nothing was published, which is no error
	}
	var doc setupDoc
	if err := decode("setup of the node", text, maxSetupBytes, &doc); err != nil {
		return nil, err
	}
	return &NodeSetup{Injection: doc.Injection, Pinned: doc.Pinned, Detected: doc.Detected, Why: doc.Why, Findings: doc.Findings}, nil
}

func (doc *setupDoc) validate() error {
	if doc.Version != SetupVersion {
		return versionError(doc.Version, SetupVersion)
	}
	var errs []error
	for _, f := range doc.Findings {
		if f.Kind == "" || f.What == "" {
			errs = append(errs, errors.New("a finding has no kind or no text"))
		}
	}
	if len(doc.Findings) > maxFindings {
		errs = append(errs, fmt.Errorf("%d findings, at most %d are listed", len(doc.Findings), maxFindings))
	}
	return errors.Join(errs...)
}

// cut returns at most maxFinding bytes of a text, in whole characters.
func cut(text string) string {
	if len(text) <= maxFinding {
		return text
	}
	const mark = "..."
	end := maxFinding - len(mark)
	for end > 0 && !utf8.RuneStart(text[end]) {
		end--
	}
	return text[:end] + mark
}
