// Package nvmltable makes NVML a library that a process can unload, and load again
// from another file.
//
// The binding go-nvml calls NVML's functions by name and leaves these names to the
// dynamic loader, which resolves each of them once, in the first call. From then on the
// program itself depends on the library, so glibc never unloads it. This package defines
// all names that the binding calls, so that the linker resolves them: each is a jump
// through a slot, which Bind sets to the function of the library that is loaded and
// Unbind takes away again. A function that the library lacks, and any function while
// nothing is bound, returns NVML_ERROR_FUNCTION_NOT_FOUND; with the binding alone,
// the process would end.
//
// The names are hidden, so they are not in the way of another vendor's library that
// exports the same ones.
//
// If nothing was bound, nvmlInit_v2 and nvmlInitWithFlags bind what the process has loaded
// with RTLD_GLOBAL, as the binding does. So programs that know nothing of this package,
// such as NVIDIA's own library for CDI, work as before, and keep the library as before.
//
// Nothing may call NVML during Bind and Unbind.
package nvmltable

/*
#cgo LDFLAGS: -ldl
#include <stdlib.h>
#include "table.h"
*/
import "C"

import (
	"fmt"
	"runtime"
	"unsafe"
)

// Bind makes NVML's functions those of the library that the process has loaded from
// that path, or by that bare name.
func Bind(path string) error {
	name := C.CString(path)
	defer C.free(unsafe.Pointer(name))
	// dlerror's text belongs to the thread.
	runtime.LockOSThread()
	defer runtime.UnlockOSThread()
	if C.nvmltable_bind(name) != 0 {
		return fmt.Errorf("bind %s: %s", path, C.GoString(C.nvmltable_error()))
	}
	return nil
}

// Unbind leaves no function of a library behind, which can then be unloaded.
func Unbind() { C.nvmltable_unbind() }

// Unload unloads the library that was loaded from that path, by whichever part of the process, and
// how often: the binding keeps its own handle if nvmlShutdown fails, as it does when
// the driver is gone. It reports whether the process no longer has the library; one
// that was linked with "-z nodelete" stays until the process ends.
func Unload(path string) (gone bool) {
	name := C.CString(path)
	defer C.free(unsafe.Pointer(name))
	return C.nvmltable_unload(name) != 0
}
