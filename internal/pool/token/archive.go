package token

import (
	"archive/tar"
	"bufio"
	"bytes"
	"compress/gzip"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"os"
	"path"
	"slices"
	"strings"

	"github.com/divvy-gpu/divvy/internal/pool"
)

// Bounds of what is read. A token has a few KB in three files.
const (
	// maxFile bounds one file of a token, in bytes.
	maxFile = 256 << 10
	// maxArchive bounds an archive, in bytes after decompression.
	maxArchive = 4 << 20
	maxEntries = 64
)

// Read reads a token from an archive (tar or tar.gz), or from the folder into
// which one was unpacked. The contents are not checked: see Token.Check.
func Read(name string) (*Token, error) {
	info, err := os.Stat(name)
	if err != nil {
		return nil, fmt.Errorf("read the token: %w", err)
	}
	if info.IsDir() {
		return readFolder(name)
	}
	f, err := os.Open(name)
	if err != nil {
		return nil, fmt.Errorf("read the token: %w", err)
	}
	defer f.Close() //nolint:errcheck // opened for reading
	t, err := readArchive(f)
	if err != nil {
		return nil, fmt.Errorf("token %s: %w", name, err)
	}
	return t, nil
}

// readFolder reads a token from the folder into which one was unpacked. Links
// are followed inside the folder alone.
func readFolder(name string) (*Token, error) {
	root, err := os.OpenRoot(name)
	if err != nil {
		return nil, fmt.Errorf("read the token: %w", err)
	}
	defer root.Close() //nolint:errcheck // opened for reading
	t := &Token{}
	var errs []error
	for _, file := range names {
		content, err := readFile(root, file)
		if err != nil {
			errs = append(errs, fmt.Errorf("folder %s: %w", name, err))
			continue
		}
		t.Set(file, content)
	}
	if err := errors.Join(errs...); err != nil {
		return nil, err
	}
	return t, nil
}

func readFile(root *os.Root, name string) ([]byte, error) {
	info, err := root.Stat(name)
	if errors.Is(err, fs.ErrNotExist) {
		return nil, missing(name, "")
	}
	if err != nil {
		return nil, err
	}
	if !info.Mode().IsRegular() {
		return nil, fmt.Errorf("%s is a %s: it must be a regular file", name, kindOfFile(info.Mode()))
	}
	f, err := root.Open(name)
	if err != nil {
		return nil, err
	}
	defer f.Close() //nolint:errcheck // opened for reading
	return content(f, name)
}

func kindOfFile(mode fs.FileMode) string {
	if mode.IsDir() {
		return "folder"
	}
	return "special file"
}

func content(r io.Reader, name string) ([]byte, error) {
	data, err := io.ReadAll(io.LimitReader(r, maxFile+1))
	switch {
	case err != nil:
		return nil, fmt.Errorf("read %s: %w", name, err)
	case len(data) > maxFile:
		return nil, fmt.Errorf("%s is larger than %d KiB: a file of a token has a few KB", name, maxFile>>10)
	case len(data) == 0:
		return nil, fmt.Errorf("%s is empty: download the token again", name)
	}
	return data, nil
}

func missing(name, there string) error {
	return fmt.Errorf("%s is missing: a token has the files %s%s", name, strings.Join(names, ", "), there)
}

// readArchive reads a token from a tar, plain or compressed with gzip. It reads
// at most maxArchive bytes of it. Files other than the token's are passed over;
// entries that no token has (absolute paths, .., links, devices) are errors. The
// three files may be in a folder, all in the same.
func readArchive(r io.Reader) (*Token, error) {
	in := bufio.NewReader(r)
	head, err := in.Peek(2)
	if len(head) == 0 {
		if err != nil && !errors.Is(err, io.EOF) {
			return nil, fmt.Errorf("read the archive: %w", err)
		}
		return nil, errors.New("the archive is empty: download the token again")
	}
	a := &archive{token: &Token{}, found: map[string]string{}, in: io.LimitedReader{R: in, N: maxArchive + 1}}
	if bytes.Equal(head, []byte{0x1f, 0x8b}) {
		z, err := gzip.NewReader(in)
		if err != nil {
			return nil, a.damaged(err)
		}
		a.in.R = z
	}
	if err := a.read(tar.NewReader(&a.in)); err != nil {
		return nil, err
	}
	// What follows the last entry holds nothing, but a compressed archive ends
	// with its checksum.
	if _, err := io.Copy(io.Discard, &a.in); err != nil || a.in.N <= 0 {
		return nil, a.damaged(err)
	}
	if err := a.complete(); err != nil {
		return nil, err
	}
	return a.token, nil
}

