#include "state.h"

#include <errno.h>
#include <fcntl.h>
#include <limits.h>
#include <stddef.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/auxv.h>
#include <sys/file.h>
#include <unistd.h>

/* One of the copies in the file; limits, clients and allocations follow. */
struct header {
	char magic[8];
	uint64_t checksum; /* of all that follows it */
	uint64_t generation; /* the copy with the higher one counts */
	uint64_t numbers;
	uint64_t exclusive;
	uint32_t memacct;
	uint32_t limits, clients, allocations;
};

/* A part of a copy behind its header. */
struct part {
	void *data;
	size_t size;
};

enum {
	COPIES = 2,
	PARTS = 3,
	COPY_BYTES = 1024 * 1024,
};

static const char magic[8] = "DIVVYS2";

_Static_assert(sizeof(struct header) + offsetof(struct state, file) <= COPY_BYTES, "a copy has room for everything");

/*
 * The file clients. It is never closed: that would take away the locks of the
 * whole process, also those of another copy of this library in it. Guarded by the
 * lock of struct sim.
 */
static int clients_file = -1;

/* FNV-1a, of data that follows other data with the sum before. */
static uint64_t add_to_sum(uint64_t before, const void *data, size_t size)
{
	for (const unsigned char *c = data; size > 0; c++, size--)
		before = (before ^ *c) * 1099511628211u;
	return before;
}

static uint64_t checksum(const struct header *h, const struct part parts[PARTS])
{
	uint64_t sum = add_to_sum(14695981039346656037u, &h->generation, sizeof *h - offsetof(struct header, generation));

	for (int i = 0; i < PARTS; i++)
		sum = add_to_sum(sum, parts[i].data, parts[i].size);
	return sum;
}

static void parts_of(struct state *state, struct part out[PARTS])
{
	out[0] = (struct part){state->limits, (size_t)state->limit_count * sizeof *state->limits};
	out[1] = (struct part){state->clients, (size_t)state->client_count * sizeof *state->clients};
	out[2] = (struct part){state->allocations, (size_t)state->allocation_count * sizeof *state->allocations};
}

/* Says what is wrong with a file, and why unless error is 0. */
static bool complain(const char *path, const char *what, int error)
{
	fprintf(stderr, "%s: %s%s%s\n", path, what, error ? ": " : "", error ? strerror(error) : "");
	return false;
}

/* The path of one of the two files. */
static bool place(const struct sim *s, const char *name, char out[PATH_MAX])
{
	char folder[PATH_MAX];
	const char *run = s->driver->run;

	bool fits = sim_path(s, *run ? run : ".", folder, sizeof folder) &&
		    snprintf(out, PATH_MAX, "%s/%s-driver.%s", folder, s->vendor, name) < PATH_MAX;
	return fits || complain(s->path, "the path of the driver's state is too long", 0);
}

/* Opens a file for reading and writing, and makes it for all users if need be and wanted. */
static int open_shared(const char *path, bool make)
{
	int fd = open(path, O_RDWR | O_CLOEXEC);

	if (fd < 0 && errno == ENOENT && make) {
		fd = open(path, O_RDWR | O_CREAT | O_CLOEXEC, 0666);
		if (fd >= 0)
			fchmod(fd, 0666); /* past the umask; of another's file, made meanwhile, it need not succeed */
	}
	return fd;
}

/* Reads all of size bytes. Behind the end of the file it leaves zeros. */
static bool read_at(int fd, void *out, size_t size, off_t at)
{
	memset(out, 0, size);
	for (char *c = out; size > 0;) {
		ssize_t n = pread(fd, c, size, at);
		if (n == 0)
			return true;
		if (n < 0 && errno != EINTR)
			return false;
		n = n < 0 ? 0 : n;
		c += n;
		at += n;
		size -= (size_t)n;
	}
	return true;
}

static bool write_at(int fd, const void *data, size_t size, off_t at)
{
	for (const char *c = data; size > 0;) {
		ssize_t n = pwrite(fd, c, size, at);
		if (n < 0 && errno != EINTR)
			return false;
		n = n < 0 ? 0 : n;
		c += n;
		at += n;
		size -= (size_t)n;
	}
	return true;
}

