/* A file of the disk cache, mapped. */
#include "hx_mapping.h"

#include <errno.h>
#include <stdlib.h>
#include <sys/mman.h>

#include "hx_atomic.h"

/* Since Linux 5.14; headers may be older. */
#ifndef MADV_POPULATE_READ
#define MADV_POPULATE_READ 22
#endif

enum hx_status hx_mapping_open(int fd, uint64_t nbytes, struct hx_mapping **out)
{
    struct hx_mapping *mapping = malloc(sizeof *mapping);
    void *data;
    if (mapping == NULL)
        return HX_NO_MEMORY;
    data = mmap(NULL, nbytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_NORESERVE, fd, 0);
    if (data == MAP_FAILED) {
        const int saved_errno = errno;
        free(mapping);
        errno = saved_errno;
        return saved_errno == ENOMEM ? HX_NO_MEMORY : HX_SYSTEM;
    }
    mapping->data = data;
    mapping->nbytes = nbytes;
    atomic_init(&mapping->reference_count, 1);
    *out = mapping;
    return HX_OK;
}

enum hx_status hx_mapping_populate(const struct hx_mapping *mapping)
{
    int result;
    do {
        result = madvise(mapping->data, mapping->nbytes, MADV_POPULATE_READ);
    } while (result != 0 && (errno == EINTR || errno == EAGAIN));
    return result == 0 || errno == EINVAL ? HX_OK : HX_SYSTEM;
}

void hx_mapping_retain(struct hx_mapping *mapping)
{
    hx_add_relaxed_u32(&mapping->reference_count, 1);
}

void hx_mapping_release(struct hx_mapping *mapping)
{
    if (hx_sub_acq_rel_u32(&mapping->reference_count, 1) == 1) {
        munmap(mapping->data, mapping->nbytes);
        free(mapping);
    }
}
