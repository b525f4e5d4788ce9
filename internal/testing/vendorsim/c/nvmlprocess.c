/* The functions of NVML that are about processes and who may use a GPU. */
#include "nvmlabi.h"

/* The values of nvmlComputeMode_t and nvmlEnableState_t that simulated cards have. */
enum {
	COMPUTE_MODE_DEFAULT = 0,
	PERSISTENCE_DISABLED = 0,
};

/* Stands for an amount that is not known. */
#define NOT_AVAILABLE UINT64_MAX

/* The second and the third version of the struct. */
struct nvml_process {
	uint32_t pid;
	uint64_t used;				 /* bytes */
	uint32_t gpu_instance, compute_instance; /* SIM_NO_INSTANCE: of none */
};

_Static_assert(sizeof(struct nvml_process) == 24, "nvmlProcessInfo_t has 24 bytes");

NVML_VALUE(nvmlDeviceGetComputeMode, int, COMPUTE_MODE_DEFAULT)
NVML_VALUE(nvmlDeviceGetPersistenceMode, int, PERSISTENCE_DISABLED)

/* The processes of a card; computes is false for lists that no simulated process is in. */
static nvml_return list(const char *function, struct device *device, uint32_t *count, struct nvml_process *out,
			bool computes)
{
	struct nvml_target target;
	nvml_return code = nvml_begin_target(function, device, count, &target);
	uint32_t room = code == NVML_SUCCESS ? *count : 0;

	if (code == NVML_SUCCESS && room > 0 && !out)
		code = NVML_ERROR_INVALID_ARGUMENT;
	if (code == NVML_SUCCESS) {
		*count = 0;
		for (int i = 0; computes && !target.mig && i < sim.topology.process_count; i++) {
			const struct process *p = &sim.topology.processes[i];
			if (p->card != target.card->index)
				continue;
			if (*count < room) {
				out[*count] = (struct nvml_process){
					.pid = (uint32_t)p->pid,
					.used = p->memory_unknown ? NOT_AVAILABLE : p->memory_mib << 20,
					.gpu_instance = SIM_NO_INSTANCE,
					.compute_instance = SIM_NO_INSTANCE,
				};
			}
			++*count;
		}
		if (*count > room)
			code = NVML_ERROR_INSUFFICIENT_SIZE;
	}
	sim_leave(&sim);
	return code;
}

#define NVML_PROCESSES(function, computes)                                                              \
	NVML_API nvml_return function(struct device *device, uint32_t *count, struct nvml_process *out) \
	{                                                                                               \
		return list(#function, device, count, out, computes);                                   \
	}

NVML_PROCESSES(nvmlDeviceGetComputeRunningProcesses_v3, true)
NVML_PROCESSES(nvmlDeviceGetGraphicsRunningProcesses_v3, false)
NVML_PROCESSES(nvmlDeviceGetMPSComputeRunningProcesses_v3, false)
