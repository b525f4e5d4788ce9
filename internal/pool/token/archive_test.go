package token

import (
	"archive/tar"
	"bytes"
	"compress/gzip"
	"fmt"
	"io"
	"os"
	"path/filepath"
	"strings"
	"testing"
)

// entry is one of a tar that a test writes.
type entry struct {
	name string
	body string
	kind byte // of the header; 0 for a plain file
	link string
}

func three() []entry {
	return []entry{{name: "ca.crt", body: "ca"}, {name: "client.yaml", body: "client"}, {name: "servers.conf", body: "servers"}}
}

func archiveOf(t testing.TB, entries ...entry) []byte {
	t.Helper()
	var b bytes.Buffer
	w := tar.NewWriter(&b)
	for _, e := range entries {
		h := &tar.Header{Name: e.name, Mode: 0o600, Size: int64(len(e.body)), Typeflag: e.kind, Linkname: e.link}
		if e.kind == 0 {
			h.Typeflag = tar.TypeReg
		}
		if e.kind == tar.TypeXGlobalHeader {
			h = &tar.Header{Typeflag: tar.TypeXGlobalHeader, PAXRecords: map[string]string{"comment": "made by git"}}
		}
		if err := w.WriteHeader(h); err != nil {
			t.Fatal(err)
		}
		if h.Size > 0 {
			if _, err := io.WriteString(w, e.body); err != nil {
				t.Fatal(err)
			}
		}
	}
	if err := w.Close(); err != nil {
		t.Fatal(err)
	}
	return b.Bytes()
}

func zipped(t testing.TB, data []byte) []byte {
	t.Helper()
	var b bytes.Buffer
	w := gzip.NewWriter(&b)
	if _, err := w.Write(data); err != nil {
		t.Fatal(err)
	}
	if err := w.Close(); err != nil {
		t.Fatal(err)
	}
	return b.Bytes()
}

func below(folder string) []entry {
	all := three()
	for i := range all {
		all[i].name = folder + all[i].name
	}
	return all
}

func TestReadArchive(t *testing.T) {
	tests := map[string][]byte{
		"tar":               archiveOf(t, three()...),
		"tar.gz":            zipped(t, archiveOf(t, three()...)),
		"./":                archiveOf(t, append([]entry{{name: "./", kind: tar.TypeDir}}, below("./")...)...),
		"in a folder":       archiveOf(t, append([]entry{{name: "tokens/", kind: tar.TypeDir}}, below("tokens/")...)...),
		"with other files":  archiveOf(t, append(three(), entry{name: "._ca.crt", body: "x"}, entry{name: "README.md", body: "x"})...),
		"with remarks":      archiveOf(t, append([]entry{{kind: tar.TypeXGlobalHeader}}, three()...)...),
		"with a large file": archiveOf(t, append(three(), entry{name: "other", body: strings.Repeat("x", 1<<20)})...),
	}
	// Files are padded to whole blocks; the end of the archive may be missing.
	tests["without an end"] = archiveOf(t, three()...)[:3*1024]
	for name, data := range tests {
		t.Run(name, func(t *testing.T) {
			got, err := readArchive(bytes.NewReader(data))
			if err != nil {
				t.Fatal(err)
			}
			if string(got.CA) != "ca" || string(got.Client) != "client" || string(got.Servers) != "servers" {
				t.Errorf("read %q, %q and %q", got.CA, got.Client, got.Servers)
			}
		})
	}
}

