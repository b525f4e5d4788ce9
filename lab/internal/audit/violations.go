package audit

import (
	"fmt"
	"maps"
	"slices"
	"time"
)

// violations are what was seen and must not be, by what was violated.
type violations map[string]*violation

// violation is what was seen, for the first time and how often.
type violation struct {
	text  string
	first time.Time
	times int
}

// note counts what was seen with what has the same key.
func (v violations) note(key, text string) {
	if v[key] == nil {
		v[key] = &violation{text: text, first: time.Now()}
	}
	v[key].times++
}

// list is all of them for people, in the order of their keys.
func (v violations) list() (texts []string) {
	for _, key := range slices.Sorted(maps.Keys(v)) {
		one := v[key]
		texts = append(texts, fmt.Sprintf("%s (seen %d times, first at %s)", one.text, one.times, one.first.UTC().Format("15:04:05.000")))
	}
	return texts
}
