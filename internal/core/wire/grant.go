package wire

import (
	"crypto/hmac"
	"crypto/sha256"
	"encoding/base64"
	"encoding/binary"
	"encoding/json"
	"errors"
	"fmt"
	"slices"
	"strconv"
	"time"
	"unicode/utf8"

	"github.com/divvy-gpu/divvy/internal/core/accel"
)

// GrantAnnotation is the annotation of a Pod that carries its grant.
const GrantAnnotation = "divvy.dev/grant"

// MinKeyBytes is the shortest key that NewSigner takes.
const MinKeyBytes = sha256.Size

// The versions of the document in GrantAnnotation. A grant of one device has the
// first, as it always had. One of several devices has the second: a program that
// does not know of several cannot read it, where it would otherwise serve the pod
// with the first device alone.
const (
	GrantVersion        = 1
	GrantVersionSeveral = 2
)

// GrantVersions returns the versions, in ascending order, as people read them.
func GrantVersions() []string {
	return []string{strconv.Itoa(GrantVersion), strconv.Itoa(GrantVersionSeveral)}
}

const (
	// maxGrantBytes is room for MaxDevices with the longest uuids.
	maxGrantBytes = 16 << 10
	// macDomain keeps a MAC of a grant from ever being one of something else
	// that is signed with the same key.
	macDomain = "divvy.dev/grant/v1"
)

// grantV1 is the grant as written. Its JSON without the MAC, in the order of
// these fields, is also what is signed; so the order and the tags are part of
// the version.
type grantV1 struct {
	Version     int            `json:"v"`
	Resource    accel.Resource `json:"resource"`
	Node        string         `json:"node"`
	Device      accel.DeviceID `json:"device"`
	Index       int            `json:"index"`
	DeviceUnits accel.Units    `json:"deviceUnits"`
	Units       accel.Units    `json:"units"`
	At          time.Time      `json:"at"`
	Confirmed   bool           `json:"confirmed,omitempty"`
	// More are the second and further devices; only version 2 has them.
	More []moreV2 `json:"more,omitempty"`
	// MAC is HMAC-SHA256 in unpadded URL-safe base64.
	MAC string `json:"mac,omitempty"`
}

// moreV2 is one more device of a grant.
type moreV2 struct {
	Device      accel.DeviceID `json:"device"`
	Index       int            `json:"index"`
	DeviceUnits accel.Units    `json:"deviceUnits"`
}

// Signer writes grants and reads those that were written with the same key. It
// is safe for concurrent use.
type Signer struct{ key []byte }

// NewSigner returns a signer for a key of at least MinKeyBytes. The key is
// used as it is, a trailing newline included.
func NewSigner(key []byte) (*Signer, error) {
	if len(key) < MinKeyBytes {
		return nil, fmt.Errorf("the signing key has %d bytes, at least %d are required", len(key), MinKeyBytes)
	}
	return &Signer{key: slices.Clone(key)}, nil
}

// EncodeGrant returns the annotation's value for the pod. The signature covers
// the pod's UID and every field, so the value means nothing on another pod. At
// is kept to the nanosecond and read back in UTC.
func (s *Signer) EncodeGrant(podUID string, g accel.Grant) (string, error) {
	doc := grantV1{
		Version: GrantVersion, Resource: g.Resource, Node: g.Node, Device: g.Device, Index: g.Index,
		DeviceUnits: g.DeviceUnits, Units: g.Units, At: g.At.UTC(), Confirmed: g.Confirmed,
	}
	for _, d := range g.More {
		doc.Version = GrantVersionSeveral
		doc.More = append(doc.More, moreV2{Device: d.Device, Index: d.Index, DeviceUnits: d.DeviceUnits})
	}
	if podUID == "" {
		return "", errors.New("encode allocation: the pod has no UID")
	}
	if err := doc.validate(); err != nil {
		return "", fmt.Errorf("encode allocation: %w", err)
	}
	payload, err := json.Marshal(doc)
	if err != nil {
		return "", fmt.Errorf("encode allocation: %w", err)
	}
	mac := s.mac(podUID, payload)
	// The MAC is the last field, so what was signed need not be encoded again.
	b := payload[:len(payload)-1]
	b = append(b, `,"mac":"`...)
	b = base64.RawURLEncoding.AppendEncode(b, mac)
	b = append(b, `"}`...)
	if len(b) > maxGrantBytes {
		return "", fmt.Errorf("encode allocation: %d bytes, at most %d are read", len(b), maxGrantBytes)
	}
	return string(b), nil
}

