/*
 * Memory that processes allocate, and limits for it: nvmlDeviceSetMemoryLimits_v1
 * and nvmlDeviceGetMemoryLimits_v1, and what CUDA would ask the driver for.
 */
#include "nvmllimits.h"

#include <limits.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

struct nvml_set_limits {
	const char *name_space; /* the path of a control group's folder */
	uint64_t soft, hard;	/* bytes */
};

struct nvml_get_limits {
	const char *name_space;
	uint64_t soft, hard;
	uint64_t used; /* bytes */
};

_Static_assert(sizeof(struct nvml_set_limits) == 24, "nvmlSetMemoryLimits_v1_t has 24 bytes");
_Static_assert(sizeof(struct nvml_get_limits) == 32, "nvmlGetMemoryLimits_v1_t has 32 bytes");

#define LIMIT_MAX UINT64_MAX /* NVML_DEVICE_MEMORY_LIMIT_MAX */

enum { PAGE = 4096 };

/* Codes of CUDA's driver API. */
enum {
	CUDA_SUCCESS = 0,
	CUDA_ERROR_INVALID_VALUE = 1,
	CUDA_ERROR_OUT_OF_MEMORY = 2,
	CUDA_ERROR_DEVICE_UNAVAILABLE = 46,
	CUDA_ERROR_NO_DEVICE = 100,
	CUDA_ERROR_INVALID_DEVICE = 101,
	CUDA_ERROR_UNKNOWN = 999,
};

/* What was read last. Guarded by sim.lock. */
static struct state state;

static bool is_of(const char *uuid, const struct card *card)
{
	return strcmp(uuid, card->uuid) == 0;
}

/* The limit of one control group on a card, or NULL. */
static struct limit *limit_of(uint64_t cgroup, const struct card *card)
{
	for (int i = 0; i < state.limit_count; i++) {
		if (state.limits[i].cgroup == cgroup && is_of(state.limits[i].card, card))
			return &state.limits[i];
	}
	return NULL;
}

/* The limit of a control group on a card, or of the nearest above it that has one; NULL for none. */
static struct limit *nearest(const struct cgroup *c, const struct card *card)
{
	for (int i = 0; i < c->depth; i++) {
		struct limit *l = limit_of(c->chain[i], card);
		if (l)
			return l;
	}
	return NULL;
}

static bool is_below(const struct cgroup *c, uint64_t group)
{
	for (int i = 0; i < c->depth; i++) {
		if (c->chain[i] == group)
			return true;
	}
	return false;
}

/*
 * What is charged to a limit, in bytes. With dmem that is all memory of its control
 * group and those below, with misc what was allocated since it was set.
 */
static uint64_t used_of(const struct limit *l)
{
	uint64_t used = 0;

	for (int i = 0; i < state.allocation_count; i++) {
		const struct allocation *a = &state.allocations[i];
		bool counts = state.memacct == MEMACCT_DMEM ?
				      strcmp(a->card, l->card) == 0 && is_below(&a->cgroup, l->cgroup) :
				      a->limit == l->number;
		if (counts)
			used += a->bytes;
	}
	return used;
}

/* What a limit leaves, in bytes. With dmem it may have been lowered below what is used. */
static uint64_t room_of(const struct limit *l)
{
	uint64_t used = used_of(l);

	return l->hard > used ? l->hard - used : 0;
}

/* The limit that leaves a process of a control group the least, or NULL for none. */
static struct limit *tightest(const struct cgroup *c, const struct card *card)
{
	struct limit *found = nearest(c, card);

	if (state.memacct != MEMACCT_DMEM) /* limits do not nest */
		return found;
	for (int i = 0; i < c->depth; i++) {
		struct limit *l = limit_of(c->chain[i], card);
		if (l && room_of(l) < room_of(found))
			found = l;
	}
	return found;
}

/* What all processes have allocated of a card, in bytes. */
static uint64_t allocated(const struct card *card)
{
	uint64_t bytes = 0;

	for (int i = 0; i < state.allocation_count; i++) {
		if (is_of(state.allocations[i].card, card))
			bytes += state.allocations[i].bytes;
	}
	return bytes;
}

bool nvml_driver_used(const struct card *card, uint64_t *bytes)
{
	if (!state_begin(&state, &sim, false))
		return false;
	*bytes = allocated(card);
	return state_end(&state);
}