// damaged says what is wrong with an archive after some entries of it.
func (a *archive) damaged(err error) error {
	entries := a.entries
	switch {
	case a.in.N <= 0:
		return fmt.Errorf("it holds more than %d MiB: a token has a few KB", maxArchive>>20)
	case errors.Is(err, gzip.ErrHeader), errors.Is(err, gzip.ErrChecksum):
		return fmt.Errorf("the archive is damaged (%w): download the token again", err)
	case entries == 0 && (errors.Is(err, tar.ErrHeader) || errors.Is(err, io.ErrUnexpectedEOF)):
		return errors.New("this is not a tar or tar.gz file, or its beginning is missing: use the file that was downloaded from the " +
			"pool's administration")
	case errors.Is(err, io.ErrUnexpectedEOF):
		return fmt.Errorf("the archive is truncated after entry %d: download the token again", entries)
	}
	return fmt.Errorf("the archive is damaged after entry %d (%w): download the token again", entries, err)
}

// archive is what was read of one so far.
type archive struct {
	in      io.LimitedReader
	token   *Token
	entries int
	// found are the paths of the token's files, by name.
	found map[string]string
	// others are the names of other files.
	others []string
}

func (a *archive) read(r *tar.Reader) error {
	for {
		h, err := r.Next()
		if errors.Is(err, io.EOF) {
			return nil
		}
		if err != nil {
			return a.damaged(err)
		}
		if a.entries++; a.entries > maxEntries {
			return fmt.Errorf("it has more than %d entries: a token has the files %s", maxEntries, strings.Join(names, ", "))
		}
		if err := a.entry(h, r); err != nil {
			return err
		}
	}
}

func (a *archive) entry(h *tar.Header, r io.Reader) error {
	if h.Typeflag == tar.TypeXGlobalHeader {
		return nil // remarks about the archive
	}
	shown := Printable(h.Name)
	if err := checkPath(h.Name); err != nil {
		return fmt.Errorf("entry %q %w", shown, err)
	}
	name := path.Base(path.Clean(h.Name))
	switch h.Typeflag {
	case tar.TypeReg, tar.TypeGNUSparse:
	case tar.TypeDir:
		return nil
	case tar.TypeSymlink, tar.TypeLink:
		return fmt.Errorf("entry %q is a link to %q: a token has plain files", shown, Printable(h.Linkname))
	default:
		return fmt.Errorf("entry %q is a device, a pipe or of another special kind: a token has plain files", shown)
	}
	if !slices.Contains(names, name) {
		a.others = append(a.others, shown)
		return nil
	}
	if before, doubled := a.found[name]; doubled {
		return fmt.Errorf("duplicate %s, as %q and as %q: a token has it once", name, before, shown)
	}
	for other, at := range a.found {
		if path.Dir(path.Clean(at)) != path.Dir(path.Clean(h.Name)) {
			return fmt.Errorf("%q and %q are in different folders: %s and %s must be side by side", at, shown, other, name)
		}
	}
	a.found[name] = shown
	data, err := content(r, fmt.Sprintf("entry %q", shown))
	if err != nil {
		if errors.Is(err, io.ErrUnexpectedEOF) || a.in.N <= 0 || errors.Is(err, gzip.ErrChecksum) {
			return a.damaged(err)
		}
		return err
	}
	a.token.Set(name, data)
	return nil
}

// checkPath refuses paths that would lead out of the folder in which somebody
// unpacks the archive. Nothing is unpacked here, but an archive with such paths
// is none that the pool has made.
func checkPath(name string) error {
	if strings.HasPrefix(name, "/") || strings.HasPrefix(name, `\`) || len(name) > 1 && name[1] == ':' {
		return errors.New("is an absolute path: a token has ca.crt, client.yaml and servers.conf")
	}
	if slices.Contains(strings.FieldsFunc(name, func(r rune) bool { return r == '/' || r == '\\' }), "..") {
		return errors.New("leads out of the archive's folder: a token has ca.crt, client.yaml and servers.conf")
	}
	if name == "" || strings.ContainsRune(name, 0) {
		return errors.New("has no proper name: a token has ca.crt, client.yaml and servers.conf")
	}
	return nil
}

func (a *archive) complete() error {
	there := ""
	if len(a.others) > 0 {
		there = fmt.Sprintf("; this archive has %s", strings.Join(quoted(a.others), ", "))
	}
	var errs []error
	for _, name := range names {
		if _, ok := a.found[name]; !ok {
			errs = append(errs, missing(name, there))
			there = "" // once is enough
		}
	}
	return errors.Join(errs...)
}

const maxListed = 5

func quoted(list []string) []string {
	var out []string
	for i, s := range list {
		if i == maxListed {
			return append(out, fmt.Sprintf("%d more", len(list)-i))
		}
		out = append(out, fmt.Sprintf("%q", s))
	}
	return out
}

// Secrets returns the data of the four secrets that hold a token, by name.
func (t *Token) Secrets() map[string]map[string][]byte {
	return map[string]map[string][]byte{
		pool.CASecret:      {pool.CAKey: t.CA},
		pool.ClientSecret:  {pool.ClientKey: t.Client},
		pool.ServersSecret: {pool.ServersKey: t.Servers},
		pool.SingleSecret:  {pool.CAKey: t.CA, pool.ClientKey: t.Client, pool.ServersKey: t.Servers},
	}
}
