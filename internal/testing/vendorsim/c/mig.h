/*
 * MIG: what follows from the profile of a MIG device and from the GPU that has
 * it. The Go package vendorsim derives the same numbers; a test holds the two
 * together.
 */
#ifndef DIVVY_MIG_H
#define DIVVY_MIG_H

#include "topology.h"

enum {
	MIG_PROFILES = 18, /* numbers of profiles of GPU instances, 0 to 17 */
	MIG_MAX_SLICES = 8,
};

/* Fills *out with the profile of that number. Returns false if the GPU has none. */
bool mig_profile_at(const struct card *card, uint32_t number, struct mig_profile *out);

/*
 * Fills *out with the profile that name gives a MIG device, and *slices with the
 * compute instance's. Returns false if the GPU has none of that name.
 */
bool mig_profile_named(const struct card *card, const char *name, struct mig_profile *out, int *slices);

/* Whether a GPU instance of that profile can have compute instances of so many slices. */
bool mig_has_compute(const struct mig_profile *profile, int slices);

/* The multiprocessors of a compute instance of so many slices. */
int mig_multiprocessors(const struct card *card, const struct mig_profile *profile, int slices);

/* The memory of a GPU instance in MiB. */
uint64_t mig_memory_mib(const struct card *card, const struct mig_profile *profile);

/* Writes the name that NVIDIA's tools give a MIG device. */
void mig_name(const struct card *card, const struct mig_profile *profile, int slices, char out[TOPOLOGY_TEXT]);

/* The number of the first GPU instance of a profile. */
int mig_first_instance(const struct mig_profile *profile);

/* Fills in what the sections of the card's MIG devices do not say. */
void mig_derive(struct card *card);

#endif