bool nvml_driver_cap(const struct card *card, struct nvml_memory_v2 *memory)
{
	struct cgroup caller;

	if (sim.driver->memacct == MEMACCT_OFF)
		return true;
	if (!state_begin(&state, &sim, false))
		return false;
	if (state.limit_count > 0 && cgroup_of_caller(&sim, &caller)) {
		const struct limit *l = tightest(&caller, card);
		uint64_t room = l ? room_of(l) : LIMIT_MAX;
		if (l && l->hard < memory->total)
			memory->total = l->hard;
		if (room < memory->free)
			memory->free = room;
		memory->used = memory->total - memory->free - memory->reserved;
	}
	return state_end(&state);
}

void nvml_driver_gone(void)
{
	if (!state_begin(&state, &sim, false))
		return;
	state_clear(&state);
	state_end(&state);
}

int nvml_allocators(const struct card *card, struct nvml_allocator out[STATE_CLIENTS])
{
	int count = 0;

	if (!state_begin(&state, &sim, false))
		return -1;
	for (int i = 0; i < state.client_count; i++) {
		struct nvml_allocator a = {.pid = state_pid(&state.clients[i])};
		for (int j = 0; j < state.allocation_count; j++) {
			const struct allocation *one = &state.allocations[j];
			if (one->client == state.clients[i].number && is_of(one->card, card))
				a.bytes += one->bytes;
		}
		if (a.pid != 0 && a.bytes > 0)
			out[count++] = a;
	}
	return state_end(&state) ? count : -1;
}

/* Begins a call about limits. sim_leave must follow. */
static nvml_return begin(const char *function, const struct device *device, const void *argument, const struct card **card)
{
	nvml_return code = nvml_begin_card(function, device, argument, card);

	if (code == NVML_SUCCESS && (sim.driver->memacct == MEMACCT_OFF || (*card)->mig == MIG_ENABLED))
		code = NVML_ERROR_NOT_SUPPORTED;
	return code;
}

/* Finds the control group of a path that a caller gave. */
static nvml_return find(const char *path, struct cgroup *out)
{
	if (!path || *path != '/')
		return NVML_ERROR_INVALID_ARGUMENT;
	return cgroup_at(&sim, path, out) ? NVML_SUCCESS : NVML_ERROR_OPERATING_SYSTEM;
}

/* Whether a control group can have a limit of its own. */
static nvml_return can_be_limited(const char *path, const struct cgroup *c)
{
	if (sim.driver->memacct == MEMACCT_DMEM)
		return cgroup_has_dmem(path, 1) ? NVML_SUCCESS : NVML_ERROR_NOT_FOUND;
	return c->depth > 1 ? NVML_SUCCESS : NVML_ERROR_NOT_SUPPORTED; /* the root cannot */
}

/* Sets, changes or clears the limit of a control group. The state is open. */
static nvml_return set(const struct card *card, uint64_t cgroup, uint64_t soft, uint64_t hard)
{
	struct limit *l = limit_of(cgroup, card);

	if (soft == 0 && hard == LIMIT_MAX) {
		if (l) {
			*l = state.limits[--state.limit_count];
			state.changed = true;
		}
		return NVML_SUCCESS;
	}
	if (l && state.memacct == MEMACCT_MISC && hard < used_of(l))
		return NVML_ERROR_INVALID_ARGUMENT;
	if (!l) {
		if (state.limit_count == STATE_LIMITS)
			return NVML_ERROR_MEMORY;
		l = &state.limits[state.limit_count++];
		*l = (struct limit){.number = state_number(&state), .cgroup = cgroup};
		snprintf(l->card, sizeof l->card, "%s", card->uuid);
	}
	l->soft = soft;
	l->hard = hard;
	state.changed = true;
	return NVML_SUCCESS;
}

/* Values of nvmlComputeMode_t. */
enum {
	COMPUTE_MODE_DEFAULT = 0,
	COMPUTE_MODE_EXCLUSIVE_PROCESS = 3,
};

enum { EXCLUSIVE_CARDS = 64 };

