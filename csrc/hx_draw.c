/* Drawing mini-batches out of an arena, by position, from any thread. */
#include "hx_draw.h"

#include <errno.h>
#include <pthread.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>
#include <unistd.h>

#include "hx_atomic.h"
#include "hx_interrupt.h"
#include "hx_plan.h"
#include "hx_slot.h"
#include "hx_wait.h"

/* A wait looks this often whether the user interrupts: the signal goes to another thread. */
#define LOOK_EVERY_NS UINT64_C(100000000)
/* A chain counts as given up when all slots could have been drawn empty so many times since. */
#define STALE_ROUNDS 1
/* Programs that are told apart in watching for interrupts. */
#define RUN_COUNT 16

enum block_state {
    BLOCK_EMPTY = 0, /* the entry is free */
    BLOCK_WANTED,    /* planned; a worker loads it or will */
    BLOCK_READY      /* loaded; the entry holds one reference of the slot's lease */
};

struct block {
    enum block_state state;
    uint32_t slot;
    int is_ahead;    /* it was asked for before a draw needed it */
    int is_touched;  /* a draw has been taken from it */
    int is_consumed; /* its chain has moved on */
    struct hx_draw_key key;
    uint64_t index;  /* number of the block in its chain */
    uint64_t serial; /* of its plan */
    uint64_t stamp;  /* of its last use */
};

/* A program that draws, and how many interrupts there had been at its first draw. */
struct run {
    uint64_t run;
    uint64_t stamp;
    uint32_t interrupts;
};

struct hx_draw {
    pthread_mutex_t mutex;
    pthread_cond_t changed; /* the table, the arena or who waits */
    uint64_t id;
    struct hx_draw_config config;
    struct hx_draw_array *arrays;
    hx_draw_describe *describe;
    void *context; /* guarded by whoever sets it */
    _Atomic uint32_t reference_count;
    _Atomic uint32_t is_abandoned; /* this is a fork of the owner */
    /* Guarded by the mutex from here on. */
    struct hx_arena *arena; /* owned reference, or NULL */
    uint64_t generation;    /* grows with each attach */
    int is_closed;
    int has_waiter;       /* one thread at a time waits for the arena; the others for it */
    struct block *blocks; /* as many as the arena has slots */
    uint32_t block_count;
    uint32_t hint; /* entry that was used last */
    uint64_t next_serial;
    uint64_t clock;
    struct run runs[RUN_COUNT];
};

/* Engines by number, so that a compiled program that outlives one finds out. */
static pthread_mutex_t registry_mutex = PTHREAD_MUTEX_INITIALIZER;
static struct hx_draw **registry;
static size_t registry_capacity;
static size_t registry_count;
static uint64_t last_id;

/* Add to the registry. Returns HX_OK, HX_NO_MEMORY. */
static enum hx_status enter(struct hx_draw *engine)
{
    enum hx_status status = HX_OK;
    pthread_mutex_lock(&registry_mutex);
    if (registry_count == registry_capacity) {
        const size_t capacity = registry_capacity ? 2 * registry_capacity : 16;
        struct hx_draw **larger = realloc(registry, capacity * sizeof(struct hx_draw *));
        if (larger == NULL) {
            status = HX_NO_MEMORY;
        } else {
            registry = larger;
            registry_capacity = capacity;
        }
    }
    if (status == HX_OK) {
        engine->id = ++last_id;
        registry[registry_count++] = engine;
    }
    pthread_mutex_unlock(&registry_mutex);
    return status;
}

static void leave(struct hx_draw *engine)
{
    pthread_mutex_lock(&registry_mutex);
    for (size_t i = 0; i < registry_count; i++) {
        if (registry[i] == engine)
            registry[i] = registry[--registry_count];
    }
    pthread_mutex_unlock(&registry_mutex);
}

struct hx_draw *hx_draw_find(uint64_t id)
{
    struct hx_draw *found = NULL;
    pthread_mutex_lock(&registry_mutex);
    for (size_t i = 0; found == NULL && i < registry_count; i++) {
        if (registry[i]->id == id)
            found = registry[i];
    }
    if (found != NULL)
        hx_add_relaxed_u32(&found->reference_count, 1);
    pthread_mutex_unlock(&registry_mutex);
    return found;
}