/* Reads the parts of a copy into *state. Returns false if the copy is broken. */
static bool load_copy(struct state *state, const struct header *h, int copy)
{
	struct part parts[PARTS];
	off_t at = (off_t)copy * COPY_BYTES + (off_t)sizeof *h;

	if (memcmp(h->magic, magic, sizeof magic) != 0 || h->limits > STATE_LIMITS || h->clients > STATE_CLIENTS ||
	    h->allocations > STATE_ALLOCATIONS)
		return false;
	state->limit_count = (int)h->limits;
	state->client_count = (int)h->clients;
	state->allocation_count = (int)h->allocations;
	parts_of(state, parts);
	for (int i = 0; i < PARTS; i++) {
		if (!read_at(state->file, parts[i].data, parts[i].size, at))
			return false;
		at += (off_t)parts[i].size;
	}
	state->numbers = h->numbers;
	state->exclusive = h->exclusive;
	state->memacct = h->memacct;
	state->generation = h->generation;
	state->copy = copy;
	return checksum(h, parts) == h->checksum;
}

/* Reads the newer copy that is whole, or nothing from a new file. Returns false if the file is broken. */
static bool load(struct state *state)
{
	static const struct header none;
	struct header h[COPIES];
	bool new = true;

	for (int i = 0; i < COPIES; i++) {
		if (!read_at(state->file, &h[i], sizeof h[i], (off_t)i * COPY_BYTES))
			return false;
		new &= memcmp(&h[i], &none, sizeof none) == 0;
	}
	int newer = h[1].generation > h[0].generation;
	if (load_copy(state, &h[newer], newer) || load_copy(state, &h[!newer], !newer))
		return true;
	state->limit_count = state->client_count = state->allocation_count = 0;
	return new;
}

/* Writes the copy that is not the present one, its header last. */
static bool save(struct state *state)
{
	struct part parts[PARTS];
	struct header h = {
		.generation = state->generation + 1,
		.numbers = state->numbers,
		.exclusive = state->exclusive,
		.memacct = state->memacct,
		.limits = (uint32_t)state->limit_count,
		.clients = (uint32_t)state->client_count,
		.allocations = (uint32_t)state->allocation_count,
	};
	off_t start = (off_t)!state->copy * COPY_BYTES, at = start + (off_t)sizeof h;

	memcpy(h.magic, magic, sizeof magic);
	parts_of(state, parts);
	h.checksum = checksum(&h, parts);
	for (int i = 0; i < PARTS; i++) {
		if (!write_at(state->file, parts[i].data, parts[i].size, at))
			return false;
		at += (off_t)parts[i].size;
	}
	return write_at(state->file, &h, sizeof h, start);
}

static struct flock lock_of(uint64_t number)
{
	return (struct flock){.l_type = F_WRLCK, .l_whence = SEEK_SET, .l_start = (off_t)number, .l_len = 1};
}

/* The start time of this process, field 22 of its stat, or 0. */
static uint64_t start_time(void)
{
	char text[1024];
	FILE *f = fopen("/proc/self/stat", "re");
	size_t n = f ? fread(text, 1, sizeof text - 1, f) : 0;

	if (f)
		fclose(f);
	text[n] = '\0';
	char *field = strrchr(text, ')'); /* the end of field 2, whose text may have anything in it */
	for (int i = 2; field && i < 22; i++)
		field = strchr(field + 1, ' ');
	return field ? strtoull(field + 1, NULL, 10) : 0;
}

/* This process as a client, without a number. */
static struct client this_process(void)
{
	struct client self = {.pid = (uint64_t)getpid(), .start = start_time()};
	struct stat namespace;
	const void *random = (const void *)getauxval(AT_RANDOM); /* another for each program that is executed */

	if (stat("/proc/self/ns/pid", &namespace) == 0)
		self.pid_namespace = namespace.st_ino;
	if (random)
		memcpy(&self.program, random, sizeof self.program);
	return self;
}

static bool same_process(const struct client *a, const struct client *b)
{
	return a->pid == b->pid && a->pid_namespace == b->pid_namespace && a->start == b->start && a->program == b->program;
}

int state_pid(const struct client *client)
{
	struct client self = this_process();
	struct flock l = lock_of(client->number);

	if (same_process(client, &self)) /* a process does not see its own locks */
		return (int)self.pid;
	if (fcntl(clients_file, F_GETLK, &l) != 0 || l.l_type == F_UNLCK)
		return 0;
	return l.l_pid;
}

/* Whether a client still runs. */
static bool runs(const struct client *client, const struct client *self)
{
	struct flock l = lock_of(client->number);

	if (same_process(client, self))
		return true;
	return fcntl(clients_file, F_GETLK, &l) != 0 || l.l_type != F_UNLCK;
}

static void remove_allocations(struct state *state, uint64_t client)
{
	int kept = 0;

	for (int i = 0; i < state->allocation_count; i++) {
		if (state->allocations[i].client != client)
			state->allocations[kept++] = state->allocations[i];
	}
	state->allocation_count = kept;
}