NVML_API nvml_return nvmlDeviceGetComputeMode(struct device *device, int *out)
{
	const struct card *card;
	nvml_return code = nvml_begin_card("nvmlDeviceGetComputeMode", device, out, &card);

	if (code == NVML_SUCCESS) {
		if (!state_begin(&state, &sim, false)) {
			code = NVML_ERROR_UNKNOWN;
		} else {
			bool exclusive = card->index < EXCLUSIVE_CARDS && (state.exclusive >> card->index & 1);
			*out = exclusive ? COMPUTE_MODE_EXCLUSIVE_PROCESS : COMPUTE_MODE_DEFAULT;
			if (!state_end(&state))
				code = NVML_ERROR_UNKNOWN;
		}
	}
	sim_leave(&sim);
	return code;
}

/* PROHIBITED and the mode for threads, which drivers have dropped, are not simulated. */
NVML_API nvml_return nvmlDeviceSetComputeMode(struct device *device, int mode)
{
	const struct card *card;
	nvml_return code = nvml_begin_card("nvmlDeviceSetComputeMode", device, device, &card);

	if (code == NVML_SUCCESS && geteuid() != 0)
		code = NVML_ERROR_NO_PERMISSION;
	if (code == NVML_SUCCESS && mode != COMPUTE_MODE_DEFAULT && mode != COMPUTE_MODE_EXCLUSIVE_PROCESS)
		code = NVML_ERROR_INVALID_ARGUMENT;
	if (code == NVML_SUCCESS && (card->index >= EXCLUSIVE_CARDS || card->mig == MIG_ENABLED))
		code = NVML_ERROR_NOT_SUPPORTED;
	if (code == NVML_SUCCESS) {
		if (!state_begin(&state, &sim, true)) {
			code = NVML_ERROR_UNKNOWN;
		} else {
			uint64_t bit = (uint64_t)1 << card->index;
			state.exclusive = mode == COMPUTE_MODE_DEFAULT ? state.exclusive & ~bit : state.exclusive | bit;
			state.changed = true;
			if (!state_end(&state))
				code = NVML_ERROR_UNKNOWN;
		}
	}
	sim_leave(&sim);
	return code;
}

NVML_API nvml_return nvmlDeviceSetMemoryLimits_v1(struct device *device, const struct nvml_set_limits *in)
{
	const struct card *card;
	struct cgroup cgroup;
	nvml_return code = begin("nvmlDeviceSetMemoryLimits_v1", device, in, &card);

	if (code == NVML_SUCCESS && geteuid() != 0)
		code = NVML_ERROR_NO_PERMISSION;
	if (code == NVML_SUCCESS) {
		uint64_t total = card->memory_mib << 20;
		if (in->soft > in->hard || in->soft > total || (in->hard > total && in->hard != LIMIT_MAX))
			code = NVML_ERROR_INVALID_ARGUMENT;
	}
	if (code == NVML_SUCCESS)
		code = find(in->name_space, &cgroup);
	if (code == NVML_SUCCESS)
		code = can_be_limited(in->name_space, &cgroup);
	if (code == NVML_SUCCESS) {
		if (!state_begin(&state, &sim, true)) {
			code = NVML_ERROR_UNKNOWN;
		} else {
			code = set(card, cgroup.chain[0], in->soft, in->hard);
			if (!state_end(&state))
				code = NVML_ERROR_UNKNOWN;
		}
	}
	sim_leave(&sim);
	return code;
}

NVML_API nvml_return nvmlDeviceGetMemoryLimits_v1(struct device *device, struct nvml_get_limits *out)
{
	const struct card *card;
	struct cgroup cgroup;
	nvml_return code = begin("nvmlDeviceGetMemoryLimits_v1", device, out, &card);

	if (code == NVML_SUCCESS)
		code = find(out->name_space, &cgroup);
	if (code == NVML_SUCCESS && sim.driver->memacct == MEMACCT_DMEM && !cgroup_has_dmem(out->name_space, cgroup.depth))
		code = NVML_ERROR_NOT_FOUND;
	if (code == NVML_SUCCESS) {
		if (!state_begin(&state, &sim, false)) {
			code = NVML_ERROR_UNKNOWN;
		} else {
			const struct limit *l = nearest(&cgroup, card);
			code = l ? NVML_SUCCESS : NVML_ERROR_NOT_SUPPORTED;
			if (l) {
				out->soft = l->soft;
				out->hard = l->hard;
				out->used = used_of(l);
			}
			if (!state_end(&state))
				code = NVML_ERROR_UNKNOWN;
		}
	}
	sim_leave(&sim);
	return code;
}

