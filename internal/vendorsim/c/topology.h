/*
 * The topology file: what the simulated hardware looks like.
 *
 * The format is described in docs/simulated-hardware.md. The Go package
 * vendorsim reads and writes the same format; a test holds the two together.
 */
#ifndef DIVVY_TOPOLOGY_H
#define DIVVY_TOPOLOGY_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

enum {
	TOPOLOGY_TEXT = 64,	   /* bytes of a model, uuid or version, with the NUL */
	TOPOLOGY_MAX_CARDS = 1024, /* more than any vendor's library allows, so that too many can be simulated */
	TOPOLOGY_MAX_FAILURES = 32,
	TOPOLOGY_NO_CARD = -1,
};

enum driver_state { DRIVER_LOADED, DRIVER_ABSENT, DRIVER_BROKEN };

/* A function of the vendor's library that is to fail, and how. */
struct failure {
	char function[TOPOLOGY_TEXT];
	int code;
};

struct failures {
	struct failure list[TOPOLOGY_MAX_FAILURES];
	int count;
};

struct card {
	int index; /* N of [card N] */
	int line;  /* of its section */
	char vendor[TOPOLOGY_TEXT];
	char model[TOPOLOGY_TEXT];
	char uuid[TOPOLOGY_TEXT]; /* "" and duplicates are allowed: clients have to cope */
	uint64_t memory_mib;
	uint64_t used_mib;
	int numa; /* -1: unknown */
	int minor;
	bool healthy;
	bool lost;
	struct failures failures; /* for calls about this card */
};

struct topology {
	enum driver_state driver;
	char driver_version[TOPOLOGY_TEXT];
	int delay_ms;
	struct failures failures; /* for all calls */
	struct card *cards;	  /* in ascending order of index, which are 0..count-1 */
	int count;
};

/*
 * Parses text of size bytes, which need not end in NUL. Returns true and fills
 * *out, to be released with topology_free. Returns false for text that is not
 * a topology, with "LINE: what is wrong" in error, and leaves *out untouched.
 */
bool topology_parse(const char *text, size_t size, struct topology *out, char *error, size_t error_size);

/* Releases what topology_parse allocated. */
void topology_free(struct topology *t);

/* The code that the list wants function to fail with, or 0. */
int failures_find(const struct failures *f, const char *function);

#endif
