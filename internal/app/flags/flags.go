// Package flags holds what the command lines of Divvy's programs have in common:
// the environment variables that stand for flags, the flags of the log, and the
// forms of values that several programs take.
package flags

import (
	"errors"
	"fmt"
	"net"
	"strconv"
	"strings"

	"github.com/spf13/pflag"
	"k8s.io/apimachinery/pkg/util/validation"

	"github.com/divvy-gpu/divvy/internal/platform/logging"
)

// EnvPrefix and a flag's name in capitals, with "_" for "-", make the
// environment variable that gives the flag's value when the flag is absent:
// DIVVY_LOG_LEVEL for --log-level.
const EnvPrefix = "DIVVY_"

// EnvName is the environment variable of a flag.
func EnvName(flag string) string {
	return EnvPrefix + strings.ToUpper(strings.ReplaceAll(flag, "-", "_"))
}

// FromEnvironment sets the flags that were not given from their environment
// variables. theirs are, by flag, variables of programs that Divvy takes the
// place of: a flag's own variable goes before them, and an empty one says
// nothing, as with those programs. It reports all values that do not parse.
func FromEnvironment(fs *pflag.FlagSet, lookup func(string) (string, bool), theirs map[string]string) error {
	var errs []error
	fs.VisitAll(func(f *pflag.Flag) {
		if f.Changed || f.Name == "help" || f.Name == "version" {
			return
		}
		name := EnvName(f.Name)
		value, ok := lookup(name)
		if other := theirs[f.Name]; !ok && other != "" {
			name = other
			value, _ = lookup(name)
			value = strings.TrimSpace(value)
			ok = value != ""
		}
		if !ok {
			return
		}
		if err := fs.Set(f.Name, value); err != nil {
			errs = append(errs, fmt.Errorf("environment variable %s: %w", name, err))
		}
	})
	return errors.Join(errs...)
}

// Log is what a program's flags say of its log.
type Log struct {
	// File gets a copy of every line; "" for none. Level and Format are names
	// that package logging knows.
	File, Level, Format string
}

// DefaultLog returns the defaults: text of level info, no file.
func DefaultLog() Log { return Log{Level: "info", Format: string(logging.Text)} }

// AddFlags adds --log-file, --log-level and --log-format, with the present
// values as defaults.
func (l *Log) AddFlags(fs *pflag.FlagSet) {
	fs.StringVar(&l.File, "log-file", l.File, "file to also write the log to, with rotation; empty to disable")
	fs.StringVar(&l.Level, "log-level", l.Level, "error, warn, info, debug or trace")
	fs.StringVar(&l.Format, "log-format", l.Format, "text or json")
}

// Options returns what the flags stand for, or all mistakes, each with its flag.
func (l Log) Options() (logging.Options, error) {
	level, levelErr := logging.ParseLevel(l.Level)
	format, formatErr := logging.ParseFormat(l.Format)
	if err := errors.Join(Mistake("log-level", levelErr), Mistake("log-format", formatErr)); err != nil {
		return logging.Options{}, err
	}
	return logging.Options{File: l.File, Level: level, Format: format}, nil
}

// Mistake says which flag an error is about, or each of several that were joined; nil for nil.
func Mistake(flag string, err error) error {
	if err == nil {
		return nil
	}
	joined, ok := err.(interface{ Unwrap() []error })
	if !ok {
		return fmt.Errorf("--%s: %w", flag, err)
	}
	var errs []error
	for _, one := range joined.Unwrap() {
		errs = append(errs, Mistake(flag, one))
	}
	return errors.Join(errs...)
}

// CheckAddress says what is wrong with an address to listen on.
func CheckAddress(address string) error {
	_, port, err := net.SplitHostPort(address)
	if err != nil {
		return fmt.Errorf("%q: must be host:port, where the host may be empty", address)
	}
	if n, err := strconv.Atoi(port); err != nil || n < 0 || n > 65535 {
		return fmt.Errorf("%q: the port must be a number up to 65535", address)
	}
	return nil
}

// CheckResource says what is wrong with the name of an extended resource.
func CheckResource(name string) error {
	if !strings.Contains(name, "/") {
		return fmt.Errorf("%q: must be an extended resource, domain/name", name)
	}
	if problems := validation.IsQualifiedName(name); len(problems) > 0 {
		return fmt.Errorf("%q: %s", name, strings.Join(problems, "; "))
	}
	return nil
}
