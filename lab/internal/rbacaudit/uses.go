package rbacaudit

import (
	"bufio"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"os"
	"slices"
	"strings"
	"time"

	rbacv1 "k8s.io/api/rbac/v1"
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

// leaving is how long a program may still ask after its rights were taken away: pods
// end when the objects that an installation consists of are gone.
const leaving = time.Minute

// absence is a time in which one of the bindings of Divvy was not there.
type absence struct{ from, until time.Time }

// covers reports whether a refusal at that time means nothing.
func (a absence) covers(at time.Time) bool {
	return !at.Before(a.from) && at.Before(a.from.Add(leaving)) && (a.until.IsZero() || at.Before(a.until))
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
// events as the API server writes it. Neither what was refused right after the
// chart's bindings had been taken away, nor what people and tests asked for in the
// name of an account, by kubectl or a test's own client, is among them.
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
	absences := map[string][]absence{} // of bindings, by kind, namespace and name
	reader := bufio.NewReader(log)
	for number := 1; ; number++ {
		line, err := reader.ReadBytes('\n')
		if errors.Is(err, io.EOF) {
			// What has no end yet is being written.
			return slices.DeleteFunc(uses, func(u Use) bool {
				inVain := false
				for _, times := range absences {
					inVain = inVain || slices.ContainsFunc(times, func(a absence) bool { return a.covers(u.At) })
				}
				return u.Refused && inVain
			}), nil
		} else if err != nil {
			return nil, err
		}
		var event auditv1.Event
		if err := json.Unmarshal(line, &event); err != nil {
			return nil, fmt.Errorf("line %d: %w", number, err)
		}
		if ref := event.ObjectRef; ref != nil && ref.APIGroup == rbacv1.GroupName && ofDivvy(ref.Name) {
			key, at := ref.Resource+" "+ref.Namespace+"/"+ref.Name, event.RequestReceivedTimestamp.Time
			times := absences[key]
			switch last := len(times) - 1; {
			case event.Verb == "delete":
				absences[key] = append(times, absence{from: at})
			case event.Verb == "create" && last >= 0 && times[last].until.IsZero():
				times[last].until = at
			}
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

// ofDivvy reports whether a binding is one of the chart's.
func ofDivvy(name string) bool {
	return strings.HasPrefix(name, "divvy-") || strings.HasPrefix(name, "bitfusion-")
}

// byHand reports whether a request comes from a person or a test, and not from
// one of the programs.
func byHand(agent string) bool {
	program, _, _ := strings.Cut(agent, "/")
	return program == "kubectl" || program == "curl" || strings.HasSuffix(program, ".test")
}
