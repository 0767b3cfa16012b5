/* Waiting: a worker for work, the trainer for a batch.
 *
 * Every wait ends at its deadline, on close, on a signal and when the process on the other side
 * ends. Deadlines are absolute, CLOCK_MONOTONIC, in nanoseconds.
 */
#ifndef HX_WAIT_H
#define HX_WAIT_H

#include "hx_arena.h"
#include "hx_plan.h"

#define HX_FOREVER UINT64_MAX

/* Wait until items can be taken, and take them; see hx_run_claim() for ownership.
 *
 * trainer_fd  pidfd of the trainer, borrowed; -1 where the caller is the trainer itself
 *
 * GIL: not needed; may block, so call with the GIL released.
 * Returns: HX_OK, HX_TIMEOUT, HX_CLOSED, HX_INTERRUPTED, HX_NO_MEMORY, HX_SYSTEM.
 */
enum hx_status hx_worker_next(struct hx_arena *arena, uint32_t worker, int trainer_fd,
                              uint64_t deadline, struct hx_run *out);

/* Wait until batch `serial` (or HX_ANY_SERIAL) is ready, and lease its slot.
 *
 * out         slot, leased as by hx_slot_lease(); untouched on failure
 * out_worker  on HX_WORKER_ENDED, which of the watched workers has ended
 *
 * GIL: not needed; may block, so call with the GIL released.
 * Returns: HX_OK, HX_TIMEOUT, HX_CLOSED, HX_INTERRUPTED, HX_WORKER_ENDED, HX_NO_MEMORY,
 *          HX_SYSTEM. One thread at a time.
 */
enum hx_status hx_trainer_wait(struct hx_arena *arena, uint64_t serial, uint64_t deadline,
                               uint32_t *out, uint32_t *out_worker);

/* Lease batch `serial` (or HX_ANY_SERIAL) if it is ready, without waiting: HX_OK or HX_NOTHING. */
enum hx_status hx_trainer_take(struct hx_arena *arena, uint64_t serial, uint32_t *out);

/* Nanoseconds that a worker has slept while a plan waited for a free slot, this moment included.
 *
 * arena   borrowed
 * worker  below worker_count
 */
uint64_t hx_worker_slot_wait(const struct hx_arena *arena, uint32_t worker);

#endif
