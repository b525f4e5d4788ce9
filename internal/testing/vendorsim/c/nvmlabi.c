#include "nvmlabi.h"

#include <stdio.h>
#include <string.h>
#include <strings.h>

struct device devices[TOPOLOGY_MAX_CARDS];

/* A handle for each MIG device that a card can have. Its place is the MIG device's. */
static struct device mig_handles[TOPOLOGY_MAX_CARDS * TOPOLOGY_MAX_MIG];

/*
 * How often NVML was initialised and not shut down again. A driver that was
 * unloaded wants it anew. Guarded by sim.lock.
 */
static int initialised;

/* The code for the state of the driver. The lock is held. */
static nvml_return driver_code(void)
{
	switch (sim.driver->state) {
	case DRIVER_LOADED:
		return NVML_SUCCESS;
	case DRIVER_ABSENT:
		nvml_driver_gone();
		return NVML_ERROR_DRIVER_NOT_LOADED;
	case DRIVER_BROKEN:
		break;
	}
	return NVML_ERROR_UNKNOWN;
}

nvml_return nvml_ready_code(void)
{
	nvml_return code = driver_code();

	if (code != NVML_SUCCESS) {
		initialised = 0;
		return code;
	}
	return initialised > 0 ? NVML_SUCCESS : NVML_ERROR_UNINITIALIZED;
}

int nvml_card_of(const struct device *handle)
{
	if (handle < devices || handle >= devices + TOPOLOGY_MAX_CARDS)
		return TOPOLOGY_NO_CARD;
	return (int)(handle - devices);
}

nvml_return nvml_card_code(int card)
{
	if (card < 0 || card >= sim.count)
		return NVML_ERROR_INVALID_ARGUMENT;
	return sim.cards[card]->lost ? NVML_ERROR_GPU_IS_LOST : NVML_SUCCESS;
}

/* Begins a call about a card, or about none. sim_leave must follow. */
static nvml_return begin_at(const char *function, int card)
{
	struct sim_entry e = sim_enter(&sim, function, card);

	if (e.broken)
		return NVML_ERROR_UNKNOWN;
	return e.failure ? e.failure : nvml_ready_code();
}

nvml_return nvml_begin(const char *function)
{
	return begin_at(function, TOPOLOGY_NO_CARD);
}

nvml_return nvml_begin_card(const char *function, const struct device *handle, const void *out,
			    const struct card **card)
{
	return nvml_begin_number(function, nvml_card_of(handle), out, card);
}

nvml_return nvml_begin_number(const char *function, int number, const void *out, const struct card **card)
{
	nvml_return code = begin_at(function, number);

	if (code == NVML_SUCCESS)
		code = nvml_card_code(number);
	if (code == NVML_SUCCESS && !out)
		code = NVML_ERROR_INVALID_ARGUMENT;
	if (code == NVML_SUCCESS)
		*card = sim.cards[number];
	return code;
}

nvml_return nvml_begin_target(const char *function, const struct device *handle, const void *out,
			      struct nvml_target *target)
{
	bool mig = handle >= mig_handles && handle < mig_handles + TOPOLOGY_MAX_CARDS * TOPOLOGY_MAX_MIG;
	int place = mig ? (int)(handle - mig_handles) : 0;

	*target = (struct nvml_target){
		.number = mig ? place / TOPOLOGY_MAX_MIG : nvml_card_of(handle),
		.mig_index = place % TOPOLOGY_MAX_MIG,
	};
	nvml_return code = nvml_begin_number(function, target->number, out, &target->card);
	if (code == NVML_SUCCESS && mig) {
		target->mig = nvml_mig_at(target->card, (uint32_t)target->mig_index);
		if (!target->mig) /* it has gone since */
			code = NVML_ERROR_INVALID_ARGUMENT;
	}
	return code;
}

struct device *nvml_mig_handle(int card, int index)
{
	return &mig_handles[card * TOPOLOGY_MAX_MIG + index];
}

const struct mig_device *nvml_mig_at(const struct card *card, uint32_t index)
{
	bool is = card->mig == MIG_ENABLED && index < TOPOLOGY_MAX_MIG && card->mig_devices[index].line;

	return is ? &card->mig_devices[index] : NULL;
}

nvml_return nvml_begin_pair(const char *function, const struct device *a, const struct device *b, const void *out,
			    const struct card **card_a, const struct card **card_b)
{
	nvml_return code = nvml_begin_card(function, a, out, card_a);
	int index = nvml_card_of(b);

	if (code == NVML_SUCCESS)
		code = nvml_card_code(index);
	if (code == NVML_SUCCESS)
		*card_b = sim.cards[index];
	return code;
}

