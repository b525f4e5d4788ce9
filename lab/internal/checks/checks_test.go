package checks

import (
	"errors"
	"strings"
	"testing"
)

func TestChecks(t *testing.T) {
	var out strings.Builder
	c := Checks{Out: &out}
	c.Equal("cards", []string{"gcu0"}, []string{"gcu0"})
	c.Contains("event", "insufficient memory", "memory")
	c.True("time", true, "1s")
	c.NoError("start", nil)
	if c.Err() != nil || c.Made() != 4 || c.Failed() != 0 || strings.Count(out.String(), "\n  ok  ")+1 != 4 {
		t.Errorf("after four good ones: %d made, %d failed, %v\n%s", c.Made(), c.Failed(), c.Err(), &out)
	}
	c.Equal("cards", 1, 2)
	c.Contains("event", "none", "memory")
	c.True("time", false, "9s")
	c.NoError("start", errors.New("refused"))
	if c.Made() != 8 || c.Failed() != 4 || strings.Count(out.String(), "  DIFFERS  ") != 4 {
		t.Errorf("after four bad ones: %d made, %d failed\n%s", c.Made(), c.Failed(), &out)
	}
	if r := c.Results(); len(r) != 8 || !r[0].OK || r[4].OK || r[4].Text != "cards: wanted 2, got 1" {
		t.Errorf("results: %+v", r)
	}
	for _, want := range []string{"cards: wanted 2, got 1", `wanted "memory" in it, got "none"`, "got 9s", "refused"} {
		if !strings.Contains(c.Err().Error(), want) {
			t.Errorf("the error has no %q: %v", want, c.Err())
		}
	}
}
