/* Waiting: a worker for work, the trainer for a batch. */
#include "hx_wait.h"

#include <errno.h>
#include <poll.h>
#include <stdlib.h>
#include <time.h>
#include <unistd.h>

#include "hx_atomic.h"
#include "hx_slot.h"

/* poll() until an absolute deadline. Returns what ppoll() returns. */
static int poll_until(struct pollfd *fds, nfds_t count, uint64_t deadline)
{
    struct timespec left = {0, 0};
    const uint64_t now = hx_now_ns();
    if (deadline == HX_FOREVER)
        return ppoll(fds, count, NULL, NULL);
    if (deadline > now) {
        left.tv_sec = (time_t)((deadline - now) / UINT64_C(1000000000));
        left.tv_nsec = (long)((deadline - now) % UINT64_C(1000000000));
    }
    return ppoll(fds, count, &left, NULL);
}

/* Take one event from a non-blocking eventfd; another reader may have been quicker. */
static void drain_event(int fd)
{
    uint64_t count;
    while (read(fd, &count, sizeof count) < 0 && errno == EINTR) {
    }
}

/* Sleep until there may be work. HX_OK means: look again. */
static enum hx_status worker_sleep(struct hx_arena *arena, int trainer_fd, uint64_t deadline)
{
    struct pollfd fds[2] = {{.fd = arena->work_fd, .events = POLLIN},
                            {.fd = trainer_fd, .events = POLLIN}};
    const int ready = poll_until(fds, 2, deadline);
    if (ready < 0)
        return errno == EINTR ? HX_INTERRUPTED : HX_SYSTEM;
    if (ready == 0)
        return HX_TIMEOUT;
    if (fds[1].revents != 0)
        return HX_CLOSED;
    if (!hx_load_seq_cst_u32(&arena->header->is_closing))
        drain_event(arena->work_fd);
    return HX_OK;
}

/* Time since `since` in which a plan waited for a slot, for a worker that sleeps since then. It is
 * not woken when the last plan is opened, so that is what ends it. */
static uint64_t slot_wait_since(const struct hx_header *header, uint64_t since)
{
    const uint64_t end =
        hx_plan_is_waiting(header) ? hx_now_ns() : hx_load_relaxed_u64(&header->opened_ns);
    return since != 0 && end > since ? end - since : 0;
}

uint64_t hx_worker_slot_wait(const struct hx_arena *arena, uint32_t worker)
{
    const struct hx_worker *record = &arena->workers[worker];
    return hx_load_relaxed_u64(&record->slot_wait_ns) +
           slot_wait_since(arena->header, hx_load_relaxed_u64(&record->slot_wait_since_ns));
}

/* Sleep until there may be work, and account for the time in which a plan waits for a slot. */
static enum hx_status worker_sleep_counted(struct hx_arena *arena, uint32_t worker, int trainer_fd,
                                           uint64_t deadline)
{
    struct hx_worker *record = &arena->workers[worker];
    const uint64_t since = hx_plan_is_waiting(arena->header) ? hx_now_ns() : 0;
    enum hx_status status;
    hx_store_relaxed_u64(&record->slot_wait_since_ns, since);
    status = worker_sleep(arena, trainer_fd, deadline);
    hx_store_relaxed_u64(&record->slot_wait_since_ns, 0);
    hx_store_relaxed_u64(&record->slot_wait_ns, hx_load_relaxed_u64(&record->slot_wait_ns) +
                                                    slot_wait_since(arena->header, since));
    return status;
}

