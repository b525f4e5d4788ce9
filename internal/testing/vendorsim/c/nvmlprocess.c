/* The functions of NVML that are about processes and who may use a GPU. */
#include "nvmllimits.h"

#include <time.h>

/* Processes that allocated memory. Guarded by sim.lock. */
static struct nvml_allocator allocators[STATE_CLIENTS];

/* The second and the third version of the struct. */
struct nvml_process {
	uint32_t pid;
	uint64_t used;				 /* bytes */
	uint32_t gpu_instance, compute_instance; /* SIM_NO_INSTANCE: of none */
};

struct nvml_utilization {
	uint32_t pid;
	uint64_t timestamp;				/* microseconds since 1970 */
	uint32_t multiprocessors, memory, encoder, decoder; /* percent */
};

_Static_assert(sizeof(struct nvml_process) == 24, "nvmlProcessInfo_t has 24 bytes");
_Static_assert(sizeof(struct nvml_utilization) == 32, "nvmlProcessUtilizationSample_t has 32 bytes");

NVML_VALUE(nvmlDeviceGetPersistenceMode, int, sim.driver->persistence)

/* Adds the processes that allocated memory to a list that has room for that many. */
static nvml_return list_allocators(const struct card *card, uint32_t *count, uint32_t room, struct nvml_process *out)
{
	int n = nvml_allocators(card, allocators);

	for (int i = 0; i < n; i++) {
		if (*count < room) {
			out[*count] = (struct nvml_process){
				.pid = (uint32_t)allocators[i].pid,
				.used = allocators[i].bytes,
				.gpu_instance = SIM_NO_INSTANCE,
				.compute_instance = SIM_NO_INSTANCE,
			};
		}
		++*count;
	}
	return n < 0 ? NVML_ERROR_UNKNOWN : NVML_SUCCESS;
}

/* The processes of a card or of a MIG device that are in a list. */
static nvml_return list(const char *function, struct device *device, uint32_t *count, struct nvml_process *out,
			enum process_list which)
{
	struct nvml_target target;
	nvml_return code = nvml_begin_target(function, device, count, &target);
	uint32_t room = code == NVML_SUCCESS ? *count : 0;

	if (code == NVML_SUCCESS && room > 0 && !out)
		code = NVML_ERROR_INVALID_ARGUMENT;
	if (code == NVML_SUCCESS) {
		*count = 0;
		for (int i = 0; i < sim.topology.process_count; i++) {
			const struct process *p = &sim.topology.processes[i];
			if (!(p->lists & which) || !sim_uses(p, target.card))
				continue;
			if (target.mig && p->mig != target.mig_index)
				continue;
			if (*count < room) {
				const struct mig_device *m =
					p->mig == TOPOLOGY_NO_MIG ? NULL : &target.card->mig_devices[p->mig];
				out[*count] = (struct nvml_process){
					.pid = (uint32_t)p->pid,
					.used = nvml_process_bytes(p),
					.gpu_instance = m ? (uint32_t)m->gi : SIM_NO_INSTANCE,
					.compute_instance = m ? (uint32_t)m->ci : SIM_NO_INSTANCE,
				};
			}
			++*count;
		}
		if (!target.mig && which == LIST_COMPUTE)
			code = list_allocators(target.card, count, room, out);
		if (code == NVML_SUCCESS && *count > room)
			code = NVML_ERROR_INSUFFICIENT_SIZE;
	}
	sim_leave(&sim);
	return code;
}

#define NVML_PROCESSES(function, which)                                                                 \
	NVML_API nvml_return function(struct device *device, uint32_t *count, struct nvml_process *out) \
	{                                                                                               \
		return list(#function, device, count, out, which);                                      \
	}

NVML_PROCESSES(nvmlDeviceGetComputeRunningProcesses_v3, LIST_COMPUTE)
NVML_PROCESSES(nvmlDeviceGetGraphicsRunningProcesses_v3, LIST_GRAPHICS)
NVML_PROCESSES(nvmlDeviceGetMPSComputeRunningProcesses_v3, LIST_MPS)

/* When the last sample was taken: they are taken six times a second. */
static uint64_t sampled(void)
{
	enum { PERIOD = 1000000 / 6 };
	struct timespec t;

	clock_gettime(CLOCK_REALTIME, &t);
	uint64_t now = (uint64_t)t.tv_sec * 1000000 + (uint64_t)t.tv_nsec / 1000;
	return now - now % PERIOD;
}

/* The last sample of each process that computed, if it is newer than since. A GPU in MIG mode has none. */
NVML_API nvml_return nvmlDeviceGetProcessUtilization(struct device *device, struct nvml_utilization *out, uint32_t *count,
						     uint64_t since)
{
	const struct card *card;
	nvml_return code = nvml_begin_card("nvmlDeviceGetProcessUtilization", device, count, &card);
	uint32_t room = code == NVML_SUCCESS && out ? *count : 0;
	uint64_t timestamp = sampled();

	if (code == NVML_SUCCESS && card->mig == MIG_ENABLED)
		code = NVML_ERROR_NOT_SUPPORTED;
	if (code == NVML_SUCCESS) {
		*count = 0;
		for (int i = 0; timestamp > since && i < sim.topology.process_count; i++) {
			const struct process *p = &sim.topology.processes[i];
			if (p->utilization == 0 || !sim_uses(p, card))
				continue;
			if (*count < room) {
				out[*count] = (struct nvml_utilization){
					.pid = (uint32_t)p->pid,
					.timestamp = timestamp,
					.multiprocessors = (uint32_t)p->utilization,
				};
			}
			++*count;
		}
		if (*count == 0)
			code = NVML_ERROR_NOT_FOUND;
		else if (*count > room)
			code = NVML_ERROR_INSUFFICIENT_SIZE;
	}
	sim_leave(&sim);
	return code;
}
