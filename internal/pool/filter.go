package pool

import (
	"errors"
	"fmt"
	"net/netip"
	"regexp"
	"slices"
	"strings"
)

const maxFilters = 64

// A filterKey is a property by which servers or GPUs can be chosen.
type filterKey struct {
	name  string
	valid func(string) bool
	form  string
}

// filterKeys are those that clients know, in the order of the guide. None of the
// forms has a character that means anything to a shell, the blank apart, which
// is in quoted values of device.name only.
var filterKeys = []filterKey{
	{"server.addr", isAddress, "an IP address, such as 10.117.32.177"},
	{"server.hostname", matches(`[A-Za-z0-9]([A-Za-z0-9._-]{0,251}[A-Za-z0-9])?`),
		"a host name of letters, digits, - _ and ., such as bf-server"},
	{"server.has-rdma", matches(`true|false`), "true or false"},
	{"server.cuda-version", matches(`[0-9]{1,5}(\.[0-9]{1,5}){0,3}`), "a version of digits and dots, such as 11.2"},
	{driverVersion, matches(`[0-9]{1,5}(\.[0-9]{1,5}){0,3}`), "a version of digits and dots, such as 460.73.01"},
	{"device.id", matches(`[0-9]{1,9}`), "a number, 0 or more"},
	{"device.name", matches(`[A-Za-z0-9]([A-Za-z0-9 ._+-]{0,61}[A-Za-z0-9+])?`),
		`a name of at most 63 letters, digits, - _ . and +, such as Tesla; one with blanks in quotes, such as "Tesla T4"`},
	{"device.phy-memory", matches(`[1-9][0-9]{0,9}`), "a number of MB, such as 16160"},
}

const (
	driverVersion = "server.driver-version"
	// guideDriverVersion is how the guide spells it.
	guideDriverVersion = "server.dirver-version"
)

func matches(form string) func(string) bool {
	return regexp.MustCompile(`\A(?:` + form + `)\z`).MatchString
}

func isAddress(s string) bool {
	a, err := netip.ParseAddr(s)
	return err == nil && a.Zone() == ""
}

// ParseFilter reads the value of FilterAnnotation into its words, each of the
// form key=value with a key that clients know. The key server.dirver-version, as
// the guide spells it, becomes server.driver-version. A value with blanks is
// written in quotes, single or double, which are not part of it. All problems are
// joined.
func ParseFilter(value string) ([]string, error) {
	var filters []string
	var problems []error
	words, err := filterWords(value)
	if err != nil {
		problems = append(problems, err)
	}
	if len(words) > maxFilters {
		return nil, fmt.Errorf("annotation %s: %d filters; write at most %d", FilterAnnotation, len(words), maxFilters)
	}
	for _, w := range words {
		if err := checkFilter(&w); err != nil {
			problems = append(problems, fmt.Errorf("annotation %s: %w", FilterAnnotation, err))
			continue
		}
		filters = append(filters, w)
	}
	if len(problems) > 0 {
		return nil, errors.Join(problems...)
	}
	return filters, nil
}

// checkFilter judges one word and mends the guide's spelling.
func checkFilter(word *string) error {
	key, value, ok := strings.Cut(*word, "=")
	if !ok {
		return fmt.Errorf("%q is not a filter; write key=value, such as server.hostname=bf-server", short(*word))
	}
	if key == guideDriverVersion {
		key = driverVersion
	}
	i := slices.IndexFunc(filterKeys, func(k filterKey) bool { return k.name == key })
	if i < 0 {
		names := make([]string, len(filterKeys))
		for i, k := range filterKeys {
			names[i] = k.name
		}
		return fmt.Errorf("%q has an unknown key; valid keys are %s", short(*word), strings.Join(names, ", "))
	}
	if k := filterKeys[i]; !k.valid(value) {
		return fmt.Errorf("%s: the value %q is not accepted; write %s", key, short(value), k.form)
	}
	*word = key + "=" + value
	return nil
}

// filterWords parts a text at its blanks. After the = of a word quotes may hold
// a value with blanks.
func filterWords(s string) ([]string, error) {
	const blanks = " \t\r\n"
	var words []string
	for s = strings.TrimLeft(s, blanks); s != ""; s = strings.TrimLeft(s, blanks) {
		end := strings.IndexAny(s, blanks)
		if end < 0 {
			end = len(s)
		}
		equals := strings.IndexByte(s[:end], '=')
		if equals < 0 || equals+1 == len(s) || s[equals+1] != '"' && s[equals+1] != '\'' {
			words = append(words, s[:end])
			s = s[end:]
			continue
		}
		key, quoted := s[:equals+1], s[equals+1:]
		closing := strings.IndexByte(quoted[1:], quoted[0])
		if closing < 0 {
			return words, fmt.Errorf("annotation %s: the quote of %q is not closed", FilterAnnotation, short(s))
		}
		rest := quoted[closing+2:]
		if rest != "" && !strings.ContainsRune(blanks, rune(rest[0])) {
			return words, fmt.Errorf("annotation %s: no blank after the quotes of %q", FilterAnnotation, short(s))
		}
		words = append(words, key+quoted[1:closing+1])
		s = rest
	}
	return words, nil
}
