package image

import (
	"bytes"
	"debug/elf"
	"fmt"
	"os"
	"path"
	"slices"
)

// Resolve checks that a program of an image starts there: that its loader and
// every library that it names, and those that they name, are among the files, in
// the versions that were there when it was linked. loaded are libraries that the
// program will load while it runs and that must be there too.
func Resolve(program string, files []File, loaded ...string) error {
	loader, err := Interpreter(program)
	if err != nil {
		return err
	}
	byName := map[string]File{}
	for _, f := range files {
		// A link may have the name of what it leads to.
		if old, there := byName[path.Base(f.Path)]; !there || old.Target != "" {
			byName[path.Base(f.Path)] = f
		}
	}
	if loader != "" {
		if _, found := byName[path.Base(loader)]; !found {
			return fmt.Errorf("%s wants the loader %s, which is not in the image", program, loader)
		}
	}
	content, err := os.ReadFile(program)
	if err != nil {
		return fmt.Errorf("read a file of the image: %w", err)
	}
	type object struct {
		name    string
		content []byte
		more    []string
	}
	seen := map[string]bool{}
	for queue := []object{{program, content, loaded}}; len(queue) > 0; queue = queue[1:] {
		names, versions, err := wants(queue[0].content)
		if err != nil {
			return fmt.Errorf("%s: %w", queue[0].name, err)
		}
		for _, name := range append(names, queue[0].more...) {
			f, found := follow(byName, name)
			if !found {
				return fmt.Errorf("%s needs %s, which is not in the image", queue[0].name, name)
			}
			has, err := defines(f.Content)
			if err != nil {
				return fmt.Errorf("%s: %w", f.Path, err)
			}
			for _, version := range versions[name] {
				if !slices.Contains(has, version) {
					return fmt.Errorf("%s needs %s of %s, and that of the image (%s) is older: link it on a system as old as the image's "+
						"Debian",
						queue[0].name, version, name, f.Path)
				}
			}
			if !seen[name] {
				seen[name] = true
				queue = append(queue, object{name: name, content: f.Content})
			}
		}
	}
	return nil
}

// follow returns the file behind symbolic links.
func follow(byName map[string]File, name string) (File, bool) {
	f, found := byName[name]
	for range 8 {
		if !found || f.Target == "" {
			break
		}
		f, found = byName[path.Base(f.Target)]
	}
	return f, found
}

// wants returns the libraries that an ELF file names and the versions of symbols
// that it wants of each.
func wants(content []byte) (names []string, versions map[string][]string, err error) {
	file, err := elf.NewFile(bytes.NewReader(content))
	if err != nil {
		return nil, nil, err
	}
	if names, err = file.ImportedLibraries(); err != nil {
		return nil, nil, fmt.Errorf("read the libraries that it needs: %w", err)
	}
	versions = map[string][]string{}
	if file.SectionByType(elf.SHT_GNU_VERNEED) == nil {
		return names, versions, nil
	}
	needs, err := file.DynamicVersionNeeds()
	if err != nil {
		return nil, nil, fmt.Errorf("read the versions that it needs: %w", err)
	}
	for _, need := range needs {
		for _, n := range need.Needs {
			versions[need.Name] = append(versions[need.Name], n.Dep)
		}
	}
	return names, versions, nil
}

func defines(content []byte) ([]string, error) {
	file, err := elf.NewFile(bytes.NewReader(content))
	if err != nil {
		return nil, err
	}
	if file.SectionByType(elf.SHT_GNU_VERDEF) == nil {
		return nil, nil
	}
	versions, err := file.DynamicVersions()
	if err != nil {
		return nil, fmt.Errorf("read the versions that it has: %w", err)
	}
	names := make([]string, 0, len(versions))
	for _, v := range versions {
		names = append(names, v.Name)
	}
	return names, nil
}
