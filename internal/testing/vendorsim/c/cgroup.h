/*
 * Control groups of version 2: those of the machine, or a view of them that the
 * topology file gives.
 */
#ifndef DIVVY_CGROUP_H
#define DIVVY_CGROUP_H

#include "sim.h"

enum { CGROUP_DEPTH = 24 }; /* groups above one another, with the root */

/*
 * A control group and those above it, by the inodes of their folders, which are
 * the same wherever the file system is mounted. A container in a cgroup namespace
 * of its own sees only those up to the namespace's root.
 */
struct cgroup {
	uint64_t chain[CGROUP_DEPTH]; /* the group itself is the first, the root the last */
	int depth;		      /* 0: the machine has no control groups of version 2 */
};

/* Finds the control group at a path as the caller sees it. Returns false where there is none. */
bool cgroup_at(const struct sim *s, const char *path, struct cgroup *out);

/*
 * Finds the control group of this process, from the kernel's word or that of the
 * topology file. Returns false, after a line on standard error, if the topology
 * file gives a view that lacks the process.
 */
bool cgroup_of_caller(const struct sim *s, struct cgroup *out);

/*
 * Whether the control group at path, or the nearest above it that is no farther
 * than most, has the files of the dmem controller.
 */
bool cgroup_has_dmem(const char *path, int most);

#endif
