/* Slot states: free -> (reserving) -> filling -> ready -> leased -> free. */
#include "hx_slot.h"

#include <errno.h>
#include <fcntl.h>
#include <unistd.h>

#include "hx_atomic.h"

/* A results segment that grew beyond this gives its memory back when it is next opened. */
#define RESULTS_KEPT_NBYTES (UINT64_C(1) << 20)

uint32_t hx_slot_find_free(const struct hx_arena *arena)
{
    uint32_t found = HX_NO_SLOT;
    uint64_t found_stamp = 0;
    for (uint32_t i = 0; i < arena->header->slot_count; i++) {
        /* Pairs with the store in hx_slot_release(). */
        if (hx_load_seq_cst_u32(&arena->slots[i].state) == HX_SLOT_FREE) {
            const uint64_t stamp = hx_load_relaxed_u64(&arena->slots[i].freed_stamp);
            if (found == HX_NO_SLOT || stamp > found_stamp) {
                found = i;
                found_stamp = stamp;
            }
        }
    }
    return found;
}

void hx_slot_open(struct hx_arena *arena, uint32_t slot, const struct hx_plan *plan)
{
    struct hx_slot *opened = &arena->slots[slot];
    opened->plan = *plan;
    opened->claimed = 0;
    opened->completed = 0;
    opened->record_count = 0;
    opened->is_failed = 0;
    if (hx_load_relaxed_u64(&opened->results_nbytes) > RESULTS_KEPT_NBYTES)
        fallocate(arena->results_fd, FALLOC_FL_PUNCH_HOLE | FALLOC_FL_KEEP_SIZE,
                  (off_t)(slot * HX_RESULTS_SEGMENT), (off_t)HX_RESULTS_SEGMENT);
    hx_store_relaxed_u64(&opened->results_nbytes, 0);
    hx_order_steps();
    hx_store_relaxed_u32(&opened->state, opened->is_reserved ? HX_SLOT_FILLING : HX_SLOT_RESERVING);
}

enum hx_status hx_slot_reserve(struct hx_arena *arena, uint32_t slot)
{
    const struct hx_header *header = arena->header;
    const off_t start = (off_t)(header->data_offset + slot * header->slot_nbytes);
    enum hx_status status = HX_OK;
    int error;
    do {
        error = posix_fallocate(arena->memory_fd, start, (off_t)header->slot_nbytes);
    } while (error == EINTR);
    if (error != 0) {
        errno = error;
        status = error == ENOSPC || error == ENOMEM ? HX_NO_MEMORY : HX_SYSTEM;
    }
    if (status != HX_OK)
        return status;
    hx_arena_lock(arena);
    arena->slots[slot].is_reserved = 1;
    hx_order_steps();
    hx_store_relaxed_u32(&arena->slots[slot].state, HX_SLOT_FILLING);
    hx_arena_unlock(arena);
    hx_arena_wake_worker(arena);
    return HX_OK;
}

uint32_t hx_slot_find_ready(const struct hx_arena *arena, uint64_t serial)
{
    uint32_t found = HX_NO_SLOT;
    for (uint32_t i = 0; i < arena->header->slot_count; i++) {
        const struct hx_slot *slot = &arena->slots[i];
        /* Acquires what apply_end() released; no other process changes a ready slot. */
        if (hx_load_seq_cst_u32(&slot->state) != HX_SLOT_READY)
            continue;
        if (slot->plan.serial == serial)
            return i;
        if (serial == HX_ANY_SERIAL &&
            (found == HX_NO_SLOT || slot->plan.serial < arena->slots[found].plan.serial))
            found = i;
    }
    return found;
}

void hx_slot_lease(struct hx_arena *arena, uint32_t slot)
{
    hx_store_relaxed_u32(&arena->lease_counts[slot], 1);
    hx_store_relaxed_u32(&arena->slots[slot].state, HX_SLOT_LEASED);
    hx_arena_retain(arena);
}

void hx_slot_retain(struct hx_arena *arena, uint32_t slot)
{
    hx_add_relaxed_u32(&arena->lease_counts[slot], 1);
}

void hx_slot_release(struct hx_arena *arena, uint32_t slot)
{
    if (hx_sub_acq_rel_u32(&arena->lease_counts[slot], 1) != 1)
        return;
    if (getpid() == arena->owner_pid) {
        struct hx_slot *shared = &arena->slots[slot];
        hx_store_relaxed_u64(&shared->freed_stamp,
                             hx_add_relaxed_u64(&arena->header->free_clock, 1) + 1);
        /* Releases the readers' last accesses; pairs with the load in hx_slot_find_free(). */
        hx_store_seq_cst_u32(&shared->state, HX_SLOT_FREE);
        hx_arena_wake_worker(arena);
    }
    hx_arena_release(arena);
}

uint8_t *hx_slot_data(const struct hx_arena *arena, uint32_t slot)
{
    return arena->data + slot * arena->header->slot_nbytes;
}

enum hx_status hx_slot_results_write(struct hx_arena *arena, uint32_t slot, const void *bytes,
                                     uint64_t nbytes, uint64_t *offset)
{
    const uint64_t start = hx_add_relaxed_u64(&arena->slots[slot].results_nbytes, nbytes);
    uint64_t done = 0;
    if (start + nbytes > HX_RESULTS_SEGMENT)
        return HX_NO_MEMORY;
    while (done < nbytes) {
        const ssize_t written =
            pwrite(arena->results_fd, (const uint8_t *)bytes + done, nbytes - done,
                   (off_t)(slot * HX_RESULTS_SEGMENT + start + done));
        if (written >= 0)
            done += (uint64_t)written;
        else if (errno != EINTR)
            return errno == ENOSPC || errno == ENOMEM ? HX_NO_MEMORY : HX_SYSTEM;
    }
    *offset = start;
    return HX_OK;
}

enum hx_status hx_slot_results_read(const struct hx_arena *arena, uint32_t slot, uint64_t offset,
                                    void *bytes, uint64_t nbytes)
{
    uint64_t done = 0;
    while (done < nbytes) {
        const ssize_t got = pread(arena->results_fd, (uint8_t *)bytes + done, nbytes - done,
                                  (off_t)(slot * HX_RESULTS_SEGMENT + offset + done));
        if (got > 0) {
            done += (uint64_t)got;
        } else if (got == 0) {
            errno = EIO;
            return HX_SYSTEM;
        } else if (errno != EINTR) {
            return HX_SYSTEM;
        }
    }
    return HX_OK;
}