enum hx_status hx_draw_create(const struct hx_draw_config *config,
                              const struct hx_draw_array *arrays, hx_draw_describe *describe,
                              struct hx_draw **out, uint64_t *id)
{
    enum hx_status status = HX_NO_MEMORY;
    pthread_condattr_t attributes;
    struct hx_draw *engine = calloc(1, sizeof *engine);
    if (engine == NULL)
        goto cleanup;
    engine->config = *config;
    engine->describe = describe;
    atomic_store_explicit(&engine->reference_count, 1, memory_order_relaxed);
    engine->arrays = malloc(config->array_count * sizeof *arrays);
    if (engine->arrays == NULL)
        goto cleanup;
    memcpy(engine->arrays, arrays, config->array_count * sizeof *arrays);
    if (pthread_mutex_init(&engine->mutex, NULL) != 0)
        goto cleanup;
    pthread_condattr_init(&attributes);
    pthread_condattr_setclock(&attributes, CLOCK_MONOTONIC);
    pthread_cond_init(&engine->changed, &attributes);
    pthread_condattr_destroy(&attributes);
    status = enter(engine);
    if (status != HX_OK)
        goto cleanup;
    *out = engine;
    *id = engine->id;
    engine = NULL;

cleanup:
    if (engine != NULL) {
        free(engine->arrays);
        free(engine);
    }
    return status;
}

/* Give all blocks and the arena back. Called under the mutex. */
static void give_up_arena(struct hx_draw *engine)
{
    for (uint32_t i = 0; i < engine->block_count; i++) {
        if (engine->blocks[i].state == BLOCK_READY)
            hx_slot_release(engine->arena, engine->blocks[i].slot);
    }
    free(engine->blocks);
    engine->blocks = NULL;
    engine->block_count = 0;
    engine->hint = 0;
    if (engine->arena != NULL)
        hx_arena_release(engine->arena);
    engine->arena = NULL;
}

void hx_draw_release(struct hx_draw *engine)
{
    if (hx_sub_acq_rel_u32(&engine->reference_count, 1) != 1)
        return;
    /* A fork keeps it: it is in the registry still, and its locks may be other threads'. */
    if (hx_load_relaxed_u32(&engine->is_abandoned))
        return;
    give_up_arena(engine);
    pthread_cond_destroy(&engine->changed);
    pthread_mutex_destroy(&engine->mutex);
    free(engine->arrays);
    free(engine);
}

enum hx_status hx_draw_attach(struct hx_draw *engine, struct hx_arena *arena)
{
    enum hx_status status = HX_OK;
    struct block *blocks = NULL;
    if (arena != NULL) {
        blocks = calloc(arena->header->slot_count, sizeof *blocks);
        if (blocks == NULL)
            return HX_NO_MEMORY;
    }
    pthread_mutex_lock(&engine->mutex);
    give_up_arena(engine);
    if (arena != NULL && !engine->is_closed) {
        hx_arena_retain(arena);
        engine->arena = arena;
        engine->blocks = blocks;
        engine->block_count = arena->header->slot_count;
        blocks = NULL;
    }
    engine->generation += 1;
    pthread_cond_broadcast(&engine->changed);
    pthread_mutex_unlock(&engine->mutex);
    free(blocks);
    return status;
}

void hx_draw_close(struct hx_draw *engine)
{
    if (hx_load_relaxed_u32(&engine->is_abandoned))
        return;
    leave(engine);
    pthread_mutex_lock(&engine->mutex);
    engine->is_closed = 1;
    engine->generation += 1;
    if (engine->arena != NULL)
        hx_arena_kick(engine->arena);
    give_up_arena(engine);
    pthread_cond_broadcast(&engine->changed);
    pthread_mutex_unlock(&engine->mutex);
}

