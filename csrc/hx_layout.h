/* The bytes of an arena: header, groups, plans, workers, slots, result records, data.
 *
 * All of it lives in one memfd that the trainer and its workers map, each at its own address, so
 * it holds offsets and indices, never pointers. What is guarded by the mutex is touched only
 * between hx_arena_lock() and hx_arena_unlock(); the _Atomic words say who pairs with whom where
 * they are used.
 */
#ifndef HX_LAYOUT_H
#define HX_LAYOUT_H

#include <pthread.h>
#include <stdatomic.h>
#include <stdint.h>

#define HX_MAGIC UINT64_C(0x6172656e61786879)
#define HX_LAYOUT_VERSION 2u
#define HX_CACHE_LINE 64
#define HX_NO_SLOT UINT32_MAX
#define HX_MAX_WORKERS 4096

enum hx_slot_state {
    HX_SLOT_FREE = 0,  /* nobody's; a worker may open the next plan in it */
    HX_SLOT_RESERVING, /* one worker reserves the pages before the first fill */
    HX_SLOT_FILLING,   /* items are being claimed and loaded */
    HX_SLOT_READY,     /* complete, or failed: the records say which */
    HX_SLOT_LEASED     /* the trainer or its arrays hold it */
};

enum hx_plan_kind { HX_PLAN_TRAINING = 0, HX_PLAN_VALIDATION = 1 };

enum hx_record_kind {
    HX_RECORD_NONE = 0,       /* a run without results */
    HX_RECORD_ADDITIONAL = 1, /* the additional results of a run */
    HX_RECORD_ERROR = 2,      /* an item failed; the batch is failed with it */
    HX_RECORD_NO_MEMORY = 3   /* the slot's pages could not be reserved */
};

/* One batch that is to be loaded: which items, in which order, with which seeds. Compact: items
 * and seeds are functions of it, evaluated where they are needed. */
struct hx_plan {
    uint64_t serial;         /* order of delivery, counted from 0 */
    uint64_t epoch;          /* training epoch, or number of the validation run */
    uint64_t first_position; /* of the batch's first item in the order */
    uint64_t order_key;      /* key of the order's permutation */
    uint64_t order_count;    /* items permuted; 0 is the data set's own order */
    uint64_t seed_key;       /* key of the seeds' permutation of [0, 2**31) */
    uint64_t seed_start;     /* seed of position p is at seed_start + p, modulo 2**31 */
    uint32_t group;          /* index into the arena's groups */
    uint32_t item_count;     /* items of the batch, at least 1 */
    uint32_t valid_count;    /* items before they repeat, to fill up a last batch */
    uint32_t kind;           /* enum hx_plan_kind */
};

/* What is known about a group. Guarded by the mutex. */
struct hx_group {
    uint64_t item_ns; /* smoothed time of one item; 0 before the first run */
};

/* What a completed run left in the results file. Written under the mutex by the worker that
 * completes the run, read by the trainer once the slot is ready. */
struct hx_record {
    uint64_t offset; /* in the slot's segment of the results file */
    uint64_t nbytes;
    uint32_t first; /* first item of the run; for an error, the item */
    uint32_t kind;  /* enum hx_record_kind */
};

struct hx_slot {
    /* enum hx_slot_state. READY is released by the last completing worker and acquired by the
     * trainer; FREE is released by the last lease and acquired by the opening worker. */
    _Alignas(HX_CACHE_LINE) _Atomic uint32_t state;
    /* Grows with each release, so that the slot freed last, whose memory is warm, is found. */
    _Atomic uint64_t freed_stamp;
    /* Bytes that runs have taken of the slot's segment in the results file. */
    _Atomic uint64_t results_nbytes;
    /* Guarded by the mutex from here on, and the trainer's to read while READY or LEASED. */
    _Alignas(HX_CACHE_LINE) struct hx_plan plan;
    uint32_t claimed;      /* items handed out to workers */
    uint32_t completed;    /* items accounted for, loaded or not */
    uint32_t record_count; /* records in use */
    uint32_t is_failed;    /* an item failed: nothing more is handed out */
    uint32_t is_reserved;  /* the pages are there */
};

/* What a worker is doing; written by the worker, read by the trainer for its messages. A process
 * that takes a dead one's place finds here which run to load again. */
