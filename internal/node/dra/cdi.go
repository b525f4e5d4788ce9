package dra

import (
	"bytes"
	"encoding/json"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"regexp"
	"slices"
	"strings"

	"tags.cncf.io/container-device-interface/pkg/cdi"
	cdispecs "tags.cncf.io/container-device-interface/specs-go"

	"github.com/divvy-gpu/divvy/internal/core/wire"
	"github.com/divvy-gpu/divvy/internal/node/alloc"
	"github.com/divvy-gpu/divvy/internal/platform/atomicfile"
)

// SpecPrefix begins the names of the CDI specifications of claims.
const SpecPrefix = "divvy-claim-"

// specVersion is the oldest version of the CDI specification that a file has.
const specVersion = "0.5.0"

// Kind is the CDI kind of what claims hold of a vendor's devices.
func Kind(vendor string) string { return wire.Driver(vendor) + "/claim" }

// Spec describes what containers get with a claim: a CDI device for each request, named
// "<uid>-<request>". It is one for all devices of a request, since vendors name all devices of
// a container in one variable. edits returns what a container needs to reach what the request has
// of its own, beside all that the container has.
func Spec(claim *alloc.Claim, edits func(own, all []alloc.Portion) (cdispecs.ContainerEdits, error)) (*cdispecs.Spec, error) {
	a := arrange([]alloc.Claim{*claim}, nil, false)
	spec := &cdispecs.Spec{Version: specVersion, Kind: Kind(claim.Vendor)}
	for _, r := range refsOf(claim) {
		e, err := edits(a.own[r], a.given(claim, r))
		if err != nil {
			return nil, fmt.Errorf("request %s: %w", r.request, err)
		}
		spec.Devices = append(spec.Devices, cdispecs.Device{Name: claim.UID + "-" + r.request, ContainerEdits: e})
	}
	if cdispecs.ValidateVersion(spec) != nil {
		needed, err := cdispecs.MinimumRequiredVersion(spec)
		if err != nil {
			return nil, err
		}
		spec.Version = needed
	}
	return spec, nil
}

// deviceName is the name of the CDI device with a part of a claim.
func deviceName(claim *alloc.Claim, part *alloc.ClaimPart) string {
	return claim.UID + "-" + baseOf(part)
}

// specs are the CDI specifications of claims in a folder, a file for each.
type specs struct{ dir string }

// uids are what UIDs of objects consist of; they name files.
var uids = regexp.MustCompile(`^[-A-Za-z0-9]+$`)

func (s specs) path(key alloc.ClaimKey) string {
	return filepath.Join(s.dir, SpecPrefix+key.Vendor+"-"+key.UID+".json")
}

// write makes the file of a claim hold the specification, and reads it as a container
// runtime does.
func (s specs) write(key alloc.ClaimKey, spec *cdispecs.Spec) error {
	if !uids.MatchString(key.UID) {
		return fmt.Errorf("claim UID %q cannot be used in a file name", key.UID)
	}
	data, err := json.MarshalIndent(spec, "", "  ")
	if err != nil {
		return err
	}
	// The mode is the one that kubelet gives the folder.
	if err := os.MkdirAll(s.dir, 0o755); err != nil {
		return err
	}
	if before, err := os.ReadFile(s.path(key)); err == nil && bytes.Equal(before, data) {
		return nil
	}
	if _, err := atomicfile.Replace(s.path(key), data, 0o600); err != nil {
		return err
	}
	if _, err := cdi.ReadSpec(s.path(key), 0); err != nil {
		return errors.Join(fmt.Errorf("the CDI specification %s is not valid: %w", s.path(key), err), s.remove(key))
	}
	return nil
}

// remove removes the file of a claim, which may not exist.
func (s specs) remove(key alloc.ClaimKey) error {
	if err := os.Remove(s.path(key)); err != nil && !errors.Is(err, fs.ErrNotExist) {
		return fmt.Errorf("remove the CDI specification of a claim: %w", err)
	}
	return nil
}

// exists reports whether the claim has a file that can be read.
func (s specs) exists(key alloc.ClaimKey) bool {
	_, err := cdi.ReadSpec(s.path(key), 0)
	return err == nil
}

// tidy removes the files of a vendor's claims that are not among these.
func (s specs) tidy(vendor string, claims []alloc.Claim) error {
	files, err := filepath.Glob(filepath.Join(s.dir, SpecPrefix+vendor+"-*"))
	if err != nil {
		return err
	}
	for i := range claims {
		path := s.path(claims[i].Key())
		files = slices.DeleteFunc(files, func(f string) bool { return strings.TrimSuffix(f, atomicfile.Suffix) == path })
	}
	var failed []error
	for _, f := range files {
		if err := os.Remove(f); err != nil && !errors.Is(err, fs.ErrNotExist) {
			failed = append(failed, fmt.Errorf("remove the CDI specification of a claim that holds nothing: %w", err))
		}
	}
	return errors.Join(failed...)
}