void hx_draw_abandon(struct hx_draw *engine)
{
    /* Another thread may have held the mutex when the process was forked. */
    hx_store_seq_cst_u32(&engine->is_abandoned, 1);
}

void hx_draw_set_context(struct hx_draw *engine, void *context)
{
    engine->context = context;
}

void *hx_draw_context(const struct hx_draw *engine)
{
    return engine->context;
}

const struct hx_draw_config *hx_draw_get_config(const struct hx_draw *engine)
{
    return &engine->config;
}

const struct hx_draw_array *hx_draw_arrays(const struct hx_draw *engine)
{
    return engine->arrays;
}

uint64_t hx_draw_generation(struct hx_draw *engine)
{
    uint64_t generation;
    pthread_mutex_lock(&engine->mutex);
    generation = engine->generation;
    pthread_mutex_unlock(&engine->mutex);
    return generation;
}

uint64_t hx_draw_blocks_requested(struct hx_draw *engine)
{
    uint64_t count;
    pthread_mutex_lock(&engine->mutex);
    count = engine->next_serial;
    pthread_mutex_unlock(&engine->mutex);
    return count;
}

static int is_same_key(const struct hx_draw_key *a, const struct hx_draw_key *b)
{
    return memcmp(a, b, sizeof *a) == 0;
}

static int is_ordered(const struct hx_draw_key *key)
{
    return (key->words[0] & HX_DRAW_ORDERED) != 0;
}

/* Blocks of one pass in the data's own order. */
static uint64_t ordered_blocks(const struct hx_draw *engine)
{
    return (engine->config.ordered_draws + engine->config.block_draws - 1) /
           engine->config.block_draws;
}

/* The entry of a block, or NULL. Called under the mutex, as are all below that take an engine. */
static struct block *find_block(struct hx_draw *engine, const struct hx_draw_key *key,
                                uint64_t index)
{
    for (uint32_t i = 0; i < engine->block_count; i++) {
        const uint32_t entry = (engine->hint + i) % engine->block_count;
        struct block *block = &engine->blocks[entry];
        if (block->state != BLOCK_EMPTY && block->index == index && is_same_key(&block->key, key)) {
            engine->hint = entry;
            return block;
        }
    }
    return NULL;
}

static void evict(struct hx_draw *engine, struct block *block)
{
    hx_slot_release(engine->arena, block->slot);
    block->state = BLOCK_EMPTY;
}

/* Whether a loaded block has not been used for so long that its chain has been given up. */
static int is_stale(const struct hx_draw *engine, const struct block *block)
{
    const uint64_t draws = (uint64_t)engine->block_count * engine->config.block_draws;
    return block->state == BLOCK_READY && engine->clock - block->stamp > STALE_ROUNDS * draws;
}

/* A free entry, and thereby a slot. A prefetch takes only what nobody needs any more. */
static struct block *take_entry(struct hx_draw *engine, int is_prefetch)
{
    struct block *empty = NULL, *consumed = NULL, *oldest = NULL;
    uint32_t consumed_count = 0;
    for (uint32_t i = 0; i < engine->block_count; i++) {
        struct block *block = &engine->blocks[i];
        if (block->state == BLOCK_EMPTY) {
            empty = block;
        } else if (block->state == BLOCK_READY) {
            if (block->is_consumed || is_stale(engine, block)) {
                consumed_count += 1;
                if (consumed == NULL || block->stamp < consumed->stamp)
                    consumed = block;
            }
            if (oldest == NULL || block->stamp < oldest->stamp)
                oldest = block;
        }
    }
    /* The block that was left last is kept, for a draw that is made again. Beyond that, memory
     * that is warm is better than more memory. */
    if (consumed_count > 1 || (empty == NULL && consumed != NULL)) {
        evict(engine, consumed);
        return consumed;
    }
    if (empty == NULL && oldest != NULL && !is_prefetch) {
        evict(engine, oldest);
        return oldest;
    }
    return empty;
}

