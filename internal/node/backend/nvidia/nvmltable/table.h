#ifndef DIVVY_NVMLTABLE_H
#define DIVVY_NVMLTABLE_H

/* 0, or -1 with the reason in nvmltable_error. */
int nvmltable_bind(const char *path);

const char *nvmltable_error(void);

void nvmltable_unbind(void);

/* 1 if the library is no longer loaded. */
int nvmltable_unload(const char *path);

#endif