// DecodeGrant reads the annotation's value of the pod with that UID. It
// returns an error that wraps ErrSignature when the value was not signed for
// this pod with this key, and a *SyntaxError when it cannot be read at all.
// The caller compares the grant's Node with the node that the pod is bound to.
func (s *Signer) DecodeGrant(podUID, value string) (accel.Grant, error) {
	doc, err := parseGrant(value)
	if err != nil {
		return accel.Grant{}, err
	}
	got, err := base64.RawURLEncoding.Strict().DecodeString(doc.MAC)
	if err != nil || podUID == "" {
		return accel.Grant{}, fmt.Errorf("allocation of pod %q: %w", podUID, ErrSignature)
	}
	doc.MAC = ""
	payload, err := json.Marshal(doc)
	if err != nil {
		return accel.Grant{}, &SyntaxError{What: "grant", Err: err}
	}
	if !hmac.Equal(got, s.mac(podUID, payload)) {
		return accel.Grant{}, fmt.Errorf("allocation of pod %q: %w", podUID, ErrSignature)
	}
	return doc.grant(), nil
}

// DecodeGrantUnverified reads the annotation's value without a look at its
// signature. It is for reports to people only: whoever may write the pod may
// have written the value.
func DecodeGrantUnverified(value string) (accel.Grant, error) {
	doc, err := parseGrant(value)
	if err != nil {
		return accel.Grant{}, err
	}
	return doc.grant(), nil
}

func parseGrant(value string) (grantV1, error) {
	var doc grantV1
	err := decode("grant", value, maxGrantBytes, &doc)
	doc.At = doc.At.UTC()
	return doc, err
}

func (doc *grantV1) grant() accel.Grant {
	g := accel.Grant{
		Resource: doc.Resource, Node: doc.Node, Device: doc.Device, Index: doc.Index,
		DeviceUnits: doc.DeviceUnits, Units: doc.Units, At: doc.At, Confirmed: doc.Confirmed,
	}
	for _, d := range doc.More {
		g.More = append(g.More, accel.GrantedDevice{Device: d.Device, Index: d.Index, DeviceUnits: d.DeviceUnits})
	}
	return g
}

func (doc *grantV1) validate() error {
	switch {
	case doc.Version < GrantVersion:
		return versionError(doc.Version, GrantVersion)
	case doc.Version > GrantVersionSeveral:
		return versionError(doc.Version, GrantVersionSeveral)
	}
	var errs []error
	for _, f := range []struct{ name, value string }{{"resource", string(doc.Resource)}, {"node", doc.Node}} {
		errs = append(errs, checkName(f.name, f.value))
	}
	if doc.Units <= 0 || doc.Units > accel.MaxUnits {
		errs = append(errs, fmt.Errorf("%d units, not from 1 to %d", doc.Units, accel.MaxUnits))
	}
	errs = append(errs, checkDevice(doc.Device, doc.Index, doc.DeviceUnits))
	switch several := doc.Version == GrantVersionSeveral; {
	case several != (len(doc.More) > 0):
		errs = append(errs, fmt.Errorf("version %d with %d more devices", doc.Version, len(doc.More)))
	case len(doc.More) >= MaxDevices:
		errs = append(errs, fmt.Errorf("%d more devices, at most %d", len(doc.More), MaxDevices-1))
	}
	seen := map[accel.DeviceID]bool{doc.Device: true}
	for _, d := range doc.More {
		errs = append(errs, checkDevice(d.Device, d.Index, d.DeviceUnits))
		if seen[d.Device] {
			errs = append(errs, fmt.Errorf("device %q is listed twice", d.Device))
		}
		seen[d.Device] = true
	}
	return errors.Join(errs...)
}

func checkName(what, value string) error {
	switch {
	case value == "":
		return fmt.Errorf("no %s", what)
	case !utf8.ValidString(value):
		return fmt.Errorf("%s %q is not valid UTF-8", what, value)
	}
	return nil
}

func checkDevice(id accel.DeviceID, index int, units accel.Units) error {
	errs := []error{checkName("device", string(id))}
	if index < 0 {
		errs = append(errs, fmt.Errorf("index %d is below 0", index))
	}
	if units < 0 || units > accel.MaxUnits {
		errs = append(errs, fmt.Errorf("a device of %d units, not from 0 to %d", units, accel.MaxUnits))
	}
	return errors.Join(errs...)
}

// mac signs a document without its MAC field. The UID goes in front with its
// length, so that no two pairs of UID and document give the same bytes.
func (s *Signer) mac(podUID string, payload []byte) []byte {
	msg := make([]byte, 0, len(macDomain)+1+binary.MaxVarintLen64+len(podUID))
	msg = append(msg, macDomain...)
	msg = append(msg, 0)
	msg = binary.AppendUvarint(msg, uint64(len(podUID)))
	msg = append(msg, podUID...)
	h := hmac.New(sha256.New, s.key)
	h.Write(msg)
	h.Write(payload)
	return h.Sum(nil)
}
