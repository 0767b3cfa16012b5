/* The ring of planned batches, and which items a worker loads next. */
#include "hx_plan.h"

#include "hx_atomic.h"
#include "hx_journal.h"
#include "hx_permute.h"
#include "hx_slot.h"

/* A run is cut so that it lasts about this long: long enough that claiming costs nothing, short
 * enough that several workers share a batch and none of them holds it up. */
#define RUN_TARGET_NS UINT64_C(500000)

/* Batches from this size on are filled by all workers together, so that fewer slots are in use at
 * a time and those stay in the processor's cache. */
#define SHARED_BATCH_NBYTES (UINT64_C(1) << 20)

#define SEED_COUNT (UINT64_C(1) << 31)

enum hx_status hx_plan_publish(struct hx_arena *arena, const struct hx_plan *plan)
{
    struct hx_header *header = arena->header;
    const uint64_t tail = hx_load_relaxed_u64(&header->plan_tail);
    /* Pairs with the store in apply_claim(): what the plan held has been copied by then. */
    const uint64_t head = hx_load_seq_cst_u64(&header->plan_head);
    if (tail - head >= header->plan_capacity)
        return HX_NOTHING;
    arena->plans[tail % header->plan_capacity] = *plan;
    /* Pairs with the load in hx_plan_is_waiting(). */
    hx_store_seq_cst_u64(&header->plan_tail, tail + 1);
    hx_arena_wake_worker(arena);
    return HX_OK;
}

int hx_plan_is_waiting(const struct hx_header *header)
{
    return hx_load_relaxed_u64(&header->plan_head) < hx_load_seq_cst_u64(&header->plan_tail);
}

/* How many of the `remaining` items of a plan the next run takes. Called under the mutex. */
static uint32_t run_length(const struct hx_arena *arena, const struct hx_plan *plan,
                           uint32_t remaining)
{
    const struct hx_header *header = arena->header;
    const uint64_t item_ns = arena->groups[plan->group].item_ns;
    uint64_t length;
    if (header->is_batched) {
        /* A call costs what it costs, so runs are whole batches where every worker can have one
         * of its own, and otherwise equal shares. */
        if (header->slot_count > header->worker_count)
            return remaining;
        length = (plan->item_count + header->worker_count - 1) / header->worker_count;
    } else if (item_ns == 0) {
        length = 1;
    } else {
        length = RUN_TARGET_NS / item_ns;
    }
    if (!header->is_batched && header->worker_count > 1 &&
        header->slot_nbytes >= SHARED_BATCH_NBYTES) {
        const uint64_t share = (plan->item_count + header->worker_count - 1) / header->worker_count;
        length = length < share ? length : share;
    }
    if (length < 1)
        length = 1;
    return length < remaining ? (uint32_t)length : remaining;
}

/* The oldest batch that still has items to hand out, or HX_NO_SLOT. Called under the mutex. */
static uint32_t oldest_filling(const struct hx_arena *arena)
{
    uint32_t found = HX_NO_SLOT;
    for (uint32_t i = 0; i < arena->header->slot_count; i++) {
        const struct hx_slot *slot = &arena->slots[i];
        if (hx_load_relaxed_u32(&slot->state) == HX_SLOT_FILLING && !slot->is_failed &&
            slot->claimed < slot->plan.item_count &&
            (found == HX_NO_SLOT || slot->plan.serial < arena->slots[found].plan.serial))
            found = i;
    }
    return found;
}

/* The run in a worker's record, or the next one that there is. Called under the mutex. Returns
 * HX_OK or HX_NOTHING. */
static enum hx_status take_run(struct hx_arena *arena, uint32_t worker, struct hx_run *out)
{
    struct hx_header *header = arena->header;
    struct hx_worker *record = &arena->workers[worker];
    const uint64_t head = hx_load_relaxed_u64(&header->plan_head);
    const struct hx_plan *plan;
    struct hx_change change = {.worker = worker, .since_ns = hx_now_ns()};
    uint32_t claimed = 0;

    out->slot = hx_load_relaxed_u32(&record->slot);
    out->since_ns = change.since_ns;
    if (out->slot != HX_NO_SLOT) {
        /* This worker takes the place of one that died in a run. */
        out->plan = arena->slots[out->slot].plan;
        out->first = hx_load_relaxed_u32(&record->first);
        out->count = hx_load_relaxed_u32(&record->count);
        hx_store_relaxed_u32(&record->item, out->first);
        hx_store_relaxed_u64(&record->since_ns, out->since_ns);
        return HX_OK;
    }
    out->slot = oldest_filling(arena);
    if (out->slot != HX_NO_SLOT) {
        plan = &arena->slots[out->slot].plan;
        claimed = arena->slots[out->slot].claimed;
    } else {
        if (!hx_plan_is_waiting(header))
            return HX_NOTHING;
        out->slot = hx_slot_find_free(arena);
        if (out->slot == HX_NO_SLOT)
            return HX_NOTHING;
        plan = &arena->plans[head % header->plan_capacity];
        change.is_opening = 1;
        change.plan_head = head;
    }
    out->plan = *plan;
    out->first = claimed;
    out->count = run_length(arena, plan, plan->item_count - claimed);
    change.slot = out->slot;
    change.first = out->first;
    change.count = out->count;
    change.claimed = claimed + out->count;
    hx_journal_commit(arena, HX_CHANGE_CLAIM, &change);
    return HX_OK;
}

