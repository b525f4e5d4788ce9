package proc

import "testing"

func TestParseStat(t *testing.T) {
	rest := " 1 7 0 -1 4194560 1 2 3 4 5 6 7 8 20 0 1 0 4711 1 2 3"
	for name, want := range map[string]byte{"(sh) S 1": 'S', "(a) b) (c) Z 1": 'Z'} {
		got, err := parseStat("42 " + name + rest)
		if err != nil || got != (stat{state: want, session: 7, startTicks: 4711}) {
			t.Errorf("%q: %+v, %v; want state %c, session 7, start 4711", name, got, err, want)
		}
	}
	for _, damaged := range []string{"", "42 (sh", "42 (sh) S 1 2", "42 (sh) S 1 1 own 0 -1 4 1 2 3 4 5 6 7 8 20 0 1 0 4711 1",
		"42 (sh) S 1 1 1 0 -1 4 1 2 3 4 5 6 7 8 20 0 1 0 soon 1"} {
		if _, err := parseStat(damaged); err == nil {
			t.Errorf("%q: no error", damaged)
		}
	}
}
