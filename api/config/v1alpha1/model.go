package v1alpha1

import "strings"

// MatchModel reports whether a product name is all of what an entry of
// DeviceSelector.Models stands for, in which "*" is any text and every other
// character itself. It takes the parts between the stars from left to right, each
// at the first place where it is found, so the time does not grow with the number
// of ways to match.
func MatchModel(pattern, model string) bool {
	head, rest, star := strings.Cut(pattern, "*")
	if !star {
		return pattern == model
	}
	model, ok := strings.CutPrefix(model, head)
	if !ok {
		return false
	}
	parts := strings.Split(rest, "*")
	last := parts[len(parts)-1]
	for _, part := range parts[:len(parts)-1] {
		i := strings.Index(model, part)
		if i < 0 {
			return false
		}
		model = model[i+len(part):]
	}
	return strings.HasSuffix(model, last)
}