enum hx_status hx_worker_next(struct hx_arena *arena, uint32_t worker, int trainer_fd,
                              uint64_t deadline, struct hx_run *out)
{
    _Atomic uint64_t *idle = &arena->header->idle_workers[worker / 64];
    const uint64_t bit = UINT64_C(1) << worker % 64;
    enum hx_status status = hx_run_claim(arena, worker, out);
    while (status == HX_NOTHING) {
        /* Announce, then look again: whoever makes work available after this look sees the
         * announcement in hx_arena_wake_worker(). */
        hx_set_bits_seq_cst_u64(idle, bit);
        status = hx_run_claim(arena, worker, out);
        if (status == HX_NOTHING && trainer_fd < 0 && atomic_exchange(&arena->is_kicked, 0))
            status = HX_INTERRUPTED;
        if (status == HX_NOTHING) {
            status = worker_sleep_counted(arena, worker, trainer_fd, deadline);
            if (status == HX_OK)
                status = HX_NOTHING; /* look again */
        }
        hx_clear_bits_seq_cst_u64(idle, bit);
        if (status == HX_NOTHING)
            status = hx_run_claim(arena, worker, out);
    }
    return status;
}

enum hx_status hx_trainer_take(struct hx_arena *arena, uint64_t serial, uint32_t *out)
{
    const uint32_t slot = hx_slot_find_ready(arena, serial);
    if (slot == HX_NO_SLOT)
        return HX_NOTHING;
    hx_slot_lease(arena, slot);
    *out = slot;
    return HX_OK;
}

/* Sleep until the batch may be ready. HX_OK means: look again. */
static enum hx_status trainer_sleep(struct hx_arena *arena, struct pollfd *fds, uint64_t deadline,
                                    uint32_t *out_worker)
{
    const uint32_t worker_count = arena->header->worker_count;
    const int ready = poll_until(fds, worker_count + 1, deadline);
    if (ready < 0)
        return errno == EINTR ? HX_INTERRUPTED : HX_SYSTEM;
    if (ready == 0)
        return HX_TIMEOUT;
    if (fds[worker_count].revents != 0) {
        drain_event(arena->ready_fd);
        return HX_OK;
    }
    for (uint32_t i = 0; i < worker_count; i++) {
        if (fds[i].revents != 0) {
            *out_worker = i;
            return HX_WORKER_ENDED;
        }
    }
    return HX_OK;
}

enum hx_status hx_trainer_wait(struct hx_arena *arena, uint64_t serial, uint64_t deadline,
                               uint32_t *out, uint32_t *out_worker)
{
    struct hx_header *header = arena->header;
    const uint32_t worker_count = header->worker_count;
    enum hx_status status = hx_trainer_take(arena, serial, out);
    struct pollfd *fds = NULL;
    if (status == HX_OK)
        goto cleanup;
    fds = calloc(worker_count + 1, sizeof *fds);
    if (fds == NULL) {
        status = HX_NO_MEMORY;
        goto cleanup;
    }
    for (uint32_t i = 0; i < worker_count; i++)
        fds[i] = (struct pollfd){.fd = arena->worker_fds[i], .events = POLLIN};
    fds[worker_count] = (struct pollfd){.fd = arena->ready_fd, .events = POLLIN};
    do {
        /* Announce, then look again; pairs with hx_arena_wake_trainer(). */
        hx_store_seq_cst_u32(&header->is_trainer_waiting, 1);
        status = hx_trainer_take(arena, serial, out);
        if (status == HX_NOTHING) {
            if (hx_load_seq_cst_u32(&header->is_closing))
                status = HX_CLOSED;
            else if (atomic_exchange(&arena->is_kicked, 0))
                status = HX_INTERRUPTED;
            else
                status = trainer_sleep(arena, fds, deadline, out_worker);
            if (status == HX_OK)
                status = HX_NOTHING; /* look again */
        }
        hx_store_seq_cst_u32(&header->is_trainer_waiting, 0);
    } while (status == HX_NOTHING);
    /* A batch that became ready in the meantime comes before any bad news. */
    if (status == HX_TIMEOUT || status == HX_WORKER_ENDED) {
        if (hx_trainer_take(arena, serial, out) == HX_OK)
            status = HX_OK;
    }

cleanup:
    free(fds);
    return status;
}