func TestBadArchives(t *testing.T) {
	plain := archiveOf(t, three()...)
	with := func(more ...entry) []byte { return archiveOf(t, append(three(), more...)...) }
	without := func(i int) []byte { return archiveOf(t, append(three()[:i:i], three()[i+1:]...)...) }
	damaged := zipped(t, plain)
	damaged[len(damaged)-5] ^= 1
	var many []entry
	for i := range maxEntries + 1 {
		many = append(many, entry{name: fmt.Sprint(i), body: "x"})
	}
	tests := map[string]struct {
		data []byte
		want string
	}{
		"nothing":             {nil, "the archive is empty: download the token again"},
		"one byte":            {[]byte{0x1f}, "this is not a tar or tar.gz file"},
		"text":                {[]byte(strings.Repeat("hello\n", 1000)), "this is not a tar or tar.gz file"},
		"a certificate":       {[]byte("-----BEGIN CERTIFICATE-----"), "this is not a tar or tar.gz file"},
		"text that is zipped": {zipped(t, []byte(strings.Repeat("hello\n", 1000))), "this is not a tar or tar.gz file"},
		"zeros":               {make([]byte, 10240), "ca.crt is missing: a token has the files ca.crt, client.yaml, servers.conf"},
		"no ca.crt":           {without(0), "ca.crt is missing"},
		"no client.yaml":      {without(1), "client.yaml is missing"},
		"no servers.conf":     {without(2), "servers.conf is missing"},
		"services.conf": {archiveOf(t, three()[0], three()[1], entry{name: "services.conf", body: "x"}),
			`servers.conf is missing: a token has the files ca.crt, client.yaml, servers.conf; this archive has "services.conf"`},
		"another case":          {archiveOf(t, entry{name: "CA.CRT", body: "x"}, three()[1], three()[2]), `this archive has "CA.CRT"`},
		"twice":                 {with(entry{name: "ca.crt", body: "other"}), `duplicate ca.crt, as "ca.crt" and as "ca.crt"`},
		"twice, by another way": {with(entry{name: "a/../ca.crt", body: "other"}), `entry "a/../ca.crt" leads out`},
		"twice, in a folder":    {with(entry{name: "./x/ca.crt", body: "other"}), `duplicate ca.crt, as "ca.crt" and as "./x/ca.crt"`},
		"in two folders":        {archiveOf(t, append(below("a/")[:2], below("b/")[2])...), `are in different folders`},
		"an empty file":         {archiveOf(t, three()[0], entry{name: "client.yaml"}, three()[2]), `entry "client.yaml" is empty`},
		"a large ca.crt": {archiveOf(t, entry{name: "ca.crt", body: strings.Repeat("x", maxFile+1)}),
			`entry "ca.crt" is larger than 256 KiB`},
		"too many entries": {archiveOf(t, many...), "it has more than 64 entries"},
		"too much":         {archiveOf(t, entry{name: "x", body: strings.Repeat("x", maxArchive)}), "it holds more than 4 MiB"},
		"a bomb": {zipped(t, archiveOf(t, append([]entry{{name: "x", body: strings.Repeat("x", 6<<20)}}, three()...)...)),
			"it holds more than 4 MiB"},
		"a bomb at the end": {zipped(t, append(bytes.Clone(plain), make([]byte, 6<<20)...)), "it holds more than 4 MiB"},
		"out of the folder": {with(entry{name: "../../root/.ssh/authorized_keys", body: "x"}),
			`entry "../../root/.ssh/authorized_keys" leads out of the archive's folder`},
		"out, further down":     {with(entry{name: "a/b/../../../ca.crt", body: "x"}), "leads out of the archive's folder"},
		"out, with backslashes": {with(entry{name: `..\..\ca.crt`, body: "x"}), "leads out of the archive's folder"},
		"a folder outside":      {with(entry{name: "../", kind: tar.TypeDir}), "leads out of the archive's folder"},
		"absolute":              {with(entry{name: "/etc/passwd", body: "x"}), `entry "/etc/passwd" is an absolute path`},
		"absolute, of a drive":  {with(entry{name: `C:\ca.crt`, body: "x"}), "is an absolute path"},
		"a symbolic link": {archiveOf(t, entry{name: "ca.crt", kind: tar.TypeSymlink, link: "/etc/shadow"}),
			`entry "ca.crt" is a link to "/etc/shadow": a token has plain files`},
		"a link, not a token's": {with(entry{name: "x", kind: tar.TypeSymlink, link: "/"}), `entry "x" is a link to "/"`},
		"a hard link": {archiveOf(t, entry{name: "ca.crt", kind: tar.TypeLink, link: "client.yaml"}),
			`entry "ca.crt" is a link to "client.yaml"`},
		"a device":              {with(entry{name: "null", kind: tar.TypeChar}), `entry "null" is a device, a pipe`},
		"a disk":                {with(entry{name: "sda", kind: tar.TypeBlock}), `entry "sda" is a device, a pipe`},
		"a pipe":                {with(entry{name: "ca.crt", kind: tar.TypeFifo}), `entry "ca.crt" is a device, a pipe`},
		"escapes in a name":     {with(entry{name: "\x1b[2J/../x", body: "x"}), `entry "?[2J/../x" leads out`},
		"cut off in a file":     {plain[:512+1], "the archive is truncated after entry 1: download the token again"},
		"cut off in a header":   {plain[:1024+100], "the archive is truncated after entry 1"},
		"cut off between files": {plain[:2*1024], "servers.conf is missing"},
		"zipped, and cut off":   {zipped(t, plain)[:60], "or its beginning is missing"},
		"zipped, without end":   {zipped(t, plain)[:len(zipped(t, plain))-4], "the archive is truncated after entry 3"},
		"zipped, and damaged":   {damaged, "the archive is damaged"},
		"half a header of gzip": {[]byte{0x1f, 0x8b, 8}, "or its beginning is missing"},
	}
	for name, tt := range tests {
		t.Run(name, func(t *testing.T) {
			file := filepath.Join(t.TempDir(), "CA7WPsj.tar")
			if err := os.WriteFile(file, tt.data, 0o600); err != nil {
				t.Fatal(err)
			}
			_, err := Read(file)
			if err == nil || !strings.Contains(err.Error(), tt.want) {
				t.Errorf("error %v, want %q in it", err, tt.want)
			}
			if err != nil && !strings.Contains(err.Error(), "CA7WPsj.tar") {
				t.Errorf("error %q does not name the file", err)
			}
		})
	}
}

