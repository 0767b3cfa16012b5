/* Slot states: free -> (reserving) -> filling -> ready -> leased -> free.
 *
 * A lease belongs to the process that took it: its references are counted in that process's own
 * memory, and a forked child's copies never free the slot.
 */
#ifndef HX_SLOT_H
#define HX_SLOT_H

#include "hx_arena.h"

/* Any batch will do, in hx_slot_find_ready() and hx_trainer_wait(). */
#define HX_ANY_SERIAL UINT64_MAX

/* The free slot that was freed last, or HX_NO_SLOT. Called under the mutex. */
uint32_t hx_slot_find_free(const struct hx_arena *arena);

/* Begin to fill a free slot with a plan. Called under the mutex; may be called again after a death
 * at any point of it. */
void hx_slot_open(struct hx_arena *arena, uint32_t slot, const struct hx_plan *plan);

/* Reserve the pages of a slot in state RESERVING, and let others fill it. Blocks for as long as
 * the kernel needs to clear the pages; not under the mutex.
 * Returns HX_OK, or HX_NO_MEMORY, HX_SYSTEM: then the caller owns the slot still, and fails its
 * run. */
enum hx_status hx_slot_reserve(struct hx_arena *arena, uint32_t slot);

/* The ready slot that holds batch `serial` (HX_ANY_SERIAL: the oldest one), or HX_NO_SLOT. */
uint32_t hx_slot_find_ready(const struct hx_arena *arena, uint64_t serial);

/* Turn a ready slot into a leased one with a single reference, which the caller owns and ends
 * with hx_slot_release(). Trainer only. */
void hx_slot_lease(struct hx_arena *arena, uint32_t slot);

/* Add a reference to a lease. The caller must hold one. Any thread, no GIL. */
void hx_slot_retain(struct hx_arena *arena, uint32_t slot);

/* Give a reference back; the last one frees the slot and wakes a worker. Any thread, no GIL. In
 * a process that was forked after the lease was taken the slot stays as it is. */
void hx_slot_release(struct hx_arena *arena, uint32_t slot);

/* First byte of a slot's memory; valid as long as the arena is mapped. */
uint8_t *hx_slot_data(const struct hx_arena *arena, uint32_t slot);

/* Append bytes to a slot's segment of the results file; *offset says where. Any worker that
 * owns a run of the slot. Returns HX_OK, HX_NO_MEMORY, HX_SYSTEM. */
enum hx_status hx_slot_results_write(struct hx_arena *arena, uint32_t slot, const void *bytes,
                                     uint64_t nbytes, uint64_t *offset);

/* Read what hx_slot_results_write() left. Returns HX_OK, HX_SYSTEM. */
enum hx_status hx_slot_results_read(const struct hx_arena *arena, uint32_t slot, uint64_t offset,
                                    void *bytes, uint64_t nbytes);

#endif
