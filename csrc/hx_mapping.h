/* A file of the disk cache, mapped: counted, so that it lives as long as the arrays in it.
 *
 * The mapping is private and writable: a read is a read of the page cache, without a copy, and
 * what somebody writes to an array never reaches the file or another process.
 */
#ifndef HX_MAPPING_H
#define HX_MAPPING_H

#include <stdatomic.h>
#include <stdbool.h>
#include <stdint.h>

#include "hx_status.h"

struct hx_mapping {
    uint8_t *data;
    uint64_t nbytes;
    _Atomic uint32_t reference_count;
};

/* Map the first nbytes, at least 1, of an open file, which may be closed afterwards.
 *
 * Ownership: *out is a new reference, to be ended with hx_mapping_release(); untouched on failure.
 * Returns:   HX_OK, HX_NO_MEMORY, HX_SYSTEM.
 */
enum hx_status hx_mapping_open(int fd, uint64_t nbytes, struct hx_mapping **out);

/* What is another one once a file has been replaced or written to. */
struct hx_file_stamp {
    uint64_t device;
    uint64_t inode;
    int64_t modified_ns;
    int64_t changed_ns;
};

/* Map all of a file that was mapped before, by name.
 *
 * path      borrowed
 * stamp     borrowed; what the file had when it was known to be right
 * nbytes    its size, at least 1
 * may_wait  whether to read it into memory, as hx_mapping_populate() does; otherwise it has to be
 *           there, which kernels before 6.5 do not tell
 *
 * GIL:       not needed; waits for the disk at most if may_wait.
 * Ownership: as of hx_mapping_open().
 * Returns:   HX_OK; HX_NOTHING if it is not that file any more, or cannot be had so.
 */
enum hx_status hx_mapping_reopen(const char *path, const struct hx_file_stamp *stamp,
                                 uint64_t nbytes, bool may_wait, struct hx_mapping **out);

/* Read the whole file into memory and into the page tables.
 *
 * GIL:     not needed; may wait for the disk.
 * Returns: HX_OK, also where the kernel is too old to do it; HX_SYSTEM if a page cannot be had:
 *          the disk failed, or the file has become shorter (EFAULT). Such a page is a bus error
 *          for whoever touches it.
 */
enum hx_status hx_mapping_populate(const struct hx_mapping *mapping);

/* Add a reference. Any thread, no GIL. */
void hx_mapping_retain(struct hx_mapping *mapping);

/* Give a reference back; the last one unmaps. Any thread, no GIL. */
void hx_mapping_release(struct hx_mapping *mapping);

#endif
