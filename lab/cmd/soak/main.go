// Command soak creates and deletes pods at random on the lab, fills the cards,
// restarts parts of the cluster meanwhile, and then compares all records: what
// every container really sees, what kubelet gave it, its annotations, and
// inspect. All the time it watches that no card is used beyond its size. With --limits
// pods try to use more of a GPU than their allocation, and it watches that none does. With
// --claims other pods have devices of the same node by ResourceClaims, and all records of
// these are compared all the time.
package main

import (
	"errors"
	"flag"
	"fmt"
	"io"
	"math/rand/v2"
	"os"
	"strconv"
	"time"

	"github.com/divvy-gpu/divvy/lab/internal/program"
)

func main() { os.Exit(program.Run("soak", run)) }

// options are the flags.
type options struct {
	duration time.Duration
	seed     uint64
	keep     bool
	limits   bool
	claims   bool
}

// minDuration is the shortest run that can show something: filling the cards
// takes about half of it.
const minDuration = time.Minute

func parse(args []string, out io.Writer) (options, error) {
	o := options{duration: 4 * time.Minute}
	if minutes := os.Getenv("SOAK_MINUTES"); minutes != "" {
		n, err := strconv.ParseFloat(minutes, 64)
		if err != nil {
			return o, fmt.Errorf("SOAK_MINUTES is %q: must be a number", minutes)
		}
		o.duration = time.Duration(n * float64(time.Minute))
	}
	flags := flag.NewFlagSet("soak", flag.ContinueOnError)
	flags.SetOutput(out)
	flags.DurationVar(&o.duration, "duration", o.duration, "how long pods come and go (environment SOAK_MINUTES)")
	flags.Uint64Var(&o.seed, "seed", 0, "seed of what happens by chance; 0 for another each time")
	flags.BoolVar(&o.keep, "keep", false, "leave the lab and the pods as they are at the end, to look at them")
	flags.BoolVar(&o.limits, "limits", false, "watch the limits of NVIDIA's driver instead of the records of all cards")
	flags.BoolVar(&o.claims, "claims", false, "let pods have devices by ResourceClaims beside those by units")
	if err := flags.Parse(args); err != nil {
		return o, err
	}
	switch {
	case flags.NArg() > 0:
		return o, fmt.Errorf("unknown argument %q", flags.Arg(0))
	case o.limits && o.claims:
		return o, errors.New("--limits and --claims exclude each other")
	case o.duration < minDuration:
		return o, fmt.Errorf("a duration of %v is too short: at least %v are needed to fill the cards", o.duration, minDuration)
	}
	if o.seed == 0 {
		o.seed = rand.Uint64() //nolint:gosec // chance, not secrecy
	}
	return o, nil
}
