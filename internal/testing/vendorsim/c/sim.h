/*
 * What all stand-ins share: the current topology, read again whenever its file
 * changes, delays, ordered failures and events.
 *
 * A stand-in has one struct sim, filled in by SIM_INIT. Each function of the
 * vendor's interface starts with sim_enter and ends with sim_leave; between
 * the two it holds the lock and may read the topology and keep state of its
 * own.
 */
#ifndef DIVVY_SIM_H
#define DIVVY_SIM_H

#include "topology.h"

#include <pthread.h>
#include <sys/stat.h>

/* What happened to a card, as the vendor's interface numbers cards. */
enum sim_change {
	SIM_CARD_UNHEALTHY,
	SIM_CARD_HEALTHY,
	SIM_CARD_LOST,
	SIM_CARD_BACK,
	SIM_CARD_XID,  /* value is the code of a critical error */
	SIM_CARD_BITS, /* value is the new health_bits */
};

struct sim_event {
	int card;
	enum sim_change change;
	uint64_t value;
	uint64_t number; /* 1 for the first event of the process, then 2 */
	uint32_t gpu_instance, compute_instance; /* SIM_NO_INSTANCE: it is about the whole card */
};

#define SIM_NO_INSTANCE UINT32_MAX

enum { SIM_EVENTS = 256 }; /* older ones are dropped, as a driver's queue would */

struct sim {
	const char *vendor; /* only cards of this vendor exist */
	pthread_mutex_t lock;

	/* All below is guarded by lock. */
	char path[4096];	  /* of the topology file, "" until the first call */
	struct stat file;	  /* the file that was read last */
	bool read;		  /* a file was read, or tried */
	bool broken;		  /* it could not be parsed */
	char mistake[512];	  /* why, "FILE:LINE: text" */
	struct topology topology; /* the last one that could be parsed */
	bool valid;		  /* there has been one */
	struct card **cards;	  /* the cards of vendor, as it numbers them */
	int count;
	const struct driver *driver;   /* the one that serves vendor */
	const struct library *library; /* how the library of vendor behaves */
	uint64_t happened;	       /* events so far */
	struct sim_event events[SIM_EVENTS]; /* a ring */
	int first, pending;
	bool held; /* a call takes its time; it holds up others, see one_lock of struct library */
};

#define SIM_INIT(name) {.vendor = (name), .lock = PTHREAD_MUTEX_INITIALIZER}

/* How a call begins. */
struct sim_entry {
	bool broken; /* the topology file is; sim->mistake says why */
	int failure; /* the code that the file orders this call to fail with, or 0 */
};

/*
 * Begins a call of function about a card (or TOPOLOGY_NO_CARD): waits for as
 * long as the topology says, brings it up to date and takes the lock. A delay
 * that the file takes back ends early. In a library with one lock a call also
 * waits for those that take their time.
 */
struct sim_entry sim_enter(struct sim *s, const char *function, int card);

/* Ends a call: releases the lock. */
void sim_leave(struct sim *s);

/* Whether a process uses a card now. One on a MIG device does so while that exists. The lock is held. */
bool sim_uses(const struct process *p, const struct card *card);

/* The memory of a card that is in use, in MiB: its processes' and the rest. The lock is held. */
uint64_t sim_used_mib(const struct sim *s, const struct card *card);

/*
 * Takes the oldest event, or the oldest of one card unless card is
 * TOPOLOGY_NO_CARD. Returns false when there is none. The lock is held.
 */
bool sim_next_event(struct sim *s, int card, struct sim_event *out);

/*
 * Copies the oldest event whose number is above after, and leaves it in the
 * queue, for interfaces with several listeners. Returns false when there is
 * none. The lock is held.
 */
bool sim_event_after(const struct sim *s, uint64_t after, struct sim_event *out);

/*
 * Gives the lock away for ns nanoseconds at most, and at most for one step, in
 * which the file is not looked at; then takes it again and brings the topology
 * up to date. Returns false when the file is broken.
 */
bool sim_wait_step(struct sim *s, int64_t ns);

/*
 * Writes the path of a file that the topology file names into out. Relative ones
 * start at the topology file's folder, links followed. Returns false if there is
 * no room. The lock is held.
 */
bool sim_path(const struct sim *s, const char *named, char *out, size_t size);

/* Nanoseconds on a clock that never jumps. */
int64_t sim_now_ns(void);

enum { SIM_NS_PER_MS = 1000000 };

#endif