/* Plan a block. Returns its entry, or NULL while all slots are being filled. */
static struct block *request_block(struct hx_draw *engine, const struct hx_draw_key *key,
                                   uint64_t index, int is_prefetch)
{
    const struct hx_draw_config *config = &engine->config;
    const uint64_t first_draw = index * config->block_draws;
    uint64_t draws = config->block_draws;
    struct hx_plan plan;
    struct block *block = take_entry(engine, is_prefetch);
    if (block == NULL)
        return NULL;
    if (is_ordered(key) && draws > config->ordered_draws - first_draw)
        draws = config->ordered_draws - first_draw;
    plan = (struct hx_plan){
        .serial = engine->next_serial,
        .epoch = key->words[0],
        .first_position = first_draw * config->draw_items,
        .seed_key = key->words[1] | (uint64_t)key->words[2] << 32,
        .seed_start = key->words[3] | (uint64_t)key->words[4] << 32,
        .item_count = (uint32_t)draws * config->draw_items,
        .valid_count = (uint32_t)draws * config->draw_items,
        .kind = HX_PLAN_TRAINING,
    };
    /* The ring has room for more plans than there are slots, and each entry stands for a slot. */
    if (hx_plan_publish(engine->arena, &plan) != HX_OK)
        return NULL;
    engine->next_serial += 1;
    *block = (struct block){
        .state = BLOCK_WANTED,
        .key = *key,
        .index = index,
        .is_ahead = is_prefetch,
        .serial = plan.serial,
        .stamp = ++engine->clock,
    };
    return block;
}

/* Whether a chain is at this block. */
static int is_current(const struct hx_draw *engine, const struct block *block)
{
    return block->state == BLOCK_READY && block->is_touched && !block->is_consumed &&
           !is_stale(engine, block);
}

/* Chains that are being drawn from, at least 1. */
static uint32_t count_chains(const struct hx_draw *engine)
{
    uint32_t count = 0;
    for (uint32_t i = 0; i < engine->block_count; i++) {
        const struct block *block = &engine->blocks[i];
        uint32_t j = 0;
        if (!is_current(engine, block))
            continue;
        while (j < i && !(is_current(engine, &engine->blocks[j]) &&
                          is_same_key(&engine->blocks[j].key, &block->key)))
            j++;
        count += j == i;
    }
    return count == 0 ? 1 : count;
}

/* The chain has come to this block: let go of those that it has left, and ask for those that
 * follow. Several are asked for at a time, so that workers are not woken for each. */
static void move_on(struct hx_draw *engine, const struct hx_draw_key *key, uint64_t index)
{
    const uint64_t cycle = is_ordered(key) ? ordered_blocks(engine) : 0;
    uint32_t ahead = engine->config.ahead;
    uint32_t share, coming = 0;
    for (uint32_t i = 0; i < engine->block_count; i++) {
        struct block *block = &engine->blocks[i];
        if (block->state != BLOCK_EMPTY && is_same_key(&block->key, key)) {
            uint64_t distance = block->index - index;
            if (cycle != 0 && block->index < index)
                distance += cycle;
            if (block->state == BLOCK_READY)
                block->is_consumed = distance > ahead;
            coming += distance >= 1 && distance <= ahead;
        }
    }
    share = engine->block_count / count_chains(engine);
    if (ahead + 1 > share)
        ahead = share > 1 ? share - 1 : 0;
    if (coming > ahead / 2)
        return;
    for (uint64_t i = 1; i <= ahead && (cycle == 0 || i < cycle); i++) {
        const uint64_t next = cycle == 0 ? index + i : (index + i) % cycle;
        if (find_block(engine, key, next) == NULL && request_block(engine, key, next, 1) == NULL)
            break;
    }
}

/* Enter a slot that has become ready, whose lease reference the caller owns, into the table. */
static void adopt(struct hx_draw *engine, uint32_t slot)
{
    const uint64_t serial = engine->arena->slots[slot].plan.serial;
    for (uint32_t i = 0; i < engine->block_count; i++) {
        struct block *block = &engine->blocks[i];
        if (block->state == BLOCK_WANTED && block->serial == serial) {
            block->state = BLOCK_READY;
            block->slot = slot;
            return;
        }
    }
    hx_slot_release(engine->arena, slot);
}

