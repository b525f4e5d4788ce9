package main

import (
	"bufio"
	"cmp"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"os"
	"os/exec"
	"path/filepath"
	"runtime"
	"strconv"
	"strings"
	"time"

	"github.com/ebitengine/purego"

	"github.com/divvy-gpu/divvy/internal/core/accel"
	"github.com/divvy-gpu/divvy/internal/node/backend/libfile"
)

const (
	// contextPart is the part that creates a CUDA context and holds it until its
	// standard input ends.
	contextPart = "hold-cuda-context"
	// libcuda is the file of CUDA's driver API.
	libcuda = "libcuda.so.1"
)

// Codes of CUDA's driver API. All but the first say that a GPU is busy.
const (
	cudaSuccess           = 0
	cudaOutOfMemory       = 2
	cudaDeviceUnavailable = 46
)

// cudaMultiprocessors is the attribute of a device that counts its multiprocessors.
const cudaMultiprocessors = 16

// contextAnswer is what the part writes when the context exists, or cannot.
type contextAnswer struct {
	// Missing is why there is no CUDA here, "" if there is.
	Missing string
	// Call is the function that failed with Code, "" for none.
	Call string
	Code int32
	// Version is that of the driver API: 12080 for 12.8.
	Version int32
	// Multiprocessors are those that the process may use.
	Multiprocessors int32
	// Allocated is the code of the allocation that was asked for.
	Allocated int32
}

// reason is why there is no context, "" if there is one. failed is false where that says
// nothing about the driver.
func (a contextAnswer) reason() (text string, failed bool) {
	switch {
	case a.Missing != "":
		return a.Missing, false
	case a.Call == "":
		return "", false
	case a.Code == cudaOutOfMemory || a.Code == cudaDeviceUnavailable:
		return fmt.Sprintf("the GPU is in use: %s returns %d", a.Call, a.Code), false
	default:
		return fmt.Sprintf("%s returns %d", a.Call, a.Code), true
	}
}

// err is reason as an error.
func (a contextAnswer) err() error {
	if text, _ := a.reason(); text != "" {
		return errors.New(text)
	}
	return nil
}

func contextCommand(args []string) error {
	if len(args) != 2 {
		return errors.New(contextPart + " needs the file of libcuda, and how many MiB to allocate")
	}
	mib, err := strconv.ParseUint(args[1], 10, 32)
	if err != nil {
		return err
	}
	if err := json.NewEncoder(os.Stdout).Encode(createContext(args[0], mib<<20)); err != nil {
		return err
	}
	_, err = io.Copy(io.Discard, os.Stdin)
	return err
}

// createContext creates a context on the first GPU that CUDA shows, and allocates memory
// there. The process keeps both.
func createContext(path string, bytes uint64) (a contextAnswer) {
	runtime.LockOSThread() // the context is the thread's
	library, err := libfile.LoadShared(path, purego.RTLD_LAZY|purego.RTLD_LOCAL)
	if err != nil {
		a.Missing = err.Error()
		return a
	}
	var (
		initialise func(flags uint32) int32
		version    func(*int32) int32
		device     func(*int32, int32) int32
		create     func(*uintptr, uint32, int32) int32
		attribute  func(value *int32, which, device int32) int32
		allocate   func(*uintptr, uint64) int32
	)
	missing := library.Bind(libfile.Symbols{
		{Function: &initialise, Name: "cuInit"}, {Function: &version, Name: "cuDriverGetVersion"},
		{Function: &device, Name: "cuDeviceGet"}, {Function: &create, Name: "cuCtxCreate_v2"},
		{Function: &attribute, Name: "cuDeviceGetAttribute"}, {Function: &allocate, Name: "cuMemAlloc_v2"},
	})
	if len(missing) > 0 {
		a.Missing = path + " lacks " + strings.Join(missing, ", ")
		return a
	}
	var gpu int32
	var handle uintptr
	for _, step := range []struct {
		call string
		run  func() int32
	}{
		{"cuInit", func() int32 { return initialise(0) }},
		{"cuDriverGetVersion", func() int32 { return version(&a.Version) }},
		{"cuDeviceGet", func() int32 { return device(&gpu, 0) }},
		{"cuCtxCreate", func() int32 { return create(&handle, 0, gpu) }},
		{"cuDeviceGetAttribute", func() int32 { return attribute(&a.Multiprocessors, cudaMultiprocessors, gpu) }},
	} {
		if code := step.run(); code != 0 {
			a.Call, a.Code = step.call, code
			return a
		}
	}
	if bytes > 0 {
		var address uintptr
		a.Allocated = allocate(&address, bytes)
	}
	return a
}

