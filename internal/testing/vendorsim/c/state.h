/*
 * The state of the driver, which all processes that load the stand-in share: the
 * limits of control groups, compute modes, and what processes have allocated. The topology file
 * says how the hardware is to be, this file how it is.
 *
 * It consists of two files in the driver's folder. state has everything, twice, so
 * that a process that is killed while it writes leaves the other copy. clients is
 * empty: each process that has memory holds a lock on one byte of it, which the
 * kernel takes away when the process ends, in whatever namespace it was.
 */
#ifndef DIVVY_STATE_H
#define DIVVY_STATE_H

#include "cgroup.h"

enum {
	STATE_LIMITS = 1024,
	STATE_CLIENTS = 1024,
	STATE_ALLOCATIONS = 2048,
};

/* A limit of a control group on a card. */
struct limit {
	uint64_t number; /* never used again */
	uint64_t cgroup; /* as in struct cgroup */
	uint64_t soft, hard; /* bytes */
	char card[TOPOLOGY_TEXT]; /* its uuid */
};

/* A process that has memory. */
struct client {
	uint64_t number;		    /* of the byte that it has locked */
	uint64_t pid_namespace, pid, start; /* of the process */
	uint64_t program;		    /* differs between programs that one process executes */
};

/* Memory of a client on a card that was charged alike. */
struct allocation {
	uint64_t client; /* its number */
	uint64_t limit;	 /* the number of the one that it is charged to, 0 for none; misc only */
	uint64_t bytes;
	struct cgroup cgroup;	  /* of the process when it allocated */
	char card[TOPOLOGY_TEXT]; /* its uuid */
};

struct state {
	uint64_t numbers; /* the last that was used */
	uint64_t exclusive; /* a bit for each card, by its index, whose compute mode is EXCLUSIVE_PROCESS */
	uint32_t memacct; /* enum memacct, under which the limits were set */
	int limit_count, client_count, allocation_count;
	struct limit limits[STATE_LIMITS];
	struct client clients[STATE_CLIENTS];
	struct allocation allocations[STATE_ALLOCATIONS];

	/* The rest is not in the file. */
	int file;	     /* -1: there is none yet */
	bool read_only;	     /* it cannot be written */
	bool changed;	     /* state_end writes it */
	uint64_t generation; /* of the copy that was read */
	int copy;	     /* the one that was read */
};

/*
 * Reads the state and keeps other processes from it until state_end. What ended
 * processes had is gone already, and so are limits that the driver has forgotten.
 * With write the files are made if need be. Returns false, without state_end to
 * follow, after a line on standard error. The lock of s is held.
 */
bool state_begin(struct state *state, const struct sim *s, bool write);

/* Writes the state if it has changed. Returns false if that failed. */
bool state_end(struct state *state);

/* Forgets everything, as a driver does that is unloaded. state_end follows. */
void state_clear(struct state *state);

/* A number that was not used before. */
uint64_t state_number(struct state *state);

/* The client that this process is; it becomes one if it is none. NULL if it cannot. */
struct client *state_self(struct state *state);

/* The pid of a client in this process's namespace, 0 if it is outside of it. */
int state_pid(const struct client *client);

#endif
