/*
 * alloc allocates memory of a simulated GPU as a program that uses CUDA would: it
 * loads the stand-in for the driver's library and asks for memory. It has no say
 * in whom the memory is charged to.
 */
#include <dlfcn.h>
#include <errno.h>
#include <inttypes.h>
#include <signal.h>
#include <stdbool.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/prctl.h>
#include <unistd.h>

static const char usage[] =
	"usage: alloc [--library FILE] [--device NUMBER|UUID] [--fork] [--hold] --mib N...\n"
	"  --mib N      allocate N MiB; may be given several times, in which case each follows the one before\n"
	"  --device     the GPU, 0 by default\n"
	"  --fork       each amount is allocated by a process of its own\n"
	"  --hold       keep the memory until a signal ends the program\n"
	"  --library    the library, libnvidia-ml.so.1 by default\n"
	"It ends with 0 if all was allocated, with 2 if memory was refused, else with 1.\n";

enum {
	OK = 0,
	FAILED = 1,
	REFUSED = 2,
	MAX_STEPS = 64,
	OUT_OF_MEMORY = 2, /* CUDA_ERROR_OUT_OF_MEMORY */
};

typedef int allocate_function(const char *device, uint64_t bytes);

struct options {
	const char *library, *device;
	bool fork, hold;
	uint64_t steps[MAX_STEPS]; /* MiB */
	int count;
};

static bool parse_step(struct options *o, const char *text)
{
	char *end;

	errno = 0;
	unsigned long long n = strtoull(text, &end, 10);
	if (*text < '0' || *text > '9' || *end != '\0' || errno != 0 || n == 0 || n > UINT64_MAX >> 21 || o->count == MAX_STEPS)
		return false;
	o->steps[o->count++] = n;
	return true;
}

static bool parse(struct options *o, int argc, char **argv)
{
	*o = (struct options){.library = "libnvidia-ml.so.1", .device = "0"};
	for (int i = 1; i < argc; i++) {
		const char *value = i + 1 < argc ? argv[i + 1] : NULL;
		if (strcmp(argv[i], "--fork") == 0) {
			o->fork = true;
			continue;
		}
		if (strcmp(argv[i], "--hold") == 0) {
			o->hold = true;
			continue;
		}
		if (!value)
			return false;
		i++;
		if (strcmp(argv[i - 1], "--library") == 0)
			o->library = value;
		else if (strcmp(argv[i - 1], "--device") == 0)
			o->device = value;
		else if (strcmp(argv[i - 1], "--mib") != 0 || !parse_step(o, value))
			return false;
	}
	return o->count > 0;
}

/*
 * Allocates in a new process, which keeps the memory until this one ends. Returns
 * the code, or -1 if there is no such process.
 */
static int allocate_apart(allocate_function *allocate, const char *device, uint64_t bytes)
{
	int answer[2], code = -1;
	pid_t parent = getpid();

	if (pipe(answer) != 0)
		return -1;
	pid_t child = fork();
	if (child == 0) {
		prctl(PR_SET_PDEATHSIG, SIGKILL);
		if (getppid() != parent) /* it ended before */
			_exit(FAILED);
		code = allocate(device, bytes);
		if (write(answer[1], &code, sizeof code) != sizeof code)
			_exit(FAILED);
		for (;;)
			pause();
	}
	close(answer[1]);
	if (child > 0 && read(answer[0], &code, sizeof code) != sizeof code)
		code = -1;
	close(answer[0]);
	return code;
}

/* Allocates step by step, with a line about each. Returns how the program ends. */
static int run(const struct options *o, allocate_function *allocate)
{
	uint64_t all = 0;
	int result = OK;

	for (int i = 0; i < o->count; i++) {
		uint64_t mib = o->steps[i];
		int code = o->fork ? allocate_apart(allocate, o->device, mib << 20) : allocate(o->device, mib << 20);
		if (code == 0) {
			all += mib;
			printf("allocated %" PRIu64 " MiB, %" PRIu64 " MiB in all\n", mib, all);
			continue;
		}
		const char *why = code == OUT_OF_MEMORY ? "out of memory" : "failed";
		printf("refused %" PRIu64 " MiB, %" PRIu64 " MiB in all: %s, code %d\n", mib, all, why, code);
		if (result != FAILED)
			result = code == OUT_OF_MEMORY ? REFUSED : FAILED;
	}
	return result;
}

/* Waits for a signal. The first process of a container gets only those that it waits for. */
static void wait_for_end(void)
{
	sigset_t ends;
	int number;

	sigemptyset(&ends);
	sigaddset(&ends, SIGTERM);
	sigaddset(&ends, SIGINT);
	sigprocmask(SIG_BLOCK, &ends, NULL);
	sigwait(&ends, &number);
}

int main(int argc, char **argv)
{
	struct options o;

	if (!parse(&o, argc, argv)) {
		fputs(usage, stderr);
		return FAILED;
	}
	void *library = dlopen(o.library, RTLD_NOW | RTLD_LOCAL);
	if (!library) {
		fprintf(stderr, "alloc: %s\n", dlerror());
		return FAILED;
	}
	allocate_function *allocate = (allocate_function *)dlsym(library, "sim_alloc");
	if (!allocate) {
		fprintf(stderr, "alloc: %s\n", dlerror());
		return FAILED;
	}
	setvbuf(stdout, NULL, _IOLBF, 0);
	int result = run(&o, allocate);
	if (o.hold)
		wait_for_end();
	return result;
}
