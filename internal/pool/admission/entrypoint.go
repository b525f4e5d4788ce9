package admission

import (
	"bytes"
	"encoding/json"
	"errors"
	"fmt"

	"github.com/divvy-gpu/divvy/internal/platform/admissionreview"
)

type entrypoints struct {
	all         []string
	byContainer map[string][]string
}

// of returns the entrypoint of a container's image, nil when it is not known.
func (e entrypoints) of(container string) []string {
	if own, ok := e.byContainer[container]; ok {
		return own
	}
	return e.all
}

// parseEntrypoints reads the value of pool.EntrypointAnnotation; "" says nothing.
func parseEntrypoints(value string) (entrypoints, error) {
	if value == "" {
		return entrypoints{}, nil
	}
	const form = `must be a JSON list such as ["/entrypoint.sh"], or an object of such lists by container such as {"main": ` +
		`["/entrypoint.sh"]}`
	var e entrypoints
	var err error
	switch text := bytes.TrimSpace([]byte(value)); {
	case bytes.HasPrefix(text, []byte("[")):
		if err = json.Unmarshal(text, &e.all); err == nil && (len(e.all) == 0 || e.all[0] == "") {
			err = errors.New("the list names no program")
		}
	case bytes.HasPrefix(text, []byte("{")):
		err = json.Unmarshal(text, &e.byContainer)
		for name, list := range e.byContainer {
			if err == nil && (len(list) == 0 || list[0] == "") {
				err = fmt.Errorf("the list of container %q names no program", admissionreview.Short(name))
			}
		}
	default:
		err = errors.New("it is neither")
	}
	if err != nil {
		return entrypoints{}, fmt.Errorf("%q: %s: %w", admissionreview.Short(value), form, err)
	}
	return e, nil
}
