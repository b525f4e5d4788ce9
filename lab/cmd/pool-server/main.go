// Command pool-server is a stand-in for the servers of a pool of remote GPUs. It
// has no GPUs: it checks tokens, grants what its list says that there is, and
// takes it back when the client goes away.
package main

import (
	"context"
	"crypto/tls"
	"flag"
	"fmt"
	"os"
	"os/signal"
	"strings"
	"syscall"

	"github.com/divvy-gpu/divvy/lab/internal/remotepool"
)

func main() {
	ctx, stop := signal.NotifyContext(context.Background(), os.Interrupt, syscall.SIGTERM)
	err := run(ctx, os.Args[1:])
	stop()
	if err != nil {
		fmt.Fprintln(os.Stderr, "pool-server:", err)
		os.Exit(1)
	}
}

func run(ctx context.Context, args []string) error {
	flags := flag.NewFlagSet("pool-server", flag.ContinueOnError)
	config := flags.String("config", "/etc/pool/servers.yaml", "file that lists servers and their GPUs")
	certFile := flags.String("cert", "/etc/pool/tls.crt", "certificate of the servers")
	keyFile := flags.String("key", "/etc/pool/tls.key", "key of the certificate")
	tokenFile := flags.String("token-file", "/etc/pool/token", "file with the token that clients show")
	if err := flags.Parse(args); err != nil {
		return err
	}
	data, err := os.ReadFile(*config)
	if err != nil {
		return err
	}
	inventory, err := remotepool.DecodeInventory(data)
	if err != nil {
		return err
	}
	token, err := os.ReadFile(*tokenFile)
	if err != nil {
		return err
	}
	certificate, err := tls.LoadX509KeyPair(*certFile, *keyFile)
	if err != nil {
		return err
	}
	return remotepool.Serve(ctx, inventory, certificate, strings.TrimSpace(string(token)))
}
