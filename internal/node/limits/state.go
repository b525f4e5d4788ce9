package limits

import (
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"regexp"
)

// maxState is more than a container runtime writes, in bytes: the state has the container's
// annotations in it, which Kubernetes bounds to 256 KiB.
const maxState = 4 << 20

// State is what a hook needs of the state of a container, as the runtime specification of
// the Open Container Initiative defines it.
type State struct {
	// ID is the runtime's id of the container.
	ID string `json:"id"`
	// PID is that of the container's first process, in the PID namespace of the hook.
	PID int `json:"pid"`
}

// containerID is what runtimes make ids of. Records are files that are named after it.
var containerID = regexp.MustCompile(`^[A-Za-z0-9][A-Za-z0-9_.+-]{0,127}$`)

// ReadState reads the state that the runtime writes to a hook's standard input.
func ReadState(r io.Reader) (State, error) {
	text, err := io.ReadAll(io.LimitReader(r, maxState+1))
	switch {
	case err != nil:
		return State{}, fmt.Errorf("read the state of the container: %w", err)
	case len(text) > maxState:
		return State{}, fmt.Errorf("the state of the container exceeds %d bytes", maxState)
	}
	return ParseState(text)
}

// ParseState reads the text of a state.
func ParseState(text []byte) (State, error) {
	var s State
	if err := json.Unmarshal(text, &s); err != nil {
		return State{}, fmt.Errorf("the state of the container is not valid: %w", err)
	}
	switch {
	case !containerID.MatchString(s.ID):
		return State{}, fmt.Errorf("the state of the container has no valid id: %q", s.ID[:min(len(s.ID), 200)])
	case s.PID <= 0:
		return State{}, errors.New("the state of the container has no process; the hook is for createRuntime")
	}
	return s, nil
}
