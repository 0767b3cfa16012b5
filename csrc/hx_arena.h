/* One memfd mapping that a trainer and its workers share: create, attach, lock, close, unmap.
 *
 * The struct hx_arena is private to a process; a forked child inherits a copy. It is counted:
 * the mapping lives until the last lease, export or owner in this process has gone.
 */
#ifndef HX_ARENA_H
#define HX_ARENA_H

#include <stdatomic.h>
#include <stddef.h>
#include <stdint.h>
#include <sys/types.h>

#include "hx_layout.h"
#include "hx_status.h"

/* Bytes of the results file that belong to one slot; sparse, so only what is written counts. */
#define HX_RESULTS_SEGMENT (UINT64_C(1) << 40)

/* What an arena is made for; see struct hx_header for the fields. */
struct hx_arena_config {
    uint32_t slot_count;
    uint32_t worker_count;
    uint32_t group_count;
    uint32_t batch_capacity;
    uint32_t is_batched;
    uint64_t slot_nbytes; /* rounded up to whole pages */
};

struct hx_arena {
    struct hx_header *header; /* start of the mapping */
    struct hx_group *groups;
    struct hx_plan *plans;
    struct hx_worker *workers;
    struct hx_slot *slots;
    struct hx_record *records;      /* batch_capacity for each slot */
    uint8_t *data;                  /* slot i starts at i * slot_nbytes */
    uint64_t nbytes;                /* of the mapping */
    _Atomic uint32_t *lease_counts; /* per slot: references held in this process */
    _Atomic uint32_t reference_count;
    _Atomic uint32_t is_kicked; /* hx_arena_kick() was called and not yet answered */
    pid_t owner_pid;            /* the process that made this struct; leases belong to it */
    int memory_fd;
    int results_fd;
    int work_fd;     /* semaphore eventfd: workers wait on it */
    int ready_fd;    /* eventfd: the trainer waits on it */
    int *worker_fds; /* pidfd of each worker, or -1; borrowed from Python, which closes them */
};

/* Bytes of the whole arena, results excluded. Pure. */
uint64_t hx_arena_nbytes(const struct hx_arena_config *config);

/* Make an arena. *out is a new reference that the caller ends with hx_arena_release().
 * Returns HX_OK, HX_NO_MEMORY, HX_SYSTEM; *out is untouched on failure. */
enum hx_status hx_arena_create(const struct hx_arena_config *config, struct hx_arena **out);

/* Map an arena that another process made. Takes the four descriptors, on failure too.
 * Returns HX_OK, HX_BAD_ARENA, HX_NO_MEMORY, HX_SYSTEM. */
enum hx_status hx_arena_attach(int memory_fd, int results_fd, int work_fd, int ready_fd,
                               struct hx_arena **out);

/* Add a reference. Any thread, no GIL. */
void hx_arena_retain(struct hx_arena *arena);

/* Give a reference back; the last one unmaps and closes. Any thread, no GIL. */
void hx_arena_release(struct hx_arena *arena);

/* Tell workers and trainer that it is over: every wait in every process ends with HX_CLOSED.
 * May be called more than once. Arrays stay valid. */
void hx_arena_close(struct hx_arena *arena);

/* End the trainer's current or next wait with HX_INTERRUPTED. Any thread, no GIL. */
void hx_arena_kick(struct hx_arena *arena);

/* Forget that a worker that has died was started or asleep, and wake the others in its place. Its
 * run stays in its record, for the process that takes its place. Trainer only. */
void hx_arena_bury(struct hx_arena *arena, uint32_t worker);

/* Take and give back the mutex that guards scheduling. A holder that died is survived: what it
 * was changing is finished. */
void hx_arena_lock(struct hx_arena *arena);
void hx_arena_unlock(struct hx_arena *arena);

/* Wake one idle worker, if there is one; call it after making work available. */
void hx_arena_wake_worker(struct hx_arena *arena);

/* Wake the trainer if it waits. */
void hx_arena_wake_trainer(struct hx_arena *arena);

/* CLOCK_MONOTONIC in nanoseconds. */
uint64_t hx_now_ns(void);

#endif
