/* The ring of planned batches, and which items a worker loads next. */
#ifndef HX_PLAN_H
#define HX_PLAN_H

#include "hx_arena.h"

/* Items of one batch that a worker has taken to load. */
struct hx_run {
    struct hx_plan plan; /* of the batch */
    uint32_t slot;
    uint32_t first; /* first item within the batch */
    uint32_t count;
    uint32_t padding;
    uint64_t since_ns; /* when it was taken */
};

/* Add a planned batch. Trainer only; plan is copied.
 * Returns HX_OK, or HX_NOTHING if the ring is full. */
enum hx_status hx_plan_publish(struct hx_arena *arena, const struct hx_plan *plan);

/* Whether a published plan has not been opened yet. Any process. */
int hx_plan_is_waiting(const struct hx_header *header);

/* Take items to load, without waiting. The oldest batch that is being filled comes first, then a
 * new batch is opened if a plan and a free slot are there. Before all that comes the run that the
 * worker's record holds: the caller then takes the place of a process that died in it.
 *
 * worker     index of the caller's record
 * out        the run; without meaning on failure
 *
 * Ownership: on HX_OK the caller owns the run's items and ends with hx_run_complete() or
 *            hx_run_fail().
 * Returns:   HX_OK, HX_NOTHING, HX_CLOSED; HX_NO_MEMORY or HX_SYSTEM, where the run has been ended
 *            as failed already.
 */
enum hx_status hx_run_claim(struct hx_arena *arena, uint32_t worker, struct hx_run *out);

/* End a run whose items are all loaded. A record is kept if nbytes is not 0. */
void hx_run_complete(struct hx_arena *arena, uint32_t worker, const struct hx_run *run,
                     uint64_t offset, uint64_t nbytes);

/* End a run in which an item failed: the batch is failed, and nothing more of it is handed out.
 * The record says where the error is described. */
void hx_run_fail(struct hx_arena *arena, uint32_t worker, const struct hx_run *run, uint32_t item,
                 uint64_t offset, uint64_t nbytes, enum hx_record_kind kind);

/* Item index and seed for count positions of a plan, beginning with the batch's item `first`.
 * Either array may be NULL. Pure. */
void hx_plan_items(const struct hx_plan *plan, uint32_t first, uint32_t count, int64_t *indices,
                   int64_t *seeds);

#endif
