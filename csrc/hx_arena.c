/* One memfd mapping that a trainer and its workers share. */
#include "hx_arena.h"

#include <errno.h>
#include <fcntl.h>
#include <stdlib.h>
#include <string.h>
#include <sys/eventfd.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <time.h>
#include <unistd.h>

#include "hx_atomic.h"
#include "hx_journal.h"

uint64_t hx_now_ns(void)
{
    struct timespec now;
    clock_gettime(CLOCK_MONOTONIC, &now);
    return (uint64_t)now.tv_sec * UINT64_C(1000000000) + (uint64_t)now.tv_nsec;
}

static uint64_t round_up(uint64_t value, uint64_t multiple)
{
    return (value + multiple - 1) / multiple * multiple;
}

/* Plans that can wait: enough that workers never lack one while the trainer computes. */
static uint32_t plan_capacity(const struct hx_arena_config *config)
{
    uint32_t capacity = 2;
    while (capacity < config->slot_count + 1)
        capacity *= 2;
    return capacity;
}

/* Fill in everything that follows from the configuration. */
static void lay_out(const struct hx_arena_config *config, struct hx_header *header)
{
    const uint64_t page = (uint64_t)sysconf(_SC_PAGESIZE);
    uint64_t offset = round_up(sizeof *header, HX_CACHE_LINE);
    header->magic = HX_MAGIC;
    header->version = HX_LAYOUT_VERSION;
    header->slot_count = config->slot_count;
    header->worker_count = config->worker_count;
    header->group_count = config->group_count;
    header->plan_capacity = plan_capacity(config);
    header->batch_capacity = config->batch_capacity;
    header->is_batched = config->is_batched;
    header->slot_nbytes = round_up(config->slot_nbytes, page);

    header->groups_offset = offset;
    offset = round_up(offset + config->group_count * sizeof(struct hx_group), HX_CACHE_LINE);
    header->plans_offset = offset;
    offset = round_up(offset + header->plan_capacity * sizeof(struct hx_plan), HX_CACHE_LINE);
    header->workers_offset = offset;
    offset += config->worker_count * sizeof(struct hx_worker);
    header->slots_offset = offset;
    offset += config->slot_count * sizeof(struct hx_slot);
    header->records_offset = offset;
    offset += (uint64_t)config->slot_count * config->batch_capacity * sizeof(struct hx_record);
    header->data_offset = round_up(offset, page);
    header->total_nbytes = header->data_offset + config->slot_count * header->slot_nbytes;
}

uint64_t hx_arena_nbytes(const struct hx_arena_config *config)
{
    struct hx_header header;
    memset(&header, 0, sizeof header);
    lay_out(config, &header);
    return header.total_nbytes;
}

static enum hx_status init_mutex(pthread_mutex_t *mutex)
{
    enum hx_status status = HX_SYSTEM;
    pthread_mutexattr_t attributes;
    int error = pthread_mutexattr_init(&attributes);
    if (error == 0) {
        error = pthread_mutexattr_setpshared(&attributes, PTHREAD_PROCESS_SHARED);
        if (error == 0)
            error = pthread_mutexattr_setrobust(&attributes, PTHREAD_MUTEX_ROBUST);
        if (error == 0)
            error = pthread_mutex_init(mutex, &attributes);
        pthread_mutexattr_destroy(&attributes);
    }
    if (error == 0)
        status = HX_OK;
    else
        errno = error;
    return status;
}

/* An arena struct without mapping or descriptors; returns new, or NULL with errno. */
static struct hx_arena *new_arena(void)
{
    struct hx_arena *arena = calloc(1, sizeof *arena);
    if (arena != NULL) {
        arena->owner_pid = getpid();
        arena->memory_fd = arena->results_fd = arena->work_fd = arena->ready_fd = -1;
        atomic_store_explicit(&arena->reference_count, 1, memory_order_relaxed);
    }
    return arena;
}

static void destroy_arena(struct hx_arena *arena)
{
    const int saved_errno = errno;
    const int fds[] = {arena->memory_fd, arena->results_fd, arena->work_fd, arena->ready_fd};
    if (arena->header != NULL)
        munmap(arena->header, arena->nbytes);
    for (size_t i = 0; i < sizeof fds / sizeof fds[0]; i++) {
        if (fds[i] >= 0)
            close(fds[i]);
    }
    free(arena->lease_counts);
    free(arena->worker_fds);
    free(arena);
    errno = saved_errno;
}

