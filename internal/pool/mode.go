package pool

import (
	"fmt"
	"strings"
)

// ParseMode reads the value of ModeAnnotation, in any case. The error names the
// values that are accepted.
func ParseMode(value string) (Mode, error) {
	switch strings.ToLower(strings.TrimSpace(value)) {
	case "all", "y", "yes", "true", "on":
		return ModeAll, nil
	case "injection":
		return ModeInjection, nil
	case "none", "n", "no", "false", "off", "":
		return ModeNone, nil
	}
	return ModeNone, fmt.Errorf("annotation %s: %q is not a mode; write all (also y, yes, true, on), injection, or none (also n, no, "+
		"false, off)",
		ModeAnnotation, short(value))
}

// short bounds what is repeated of a text that a user wrote.
func short(s string) string {
	const most = 64
	if len(s) <= most {
		return s
	}
	return strings.ToValidUTF8(s[:most], "") + "..."
}
