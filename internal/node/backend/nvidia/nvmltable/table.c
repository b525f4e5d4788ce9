/* The names of NVML's functions, as jumps through slots. See table.go. */
#define _GNU_SOURCE
#include "table.h"

#include <dlfcn.h>
#include <stdbool.h>
#include <stddef.h>

#define HIDDEN __attribute__((visibility("hidden")))

enum { FUNCTION_NOT_FOUND = 13 };

static int missing(void) { return FUNCTION_NOT_FOUND; }

/* nvmlErrorString returns a text. */
static const char *missing_text(int code)
{
	(void)code;
	return "NVML is not loaded";
}

/* A slot and the function that jumps through it, whatever its arguments are. */
#if defined(__x86_64__)
#define JUMP(name) "\tjmp *nvmltable_slot_" #name "(%rip)\n"
#elif defined(__aarch64__)
#define JUMP(name) \
	"\tadrp x16, nvmltable_slot_" #name "\n" \
	"\tldr x16, [x16, #:lo12:nvmltable_slot_" #name "]\n" \
	"\tbr x16\n"
#else
#error "nvmltable knows no jump for this architecture"
#endif

#define NVML_FUNCTION(name) \
	HIDDEN void *nvmltable_slot_##name; \
	__asm__(".text\n.globl " #name "\n.hidden " #name "\n.type " #name ", %function\n.p2align 4\n" #name ":\n" \
		"\t.cfi_startproc\n" JUMP(name) "\t.cfi_endproc\n.size " #name ", .-" #name "\n");
#include "functions.h"
#undef NVML_FUNCTION

static const struct entry {
	const char *name;
	void **slot;
} entries[] = {
#define NVML_FUNCTION(name) {#name, &nvmltable_slot_##name},
#include "functions.h"
#undef NVML_FUNCTION
};

enum { COUNT = sizeof entries / sizeof entries[0] };

static void *or_missing(void **slot, void *function)
{
	extern void *nvmltable_slot_nvmlErrorString;

	if (function)
		return function;
	return slot == &nvmltable_slot_nvmlErrorString ? (void *)missing_text : (void *)missing;
}

static void fill(void *handle)
{
	for (size_t i = 0; i < COUNT; i++)
		*entries[i].slot = or_missing(entries[i].slot, dlsym(handle, entries[i].name));
}

/*
 * The functions that come first. While nothing is bound, they bind what the process has loaded, at
 * each initialisation again, since it may have been unloaded and loaded in between.
 */
extern void *nvmltable_slot_nvmlInit_v2, *nvmltable_slot_nvmlInitWithFlags;

static void await_init(void);

static int init_any(void)
{
	int (*init)(void);
	int code;

	fill(RTLD_DEFAULT);
	init = (int (*)(void))nvmltable_slot_nvmlInit_v2;
	code = init();
	await_init();
	return code;
}

static int init_any_with_flags(unsigned flags)
{
	int (*init)(unsigned);
	int code;

	fill(RTLD_DEFAULT);
	init = (int (*)(unsigned))nvmltable_slot_nvmlInitWithFlags;
	code = init(flags);
	await_init();
	return code;
}

static void await_init(void)
{
	nvmltable_slot_nvmlInit_v2 = (void *)init_any;
	nvmltable_slot_nvmlInitWithFlags = (void *)init_any_with_flags;
}

void nvmltable_unbind(void)
{
	for (size_t i = 0; i < COUNT; i++)
		*entries[i].slot = or_missing(entries[i].slot, NULL);
	await_init();
}

__attribute__((constructor)) static void start(void) { nvmltable_unbind(); }

static const char *error = "";

const char *nvmltable_error(void) { return error; }

int nvmltable_bind(const char *path)
{
	void *handle = dlopen(path, RTLD_LAZY | RTLD_LOCAL | RTLD_NOLOAD);

	if (!handle) {
		error = dlerror();
		if (!error)
			error = "the library is not loaded";
		return -1;
	}
	fill(handle);
	dlclose(handle);
	return 0;
}

/* More handles than anyone in the process may have of one library. */
enum { MAX_HANDLES = 64 };

int nvmltable_unload(const char *path)
{
	for (int i = 0; i < MAX_HANDLES; i++) {
		void *handle = dlopen(path, RTLD_LAZY | RTLD_LOCAL | RTLD_NOLOAD);

		if (!handle)
			return 1;
		dlclose(handle); /* of this call */
		if (dlclose(handle) != 0) /* of another */
			return 0;
	}
	return 0;
}
