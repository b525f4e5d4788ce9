package rbacaudit

import (
	"bufio"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"os"
	"strings"
	"time"

	auditv1 "k8s.io/apiserver/pkg/apis/audit/v1"
	"k8s.io/apiserver/pkg/authentication/serviceaccount"
)

// Use is one request of an account.
type Use struct {
	// Account is NAMESPACE/NAME of the service account, Agent what its program
	// calls itself.
	Account, Agent string
	At             time.Time
	Verb           string
	// Group, Resource (with "/" and the subresource), Namespace and Name are
	// those of the object; for a path that is no object, Path alone is set.
	Group, Resource, Namespace, Name string
	Path                             string
	// Refused is true when no role allowed it.
	Refused bool
}

func (u Use) String() string {
	what := u.Path
	if u.Resource != "" {
		what = u.Resource
		if u.Group != "" {
			what += "." + u.Group
		}
		if u.Name != "" {
			what += " " + u.Name
		}
		if u.Namespace != "" {
			what += " in " + u.Namespace
		}
	}
	return u.Verb + " " + what
}

// decision is the annotation in which the API server says whether RBAC, or
// another authorizer, allowed a request.
const decision = "authorization.k8s.io/decision"

// ReadLog returns the requests of service accounts since a time, from a file of
// events as the API server writes it. What people and tests asked for in the
// name of an account, by kubectl or a test's own client, is not among them.
func ReadLog(path string, since time.Time) ([]Use, error) {
	file, err := os.Open(path)
	if err != nil {
		return nil, fmt.Errorf("read the audit log: %w", err)
	}
	defer file.Close() //nolint:errcheck // it was only read
	uses, err := readLog(file, since)
	if err != nil {
		return nil, fmt.Errorf("read the audit log %s: %w", path, err)
	}
	return uses, nil
}

func readLog(log io.Reader, since time.Time) ([]Use, error) {
	var uses []Use
	reader := bufio.NewReader(log)
	for number := 1; ; number++ {
		line, err := reader.ReadBytes('\n')
		if errors.Is(err, io.EOF) {
			// What has no end yet is being written.
			return uses, nil
		} else if err != nil {
			return nil, err
		}
		var event auditv1.Event
		if err := json.Unmarshal(line, &event); err != nil {
			return nil, fmt.Errorf("line %d: %w", number, err)
		}
		namespace, name, err := serviceaccount.SplitUsername(event.User.Username)
		if err != nil || event.RequestReceivedTimestamp.Time.Before(since) || byHand(event.UserAgent) {
			continue
		}
		use := Use{
			Account: namespace + "/" + name, Agent: event.UserAgent, At: event.RequestReceivedTimestamp.Time,
			Verb: event.Verb, Refused: event.Annotations[decision] == "forbid",
		}
		if ref := event.ObjectRef; ref != nil {
			use.Group, use.Resource, use.Namespace, use.Name = ref.APIGroup, ref.Resource, ref.Namespace, ref.Name
			if ref.Subresource != "" {
				use.Resource += "/" + ref.Subresource
			}
		} else {
			use.Path, _, _ = strings.Cut(event.RequestURI, "?")
		}
		uses = append(uses, use)
	}
}

// byHand reports whether a request comes from a person or a test, and not from
// one of the programs.
func byHand(agent string) bool {
	program, _, _ := strings.Cut(agent, "/")
	return program == "kubectl" || program == "curl" || strings.HasSuffix(program, ".test")
}
