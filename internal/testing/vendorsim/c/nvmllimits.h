/* What NVIDIA's driver knows of memory beyond the topology file. */
#ifndef DIVVY_NVMLLIMITS_H
#define DIVVY_NVMLLIMITS_H

#include "nvmlabi.h"
#include "state.h"

/* A process that allocated memory of a card. */
struct nvml_allocator {
	int pid; /* as the caller sees it */
	uint64_t bytes;
};

/*
 * Fills the processes that allocated memory of a card and are in the caller's pid
 * namespace. Returns how many there are, or -1 if that cannot be read. The lock is
 * held.
 */
int nvml_allocators(const struct card *card, struct nvml_allocator out[STATE_CLIENTS]);

#endif