/* Map the first nbytes of arena->memory_fd. */
static enum hx_status map_memory(struct hx_arena *arena, uint64_t nbytes)
{
    void *base = mmap(NULL, nbytes, PROT_READ | PROT_WRITE, MAP_SHARED, arena->memory_fd, 0);
    if (base == MAP_FAILED)
        return errno == ENOMEM ? HX_NO_MEMORY : HX_SYSTEM;
    arena->header = base;
    arena->nbytes = nbytes;
    return HX_OK;
}

/* Set the pointers that follow from a valid header, and make this process's own tables. */
static enum hx_status adopt_header(struct hx_arena *arena)
{
    const struct hx_header *header = arena->header;
    uint8_t *base = (uint8_t *)arena->header;
    arena->groups = (struct hx_group *)(base + header->groups_offset);
    arena->plans = (struct hx_plan *)(base + header->plans_offset);
    arena->workers = (struct hx_worker *)(base + header->workers_offset);
    arena->slots = (struct hx_slot *)(base + header->slots_offset);
    arena->records = (struct hx_record *)(base + header->records_offset);
    arena->data = base + header->data_offset;
    arena->lease_counts = calloc(header->slot_count, sizeof *arena->lease_counts);
    arena->worker_fds = malloc((header->worker_count + 1) * sizeof *arena->worker_fds);
    if (arena->lease_counts == NULL || arena->worker_fds == NULL)
        return HX_NO_MEMORY;
    for (uint32_t i = 0; i < header->worker_count; i++)
        arena->worker_fds[i] = -1;
    return HX_OK;
}

enum hx_status hx_arena_create(const struct hx_arena_config *config, struct hx_arena **out)
{
    enum hx_status status = HX_SYSTEM;
    struct hx_header header;
    struct hx_arena *arena = new_arena();
    int error;
    if (arena == NULL) {
        status = HX_NO_MEMORY;
        goto cleanup;
    }
    memset(&header, 0, sizeof header);
    lay_out(config, &header);
    arena->memory_fd = memfd_create("hydrax-arena", MFD_CLOEXEC);
    arena->results_fd = memfd_create("hydrax-results", MFD_CLOEXEC);
    arena->work_fd = eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK | EFD_SEMAPHORE);
    arena->ready_fd = eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK);
    if (arena->memory_fd < 0 || arena->results_fd < 0 || arena->work_fd < 0 || arena->ready_fd < 0)
        goto cleanup;
    if (ftruncate(arena->memory_fd, (off_t)header.total_nbytes) != 0)
        goto cleanup;
    /* The tables are reserved now, so that writing them can never be a bus error. */
    do {
        error = posix_fallocate(arena->memory_fd, 0, (off_t)header.data_offset);
    } while (error == EINTR);
    if (error != 0) {
        errno = error;
        status = error == ENOSPC || error == ENOMEM ? HX_NO_MEMORY : HX_SYSTEM;
        goto cleanup;
    }
    status = map_memory(arena, header.total_nbytes);
    if (status != HX_OK)
        goto cleanup;
    memcpy(arena->header, &header, sizeof header);
    status = init_mutex(&arena->header->mutex);
    if (status != HX_OK)
        goto cleanup;
    status = adopt_header(arena);
    if (status != HX_OK)
        goto cleanup;
    for (uint32_t i = 0; i < header.worker_count; i++)
        hx_store_relaxed_u32(&arena->workers[i].slot, HX_NO_SLOT);
    *out = arena;
    arena = NULL;

cleanup:
    if (arena != NULL)
        destroy_arena(arena);
    return status;
}

/* Whether the mapping holds an arena of this version that fits into file_nbytes. */
static int is_valid_header(const struct hx_header *header, uint64_t file_nbytes)
{
    struct hx_header expected;
    struct hx_arena_config config;
    if (header->magic != HX_MAGIC || header->version != HX_LAYOUT_VERSION)
        return 0;
    config.slot_count = header->slot_count;
    config.worker_count = header->worker_count;
    config.group_count = header->group_count;
    config.batch_capacity = header->batch_capacity;
    config.is_batched = header->is_batched;
    config.slot_nbytes = header->slot_nbytes;
    memset(&expected, 0, sizeof expected);
    lay_out(&config, &expected);
    return header->total_nbytes == expected.total_nbytes &&
           header->data_offset == expected.data_offset &&
           header->records_offset == expected.records_offset && header->total_nbytes <= file_nbytes;
}

