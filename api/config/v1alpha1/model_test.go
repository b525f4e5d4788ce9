package v1alpha1

import (
	"strings"
	"testing"
)

// A pattern of many stars is no reason to be slow.
func TestPatternWithManyStars(t *testing.T) {
	if MatchModel(strings.Repeat("*a", 2000)+"*b", strings.Repeat("a", 10000)) {
		t.Error("matches")
	}
	if !MatchModel(strings.Repeat("*a", 2000)+"*", strings.Repeat("a", 10000)) {
		t.Error("does not match")
	}
}

// Product names have slashes and brackets, which mean nothing else in a pattern.
func TestModelsHaveNoOtherSignThanTheStar(t *testing.T) {
	for _, tt := range []struct {
		pattern, model string
		want           bool
	}{
		{"NVIDIA A100 *", "NVIDIA A100 40/80", true},
		{"NVIDIA [X]Y", "NVIDIA [X]Y", true},
		{"NVIDIA [X]Y", "NVIDIA XY", false},
		{"A?", "AB", false},
		{`A\*`, "A*", false},
		{"", "", true},
		{"*", "", true},
		{"A*A", "A", false},
	} {
		if got := MatchModel(tt.pattern, tt.model); got != tt.want {
			t.Errorf("%q, %q: got %t", tt.pattern, tt.model, got)
		}
	}
}