/* Whether an interrupt has come since the first draw of a program, or, of no program, since this
 * draw began with so many interrupts. */
static int is_interrupted(struct hx_draw *engine, uint64_t run, uint32_t before)
{
    const uint32_t count = hx_interrupt_count();
    struct run *oldest = &engine->runs[0];
    if (run == 0)
        return count != before;
    for (uint32_t i = 0; i < RUN_COUNT; i++) {
        struct run *entry = &engine->runs[i];
        if (entry->run == run) {
            entry->stamp = ++engine->clock;
            return entry->interrupts != count;
        }
        if (entry->stamp < oldest->stamp)
            oldest = entry;
    }
    *oldest = (struct run){.run = run, .stamp = ++engine->clock, .interrupts = count};
    return 0;
}

/* Wait until a block comes or something changes, with the mutex, which is given up meanwhile.
 * Returns HX_OK for: look again. */
static enum hx_status wait_for_change(struct hx_draw *engine, uint64_t deadline,
                                      uint32_t *out_worker)
{
    enum hx_status status = HX_OK;
    uint64_t until = hx_now_ns() + LOOK_EVERY_NS;
    if (until > deadline)
        until = deadline;
    if (engine->arena == NULL || engine->has_waiter) {
        const struct timespec end = {.tv_sec = (time_t)(until / UINT64_C(1000000000)),
                                     .tv_nsec = (long)(until % UINT64_C(1000000000))};
        if (pthread_cond_timedwait(&engine->changed, &engine->mutex, &end) == ETIMEDOUT)
            status = HX_TIMEOUT;
    } else {
        struct hx_arena *arena = engine->arena;
        const uint64_t generation = engine->generation;
        uint32_t slot;
        hx_arena_retain(arena);
        engine->has_waiter = 1;
        pthread_mutex_unlock(&engine->mutex);
        status = hx_trainer_wait(arena, HX_ANY_SERIAL, until, &slot, out_worker);
        pthread_mutex_lock(&engine->mutex);
        engine->has_waiter = 0;
        if (status == HX_OK && engine->generation != generation)
            hx_slot_release(arena, slot);
        else if (status == HX_OK)
            adopt(engine, slot);
        /* Trouble of an arena that is no longer used is none. */
        if (engine->generation != generation)
            status = HX_OK;
        hx_arena_release(arena);
        pthread_cond_broadcast(&engine->changed);
    }
    if (status == HX_INTERRUPTED || (status == HX_TIMEOUT && hx_now_ns() < deadline))
        status = HX_OK;
    return status;
}

/* Move the error of a failed block, whose reference it takes, into a report. No mutex. */
static void read_failure(struct hx_arena *arena, uint32_t slot, struct hx_draw_report *report)
{
    const struct hx_record *record =
        &arena->records[(uint64_t)slot * arena->header->batch_capacity];
    report->trouble = HX_DRAW_FAILED;
    report->has_no_memory = record->kind == HX_RECORD_NO_MEMORY;
    if (record->nbytes != 0) {
        report->payload = malloc(record->nbytes);
        if (report->payload != NULL &&
            hx_slot_results_read(arena, slot, record->offset, report->payload, record->nbytes) ==
                HX_OK) {
            report->payload_nbytes = record->nbytes;
        }
    }
    hx_slot_release(arena, slot);
}

/* Whether the records of a ready block say that it failed. */
static int is_failed(const struct hx_arena *arena, uint32_t slot)
{
    return arena->slots[slot].is_failed != 0;
}

void hx_draw_prepare(struct hx_draw *engine, const struct hx_draw_key *key, uint64_t draw)
{
    if (hx_load_relaxed_u32(&engine->is_abandoned))
        return;
    if (is_ordered(key))
        draw %= engine->config.ordered_draws;
    pthread_mutex_lock(&engine->mutex);
    if (engine->arena != NULL && find_block(engine, key, draw / engine->config.block_draws) == NULL)
        request_block(engine, key, draw / engine->config.block_draws, 1);
    pthread_mutex_unlock(&engine->mutex);
}

