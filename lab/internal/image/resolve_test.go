package image

import (
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"
)

// withContent returns the libraries of a program of this machine as an image's
// base has them: by content.
func withContent(t *testing.T, program string) []File {
	t.Helper()
	files, err := Libraries(program)
	if err != nil {
		t.Fatal(err)
	}
	for i, f := range files {
		if files[i].Content, err = os.ReadFile(f.Source); err != nil {
			t.Fatal(err)
		}
		files[i].Source = ""
	}
	return files
}

func TestResolve(t *testing.T) {
	const program = "/bin/ls"
	whole := withContent(t, program)
	is := func(name string) func(File) bool {
		return func(f File) bool { return filepath.Base(f.Path) == name }
	}
	without := func(name string) []File { return slices.DeleteFunc(slices.Clone(whole), is(name)) }
	libc := slices.IndexFunc(whole, is("libc.so.6"))
	if libc < 0 {
		t.Fatalf("%s does not use the C library: %v", program, whole)
	}
	// The loader has versions, too, but none of the C library's.
	other := without("libc.so.6")
	other = append(other, File{Path: whole[libc].Path, Content: whole[0].Content})
	linked := append(without("libc.so.6"),
		File{Path: "/usr/lib/libc-1.so", Content: whole[libc].Content}, File{Path: whole[libc].Path, Target: "libc-1.so"})

	tests := map[string]struct {
		files  []File
		loaded []string
		want   string
	}{
		"all there":          {files: whole},
		"behind a link":      {files: linked},
		"a library is not":   {files: without("libc.so.6"), want: "needs libc.so.6, which is not in the image"},
		"the loader is not":  {files: without(filepath.Base(whole[0].Path)), want: "wants the loader"},
		"what it will load":  {files: whole, loaded: []string{"libstdc++.so.6"}, want: "needs libstdc++.so.6"},
		"an older C library": {files: other, want: "of libc.so.6, and that of the image (" + whole[libc].Path + ") is older"},
		"no library at all": {files: append(without("libc.so.6"), File{Path: "/lib/libc.so.6", Content: []byte("x")}),
			want: "/lib/libc.so.6: "},
	}
	for name, tt := range tests {
		t.Run(name, func(t *testing.T) {
			err := Resolve(program, tt.files, tt.loaded...)
			if tt.want == "" && err != nil || tt.want != "" && (err == nil || !strings.Contains(err.Error(), tt.want)) {
				t.Errorf("got %v, want %q", err, tt.want)
			}
		})
	}
}