struct hx_worker {
    _Alignas(HX_CACHE_LINE) _Atomic uint32_t is_started; /* the start-up function has returned */
    _Atomic uint32_t slot;                               /* being filled, or HX_NO_SLOT */
    _Atomic uint32_t first;                              /* the run: first item */
    _Atomic uint32_t count;                              /* the run: items */
    _Atomic uint32_t item;                               /* item being loaded */
    _Atomic uint64_t since_ns;                           /* start of the run, CLOCK_MONOTONIC */
    _Atomic uint64_t item_count;                         /* items loaded so far */
    _Atomic uint64_t busy_ns;                            /* time in runs so far */
    _Atomic uint64_t slot_wait_ns;                       /* time without a free slot so far */
    _Atomic uint64_t slot_wait_since_ns;                 /* start of such a wait, or 0 */
};

enum hx_change_kind { HX_CHANGE_NONE = 0, HX_CHANGE_CLAIM, HX_CHANGE_END };

/* A change to the tables, as the values to be stored; see hx_journal.h. */
struct hx_change {
    uint32_t worker;
    uint32_t slot;
    uint32_t is_opening; /* claim: the plan at plan_head goes into the slot, which is free */
    uint64_t plan_head;  /* claim: before the change */
    uint64_t since_ns;   /* claim */
    uint32_t first;      /* claim: the run */
    uint32_t count;
    uint32_t claimed; /* of the slot, after the change; and so on */
    uint32_t completed;
    uint32_t record_count;
    uint32_t is_failed;
    uint32_t is_ready; /* end: the batch is complete */
    uint32_t group;
    uint64_t item_ns;        /* end: of the group */
    uint64_t item_count;     /* end: of the worker */
    uint64_t busy_ns;        /* end: of the worker */
    struct hx_record record; /* end: the last of record_count, unless its kind is NONE */
};

/* The change that the holder of the mutex is making. Guarded by the mutex. */
struct hx_journal {
    _Atomic uint32_t kind; /* enum hx_change_kind; not NONE while the change is being made */
    struct hx_change change;
};

struct hx_header {
    uint64_t magic;
    uint32_t version;
    uint32_t slot_count;
    uint32_t worker_count;
    uint32_t group_count;
    uint32_t plan_capacity;  /* a power of two */
    uint32_t batch_capacity; /* items of the largest batch; records per slot */
    uint32_t is_batched;     /* runs are as long as can be, for loaders that take many items */
    uint32_t padding;
    uint64_t slot_nbytes; /* a multiple of the page size */
    uint64_t groups_offset;
    uint64_t plans_offset;
    uint64_t workers_offset;
    uint64_t slots_offset;
    uint64_t records_offset;
    uint64_t data_offset; /* page-aligned */
    uint64_t total_nbytes;
    _Alignas(HX_CACHE_LINE) pthread_mutex_t mutex; /* process-shared and robust */
    struct hx_journal journal;
    _Atomic uint64_t plan_head; /* next plan to open; written under the mutex */
    _Atomic uint64_t opened_ns; /* when one was opened last; likewise */
    _Alignas(
        HX_CACHE_LINE) _Atomic uint64_t plan_tail; /* plans published; written by the trainer */
    _Alignas(HX_CACHE_LINE) _Atomic uint32_t is_closing;
    /* One bit for each worker that sleeps, or is about to. */
    _Alignas(HX_CACHE_LINE) _Atomic uint64_t idle_workers[HX_MAX_WORKERS / 64];
    _Alignas(HX_CACHE_LINE) _Atomic uint32_t is_trainer_waiting;
    _Alignas(HX_CACHE_LINE) _Atomic uint64_t free_clock;
};

_Static_assert(sizeof(struct hx_plan) == 72, "a plan has no holes");
_Static_assert(sizeof(struct hx_record) == 24, "a record has no holes");
_Static_assert(sizeof(struct hx_slot) % HX_CACHE_LINE == 0, "slots do not share cache lines");
_Static_assert(sizeof(struct hx_worker) % HX_CACHE_LINE == 0, "workers do not share cache lines");
_Static_assert(ATOMIC_INT_LOCK_FREE == 2 && ATOMIC_LLONG_LOCK_FREE == 2,
               "atomics that processes share must be lock-free");

#endif