nvml_return nvml_put_text(char *out, uint32_t size, const char *text)
{
	if (!out)
		return NVML_ERROR_INVALID_ARGUMENT;
	if (strlen(text) >= size)
		return NVML_ERROR_INSUFFICIENT_SIZE;
	memcpy(out, text, strlen(text) + 1);
	return NVML_SUCCESS;
}

NVML_API nvml_return nvmlInit_v2(void)
{
	struct sim_entry e = sim_enter(&sim, "nvmlInit_v2", TOPOLOGY_NO_CARD);
	nvml_return code = NVML_ERROR_UNKNOWN;

	if (!e.broken) {
		code = e.failure ? e.failure : driver_code();
		if (code == NVML_SUCCESS)
			initialised++;
	}
	sim_leave(&sim);
	return code;
}

NVML_API nvml_return nvmlShutdown(void)
{
	nvml_return code = nvml_begin("nvmlShutdown");

	if (code == NVML_SUCCESS)
		initialised--;
	sim_leave(&sim);
	return code;
}

NVML_API nvml_return nvmlSystemGetDriverVersion(char *out, uint32_t size)
{
	nvml_return code = nvml_begin("nvmlSystemGetDriverVersion");

	if (code == NVML_SUCCESS)
		code = nvml_put_text(out, size, sim.driver->version);
	sim_leave(&sim);
	return code;
}

NVML_API nvml_return nvmlSystemGetCudaDriverVersion(int *out)
{
	nvml_return code = nvml_begin("nvmlSystemGetCudaDriverVersion");

	if (code == NVML_SUCCESS && !out)
		code = NVML_ERROR_INVALID_ARGUMENT;
	if (code == NVML_SUCCESS)
		*out = sim.driver->cuda_major * 1000 + sim.driver->cuda_minor * 10;
	sim_leave(&sim);
	return code;
}

/*
 * Calls an exported function as a library does that was not linked to itself, so
 * that a process that lets one library answer for the names of another is
 * noticed.
 */
NVML_API nvml_return nvmlSystemGetCudaDriverVersion_v2(int *out)
{
	nvml_return code = nvml_begin("nvmlSystemGetCudaDriverVersion_v2");

	sim_leave(&sim);
	return code == NVML_SUCCESS ? nvmlSystemGetCudaDriverVersion(out) : code;
}

NVML_API nvml_return nvmlDeviceGetCount_v2(uint32_t *out)
{
	nvml_return code = nvml_begin("nvmlDeviceGetCount_v2");

	if (code == NVML_SUCCESS && !out)
		code = NVML_ERROR_INVALID_ARGUMENT;
	if (code == NVML_SUCCESS)
		*out = (uint32_t)sim.count;
	sim_leave(&sim);
	return code;
}

NVML_API nvml_return nvmlDeviceGetHandleByIndex_v2(uint32_t index, struct device **out)
{
	struct device *device = index < TOPOLOGY_MAX_CARDS ? &devices[index] : NULL;
	const struct card *card;
	nvml_return code = nvml_begin_card("nvmlDeviceGetHandleByIndex_v2", device, out, &card);

	if (code == NVML_SUCCESS)
		*out = device;
	sim_leave(&sim);
	return code;
}

/* Writes a card's address into text, with the digits of domain that NVML has there. */
static void address(const struct card *card, int domain_digits, char text[32])
{
	snprintf(text, 32, "%0*X:%02X:%02X.%X", domain_digits, card->pci_domain, card->pci_bus, card->pci_device,
		 card->pci_function);
}

/* Finds the first card of which matches says that it is the one. sim_leave must follow. */
static nvml_return begin_find(const char *function, const char *what, struct device **out,
			      bool (*matches)(const struct card *, const char *))
{
	nvml_return code = nvml_begin(function);

	if (code == NVML_SUCCESS && (!what || !out))
		code = NVML_ERROR_INVALID_ARGUMENT;
	if (code == NVML_SUCCESS) {
		code = NVML_ERROR_NOT_FOUND;
		for (int i = 0; code == NVML_ERROR_NOT_FOUND && i < sim.count; i++) {
			if (!matches(sim.cards[i], what))
				continue;
			code = nvml_card_code(i);
			*out = &devices[i];
		}
	}
	return code;
}

