#include "cgroup.h"

#include <fcntl.h>
#include <limits.h>
#include <linux/magic.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/vfs.h>
#include <unistd.h>

/* Where the control groups are. */
struct view {
	char root[PATH_MAX];
	struct stat at; /* the root, if the topology file names it */
	bool named;
};

/* Fills *v. Returns false where there are no control groups of version 2. */
static bool open_view(const struct sim *s, struct view *v)
{
	const char *root = s->topology.cgroup.root;
	struct statfs system;

	v->named = *root != '\0';
	if (!v->named) {
		snprintf(v->root, sizeof v->root, "/sys/fs/cgroup");
		return statfs(v->root, &system) == 0 && system.f_type == CGROUP2_SUPER_MAGIC;
	}
	return sim_path(s, root, v->root, sizeof v->root) && stat(v->root, &v->at) == 0 && S_ISDIR(v->at.st_mode);
}

static bool same_inode(const struct stat *a, const struct stat *b)
{
	return a->st_dev == b->st_dev && a->st_ino == b->st_ino;
}

/* Goes up from a folder, which it closes, to the root. Returns false if it is in no control group. */
static bool climb(const struct view *v, int folder, struct cgroup *out)
{
	struct stat here, above;
	struct statfs system;
	bool found = false;

	out->depth = 0;
	if (!v->named && (fstatfs(folder, &system) != 0 || system.f_type != CGROUP2_SUPER_MAGIC)) {
		close(folder);
		return false;
	}
	while (fstat(folder, &here) == 0 && out->depth < CGROUP_DEPTH) {
		out->chain[out->depth++] = here.st_ino;
		if (v->named && same_inode(&here, &v->at)) {
			found = true;
			break;
		}
		int up = openat(folder, "..", O_RDONLY | O_DIRECTORY | O_CLOEXEC);
		if (up < 0)
			break;
		close(folder);
		folder = up;
		if (fstat(folder, &above) != 0 || same_inode(&here, &above))
			break; /* at the root of all files */
		if (!v->named && above.st_dev != here.st_dev) {
			found = true; /* it left the file system of control groups */
			break;
		}
	}
	close(folder);
	return found;
}

static bool climb_from(const struct view *v, const char *path, struct cgroup *out)
{
	int folder = open(path, O_RDONLY | O_DIRECTORY | O_CLOEXEC);

	return folder >= 0 && climb(v, folder, out);
}

bool cgroup_at(const struct sim *s, const char *path, struct cgroup *out)
{
	struct view v;

	return open_view(s, &v) && climb_from(&v, path, out);
}

/* Whether a list with commas between its items has that one. */
static bool has_item(const char *list, size_t size, const char *item)
{
	size_t n = strlen(item);

	for (const char *end = list + size; list < end;) {
		const char *comma = memchr(list, ',', (size_t)(end - list));
		const char *stop = comma ? comma : end;
		if ((size_t)(stop - list) == n && memcmp(list, item, n) == 0)
			return true;
		list = stop + 1;
	}
	return false;
}

/*
 * Returns the path of the control group in a line NUMBER:CONTROLLERS:PATH of
 * /proc/PID/cgroup, or NULL if it is one of another hierarchy. That of version 2
 * has no controllers there.
 */
static char *path_in(char *line, const char *hierarchy)
{
	char *controllers = strchr(line, ':');
	char *path = controllers ? strchr(controllers + 1, ':') : NULL;

	if (!path)
		return NULL;
	controllers++;
	bool is = *hierarchy ? has_item(controllers, (size_t)(path - controllers), hierarchy) :
			       strncmp(line, "0::", 3) == 0;
	return is ? path + 1 : NULL;
}

/* The parent of a process, or 0. */
static int parent_of(int pid)
{
	char path[64], text[512];
	int parent = 0;

	snprintf(path, sizeof path, "/proc/%d/stat", pid);
	FILE *f = fopen(path, "re");
	size_t n = f ? fread(text, 1, sizeof text - 1, f) : 0;
	if (f)
		fclose(f);
	text[n] = '\0';
	const char *name_ends = strrchr(text, ')'); /* then come the state and the parent */
	if (name_ends && sscanf(name_ends + 1, " %*c %d", &parent) != 1)
		parent = 0;
	return parent;
}

/*
 * Opens what stands for /proc/self/cgroup. A process that the view does not have is
 * where its parent is: children begin there.
 */
static FILE *open_membership(const struct sim *s)
{
	char proc[PATH_MAX], file[PATH_MAX + 32];

	if (!s->topology.cgroup.proc[0])
		return fopen("/proc/self/cgroup", "re");
	if (!sim_path(s, s->topology.cgroup.proc, proc, sizeof proc))
		return NULL;
	for (int pid = getpid(); pid > 0; pid = parent_of(pid)) {
		snprintf(file, sizeof file, "%s/%d/cgroup", proc, pid);
		FILE *f = fopen(file, "re");
		if (f)
			return f;
	}
	return NULL;
}

/* Reads the path of this process's control group. */
static bool path_of_caller(const struct sim *s, char *out, size_t size)
{
	const struct cgroup_view *v = &s->topology.cgroup;
	char line[PATH_MAX];
	bool found = false;

	FILE *f = open_membership(s);
	if (!f)
		return false;
	while (!found && fgets(line, sizeof line, f)) {
		line[strcspn(line, "\n")] = '\0';
		const char *path = path_in(line, v->hierarchy);
		if (path && *path == '/' && strlen(path) < size) {
			memcpy(out, path, strlen(path) + 1);
			found = true;
		}
	}
	fclose(f);
	return found;
}

bool cgroup_of_caller(const struct sim *s, struct cgroup *out)
{
	char path[PATH_MAX], full[2 * PATH_MAX];
	struct view v;

	out->depth = 0;
	if (!open_view(s, &v) && !v.named)
		return true; /* the kernel has them elsewhere or not at all: the process is in no group */
	if (path_of_caller(s, path, sizeof path)) {
		snprintf(full, sizeof full, "%s%s", v.root, path);
		/* A path out of the caller's namespace names no group that it can see. */
		if (!strstr(path, "/..") && climb_from(&v, full, out))
			return true;
	} else {
		snprintf(full, sizeof full, "of no path");
	}
	out->depth = 0;
	fprintf(stderr, "%s: process %d is in a control group that is not there: %s\n", s->path, (int)getpid(), full);
	return false;
}

bool cgroup_has_dmem(const char *path, int most)
{
	int folder = open(path, O_RDONLY | O_DIRECTORY | O_CLOEXEC);
	bool found = false;

	while (folder >= 0 && !found && most-- > 0) {
		found = faccessat(folder, "dmem.max", F_OK, 0) == 0;
		int up = openat(folder, "..", O_RDONLY | O_DIRECTORY | O_CLOEXEC);
		close(folder);
		folder = up;
	}
	if (folder >= 0)
		close(folder);
	return found;
}
