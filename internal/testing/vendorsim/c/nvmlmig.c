/*
 * The functions of NVML that are about MIG. A MIG device is a compute instance
 * in a GPU instance, and has a handle of its own beside that of its GPU.
 */
#include "mig.h"
#include "nvmlabi.h"

#include <stdio.h>
#include <string.h>

/* What handles of instances point to: nothing but their place is of interest. */
struct gpu_instance {
	char nothing;
};

struct compute_instance {
	char nothing;
};

struct nvml_attributes {
	uint32_t multiprocessors;
	uint32_t copy_engines, decoders, encoders, jpegs, ofas; /* of the GPU instance */
	uint32_t gpu_slices, compute_slices;
	uint64_t memory_mib;
};

struct nvml_placement {
	uint32_t start, size;
};

struct nvml_gpu_instance_info {
	struct device *device;
	uint32_t id, profile;
	struct nvml_placement placement;
};

struct nvml_compute_instance_info {
	struct device *device;
	struct gpu_instance *gpu_instance;
	uint32_t id, profile;
	struct nvml_placement placement;
};

/* What all versions say of a profile of GPU instances, in their order. */
struct gpu_profile_counts {
	uint32_t slices, instances, multiprocessors, copy_engines, decoders, encoders, jpegs, ofas;
};

struct nvml_gpu_profile {
	uint32_t id, p2p;
	struct gpu_profile_counts counts;
	uint64_t memory_mib;
};

enum { PROFILE_NAME = 96 };

struct nvml_gpu_profile_v2 {
	uint32_t version;
	uint32_t id, p2p;
	struct gpu_profile_counts counts;
	uint64_t memory_mib;
	char name[PROFILE_NAME];
};

struct nvml_gpu_profile_v3 {
	uint32_t version;
	uint32_t id;
	struct gpu_profile_counts counts;
	uint64_t memory_mib;
	char name[PROFILE_NAME];
	uint32_t capabilities;
};

struct nvml_compute_profile {
	uint32_t id, slices, instances, multiprocessors;
	uint32_t copy_engines, decoders, encoders, jpegs, ofas; /* of the GPU instance */
};

/* Version 3 has the capabilities besides. */
struct nvml_compute_profile_v2 {
	uint32_t version;
	struct nvml_compute_profile profile;
	char name[PROFILE_NAME];
};

struct nvml_compute_profile_v3 {
	struct nvml_compute_profile_v2 v2;
	uint32_t capabilities;
};

_Static_assert(sizeof(struct nvml_attributes) == 40, "nvmlDeviceAttributes_t has 40 bytes");
_Static_assert(sizeof(struct nvml_placement) == 8, "nvmlGpuInstancePlacement_t has 8 bytes");
_Static_assert(sizeof(struct nvml_gpu_instance_info) == 24, "nvmlGpuInstanceInfo_t has 24 bytes");
_Static_assert(sizeof(struct nvml_compute_instance_info) == 32, "nvmlComputeInstanceInfo_t has 32 bytes");
_Static_assert(sizeof(struct nvml_gpu_profile) == 48, "nvmlGpuInstanceProfileInfo_t has 48 bytes");
_Static_assert(sizeof(struct nvml_gpu_profile_v2) == 152, "nvmlGpuInstanceProfileInfo_v2_t has 152 bytes");
_Static_assert(sizeof(struct nvml_gpu_profile_v3) == 152, "nvmlGpuInstanceProfileInfo_v3_t has 152 bytes");
_Static_assert(sizeof(struct nvml_compute_profile) == 36, "nvmlComputeInstanceProfileInfo_t has 36 bytes");
_Static_assert(sizeof(struct nvml_compute_profile_v2) == 136, "nvmlComputeInstanceProfileInfo_v2_t has 136 bytes");
_Static_assert(sizeof(struct nvml_compute_profile_v3) == 140, "nvmlComputeInstanceProfileInfo_v3_t has 140 bytes");

enum {
	GPU_PROFILE_GRAPHICS = 2,
	COMPUTE_PROFILE_GRAPHICS = 1,
	COMPUTE_PROFILES = 9, /* numbers of profiles of compute instances, 0 to 8 */
	ENGINES_SHARED = 0,
	NO_INSTANCE = -1,
};

