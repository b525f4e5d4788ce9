package libloader

import (
	"errors"
	"fmt"
	"slices"
)

// CodeError is a call of a library's function that returned another code than
// success.
type CodeError struct {
	// Call is the function, with the device that it was about.
	Call string
	Code int32
	// Text is what the code means.
	Text string
}

func (e *CodeError) Error() string { return fmt.Sprintf("%s: %s (%d)", e.Call, e.Text, e.Code) }

// HasCode reports whether err is a call that returned one of the codes.
func HasCode[C ~int | ~int32](err error, codes ...C) bool {
	var e *CodeError
	return errors.As(err, &e) && slices.Contains(codes, C(e.Code))
}
