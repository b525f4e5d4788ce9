package image

import (
	"debug/elf"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"slices"
)

// libraryDirs are where Debian and its relatives keep shared libraries.
var libraryDirs = []string{
	"/lib/x86_64-linux-gnu", "/usr/lib/x86_64-linux-gnu",
	"/lib/aarch64-linux-gnu", "/usr/lib/aarch64-linux-gnu",
	"/lib64", "/usr/lib64", "/lib", "/usr/lib",
}

// Interpreter returns the dynamic loader that a program names, empty for a
// static one.
func Interpreter(program string) (loader string, err error) {
	file, err := elf.Open(program)
	if err != nil {
		return "", fmt.Errorf("read program %s: %w", program, err)
	}
	defer func() { err = errors.Join(err, file.Close()) }()
	for _, p := range file.Progs {
		if p.Type != elf.PT_INTERP {
			continue
		}
		data := make([]byte, p.Filesz)
		if _, err := p.ReadAt(data, 0); err != nil {
			return "", fmt.Errorf("read the loader's name from %s: %w", program, err)
		}
		return string(data[:max(0, len(data)-1)]), nil
	}
	return "", nil
}

// Libraries returns the files that a program needs to start and to load more
// libraries while it runs: its loader, the libraries it names and those they
// name, and more by their sonames where the host has them.
func Libraries(program string, more ...string) ([]File, error) {
	loader, err := Interpreter(program)
	if err != nil {
		return nil, err
	}
	if loader == "" {
		return nil, nil
	}
	resolved, err := filepath.EvalSymlinks(loader)
	if err != nil {
		return nil, fmt.Errorf("the loader of %s: %w", program, err)
	}
	files := []File{{Path: loader, Source: resolved}}
	queue, err := needed(program)
	if err != nil {
		return nil, err
	}
	required := slices.Clone(queue)
	queue = append(queue, more...)
	seen := map[string]bool{filepath.Base(loader): true}
	for len(queue) > 0 {
		name := queue[0]
		queue = queue[1:]
		if seen[name] {
			continue
		}
		seen[name] = true
		place, err := findLibrary(name)
		if err != nil {
			if slices.Contains(required, name) {
				return nil, fmt.Errorf("%s needs %s: %w", program, name, err)
			}
			continue
		}
		source, err := filepath.EvalSymlinks(place)
		if err != nil {
			return nil, fmt.Errorf("library %s: %w", name, err)
		}
		files = append(files, File{Path: place, Source: source, Mode: 0o644})
		next, err := needed(source)
		if err != nil {
			return nil, err
		}
		required = append(required, next...)
		queue = append(queue, next...)
	}
	return files, nil
}

func needed(object string) (names []string, err error) {
	file, err := elf.Open(object)
	if err != nil {
		return nil, fmt.Errorf("read %s: %w", object, err)
	}
	defer func() { err = errors.Join(err, file.Close()) }()
	names, err = file.ImportedLibraries()
	if err != nil {
		return nil, fmt.Errorf("read the libraries that %s needs: %w", object, err)
	}
	return names, nil
}

func findLibrary(name string) (string, error) {
	for _, dir := range libraryDirs {
		place := filepath.Join(dir, name)
		if _, err := os.Stat(place); err == nil {
			return place, nil
		}
	}
	return "", fmt.Errorf("%s: %w", name, fs.ErrNotExist)
}
