/* The functions of NVML that memlimit calls, with one device and the limit of one group. */
#include <stdint.h>
#include <string.h>

typedef void *device_t;
struct set { const char *group; uint64_t soft, hard; };
struct get { const char *group; uint64_t soft, hard, used; };

static int device;
static char owner[256];
static uint64_t limit;

int nvmlInit_v2(void)
{
#ifdef BROKEN
	return 9;
#else
	return 0;
#endif
}

int nvmlShutdown(void) { return 0; }

const char *nvmlErrorString(int code)
{
	switch (code) {
	case 2: return "Invalid Argument";
	case 3: return "Not Supported";
	case 6: return "Not Found";
	case 9: return "Driver Not Loaded";
	case 17: return "Operating System";
	}
	return "Unknown Error";
}

int nvmlSystemGetDriverVersion(char *text, unsigned size)
{
	strncpy(text, "615.71.09", size);
	return 0;
}

int nvmlDeviceGetHandleByUUID(const char *uuid, device_t *out)
{
	if (strcmp(uuid, "GPU-00000000-0000-0000-0000-000000000001"))
		return 6;
	*out = &device;
	return 0;
}

#ifndef NO_SET
int nvmlDeviceSetMemoryLimits_v1(device_t d, struct set *s)
{
	if (d != &device || s->soft > s->hard)
		return 2;
	if (s->hard != UINT64_MAX && s->hard > (uint64_t)40960 << 20)
		return 2;
	if (strncmp(s->group, "/sys/fs/cgroup", 14))
		return 17;
	if (!s->group[14])
		return 3;
	if (strlen(s->group) > 4 && !strcmp(s->group + strlen(s->group) - 4, "bare"))
		return 6;
	strncpy(owner, s->group, sizeof owner - 1);
	limit = s->hard;
	return 0;
}
#endif

#ifndef NO_GET
int nvmlDeviceGetMemoryLimits_v1(device_t d, struct get *g)
{
	if (d != &device)
		return 2;
	if (strcmp(g->group, owner))
		return 3;
	g->soft = 0;
	g->hard = limit;
	g->used = 7 << 20;
	return 0;
}
#endif