/* The number that a caller puts into the field version. */
#define VERSION(type, number) (uint32_t)(sizeof(type) | (number) << 24)

/* A handle for each instance that a card can have. Its place is the instance's. */
static struct gpu_instance gpu_instances[TOPOLOGY_MAX_CARDS * TOPOLOGY_GPU_INSTANCES];
static struct compute_instance
	compute_instances[TOPOLOGY_MAX_CARDS * TOPOLOGY_GPU_INSTANCES * TOPOLOGY_COMPUTE_INSTANCES];

/* Slices of the profiles of compute instances by their numbers, which are also the driver's. */
static const int compute_slices[COMPUTE_PROFILES] = {1, 2, 3, 4, 7, 8, 6, 0, 0};

static int compute_profile_of(int slices)
{
	int i = 0;

	while (compute_slices[i] != slices)
		i++;
	return i;
}

/* A MIG device at that instance, NULL if there is none. ci is NO_INSTANCE for any in the GPU instance. */
static const struct mig_device *instance_at(const struct card *card, int gi, int ci)
{
	for (uint32_t i = 0; i < TOPOLOGY_MAX_MIG; i++) {
		const struct mig_device *m = nvml_mig_at(card, i);
		if (m && m->gi == gi && (ci == NO_INSTANCE || m->ci == ci))
			return m;
	}
	return NULL;
}

/* What the handle of an instance stands for. */
struct instance {
	int number; /* of the card */
	const struct card *card;
	const struct mig_device *mig; /* at the instance */
};

/* Begins a call about an instance by the place of its handle, negative for none. sim_leave must follow. */
static nvml_return begin_instance(const char *function, ptrdiff_t place, bool compute, const void *out, struct instance *i)
{
	int ci = NO_INSTANCE;

	if (compute && place >= 0) {
		ci = (int)(place % TOPOLOGY_COMPUTE_INSTANCES);
		place /= TOPOLOGY_COMPUTE_INSTANCES;
	}
	i->number = place < 0 ? TOPOLOGY_NO_CARD : (int)(place / TOPOLOGY_GPU_INSTANCES);
	nvml_return code = nvml_begin_number(function, i->number, out, &i->card);
	if (code == NVML_SUCCESS) {
		i->mig = instance_at(i->card, (int)(place % TOPOLOGY_GPU_INSTANCES), ci);
		if (!i->mig) /* it has gone since */
			code = NVML_ERROR_INVALID_ARGUMENT;
	}
	return code;
}

static nvml_return begin_gpu_instance(const char *function, const struct gpu_instance *handle, const void *out,
				      struct instance *i)
{
	bool is = handle >= gpu_instances && handle < gpu_instances + sizeof gpu_instances / sizeof *gpu_instances;

	return begin_instance(function, is ? handle - gpu_instances : -1, false, out, i);
}

static struct gpu_instance *gpu_instance_handle(int card, int gi)
{
	return &gpu_instances[card * TOPOLOGY_GPU_INSTANCES + gi];
}

static bool has_graphics(const struct mig_profile *p)
{
	return strcmp(p->suffix, "+gfx") == 0;
}

NVML_API nvml_return nvmlDeviceGetMigMode(struct device *device, uint32_t *current, uint32_t *pending)
{
	const struct card *card;
	nvml_return code = nvml_begin_card("nvmlDeviceGetMigMode", device, current && pending ? current : NULL, &card);

	if (code == NVML_SUCCESS && card->mig == MIG_NOT_SUPPORTED)
		code = NVML_ERROR_NOT_SUPPORTED;
	if (code == NVML_SUCCESS)
		*current = *pending = card->mig == MIG_ENABLED;
	sim_leave(&sim);
	return code;
}

NVML_VALUE(nvmlDeviceGetMaxMigDeviceCount, uint32_t, card->mig == MIG_ENABLED ? TOPOLOGY_MAX_MIG : 0)

NVML_TARGET_VALUE(nvmlDeviceIsMigDeviceHandle, uint32_t, target.mig != NULL)