nvml_return nvml_find(const char *function, const char *what, struct device **out,
		      bool (*matches)(const struct card *, const char *))
{
	nvml_return code = begin_find(function, what, out, matches);

	sim_leave(&sim);
	return code;
}

static bool has_uuid(const struct card *card, const char *uuid)
{
	return strcmp(card->uuid, uuid) == 0;
}

static bool has_address(const struct card *card, const char *wanted)
{
	char text[32];

	address(card, 8, text);
	return strcasecmp(text, wanted) == 0 || strcasecmp(text + 4, wanted) == 0;
}

/* The handle of the MIG device with that uuid, or NULL. The lock is held. */
static struct device *mig_with_uuid(const char *uuid, int *card)
{
	for (*card = 0; *card < sim.count; ++*card) {
		for (int i = 0; i < TOPOLOGY_MAX_MIG; i++) {
			const struct mig_device *m = nvml_mig_at(sim.cards[*card], (uint32_t)i);
			if (m && strcmp(m->uuid, uuid) == 0)
				return nvml_mig_handle(*card, i);
		}
	}
	return NULL;
}

NVML_API nvml_return nvmlDeviceGetHandleByUUID(const char *uuid, struct device **out)
{
	nvml_return code = begin_find("nvmlDeviceGetHandleByUUID", uuid, out, has_uuid);

	if (code == NVML_ERROR_NOT_FOUND) {
		int card;
		struct device *handle = mig_with_uuid(uuid, &card);
		if (handle) {
			code = nvml_card_code(card);
			*out = handle;
		}
	}
	sim_leave(&sim);
	return code;
}

NVML_API nvml_return nvmlDeviceGetHandleByPciBusId_v2(const char *bus_id, struct device **out)
{
	return nvml_find("nvmlDeviceGetHandleByPciBusId_v2", bus_id, out, has_address);
}

NVML_API nvml_return nvmlDeviceGetUUID(struct device *device, char *out, uint32_t size)
{
	struct nvml_target target;
	nvml_return code = nvml_begin_target("nvmlDeviceGetUUID", device, out, &target);

	if (code == NVML_SUCCESS)
		code = nvml_put_text(out, size, target.mig ? target.mig->uuid : target.card->uuid);
	sim_leave(&sim);
	return code;
}

NVML_API nvml_return nvmlDeviceGetName(struct device *device, char *out, uint32_t size)
{
	char text[2 * TOPOLOGY_TEXT + 8];
	struct nvml_target target;
	nvml_return code = nvml_begin_target("nvmlDeviceGetName", device, out, &target);

	if (code == NVML_SUCCESS) {
		const struct mig_device *m = target.mig;
		snprintf(text, sizeof text, "%s%s%s", target.card->model, m ? " MIG " : "", m ? m->profile : "");
		code = nvml_put_text(out, size, text);
	}
	sim_leave(&sim);
	return code;
}

NVML_TARGET_VALUE(nvmlDeviceGetIndex, uint32_t, target.mig ? target.mig_index : target.number)
NVML_VALUE(nvmlDeviceGetMinorNumber, uint32_t, card->minor)

NVML_API nvml_return nvmlDeviceGetSerial(struct device *device, char *out, uint32_t size)
{
	const struct card *card;
	nvml_return code = nvml_begin_card("nvmlDeviceGetSerial", device, out, &card);

	if (code == NVML_SUCCESS)
		code = card->serial[0] ? nvml_put_text(out, size, card->serial) : NVML_ERROR_NOT_SUPPORTED;
	sim_leave(&sim);
	return code;
}

void nvml_put_pci(struct nvml_pci *out, const struct card *card)
{
	char text[32];

	*out = (struct nvml_pci){
		.domain = card->pci_domain,
		.bus = card->pci_bus,
		.device = card->pci_device,
		.pci_device_id = nvml_pci_device_id,
	};
	address(card, 4, text);
	memcpy(out->bus_id_legacy, text, strnlen(text, sizeof out->bus_id_legacy - 1)); /* the rest stays NUL */
	address(card, 8, text);
	memcpy(out->bus_id, text, strlen(text));
}

NVML_API nvml_return nvmlDeviceGetPciInfo_v3(struct device *device, struct nvml_pci *out)
{
	const struct card *card;
	nvml_return code = nvml_begin_card("nvmlDeviceGetPciInfo_v3", device, out, &card);

	if (code == NVML_SUCCESS)
		nvml_put_pci(out, card);
	sim_leave(&sim);
	return code;
}