enum hx_status hx_draw_copy(struct hx_draw *engine, const struct hx_draw_key *key, uint64_t draw,
                            uint64_t run, uint8_t *const *targets, struct hx_draw_report *report)
{
    const struct hx_draw_config *config = &engine->config;
    const uint32_t interrupts = hx_interrupt_count();
    enum hx_status status = HX_OK;
    struct hx_arena *arena = NULL; /* holds the slot's lease once it is set */
    struct block *block = NULL;
    uint32_t slot = HX_NO_SLOT;
    uint64_t deadline = 0, index, line;
    int has_failed = 0;

    memset(report, 0, sizeof *report);
    report->key = *key;
    report->draw = draw;
    if (hx_load_relaxed_u32(&engine->is_abandoned)) {
        report->trouble = HX_DRAW_RELEASED;
        return HX_NOTHING;
    }
    if (is_ordered(key))
        draw %= config->ordered_draws;
    index = draw / config->block_draws;
    line = draw % config->block_draws;

    pthread_mutex_lock(&engine->mutex);
    for (;;) {
        report->generation = engine->generation;
        if (engine->is_closed) {
            report->trouble = HX_DRAW_RELEASED;
            break;
        }
        if (is_interrupted(engine, run, interrupts)) {
            report->trouble = HX_DRAW_INTERRUPTED;
            break;
        }
        if (status == HX_TIMEOUT) {
            report->trouble = HX_DRAW_TIMED_OUT;
            break;
        }
        if (status == HX_WORKER_ENDED) {
            report->trouble = HX_DRAW_WORKER_ENDED;
            break;
        }
        if (status != HX_OK) {
            report->trouble = HX_DRAW_SYSTEM;
            break;
        }
        block = find_block(engine, key, index);
        if (block == NULL && engine->arena != NULL)
            block = request_block(engine, key, index, 0);
        if (block != NULL && block->state == BLOCK_READY) {
            if (!block->is_ahead || !is_failed(engine->arena, block->slot))
                break;
            /* What failed when nobody needed it may have passed: only a failure from now on is
             * reported. */
            evict(engine, block);
            continue;
        }
        if (deadline == 0)
            deadline =
                config->timeout_ns == HX_FOREVER ? HX_FOREVER : hx_now_ns() + config->timeout_ns;
        status = wait_for_change(engine, deadline, &report->worker);
    }
    if (report->trouble == 0) {
        arena = engine->arena;
        slot = block->slot;
        has_failed = is_failed(arena, slot);
        if (has_failed) {
            /* Forgotten, so that it is tried again when it is asked for again. */
            block->state = BLOCK_EMPTY;
            hx_arena_retain(arena);
        } else {
            hx_slot_retain(arena, slot);
            block->stamp = ++engine->clock;
            if (!block->is_touched || block->is_consumed) {
                block->is_touched = 1;
                move_on(engine, key, index);
            }
        }
    }
    pthread_mutex_unlock(&engine->mutex);

    if (has_failed) {
        read_failure(arena, slot, report);
        hx_arena_release(arena);
    } else if (arena != NULL) {
        const uint8_t *data = hx_slot_data(arena, slot);
        for (uint32_t i = 0; i < config->array_count; i++) {
            const struct hx_draw_array *array = &engine->arrays[i];
            memcpy(targets[i], data + array->offset + line * array->draw_nbytes,
                   array->draw_nbytes);
        }
        hx_slot_release(arena, slot);
    }
    return report->trouble == 0 ? HX_OK : HX_NOTHING;
}

char *hx_draw_describe_report(struct hx_draw *engine, const struct hx_draw_report *report)
{
    /* Python's own handler of the signal raises as soon as Python runs. */
    if (report->trouble == HX_DRAW_INTERRUPTED)
        return strdup("the program was interrupted (SIGINT) while it drew data");
    return engine->describe == NULL ? NULL : engine->describe(engine, report);
}

void hx_draw_report_clear(struct hx_draw_report *report)
{
    free(report->payload);
    report->payload = NULL;
}