// endless is a source without an end, of zeros.
type endless struct{ read int64 }

func (e *endless) Read(p []byte) (int, error) {
	clear(p)
	e.read += int64(len(p))
	return len(p), nil
}

func TestArchiveIsNeverReadToTheEndOfTheWorld(t *testing.T) {
	rest := &endless{}
	_, err := readArchive(io.MultiReader(bytes.NewReader(archiveOf(t, three()...)), rest))
	if err == nil || !strings.Contains(err.Error(), "more than 4 MiB") {
		t.Errorf("error %v", err)
	}
	if rest.read > 2*maxArchive {
		t.Errorf("%d bytes were read", rest.read)
	}
}

// Whatever is given, there is a token with three files that are not empty, or an
// error.
func FuzzReadArchive(f *testing.F) {
	f.Add(archiveOf(f, three()...))
	f.Add(zipped(f, archiveOf(f, three()...)))
	f.Add(archiveOf(f, append(below("tokens/"), entry{name: "../x", body: "x"})...))
	f.Add(archiveOf(f, append(three(), entry{name: "x", kind: tar.TypeSymlink, link: "/"})...))
	f.Add(archiveOf(f, entry{kind: tar.TypeXGlobalHeader}))
	f.Add(archiveOf(f, three()...)[:1000])
	f.Add([]byte("hello"))
	f.Add([]byte{0x1f, 0x8b})
	f.Fuzz(func(t *testing.T, data []byte) {
		got, err := readArchive(bytes.NewReader(data))
		if (err == nil) != (got != nil) {
			t.Fatalf("token %v, error %v", got, err)
		}
		if err != nil {
			return
		}
		for i, content := range [][]byte{got.CA, got.Client, got.Servers} {
			if n := len(content); n == 0 || n > maxFile {
				t.Errorf("%s has %d bytes", names[i], n)
			}
		}
		_, _ = got.Check(now) // it must come back
	})
}