enum hx_status hx_arena_attach(int memory_fd, int results_fd, int work_fd, int ready_fd,
                               struct hx_arena **out)
{
    enum hx_status status = HX_SYSTEM;
    struct stat file;
    struct hx_arena *arena = new_arena();
    if (arena == NULL) {
        close(memory_fd);
        close(results_fd);
        close(work_fd);
        close(ready_fd);
        return HX_NO_MEMORY;
    }
    arena->memory_fd = memory_fd;
    arena->results_fd = results_fd;
    arena->work_fd = work_fd;
    arena->ready_fd = ready_fd;
    if (fstat(memory_fd, &file) != 0)
        goto cleanup;
    if ((uint64_t)file.st_size < sizeof(struct hx_header)) {
        status = HX_BAD_ARENA;
        goto cleanup;
    }
    status = map_memory(arena, (uint64_t)file.st_size);
    if (status != HX_OK)
        goto cleanup;
    if (!is_valid_header(arena->header, (uint64_t)file.st_size)) {
        status = HX_BAD_ARENA;
        goto cleanup;
    }
    status = adopt_header(arena);
    if (status != HX_OK)
        goto cleanup;
    *out = arena;
    arena = NULL;

cleanup:
    if (arena != NULL)
        destroy_arena(arena);
    return status;
}

void hx_arena_retain(struct hx_arena *arena)
{
    hx_add_relaxed_u32(&arena->reference_count, 1);
}

void hx_arena_release(struct hx_arena *arena)
{
    if (hx_sub_acq_rel_u32(&arena->reference_count, 1) == 1)
        destroy_arena(arena);
}

/* Add to an eventfd. A full counter already wakes whoever waits, so that failure is none. */
static void signal_event(int fd, uint64_t count)
{
    const int saved_errno = errno;
    while (write(fd, &count, sizeof count) < 0 && errno == EINTR) {
    }
    errno = saved_errno;
}

void hx_arena_close(struct hx_arena *arena)
{
    hx_store_seq_cst_u32(&arena->header->is_closing, 1);
    signal_event(arena->work_fd, arena->header->worker_count + 1);
    signal_event(arena->ready_fd, 1);
}

void hx_arena_bury(struct hx_arena *arena, uint32_t worker)
{
    hx_store_relaxed_u32(&arena->workers[worker].is_started, 0);
    hx_clear_bits_seq_cst_u64(&arena->header->idle_workers[worker / 64], UINT64_C(1)
                                                                             << worker % 64);
    /* It may have taken a wake-up with it, or died before it gave one. */
    signal_event(arena->work_fd, arena->header->worker_count);
}

void hx_arena_kick(struct hx_arena *arena)
{
    hx_store_seq_cst_u32(&arena->is_kicked, 1);
    signal_event(arena->ready_fd, 1);
    signal_event(arena->work_fd, 1); /* where the trainer itself loads, it waits there */
}

void hx_arena_lock(struct hx_arena *arena)
{
    if (pthread_mutex_lock(&arena->header->mutex) == EOWNERDEAD) {
        hx_journal_replay(arena);
        /* It may have made a batch ready, after the trainer has looked: once more after the death,
         * which wakes it, and before this. */
        hx_arena_wake_trainer(arena);
        pthread_mutex_consistent(&arena->header->mutex);
    }
}

void hx_arena_unlock(struct hx_arena *arena)
{
    pthread_mutex_unlock(&arena->header->mutex);
}

void hx_arena_wake_worker(struct hx_arena *arena)
{
    const struct hx_header *header = arena->header;
    /* Pairs with the announcement in hx_worker_next(): either it sees our work, or we see it. */
    for (uint32_t i = 0; i * 64 < header->worker_count; i++) {
        if (hx_load_seq_cst_u64(&header->idle_workers[i]) != 0) {
            signal_event(arena->work_fd, 1);
            break;
        }
    }
}

void hx_arena_wake_trainer(struct hx_arena *arena)
{
    /* Pairs with the announcement in hx_trainer_wait(). */
    if (hx_load_seq_cst_u32(&arena->header->is_trainer_waiting) != 0)
        signal_event(arena->ready_fd, 1);
}
