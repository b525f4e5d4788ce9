// Command abuse attacks every port of Divvy's programs that is open to pods, with a real
// kube-scheduler and API server at work: answers that are not read, slow connections,
// bodies that do not come, invented annotations, stream floods. It prints the memory of
// the programs beside their limits, and ends with an error where one takes more than
// it may, or a pod is not scheduled meanwhile. It needs root for a network of pods.
package main

import (
	"context"
	"errors"
	"flag"
	"fmt"
	"io"
	"os"
	"strings"
	"time"

	"github.com/divvy-gpu/divvy/lab/internal/abuse"
	"github.com/divvy-gpu/divvy/lab/internal/program"
)

func main() { os.Exit(program.Run("abuse", run)) }

func run(ctx context.Context, args []string, out io.Writer) (err error) {
	o := abuse.Options{Out: out}
	var only, extender string
	var keep bool
	flags := flag.NewFlagSet("abuse", flag.ContinueOnError)
	flags.SetOutput(out)
	flags.IntVar(&o.Nodes, "nodes", 5000, "simulated nodes with 8 cards")
	flags.DurationVar(&o.Each, "each", 10*time.Second, "how long each attack lasts")
	flags.StringVar(&only, "only", "", "words, joined by commas: only attacks that have one in their port or name")
	flags.StringVar(&extender, "extender", "", "further flags of the extender, such as --policy=fragmentation")
	flags.BoolVar(&keep, "keep", false, "keep the folder with the logs")
	if err := flags.Parse(args); err != nil {
		return err
	}
	if flags.NArg() > 0 {
		return fmt.Errorf("unknown argument %q", flags.Arg(0))
	}
	if o.Nodes < 1 || o.Each <= 0 {
		return errors.New("-nodes and -each must be above 0")
	}
	if only != "" {
		o.Only = strings.Split(only, ",")
	}
	o.ExtenderArgs = strings.Fields(extender)
	if o.Dir, err = os.MkdirTemp("", "divvy-abuse-"); err != nil {
		return fmt.Errorf("make a folder for the control plane: %w", err)
	}
	defer func() {
		if keep {
			fmt.Fprintln(out, "Logs are in", o.Dir)
			return
		}
		err = errors.Join(err, os.RemoveAll(o.Dir))
	}()
	_, err = abuse.Run(ctx, o)
	return err
}
