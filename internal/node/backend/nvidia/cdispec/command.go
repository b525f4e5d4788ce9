package cdispec

import (
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"time"
)

// Command is the subcommand of divvy-node that runs Serve.
const Command = "generate-cdi"

// Limit bounds Serve. It is longer than what the process that asks waits, and ends
// this one when that process is gone.
const Limit = 45 * time.Second

// Serve reads a Request in JSON from in and writes the Result in JSON to out;
// diagnostics go to log. It returns after Limit at the latest, and the process is to
// exit then: the library may still be at work.
func Serve(in io.Reader, out, log io.Writer) error {
	decoder := json.NewDecoder(in)
	decoder.DisallowUnknownFields()
	var r Request
	if err := decoder.Decode(&r); err != nil {
		return fmt.Errorf("read the request from standard input: %w", err)
	}
	if r.Kind == "" || len(r.Devices) == 0 || r.Library == "" || r.DriverRoot == "" || r.DevRoot == "" {
		return errors.New("read the request from standard input: kind, devices, library, driverRoot and devRoot are required")
	}
	var result Result
	done := make(chan error, 1)
	go func() {
		var err error
		result, err = Generate(r, log)
		done <- err
	}()
	select {
	case err := <-done:
		if err != nil {
			return err
		}
		return json.NewEncoder(out).Encode(result)
	case <-time.After(Limit):
		return fmt.Errorf("no result after %v", Limit)
	}
}