/* The card that a process names by its uuid or number, NULL if there is none. */
static const struct card *named(const char *device)
{
	char *end;
	unsigned long number = strtoul(device, &end, 10);

	if (end != device && *end == '\0')
		return number < (unsigned long)sim.count ? sim.cards[number] : NULL;
	for (int i = 0; i < sim.count; i++) {
		if (is_of(device, sim.cards[i]))
			return sim.cards[i];
	}
	return NULL;
}

/* Records memory of this process. The state is open. Returns false if there is no room. */
static bool record(const struct card *card, const struct cgroup *cgroup, uint64_t limit, uint64_t bytes)
{
	const struct client *self = state_self(&state);

	if (!self)
		return false;
	state.changed = true;
	for (int i = 0; i < state.allocation_count; i++) {
		struct allocation *a = &state.allocations[i];
		if (a->client == self->number && a->limit == limit && is_of(a->card, card) &&
		    a->cgroup.depth == cgroup->depth && (cgroup->depth == 0 || a->cgroup.chain[0] == cgroup->chain[0])) {
			a->bytes += bytes;
			return true;
		}
	}
	if (state.allocation_count == STATE_ALLOCATIONS)
		return false;
	struct allocation *a = &state.allocations[state.allocation_count++];
	*a = (struct allocation){.client = self->number, .limit = limit, .bytes = bytes, .cgroup = *cgroup};
	snprintf(a->card, sizeof a->card, "%s", card->uuid);
	return true;
}

/* Allocates memory for a process of a control group, if limits and card allow. The state is open. */
static int allocate(const struct card *card, const struct cgroup *cgroup, uint64_t bytes)
{
	const struct limit *l = tightest(cgroup, card);
	uint64_t total = card->memory_mib << 20;
	uint64_t used = (sim_used_mib(&sim, card) << 20) + allocated(card);

	if ((l && bytes > room_of(l)) || used > total || bytes > total - used)
		return CUDA_ERROR_OUT_OF_MEMORY;
	uint64_t charged = l && state.memacct == MEMACCT_MISC ? l->number : 0;
	return record(card, cgroup, charged, bytes) ? CUDA_SUCCESS : CUDA_ERROR_UNKNOWN;
}

/* The code of the driver's state for a program that uses CUDA. */
static int cuda_code(void)
{
	switch (sim.driver->state) {
	case DRIVER_LOADED:
		return CUDA_SUCCESS;
	case DRIVER_ABSENT:
		nvml_driver_gone();
		return CUDA_ERROR_NO_DEVICE;
	case DRIVER_BROKEN:
		break;
	}
	return CUDA_ERROR_UNKNOWN;
}

/*
 * Allocates memory of a card, which is named by its uuid or number, until the
 * process ends, and returns a code of CUDA's driver API. It is no function of
 * NVIDIA's library, but what that of CUDA asks the driver for. Whom the memory is
 * charged to is not for the caller to say.
 */
NVML_API int sim_alloc(const char *device, uint64_t bytes)
{
	struct sim_entry e = sim_enter(&sim, "sim_alloc", TOPOLOGY_NO_CARD);
	struct cgroup cgroup = {.depth = 0};
	const struct card *card = NULL;
	int code = e.broken ? CUDA_ERROR_UNKNOWN : e.failure ? e.failure : cuda_code();

	if (code == CUDA_SUCCESS && (!device || bytes == 0 || bytes > UINT64_MAX / 2))
		code = CUDA_ERROR_INVALID_VALUE;
	if (code == CUDA_SUCCESS) {
		card = named(device);
		if (!card || card->mig == MIG_ENABLED)
			code = CUDA_ERROR_INVALID_DEVICE;
		else if (card->lost)
			code = CUDA_ERROR_DEVICE_UNAVAILABLE;
	}
	if (code == CUDA_SUCCESS && sim.driver->memacct != MEMACCT_OFF && !cgroup_of_caller(&sim, &cgroup))
		code = CUDA_ERROR_UNKNOWN;
	if (code == CUDA_SUCCESS) {
		if (sim.driver->memacct == MEMACCT_DMEM) /* it counts pages */
			bytes = (bytes + PAGE - 1) / PAGE * PAGE;
		if (!state_begin(&state, &sim, true)) {
			code = CUDA_ERROR_UNKNOWN;
		} else {
			code = allocate(card, &cgroup, bytes);
			if (!state_end(&state))
				code = CUDA_ERROR_UNKNOWN;
		}
	}
	sim_leave(&sim);
	return code;
}