enum hx_status hx_run_claim(struct hx_arena *arena, uint32_t worker, struct hx_run *out)
{
    struct hx_header *header = arena->header;
    struct hx_slot *slot;
    enum hx_status status;
    int is_more = 0;

    if (hx_load_relaxed_u32(&header->is_closing))
        return HX_CLOSED;
    hx_arena_lock(arena);
    status = take_run(arena, worker, out);
    slot = &arena->slots[status == HX_OK ? out->slot : 0];
    if (status == HX_OK)
        is_more = slot->claimed < out->plan.item_count ||
                  (hx_plan_is_waiting(header) && hx_slot_find_free(arena) != HX_NO_SLOT);
    hx_arena_unlock(arena);
    if (is_more)
        hx_arena_wake_worker(arena);
    if (status == HX_OK && hx_load_relaxed_u32(&slot->state) == HX_SLOT_RESERVING) {
        status = hx_slot_reserve(arena, out->slot);
        if (status != HX_OK)
            hx_run_fail(arena, worker, out, out->first, 0, 0,
                        status == HX_NO_MEMORY ? HX_RECORD_NO_MEMORY : HX_RECORD_ERROR);
    }
    return status;
}

/* End a run, failed or not, with a record of it unless that is of kind NONE. */
static void end_run(struct hx_arena *arena, uint32_t worker, const struct hx_run *run,
                    const struct hx_record *result, uint32_t is_failed)
{
    const struct hx_worker *record = &arena->workers[worker];
    const struct hx_slot *slot = &arena->slots[run->slot];
    const uint64_t run_ns = hx_now_ns() - run->since_ns;
    const uint64_t item_ns = run_ns / run->count + 1;
    struct hx_change change = {
        .worker = worker,
        .slot = run->slot,
        .group = run->plan.group,
        .record = *result,
    };
    uint64_t group_ns;

    hx_arena_lock(arena);
    group_ns = arena->groups[run->plan.group].item_ns;
    change.item_ns = group_ns == 0 ? item_ns : (group_ns + item_ns) / 2;
    change.record_count = slot->record_count + (result->kind != HX_RECORD_NONE);
    change.is_failed = slot->is_failed || is_failed;
    change.claimed = slot->claimed;
    change.completed = slot->completed + run->count;
    if (change.is_failed) {
        /* What nobody has claimed will not be loaded. */
        change.completed += slot->plan.item_count - slot->claimed;
        change.claimed = slot->plan.item_count;
    }
    change.is_ready = change.completed == slot->plan.item_count;
    change.item_count = hx_load_relaxed_u64(&record->item_count) + run->count;
    change.busy_ns = hx_load_relaxed_u64(&record->busy_ns) + run_ns;
    hx_journal_commit(arena, HX_CHANGE_END, &change);
    hx_arena_unlock(arena);
    if (change.is_ready)
        hx_arena_wake_trainer(arena);
}

void hx_run_complete(struct hx_arena *arena, uint32_t worker, const struct hx_run *run,
                     uint64_t offset, uint64_t nbytes)
{
    const struct hx_record result = {
        .offset = offset,
        .nbytes = nbytes,
        .first = run->first,
        .kind = nbytes != 0 ? HX_RECORD_ADDITIONAL : HX_RECORD_NONE,
    };
    end_run(arena, worker, run, &result, 0);
}

void hx_run_fail(struct hx_arena *arena, uint32_t worker, const struct hx_run *run, uint32_t item,
                 uint64_t offset, uint64_t nbytes, enum hx_record_kind kind)
{
    const struct hx_record result = {
        .offset = offset, .nbytes = nbytes, .first = item, .kind = kind};
    end_run(arena, worker, run, &result, 1);
}

void hx_plan_items(const struct hx_plan *plan, uint32_t first, uint32_t count, int64_t *indices,
                   int64_t *seeds)
{
    const uint64_t start = plan->first_position;
    if (indices != NULL) {
        const struct hx_permutation order = hx_permutation_make(plan->order_key, plan->order_count);
        for (uint32_t i = 0; i < count; i++) {
            const uint64_t position = start + (first + i) % plan->valid_count;
            indices[i] =
                (int64_t)(plan->order_count == 0 ? position : hx_permutation_at(&order, position));
        }
    }
    if (seeds != NULL) {
        const struct hx_permutation order = hx_permutation_make(plan->seed_key, SEED_COUNT);
        for (uint32_t i = 0; i < count; i++) {
            const uint64_t position = start + (first + i) % plan->valid_count;
            seeds[i] =
                (int64_t)hx_permutation_at(&order, (plan->seed_start + position) % SEED_COUNT);
        }
    }
}