// cudaContext measures a CUDA context without anything in it.
func (t *test) cudaContext(ctx context.Context) error {
	t.title("A CUDA context")
	gpu, why := gpuForContext(t.root, t.inspected)
	if why != "" {
		t.note("The size of a CUDA context was not measured: %s.", why)
		return nil
	}
	c, err := startContext(ctx, func(ctx context.Context) *exec.Cmd {
		cmd := exec.CommandContext(ctx, self, contextPart, cmp.Or(t.libcuda, libcuda), "0")
		// Without MPS, whose daemon would be the one that has the context.
		cmd.Env = append(os.Environ(), "CUDA_VISIBLE_DEVICES="+gpu.UUID, "CUDA_MPS_PIPE_DIRECTORY=/nonexistent")
		return cmd
	})
	if err != nil {
		t.checks.NoError("a process creates a CUDA context", err)
		return nil
	}
	defer c.end()
	if text, failed := c.answer.reason(); failed {
		t.checks.NoError("a process creates a CUDA context", errors.New(text))
		return nil
	} else if text != "" {
		t.note("The size of a CUDA context was not measured: %s.", text)
		return nil
	}
	t.multiprocessors = c.answer.Multiprocessors
	after, err := inspect(ctx)
	if err != nil {
		return err
	}
	now := after.gpu(gpu.UUID)
	listed, found := now.process(c.pid)
	size := "not listed"
	switch {
	case found && listed.Known:
		size = mib(listed.Bytes)
	case found:
		size = "listed, unknown"
	}
	grown := "unknown"
	if now.Memory.Err == "" && gpu.Memory.Err == "" {
		grown = fmt.Sprint(int64(now.Memory.Used>>20) - int64(gpu.Memory.Used>>20))
	}
	t.table(table{
		Head: []string{"GPU", "CUDA driver API", "multiprocessors", "memory in the list, MiB", "growth of the used memory, MiB"},
		Rows: [][]string{{fmt.Sprint(gpu.Index), fmt.Sprintf("%d.%d", c.answer.Version/1000, c.answer.Version%1000/10),
			fmt.Sprint(c.answer.Multiprocessors), size, grown}}})
	what := "the list of compute processes has the one with the context, by its pid"
	if t.seesAllProcesses {
		t.checks.True(what, found, size)
	} else {
		t.note("Whether %s was not checked outside of the host's pid namespace: %t.", what, found)
	}
	return nil
}

// gpuForContext chooses the GPU for a context, or says why there is none. Nothing on the
// machine may change for it.
func gpuForContext(root string, found inspection) (gpu inspectedGPU, why string) {
	if _, err := os.Stat(filepath.Join(root, "dev/nvidia-uvm")); err != nil {
		return gpu, "there is no /dev/nvidia-uvm, and CUDA would load the kernel module nvidia-uvm"
	}
	for _, gpu := range found.GPUs {
		if !gpu.inMIGMode() && gpu.Compute.Text != prohibited {
			return gpu, ""
		}
	}
	return gpu, "every GPU is in MIG mode or prohibits contexts"
}

// contextLimit is how long a context may be held: as long as the longest wait, and more.
const contextLimit = partLimit + mpsPatience

// heldContext is a process that has a CUDA context, or could not create one.
type heldContext struct {
	answer contextAnswer
	// gpu is the container's, "" outside of one.
	gpu accel.DeviceID
	pid int
	end func()
}

// startContext starts the part by a command and waits for its answer. The process ends within
// contextLimit.
func startContext(ctx context.Context, command func(context.Context) *exec.Cmd) (c heldContext, err error) {
	limited, cancel := context.WithTimeout(ctx, contextLimit)
	cmd := command(limited)
	cmd.WaitDelay = time.Second
	var log strings.Builder
	cmd.Stderr = &log
	in, err := cmd.StdinPipe()
	if err != nil {
		cancel()
		return c, err
	}
	out, err := cmd.StdoutPipe()
	if err == nil {
		err = cmd.Start()
	}
	if err != nil {
		cancel()
		return c, err
	}
	c.pid = cmd.Process.Pid
	c.end = func() {
		_ = in.Close()
		_ = cmd.Wait() // what it had to say was said
		cancel()
	}
	line, err := bufio.NewReader(out).ReadBytes('\n')
	if err == nil {
		err = json.Unmarshal(line, &c.answer)
	}
	if err != nil {
		err = errors.Join(limited.Err(), err)
		c.end()
		return c, fmt.Errorf("%w: %s", err, lastLine(log.String()))
	}
	return c, nil
}
