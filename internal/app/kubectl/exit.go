package kubectl

import "errors"

// ExitError says with which code the program is to end.
type ExitError struct {
	Code int
	// Err says why; nil when what was printed has said all.
	Err error
}

// Error is "" when what was printed has said all.
func (e *ExitError) Error() string {
	if e.Err == nil {
		return ""
	}
	return e.Err.Error()
}

// Unwrap returns the cause.
func (e *ExitError) Unwrap() error { return e.Err }

// ExitCode is the code with which a program ends for an error.
func ExitCode(err error) int {
	if err == nil {
		return 0
	}
	var exit *ExitError
	if errors.As(err, &exit) {
		return exit.Code
	}
	return 1
}
