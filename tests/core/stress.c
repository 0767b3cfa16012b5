/* The Python-free core under load: threads play the workers and the holders of arrays.
 *
 * Every batch is filled with a pattern that depends on its serial number, exported twice through
 * DLPack, and checked at the moment each export is given back, on whatever thread that happens.
 * Meant to be built with ThreadSanitizer, and with AddressSanitizer and UBSan; see the Makefile.
 *
 *     stress [SEEDS [BATCHES]]      runs that many seeds of that many batches; 10 of 300 if not said
 */
#include <inttypes.h>
#include <pthread.h>
#include <sched.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "draws.h"
#include "hx_dlpack.h"
#include "hx_permute.h"
#include "hx_plan.h"
#include "hx_slot.h"
#include "hx_wait.h"

enum { HOLDERS = 3, QUEUE = 64, ITEM_WORDS = 37, MAX_ITEMS = 24, FAIL_EVERY = 29 };

#define CHECK(condition)                                                                           \
    do {                                                                                           \
        if (!(condition)) {                                                                        \
            fprintf(stderr, "%s:%d: not so: %s\n", __FILE__, __LINE__, #condition);                \
            abort();                                                                               \
        }                                                                                          \
    } while (0)

/* Tensors on their way to the threads that hold them for a while. */
struct queue {
    pthread_mutex_t mutex;
    pthread_cond_t changed;
    struct hx_dlpack_managed *tensors[QUEUE];
    uint64_t serials[QUEUE];
    unsigned head, tail;
    int is_closed;
};

struct run_state {
    struct hx_arena *arena;
    struct queue queue;
    uint64_t seed;
};

struct thread_argument {
    struct run_state *state;
    uint32_t number;
};

static uint32_t word_at(uint64_t serial, uint32_t index)
{
    return (uint32_t)hx_mix(serial, index);
}

/* Whether an item of the batch is made to fail; the whole batch then is. */
static int is_failing(uint64_t serial)
{
    return serial % FAIL_EVERY == FAIL_EVERY - 1;
}

/* A random pause: mostly none, sometimes a yield, rarely a sleep. */
static void dawdle(uint64_t *random)
{
    *random = hx_mix(*random, 1);
    if (*random % 16 == 0)
        usleep((useconds_t)(*random / 16 % 300));
    else if (*random % 4 == 0)
        sched_yield();
}

static void *worker_main(void *pointer)
{
    const struct thread_argument *argument = pointer;
    struct hx_arena *arena = argument->state->arena;
    uint64_t random = hx_mix(argument->state->seed, argument->number);
    struct hx_run run;
    enum hx_status status;
    while ((status = hx_worker_next(arena, argument->number, -1, HX_FOREVER, &run)) == HX_OK) {
        uint32_t *words = (uint32_t *)hx_slot_data(arena, run.slot);
        const uint64_t serial = run.plan.serial;
        CHECK(run.count >= 1 && run.first + run.count <= run.plan.item_count);
        for (uint32_t i = run.first; i < run.first + run.count; i++) {
            dawdle(&random);
            for (uint32_t j = 0; j < ITEM_WORDS; j++)
                words[i * ITEM_WORDS + j] = word_at(serial, i * ITEM_WORDS + j);
        }
        if (is_failing(serial) && run.first == 0) {
            hx_run_fail(arena, argument->number, &run, 0, 0, 0, HX_RECORD_ERROR);
        } else if (serial % 3 == 0) {
            uint64_t offset;
            CHECK(hx_slot_results_write(arena, run.slot, &serial, sizeof serial, &offset) == HX_OK);
            hx_run_complete(arena, argument->number, &run, offset, sizeof serial);
        } else {
            hx_run_complete(arena, argument->number, &run, 0, 0);
        }
    }
    CHECK(status == HX_CLOSED);
    return NULL;
}

static void check_tensor(const struct hx_dlpack_tensor *tensor, uint64_t serial)
{
    const uint32_t *words = tensor->data;
    CHECK((uintptr_t)tensor->data % 64 == 0);
    for (int64_t i = 0; i < tensor->shape[0]; i++)
        CHECK(words[i] == word_at(serial, (uint32_t)i));
}

static void queue_put(struct queue *queue, struct hx_dlpack_managed *tensor, uint64_t serial)
{
    pthread_mutex_lock(&queue->mutex);
    CHECK(queue->tail - queue->head < QUEUE);
    queue->tensors[queue->tail % QUEUE] = tensor;
    queue->serials[queue->tail % QUEUE] = serial;
    queue->tail += 1;
    pthread_cond_signal(&queue->changed);
    pthread_mutex_unlock(&queue->mutex);
}

static void *holder_main(void *pointer)
{
    const struct thread_argument *argument = pointer;
    struct queue *queue = &argument->state->queue;
    uint64_t random = hx_mix(~argument->state->seed, argument->number);
    for (;;) {
        struct hx_dlpack_managed *tensor = NULL;
        uint64_t serial = 0;
        pthread_mutex_lock(&queue->mutex);
        while (queue->head == queue->tail && !queue->is_closed)
            pthread_cond_wait(&queue->changed, &queue->mutex);
        if (queue->head != queue->tail) {
            tensor = queue->tensors[queue->head % QUEUE];
            serial = queue->serials[queue->head % QUEUE];
            queue->head += 1;
        }
        pthread_mutex_unlock(&queue->mutex);
        if (tensor == NULL)
            return NULL;
        dawdle(&random);
        check_tensor(&tensor->tensor, serial);
        tensor->deleter(tensor);
    }
}

static struct hx_plan plan_for(uint64_t serial, uint64_t seed)
{
    struct hx_plan plan;
    memset(&plan, 0, sizeof plan);
    plan.serial = serial;
    plan.item_count = 1 + (uint32_t)(hx_mix(seed, serial) % MAX_ITEMS);
    plan.valid_count = plan.item_count;
    plan.order_key = seed;
    plan.order_count = 1000;
    plan.first_position = serial % 900;
    return plan;
}

static void check_records(struct hx_arena *arena, uint32_t slot)
{
    const struct hx_slot *shared = &arena->slots[slot];
    const struct hx_record *records = arena->records + slot * arena->header->batch_capacity;
    for (uint32_t i = 0; i < shared->record_count; i++) {
        uint64_t found;
        if (records[i].kind != HX_RECORD_ADDITIONAL)
            continue;
        CHECK(hx_slot_results_read(arena, slot, records[i].offset, &found, sizeof found) == HX_OK);
        CHECK(found == shared->plan.serial);
    }
    CHECK(shared->is_failed == (uint32_t)is_failing(shared->plan.serial));
}

/* Deliver all batches in order, exporting each twice. */
static void train(struct run_state *state, uint64_t batch_count)
{
    struct hx_arena *arena = state->arena;
    uint64_t published = 0;
    uint64_t random = state->seed;
    for (uint64_t serial = 0; serial < batch_count; serial++) {
        struct hx_dlpack_spec spec;
        uint32_t slot, worker;
        while (published < batch_count) {
            const struct hx_plan plan = plan_for(published, state->seed);
            if (hx_plan_publish(arena, &plan) != HX_OK)
                break;
            published += 1;
        }
        CHECK(hx_trainer_wait(arena, serial, hx_now_ns() + UINT64_C(20000000000), &slot, &worker) ==
              HX_OK);
        CHECK(arena->slots[slot].plan.serial == serial);
        check_records(arena, slot);
        memset(&spec, 0, sizeof spec);
        spec.ndim = 1;
        spec.dtype = (struct hx_dlpack_dtype){1, 32, 1};
        spec.shape[0] = (int64_t)arena->slots[slot].plan.item_count * ITEM_WORDS;
        if (!is_failing(serial)) {
            const struct hx_dlpack_memory memory = hx_dlpack_slot(arena, slot);
            struct hx_dlpack_managed_versioned *kept;
            queue_put(&state->queue, hx_dlpack_export(&memory, &spec), serial);
            kept = hx_dlpack_export_versioned(&memory, &spec);
            dawdle(&random);
            check_tensor(&kept->tensor, serial);
            kept->deleter(kept);
        }
        hx_slot_release(arena, slot);
    }
}

static void run_once(uint64_t seed, uint64_t batch_count)
{
    const uint32_t worker_count = 1 + (uint32_t)(seed % 4);
    struct hx_arena_config config = {
        .slot_count = 1 + (uint32_t)(seed % 8),
        .worker_count = worker_count,
        .group_count = 1,
        .batch_capacity = MAX_ITEMS,
        .is_batched = seed % 5 == 0,
        .slot_nbytes = MAX_ITEMS * ITEM_WORDS * sizeof(uint32_t),
    };
    struct run_state state = {.seed = seed};
    struct thread_argument arguments[8 + HOLDERS];
    pthread_t threads[8 + HOLDERS];
    uint32_t count = 0;
    CHECK(hx_arena_create(&config, &state.arena) == HX_OK);
    pthread_mutex_init(&state.queue.mutex, NULL);
    pthread_cond_init(&state.queue.changed, NULL);
    for (uint32_t i = 0; i < worker_count + HOLDERS; i++, count++) {
        arguments[i].state = &state;
        arguments[i].number = i < worker_count ? i : i - worker_count;
        CHECK(pthread_create(&threads[i], NULL, i < worker_count ? worker_main : holder_main,
                             &arguments[i]) == 0);
    }
    train(&state, batch_count);
    hx_arena_close(state.arena);
    /* Leases outlive the close, and the trainer's own reference. */
    hx_arena_retain(state.arena);
    pthread_mutex_lock(&state.queue.mutex);
    state.queue.is_closed = 1;
    pthread_cond_broadcast(&state.queue.changed);
    pthread_mutex_unlock(&state.queue.mutex);
    for (uint32_t i = 0; i < count; i++)
        pthread_join(threads[i], NULL);
    for (uint32_t i = 0; i < config.slot_count; i++)
        CHECK(atomic_load(&state.arena->lease_counts[i]) == 0);
    CHECK(atomic_load(&state.arena->reference_count) == 2);
    hx_arena_release(state.arena);
    hx_arena_release(state.arena);
    pthread_cond_destroy(&state.queue.changed);
    pthread_mutex_destroy(&state.queue.mutex);
}

int main(int argc, char **argv)
{
    const uint64_t seed_count = argc > 1 ? strtoull(argv[1], NULL, 10) : 10;
    const uint64_t batch_count = argc > 2 ? strtoull(argv[2], NULL, 10) : 300;
    for (uint64_t seed = 0; seed < seed_count; seed++)
        run_once(seed, batch_count);
    for (uint64_t seed = 0; seed < seed_count; seed++)
        stress_draws(seed, batch_count);
    printf("%" PRIu64 " seeds of %" PRIu64 " batches and draws: every array was right\n",
           seed_count, batch_count);
    return 0;
}
