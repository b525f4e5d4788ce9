package vendorsim

import (
	"bytes"
	"cmp"
	"context"
	"embed"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"path"
	"path/filepath"
	"slices"
	"strings"
	"sync"
)

// TopologyName is the file that a stand-in reads, in the folder of the library's own
// file. Symbolic links to the library are followed first. Nothing else names the file: a
// process does not choose its hardware.
const TopologyName = "topology.ini"

//go:embed c/*.c c/*.h
var sources embed.FS

// library is how the stand-in for a vendor's library is made.
type library struct {
	file, soname string
	// sources are the files in folder c that have the vendor's interface.
	sources []string
}

var libraries = map[string]library{
	Enflame: {file: "libefml.so.1.0.0", soname: "libefml.so.1", sources: []string{"efml.c"}},
	NVIDIA: {
		file: "libnvidia-ml.so.1", soname: "libnvidia-ml.so.1",
		sources: []string{"nvml.c", "nvmlmig.c", "nvmlprocess.c", "nvmllimits.c", "nvmlabi.c", "cgroup.c", "state.c"},
	},
	Iluvatar: {file: "libixml.so", soname: "libixml.so", sources: []string{"ixml.c", "nvmlabi.c"}},
}

// commonSources are in every stand-in.
var commonSources = []string{"sim.c", "topology.c", "mig.c"}

// LibraryName is the file that Build makes for a vendor, one of Vendors; ""
// for others.
func LibraryName(vendor string) string { return libraries[vendor].file }

// BuildOption changes what Build makes.
type BuildOption func(*build)

type build struct {
	without []string
}

// Without leaves functions out of the library, as an older release of the
// vendor's would.
func Without(functions ...string) BuildOption {
	return func(b *build) { b.without = append(b.without, functions...) }
}

// Build compiles the stand-in for a vendor's library into dir, which it makes
// if need be, under LibraryName, and returns the file's path. It takes about a
// second. A library that is there already is replaced in one step, which does
// not disturb processes that have loaded it.
//
// The compiler is $CC, or cc; it needs a C library's headers and nothing else.
// The error of a failed compilation holds what the compiler wrote.
func Build(ctx context.Context, vendor, dir string, options ...BuildOption) (file string, err error) {
	lib, ok := libraries[vendor]
	if !ok {
		return "", fmt.Errorf("there is no stand-in for the library of vendor %q, only for those of %s",
			vendor, strings.Join(Vendors, ", "))
	}
	file, err = lib.build(ctx, dir, options...)
	if err != nil {
		return "", fmt.Errorf("build %s: %w", lib.file, err)
	}
	return file, nil
}

// compiled has what Compiled has made, by vendor.
var compiled struct {
	sync.Mutex
	libraries map[string][]byte
}

// Compiled returns the stand-in for a vendor's library, for a process that wants
// it in many places: it is compiled when it is wanted first, in a folder for
// temporary files.
func Compiled(vendor string) ([]byte, error) {
	compiled.Lock()
	defer compiled.Unlock()
	if data, ok := compiled.libraries[vendor]; ok {
		return data, nil
	}
	dir, err := os.MkdirTemp("", "vendorsim-")
	if err != nil {
		return nil, err
	}
	defer func() { _ = os.RemoveAll(dir) }() // in the temporary folder
	file, err := Build(context.Background(), vendor, dir)
	if err != nil {
		return nil, err
	}
	data, err := os.ReadFile(file)
	if err != nil {
		return nil, err
	}
	if compiled.libraries == nil {
		compiled.libraries = map[string][]byte{}
	}
	compiled.libraries[vendor] = data
	return data, nil
}

// BuildAllocator compiles alloc, the program that allocates memory of a simulated GPU as
// one that uses CUDA does, into dir, and returns the file's path. It needs the stand-in for
// NVIDIA's library, and a C library, to run. It is compiled like a stand-in; see Build.
func BuildAllocator(ctx context.Context, dir string) (file string, err error) {
	const name = "alloc"
	if file, err = compile(ctx, dir, name, "-o", name, "c/alloc.c", "-ldl"); err != nil {
		return "", fmt.Errorf("build %s: %w", name, err)
	}
	return file, nil
}

// BuildEfsmi compiles efsmi, the stand-in for Enflame's program that makes and lists DRS
// instances, into dir, and returns the file's path. It reads the topology file in lib beside dir,
// in dir, or in lib below it, and needs no other file to run, also not a C library. It is
// compiled like a stand-in; see Build.
func BuildEfsmi(ctx context.Context, dir string) (file string, err error) {
	const name = "efsmi"
	if file, err = compile(ctx, dir, name, "-static", "-o", name, "c/efsmi.c", "c/topology.c", "c/mig.c"); err != nil {
		return "", fmt.Errorf("build %s: %w", name, err)
	}
	return file, nil
}

func (lib library) build(ctx context.Context, dir string, options ...BuildOption) (built string, err error) {
	var b build
	for _, o := range options {
		o(&b)
	}
	args := []string{
		"-fPIC", "-shared", "-pthread",
		// Only the vendor's functions are exported, so that two copies of a
		// stand-in in one process have nothing in common.
		"-fvisibility=hidden", "-Wl,-soname," + lib.soname,
	}
	for _, f := range b.without {
		args = append(args, fmt.Sprintf("-D%s=left_out_%s", f, f))
	}
	args = append(args, "-o", lib.file)
	for _, source := range slices.Concat(lib.sources, commonSources) {
		args = append(args, path.Join("c", source))
	}
	return compile(ctx, dir, lib.file, append(args, "-ldl")...)
}

// compile runs the compiler, which makes file, and moves that into dir in one step.
func compile(ctx context.Context, dir, file string, args ...string) (built string, err error) {
	compiler := strings.Fields(cmp.Or(os.Getenv("CC"), "cc")) // CC may hold flags
	if len(compiler) == 0 {
		return "", errors.New("CC is blank")
	}
	if err := os.MkdirAll(dir, 0o755); err != nil {
		return "", err
	}
	// It is linked in a folder beside its place, so that moving it there is a rename.
	work, err := os.MkdirTemp(dir, ".build-")
	if err != nil {
		return "", err
	}
	defer func() {
		err = errors.Join(err, os.RemoveAll(work))
	}()
	if err := os.CopyFS(work, sources); err != nil {
		return "", fmt.Errorf("unpack the sources: %w", err)
	}
	args = slices.Concat(compiler[1:], []string{"-std=c11", "-D_GNU_SOURCE", "-O2", "-Wall", "-Wextra"}, args)
	run := exec.CommandContext(ctx, compiler[0], args...)
	run.Dir = work
	var said bytes.Buffer
	run.Stdout, run.Stderr = &said, &said
	if err := run.Run(); err != nil {
		err = fmt.Errorf("%s: %w", compiler[0], cmp.Or(ctx.Err(), err))
		if text := strings.TrimSpace(said.String()); text != "" {
			err = fmt.Errorf("%w\n%s", err, text)
		}
		return "", err
	}
	built = filepath.Join(dir, file)
	if err := os.Rename(filepath.Join(work, file), built); err != nil {
		return "", err
	}
	return built, nil
}
