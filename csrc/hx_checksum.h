/* XXH64: a checksum that runs about as fast as memory can be read. */
#ifndef HX_CHECKSUM_H
#define HX_CHECKSUM_H

#include <stddef.h>
#include <stdint.h>

/* XXH64 of nbytes at data, with a seed, as its specification says
 * (https://github.com/Cyan4973/xxHash/blob/dev/doc/xxhash_spec.md). It tells damage by accident,
 * not by intent. Pure; no GIL. */
uint64_t hx_checksum(const void *data, size_t nbytes, uint64_t seed);

#endif
