package cdispec

import (
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"os"
	"time"
)

// Command is the subcommand of divvy-node that runs Serve.
const Command = "generate-cdi"

// Limit bounds Serve. It is longer than what the process that asks waits, and ends
// this one when that process is gone.
const Limit = 45 * time.Second

// Serve reads a Request in JSON from in and writes the Result in JSON to out;
// diagnostics go to log. The process exits when it takes longer than Limit.
func Serve(in io.Reader, out, log io.Writer) error {
	end := time.AfterFunc(Limit, func() {
		fmt.Fprintf(log, "no result after %v\n", Limit) //nolint:errcheck // it is the place for errors
		os.Exit(1)
	})
	defer end.Stop()
	decoder := json.NewDecoder(in)
	decoder.DisallowUnknownFields()
	var r Request
	if err := decoder.Decode(&r); err != nil {
		return fmt.Errorf("read the request from standard input: %w", err)
	}
	if r.Kind == "" || len(r.Devices) == 0 || r.Library == "" || r.DriverRoot == "" || r.DevRoot == "" {
		return errors.New("read the request from standard input: kind, devices, library, driverRoot and devRoot are required")
	}
	result, err := Generate(r, log)
	if err != nil {
		return err
	}
	return json.NewEncoder(out).Encode(result)
}