/* The memory of a MIG device that is in use, in MiB: it is that of the GPU instance. The lock is held. */
static uint64_t mig_used_mib(const struct card *card, const struct mig_device *m)
{
	uint64_t used = 0;

	for (int i = 0; i < sim.topology.process_count; i++) {
		const struct process *p = &sim.topology.processes[i];
		if (p->mig != TOPOLOGY_NO_MIG && sim_uses(p, card) && card->mig_devices[p->mig].gi == m->gi)
			used += p->memory_mib;
	}
	return used;
}

/* Fills the memory of a card or a MIG device. The lock is held. */
static nvml_return memory_of(const struct nvml_target *target, struct nvml_memory *out)
{
	const struct mig_device *m = target->mig;
	uint64_t total = (m ? m->memory_mib : target->card->memory_mib) << 20;
	uint64_t used = (m ? mig_used_mib(target->card, m) : sim_used_mib(&sim, target->card)) << 20;
	uint64_t allocated = 0;

	if (!m && !nvml_driver_used(target->card, &allocated))
		return NVML_ERROR_UNKNOWN;
	used += allocated;
	if (used > total) /* the topology file may say afterwards that processes use more than there is */
		used = total;
	*out = (struct nvml_memory){.total = total, .free = total - used, .used = used};
	return NVML_SUCCESS;
}

NVML_API nvml_return nvmlDeviceGetMemoryInfo(struct device *device, struct nvml_memory *out)
{
	struct nvml_target target;
	nvml_return code = nvml_begin_target("nvmlDeviceGetMemoryInfo", device, out, &target);

	if (code == NVML_SUCCESS)
		code = memory_of(&target, out);
	sim_leave(&sim);
	return code;
}

NVML_API nvml_return nvmlDeviceGetMemoryInfo_v2(struct device *device, struct nvml_memory_v2 *out)
{
	struct nvml_target target;
	nvml_return code = nvml_begin_target("nvmlDeviceGetMemoryInfo_v2", device, out, &target);

	/* The caller says in version which struct it has room for. */
	if (code == NVML_SUCCESS && out->version != (sizeof *out | 2 << 24))
		code = NVML_ERROR_ARGUMENT_VERSION_MISMATCH;
	struct nvml_memory m;
	if (code == NVML_SUCCESS)
		code = memory_of(&target, &m);
	if (code == NVML_SUCCESS) {
		out->total = m.total;
		out->reserved = 0;
		out->free = m.free;
		out->used = m.used;
		if (!target.mig && !nvml_driver_cap(target.card, out))
			code = NVML_ERROR_UNKNOWN;
	}
	sim_leave(&sim);
	return code;
}

uint64_t nvml_process_bytes(const struct process *p)
{
	return p->memory_unknown ? UINT64_MAX : p->memory_mib << 20;
}

/* Whether from knows nothing of its connection to to. The lock is held. */
static bool is_one_way(const struct card *from, const struct card *to)
{
	for (int i = 0; i < sim.topology.link_count; i++) {
		const struct link *l = &sim.topology.links[i];
		if (l->one_way && l->b == from->index && l->a == to->index)
			return true;
	}
	return false;
}

NVML_API nvml_return nvmlDeviceGetTopologyCommonAncestor(struct device *a, struct device *b, int *out)
{
	static const int levels[] = {
		[NEAR_BOARD] = 0,
		[NEAR_SWITCH] = 10,
		[NEAR_HOST_BRIDGE] = 30,
		[NEAR_SYSTEM] = 50,
	};
	const struct card *card_a, *card_b;
	nvml_return code = nvml_begin_pair("nvmlDeviceGetTopologyCommonAncestor", a, b, out, &card_a, &card_b);

	if (code == NVML_SUCCESS && is_one_way(card_a, card_b))
		code = NVML_ERROR_UNKNOWN;
	if (code == NVML_SUCCESS)
		*out = levels[topology_nearness(card_a, card_b)];
	sim_leave(&sim);
	return code;
}

nvml_return nvml_await(uint32_t ms, nvml_return (*take)(void *set, struct nvml_event_data *out), void *set,
		       struct nvml_event_data *out)
{
	int64_t end = sim_now_ns() + (int64_t)ms * SIM_NS_PER_MS;
	nvml_return code;

	for (;;) {
		code = take(set, out);
		int64_t left = end - sim_now_ns();
		if (code != NVML_ERROR_TIMEOUT || left <= 0)
			return code;
		code = sim_wait_step(&sim, left) ? nvml_ready_code() : NVML_ERROR_UNKNOWN;
		if (code != NVML_SUCCESS)
			return code;
	}
}