/* Takes away what clients had that have ended. Without persistence the driver then forgets, if they were the last. */
static void purge(struct state *state, bool persistence)
{
	struct client self = this_process();
	int before = state->client_count;

	state->client_count = 0;
	for (int i = 0; i < before; i++) {
		if (runs(&state->clients[i], &self))
			state->clients[state->client_count++] = state->clients[i];
		else
			remove_allocations(state, state->clients[i].number);
	}
	if (state->client_count < before)
		state->changed = true;
	if (before > 0 && state->client_count == 0 && !persistence) {
		state->limit_count = 0;
		state->exclusive = 0;
	}
}

/* Opens the file clients, unless the open one is still it. */
static bool open_clients(const struct sim *s, bool make)
{
	char path[PATH_MAX];
	struct stat open_one, there;

	if (!place(s, "clients", path))
		return false;
	if (clients_file >= 0 && fstat(clients_file, &open_one) == 0 && stat(path, &there) == 0 &&
	    open_one.st_dev == there.st_dev && open_one.st_ino == there.st_ino)
		return true;
	clients_file = open_shared(path, make);
	if (clients_file < 0 && !make)
		clients_file = open(path, O_RDONLY | O_CLOEXEC);
	return clients_file >= 0 || complain(path, "open", errno);
}

/* Opens and locks the file state. The file is -1 if there is none and none is to be made. */
static bool open_state(struct state *state, const char *path, bool make)
{
	for (;;) {
		state->read_only = false;
		state->file = open_shared(path, make);
		if (state->file < 0 && !make && errno != ENOENT) {
			state->read_only = true;
			state->file = open(path, O_RDONLY | O_CLOEXEC);
		}
		if (state->file < 0)
			return (!make && errno == ENOENT) || complain(path, "open", errno);
		while (flock(state->file, LOCK_EX) != 0) {
			if (errno != EINTR) {
				int error = errno;
				close(state->file);
				return complain(path, "lock", error);
			}
		}
		struct stat locked;
		if (fstat(state->file, &locked) == 0 && locked.st_nlink > 0)
			return true;
		close(state->file); /* it was removed meanwhile: there may be another */
	}
}

/*
 * Gives the file away. The lock is taken off it first: a process that was forked
 * meanwhile has the file open as well.
 */
static void release(struct state *state)
{
	if (state->file >= 0) {
		flock(state->file, LOCK_UN);
		close(state->file);
	}
}

bool state_begin(struct state *state, const struct sim *s, bool write)
{
	char path[PATH_MAX];

	state->limit_count = state->client_count = state->allocation_count = 0;
	state->numbers = state->generation = state->exclusive = 0;
	state->memacct = s->driver->memacct;
	state->copy = 1; /* the first copy is written first */
	state->changed = false;
	if (!place(s, "state", path) || !open_state(state, path, write))
		return false;
	if (state->file < 0)
		return true;
	if (!load(state)) {
		release(state);
		return complain(path, "this is not the state of a driver; remove the file to begin again", 0);
	}
	if (state->memacct != s->driver->memacct) { /* chosen when the driver is loaded */
		state->memacct = s->driver->memacct;
		state->limit_count = 0;
		state->changed = true;
	}
	if ((write || state->client_count > 0) && !open_clients(s, write)) {
		release(state);
		return false;
	}
	purge(state, s->driver->persistence);
	return true;
}

bool state_end(struct state *state)
{
	bool ok = !state->changed || state->file < 0 || state->read_only || save(state);

	if (!ok)
		complain("the state of the driver", "write", errno);
	release(state);
	return ok;
}

void state_clear(struct state *state)
{
	state->changed |= state->limit_count + state->client_count > 0 || state->exclusive != 0;
	state->exclusive = 0;
	state->limit_count = state->client_count = state->allocation_count = 0;
}

uint64_t state_number(struct state *state)
{
	state->changed = true;
	return ++state->numbers;
}

struct client *state_self(struct state *state)
{
	struct client self = this_process();

	for (int i = 0; i < state->client_count; i++) {
		if (same_process(&state->clients[i], &self))
			return &state->clients[i];
	}
	if (state->client_count == STATE_CLIENTS)
		return NULL;
	struct flock l;
	for (;;) { /* a number may be another's, of a file that was removed */
		self.number = state_number(state);
		l = lock_of(self.number);
		if (fcntl(clients_file, F_SETLK, &l) == 0)
			break;
		if (errno != EAGAIN && errno != EACCES) {
			complain("a file of the driver's state", "lock", errno);
			return NULL;
		}
	}
	state->clients[state->client_count] = self;
	return &state->clients[state->client_count++];
}
