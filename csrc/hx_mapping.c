/* A file of the disk cache, mapped. */
#include "hx_mapping.h"

#include <errno.h>
#include <fcntl.h>
#include <stdlib.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <unistd.h>

#include "hx_atomic.h"

/* Since Linux 5.14; headers may be older. */
#ifndef MADV_POPULATE_READ
#define MADV_POPULATE_READ 22
#endif

/* Since Linux 6.5. */
#ifndef SYS_cachestat
#define SYS_cachestat 451
#endif
struct cache_range {
    uint64_t offset, nbytes;
};
struct cache_counts {
    uint64_t cached, dirty, written_back, evicted, recently_evicted;
};

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
    /* The disk is asked for all of it at once, rather than for a window ahead of each fault. It is
     * advice: whatever comes of it, the next call tells. */
    madvise(mapping->data, mapping->nbytes, MADV_WILLNEED);
    do {
        result = madvise(mapping->data, mapping->nbytes, MADV_POPULATE_READ);
    } while (result != 0 && (errno == EINTR || errno == EAGAIN));
    return result == 0 || errno == EINVAL ? HX_OK : HX_SYSTEM;
}

static int64_t nanoseconds(struct timespec time)
{
    return time.tv_sec * INT64_C(1000000000) + time.tv_nsec;
}

static bool is_same_file(int fd, const struct hx_file_stamp *stamp, uint64_t nbytes)
{
    struct stat status;
    return fstat(fd, &status) == 0 && status.st_dev == stamp->device &&
           status.st_ino == stamp->inode && (uint64_t)status.st_size == nbytes &&
           nanoseconds(status.st_mtim) == stamp->modified_ns &&
           nanoseconds(status.st_ctim) == stamp->changed_ns;
}

/* Whether all pages of a file are in memory; false also where the kernel does not tell. */
static bool is_in_memory(int fd, uint64_t nbytes)
{
    const uint64_t page_nbytes = (uint64_t)sysconf(_SC_PAGESIZE);
    struct cache_range range = {0, nbytes};
    struct cache_counts counts;
    return syscall(SYS_cachestat, fd, &range, &counts, 0) == 0 &&
           counts.cached >= (nbytes + page_nbytes - 1) / page_nbytes;
}

enum hx_status hx_mapping_reopen(const char *path, const struct hx_file_stamp *stamp,
                                 uint64_t nbytes, bool may_wait, struct hx_mapping **out)
{
    struct hx_mapping *mapping = NULL;
    enum hx_status result = HX_NOTHING;
    /* Whatever somebody may have put there, opening it must not wait. */
    const int fd = open(path, O_RDONLY | O_CLOEXEC | O_NONBLOCK);
    if (fd < 0)
        return HX_NOTHING;
    if (!is_same_file(fd, stamp, nbytes) || !(may_wait || is_in_memory(fd, nbytes)) ||
        hx_mapping_open(fd, nbytes, &mapping) != HX_OK)
        goto cleanup;
    if (may_wait && hx_mapping_populate(mapping) != HX_OK) {
        hx_mapping_release(mapping);
        goto cleanup;
    }
    *out = mapping;
    result = HX_OK;
cleanup:
    close(fd);
    return result;
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
