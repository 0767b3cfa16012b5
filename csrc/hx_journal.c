/* The changes to the scheduling tables, each made as a whole or not at all. */
#include "hx_journal.h"

#include "hx_arena.h"
#include "hx_atomic.h"
#include "hx_slot.h"

/* A worker takes a run, of a slot that is being filled or of one that it opens. */
static void apply_claim(struct hx_arena *arena, const struct hx_change *change)
{
    struct hx_header *header = arena->header;
    struct hx_slot *slot = &arena->slots[change->slot];
    struct hx_worker *worker = &arena->workers[change->worker];
    /* Once plan_head has moved on, the trainer may write another plan into the place of this one,
     * but then the slot is open already. */
    if (change->is_opening && hx_load_relaxed_u64(&header->plan_head) == change->plan_head) {
        hx_slot_open(arena, change->slot, &arena->plans[change->plan_head % header->plan_capacity]);
        hx_store_relaxed_u64(&header->opened_ns, change->since_ns);
        hx_order_steps();
        /* Pairs with the load in hx_plan_publish(). */
        hx_store_seq_cst_u64(&header->plan_head, change->plan_head + 1);
    }
    hx_order_steps();
    slot->claimed = change->claimed;
    hx_store_relaxed_u32(&worker->first, change->first);
    hx_store_relaxed_u32(&worker->count, change->count);
    hx_store_relaxed_u32(&worker->item, change->first);
    hx_store_relaxed_u64(&worker->since_ns, change->since_ns);
    /* Last, so that the record is whole when the trainer sees the slot in it. */
    hx_store_release_u32(&worker->slot, change->slot);
}

/* A worker ends its run, and with the last one the filling of the slot. */
static void apply_end(struct hx_arena *arena, const struct hx_change *change)
{
    struct hx_slot *slot = &arena->slots[change->slot];
    struct hx_worker *worker = &arena->workers[change->worker];
    const uint32_t state = hx_load_relaxed_u32(&slot->state);
    /* In any other state the slot is complete already, and the trainer's. */
    if (state == HX_SLOT_FILLING || state == HX_SLOT_RESERVING) {
        if (change->record.kind != HX_RECORD_NONE)
            arena->records[(uint64_t)change->slot * arena->header->batch_capacity +
                           change->record_count - 1] = change->record;
        slot->record_count = change->record_count;
        slot->is_failed = change->is_failed;
        slot->completed = change->completed;
        slot->claimed = change->claimed;
        hx_order_steps();
        if (change->is_ready)
            /* Releases the arrays, plan and records; pairs with hx_slot_find_ready(). */
            hx_store_seq_cst_u32(&slot->state, HX_SLOT_READY);
    }
    hx_order_steps();
    arena->groups[change->group].item_ns = change->item_ns;
    hx_store_relaxed_u64(&worker->item_count, change->item_count);
    hx_store_relaxed_u64(&worker->busy_ns, change->busy_ns);
    hx_store_relaxed_u32(&worker->slot, HX_NO_SLOT);
}

static void apply(struct hx_arena *arena)
{
    struct hx_journal *journal = &arena->header->journal;
    const uint32_t kind = hx_load_relaxed_u32(&journal->kind);
    if (kind == HX_CHANGE_CLAIM)
        apply_claim(arena, &journal->change);
    else if (kind == HX_CHANGE_END)
        apply_end(arena, &journal->change);
    hx_order_steps();
    hx_store_relaxed_u32(&journal->kind, HX_CHANGE_NONE);
}

void hx_journal_commit(struct hx_arena *arena, enum hx_change_kind kind,
                       const struct hx_change *change)
{
    struct hx_journal *journal = &arena->header->journal;
    journal->change = *change;
    hx_order_steps();
    hx_store_relaxed_u32(&journal->kind, kind);
    hx_order_steps();
    apply(arena);
}

void hx_journal_replay(struct hx_arena *arena)
{
    apply(arena);
}