NVML_API nvml_return nvmlDeviceGetMigDeviceHandleByIndex(struct device *device, uint32_t index, struct device **out)
{
	const struct card *card;
	nvml_return code = nvml_begin_card("nvmlDeviceGetMigDeviceHandleByIndex", device, out, &card);

	if (code == NVML_SUCCESS && card->mig != MIG_ENABLED)
		code = NVML_ERROR_NOT_SUPPORTED;
	if (code == NVML_SUCCESS && index >= TOPOLOGY_MAX_MIG)
		code = NVML_ERROR_INVALID_ARGUMENT;
	if (code == NVML_SUCCESS && !nvml_mig_at(card, index))
		code = NVML_ERROR_NOT_FOUND;
	if (code == NVML_SUCCESS)
		*out = nvml_mig_handle(nvml_card_of(device), (int)index);
	sim_leave(&sim);
	return code;
}

/* A whole function that fills a value about the MIG device that target then is. */
#define MIG_VALUE(function, type, expression)                                                     \
	NVML_API nvml_return function(struct device *device, type *out)                           \
	{                                                                                         \
		struct nvml_target target;                                                        \
		nvml_return code = nvml_begin_target(#function, device, out, &target);            \
                                                                                                  \
		if (code == NVML_SUCCESS && !target.mig)                                          \
			code = NVML_ERROR_INVALID_ARGUMENT;                                       \
		if (code == NVML_SUCCESS)                                                         \
			*out = (type)(expression);                                                \
		sim_leave(&sim);                                                                  \
		return code;                                                                      \
	}

static struct nvml_attributes attributes_of(const struct nvml_target *target)
{
	const struct mig_device *mig = target->mig;

	return (struct nvml_attributes){
		.multiprocessors = (uint32_t)mig_multiprocessors(target->card, &mig->of, mig->slices),
		.copy_engines = (uint32_t)mig->of.copy_engines,
		.decoders = (uint32_t)mig->of.decoders,
		.jpegs = (uint32_t)mig->of.jpegs,
		.ofas = (uint32_t)mig->of.ofas,
		.gpu_slices = (uint32_t)mig->of.slices,
		.compute_slices = (uint32_t)mig->slices,
		.memory_mib = mig->memory_mib,
	};
}

typedef struct device *device_handle;

MIG_VALUE(nvmlDeviceGetDeviceHandleFromMigDeviceHandle, device_handle, &devices[target.number])
MIG_VALUE(nvmlDeviceGetGpuInstanceId, uint32_t, target.mig->gi)
MIG_VALUE(nvmlDeviceGetComputeInstanceId, uint32_t, target.mig->ci)
MIG_VALUE(nvmlDeviceGetAttributes_v2, struct nvml_attributes, attributes_of(&target))

/*
 * Begins a call about a profile of GPU instances, and puts it into *p. sim_leave
 * must follow.
 */
static nvml_return begin_gpu_profile(const char *function, struct device *device, uint32_t number, const void *out,
				     const struct card **card, struct mig_profile *p)
{
	nvml_return code = nvml_begin_card(function, device, out, card);

	if (code == NVML_SUCCESS && number >= MIG_PROFILES)
		code = NVML_ERROR_INVALID_ARGUMENT;
	if (code == NVML_SUCCESS && ((*card)->mig == MIG_NOT_SUPPORTED || !mig_profile_at(*card, number, p)))
		code = NVML_ERROR_NOT_SUPPORTED;
	return code;
}

static struct gpu_profile_counts counts_of(const struct mig_profile *p)
{
	return (struct gpu_profile_counts){
		.slices = (uint32_t)p->slices,
		.instances = (uint32_t)p->instances,
		.multiprocessors = (uint32_t)p->multiprocessors,
		.copy_engines = (uint32_t)p->copy_engines,
		.decoders = (uint32_t)p->decoders,
		.jpegs = (uint32_t)p->jpegs,
		.ofas = (uint32_t)p->ofas,
	};
}

/* Writes a profile's name as NVML has it there. */
static void put_name(const struct card *card, const struct mig_profile *p, int slices, char out[PROFILE_NAME])
{
	char text[TOPOLOGY_TEXT];

	mig_name(card, p, slices, text);
	snprintf(out, PROFILE_NAME, "MIG %s", text);
}

NVML_API nvml_return nvmlDeviceGetGpuInstanceProfileInfo(struct device *device, uint32_t number, struct nvml_gpu_profile *out)
{
	const struct card *card;
	struct mig_profile p;
	nvml_return code = begin_gpu_profile("nvmlDeviceGetGpuInstanceProfileInfo", device, number, out, &card, &p);

	if (code == NVML_SUCCESS)
		*out = (struct nvml_gpu_profile){
			.id = (uint32_t)p.id,
			.counts = counts_of(&p),
			.memory_mib = mig_memory_mib(card, &p),
		};
	sim_leave(&sim);
	return code;
}

/* The first field of out says which version the caller wants. Unlike the function above, it wants MIG mode. */
NVML_API nvml_return nvmlDeviceGetGpuInstanceProfileInfoV(struct device *device, uint32_t number, void *out)
{
	struct nvml_gpu_profile_v2 *v2 = out;
	struct nvml_gpu_profile_v3 *v3 = out;
	const struct card *card;
	struct mig_profile p;
	nvml_return code = begin_gpu_profile("nvmlDeviceGetGpuInstanceProfileInfoV", device, number, out, &card, &p);

	if (code == NVML_SUCCESS && card->mig != MIG_ENABLED)
		code = NVML_ERROR_NOT_SUPPORTED;
	if (code == NVML_SUCCESS) {
		if (v2->version == VERSION(*v2, 2)) {
			v2->id = (uint32_t)p.id;
			v2->p2p = 0;
			v2->counts = counts_of(&p);
			v2->memory_mib = mig_memory_mib(card, &p);
			put_name(card, &p, p.slices, v2->name);
		} else if (v3->version == VERSION(*v3, 3)) {
			v3->id = (uint32_t)p.id;
			v3->counts = counts_of(&p);
			v3->memory_mib = mig_memory_mib(card, &p);
			put_name(card, &p, p.slices, v3->name);
			v3->capabilities = has_graphics(&p) ? GPU_PROFILE_GRAPHICS : 0;
		} else {
			code = NVML_ERROR_INVALID_ARGUMENT;
		}
	}
	sim_leave(&sim);
	return code;
}

NVML_API nvml_return nvmlDeviceGetGpuInstanceById(struct device *device, uint32_t id, struct gpu_instance **out)
{
	const struct card *card;
	nvml_return code = nvml_begin_card("nvmlDeviceGetGpuInstanceById", device, out, &card);

	if (code == NVML_SUCCESS && card->mig != MIG_ENABLED)
		code = NVML_ERROR_NOT_SUPPORTED;
	if (code == NVML_SUCCESS && (id >= TOPOLOGY_GPU_INSTANCES || !instance_at(card, (int)id, NO_INSTANCE)))
		code = NVML_ERROR_NOT_FOUND;
	if (code == NVML_SUCCESS)
		*out = gpu_instance_handle(nvml_card_of(device), (int)id);
	sim_leave(&sim);
	return code;
}

/* Where a GPU instance is among the eighths of the memory. One with a number of another profile's is at 0. */
static struct nvml_placement placement_of(const struct mig_device *m)
{
	int start = (m->gi - mig_first_instance(&m->of)) * m->of.eighths;

	if (start < 0 || start + m->of.eighths > 8)
		start = 0;
	return (struct nvml_placement){.start = (uint32_t)start, .size = (uint32_t)m->of.eighths};
}

NVML_API nvml_return nvmlGpuInstanceGetInfo(struct gpu_instance *handle, struct nvml_gpu_instance_info *out)
{
	struct instance i;
	nvml_return code = begin_gpu_instance("nvmlGpuInstanceGetInfo", handle, out, &i);

	if (code == NVML_SUCCESS)
		*out = (struct nvml_gpu_instance_info){
			.device = &devices[i.number],
			.id = (uint32_t)i.mig->gi,
			.profile = (uint32_t)i.mig->of.id,
			.placement = placement_of(i.mig),
		};
	sim_leave(&sim);
	return code;
}

/*
 * Begins a call about a profile of the compute instances in a GPU instance.
 * sim_leave must follow.
 */
static nvml_return begin_compute_profile(const char *function, struct gpu_instance *handle, uint32_t number, uint32_t engines,
					 const void *out, struct instance *i, struct nvml_compute_profile *p)
{
	nvml_return code = begin_gpu_instance(function, handle, out, i);

	if (code == NVML_SUCCESS && (number >= COMPUTE_PROFILES || engines != ENGINES_SHARED))
		code = NVML_ERROR_INVALID_ARGUMENT;
	if (code == NVML_SUCCESS && !mig_has_compute(&i->mig->of, compute_slices[number]))
		code = NVML_ERROR_NOT_SUPPORTED;
	if (code == NVML_SUCCESS) {
		const struct mig_profile *of = &i->mig->of;
		int slices = compute_slices[number];
		*p = (struct nvml_compute_profile){
			.id = number,
			.slices = (uint32_t)slices,
			.instances = (uint32_t)(of->slices / slices),
			.multiprocessors = (uint32_t)mig_multiprocessors(i->card, of, slices),
			.copy_engines = (uint32_t)of->copy_engines,
			.decoders = (uint32_t)of->decoders,
			.jpegs = (uint32_t)of->jpegs,
			.ofas = (uint32_t)of->ofas,
		};
	}
	return code;
}

NVML_API nvml_return nvmlGpuInstanceGetComputeInstanceProfileInfo(struct gpu_instance *handle, uint32_t number, uint32_t engines,
								  struct nvml_compute_profile *out)
{
	struct instance i;
	struct nvml_compute_profile p;
	nvml_return code = begin_compute_profile("nvmlGpuInstanceGetComputeInstanceProfileInfo", handle, number, engines, out,
						 &i, &p);

	if (code == NVML_SUCCESS)
		*out = p;
	sim_leave(&sim);
	return code;
}

/* The first field of out says which version the caller wants. */
NVML_API nvml_return nvmlGpuInstanceGetComputeInstanceProfileInfoV(struct gpu_instance *handle, uint32_t number,
								   uint32_t engines, struct nvml_compute_profile_v2 *out)
{
	struct instance i;
	struct nvml_compute_profile p;
	nvml_return code = begin_compute_profile("nvmlGpuInstanceGetComputeInstanceProfileInfoV", handle, number, engines, out,
						 &i, &p);
	struct nvml_compute_profile_v3 *v3 = (void *)out;
	bool is_v3 = code == NVML_SUCCESS && out->version == VERSION(*v3, 3);

	if (code == NVML_SUCCESS && !is_v3 && out->version != VERSION(*out, 2))
		code = NVML_ERROR_INVALID_ARGUMENT;
	if (code == NVML_SUCCESS) {
		out->profile = p;
		put_name(i.card, &i.mig->of, (int)p.slices, out->name);
		if (is_v3)
			v3->capabilities = has_graphics(&i.mig->of) ? COMPUTE_PROFILE_GRAPHICS : 0;
	}
	sim_leave(&sim);
	return code;
}

NVML_API nvml_return nvmlGpuInstanceGetComputeInstanceById(struct gpu_instance *handle, uint32_t id,
							   struct compute_instance **out)
{
	struct instance i;
	nvml_return code = begin_gpu_instance("nvmlGpuInstanceGetComputeInstanceById", handle, out, &i);

	if (code == NVML_SUCCESS && (id >= TOPOLOGY_COMPUTE_INSTANCES || !instance_at(i.card, i.mig->gi, (int)id)))
		code = NVML_ERROR_NOT_FOUND;
	if (code == NVML_SUCCESS)
		*out = &compute_instances[(handle - gpu_instances) * TOPOLOGY_COMPUTE_INSTANCES + (ptrdiff_t)id];
	sim_leave(&sim);
	return code;
}

NVML_API nvml_return nvmlComputeInstanceGetInfo_v2(struct compute_instance *handle, struct nvml_compute_instance_info *out)
{
	bool is = handle >= compute_instances &&
		  handle < compute_instances + sizeof compute_instances / sizeof *compute_instances;
	struct instance i;
	nvml_return code = begin_instance("nvmlComputeInstanceGetInfo_v2", is ? handle - compute_instances : -1, true, out, &i);

	if (code == NVML_SUCCESS)
		*out = (struct nvml_compute_instance_info){
			.device = &devices[i.number],
			.gpu_instance = gpu_instance_handle(i.number, i.mig->gi),
			.id = (uint32_t)i.mig->ci,
			.profile = (uint32_t)compute_profile_of(i.mig->slices),
			.placement = {.start = (uint32_t)(i.mig->ci * i.mig->slices), .size = (uint32_t)i.mig->slices},
		};
	sim_leave(&sim);
	return code;
}
