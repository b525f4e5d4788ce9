// Command bitfusion is a stand-in for the client of a pool of remote GPUs:
//
//	bitfusion run -n N [-p FRACTION | -m MB] [--filter KEY=VALUE]... [--] COMMAND...
//	bitfusion list_gpus
package main

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"strings"

	"github.com/divvy-gpu/divvy/lab/internal/remotepool"
)

func main() {
	code, err := run(context.Background(), os.Args[1:])
	if err != nil {
		fmt.Fprintln(os.Stderr, "Error:", err)
	}
	os.Exit(code)
}

const usage = "usage: bitfusion run -n N [-p FRACTION | -m MB] [--filter KEY=VALUE]... [--] COMMAND..., or bitfusion list_gpus"

func run(ctx context.Context, args []string) (code int, err error) {
	client := &remotepool.Client{Files: files(), Log: os.Stderr, Version: version()}
	if len(args) == 0 {
		return 2, errors.New(usage)
	}
	switch args[0] {
	case "run":
		request, command, err := remotepool.ParseRun(args[1:])
		if err != nil {
			return 2, fmt.Errorf("%w\n%s", err, usage)
		}
		return client.Run(ctx, request, command, os.Stdin, os.Stdout, os.Stderr)
	case "list_gpus":
		if err := client.List(ctx, os.Stdout); err != nil {
			return 1, err
		}
		return 0, nil
	case "version", "--version":
		fmt.Fprintln(os.Stdout, "bitfusion", client.Version)
		return 0, nil
	default:
		return 2, fmt.Errorf("there is no command %q; %s", args[0], usage)
	}
}

func files() remotepool.Files {
	return remotepool.Files{
		Home:        cmp.Or(os.Getenv("HOME"), "/root"),
		Servers:     "/etc/bitfusion/servers.conf",
		Libraries:   "/opt/bitfusion",
		LibraryPath: os.Getenv("LD_LIBRARY_PATH"),
	}
}

// version is written beside the client's other files, in the tree that the
// program is in.
func version() string {
	program, err := os.Executable()
	if err != nil {
		return remotepool.Version
	}
	data, err := os.ReadFile(filepath.Join(filepath.Dir(program), "../../opt/bitfusion", remotepool.VersionFile))
	if err != nil {
		return remotepool.Version
	}
	return strings.TrimSpace(string(data)) + "-" + remotepool.Version
}
