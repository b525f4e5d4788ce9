package wire

import (
	"bytes"
	"encoding/json"
	"errors"
	"fmt"
	"io"
)

// ErrSignature is the error of a grant that is well formed but was not signed
// for this pod with this key.
var ErrSignature = errors.New("the signature does not match")

// SyntaxError is the error of a value that cannot be read: no JSON, of an
// unknown version, too long, or with content that makes no sense.
type SyntaxError struct {
	// What names the value, such as "grant".
	What string
	Err  error
}

func (e *SyntaxError) Error() string { return fmt.Sprintf("unreadable %s: %v", e.What, e.Err) }

// Unwrap returns the cause.
func (e *SyntaxError) Unwrap() error { return e.Err }

// unmarshal reads exactly one JSON value of at most limit bytes. Unknown
// fields are ignored, so that a later release may add some without raising the
// version.
func unmarshal(s string, limit int, into any) error {
	if len(s) > limit {
		return fmt.Errorf("%d bytes, at most %d are read", len(s), limit)
	}
	d := json.NewDecoder(bytes.NewReader([]byte(s)))
	if err := d.Decode(into); err != nil {
		if errors.Is(err, io.EOF) {
			return errors.New("the value is empty")
		}
		// Its own text names Go types, which mean nothing to whoever wrote the
		// value.
		if te := (*json.UnmarshalTypeError)(nil); errors.As(err, &te) {
			if te.Field == "" {
				return fmt.Errorf("a JSON %s where an object is expected", te.Value)
			}
			return fmt.Errorf("field %s: unexpected JSON %s", te.Field, te.Value)
		}
		return err
	}
	if _, err := d.Token(); !errors.Is(err, io.EOF) {
		return errors.New("text follows the end of the JSON value")
	}
	return nil
}

// decode reads a document of at most limit bytes and checks it. Its errors are
// *SyntaxError.
func decode(what, s string, limit int, doc interface{ validate() error }) error {
	err := unmarshal(s, limit, doc)
	if err == nil {
		err = doc.validate()
	}
	if err != nil {
		return &SyntaxError{What: what, Err: err}
	}
	return nil
}

// encode checks a document and returns it as JSON of at most limit bytes.
func encode(what string, doc interface{ validate() error }, limit int) (string, error) {
	err := doc.validate()
	var b []byte
	if err == nil {
		b, err = json.Marshal(doc)
	}
	if err == nil && len(b) > limit {
		err = fmt.Errorf("%d bytes, at most %d are read", len(b), limit)
	}
	if err != nil {
		return "", fmt.Errorf("encode %s: %w", what, err)
	}
	return string(b), nil
}
