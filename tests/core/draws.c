/* Draws under load: threads play the workers and the programs that draw.
 *
 * Each word of a draw depends on its chain and its position, so that a draw that is served from a
 * wrong block, or from one that is being filled anew, is found out. Half way the arena and the
 * workers are replaced, as after the death of a worker.
 */
#include "draws.h"

#include <inttypes.h>
#include <pthread.h>
#include <sched.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/wait.h>
#include <unistd.h>

#include "hx_draw.h"
#include "hx_permute.h"
#include "hx_plan.h"
#include "hx_slot.h"
#include "hx_wait.h"

enum { WORKERS = 2, DRAWERS = 4, SLOTS = 7, BLOCK_DRAWS = 3, ROWS = 5, ORDERED_DRAWS = 11 };
enum { FAIL_EVERY = 97 };

#define CHECK(condition)                                                                           \
    do {                                                                                           \
        if (!(condition)) {                                                                        \
            fprintf(stderr, "%s:%d: not so: %s\n", __FILE__, __LINE__, #condition);                \
            abort();                                                                               \
        }                                                                                          \
    } while (0)

struct worker_argument {
    struct hx_arena *arena;
    uint32_t number;
};

struct drawer_argument {
    struct hx_draw *engine;
    uint64_t seed;
    uint64_t draw_count;
};

static uint64_t row_at(uint64_t options, uint64_t seed, uint64_t position)
{
    return hx_mix(hx_mix(options, seed), position);
}

/* Whether the block that begins at a position cannot be loaded, this time. */
static int is_failing(uint64_t seed, uint64_t position, uint64_t serial)
{
    return hx_mix(hx_mix(seed, position), serial) % FAIL_EVERY == 0;
}

static void *work(void *pointer)
{
    const struct worker_argument *argument = pointer;
    struct hx_arena *arena = argument->arena;
    struct hx_run run;
    while (hx_worker_next(arena, argument->number, -1, HX_FOREVER, &run) == HX_OK) {
        uint64_t *rows = (uint64_t *)hx_slot_data(arena, run.slot);
        const struct hx_plan *plan = &run.plan;
        if (is_failing(plan->seed_key, plan->first_position, plan->serial)) {
            hx_run_fail(arena, argument->number, &run, run.first, 0, 0, HX_RECORD_ERROR);
            continue;
        }
        for (uint32_t i = run.first; i < run.first + run.count; i++)
            rows[i] = row_at(plan->epoch, plan->seed_key, plan->first_position + i);
        hx_run_complete(arena, argument->number, &run, 0, 0);
    }
    return NULL;
}

static void *draw(void *pointer)
{
    const struct drawer_argument *argument = pointer;
    uint64_t random = argument->seed, number = 0;
    uint64_t rows[ROWS];
    uint8_t *targets[] = {(uint8_t *)rows};
    for (uint64_t i = 0; i < argument->draw_count; i++) {
        struct hx_draw_report report;
        struct hx_draw_key key = {{0, (uint32_t)(argument->seed % 3), 0, 0, 0}};
        uint64_t position;
        random = hx_mix(random, i);
        if (random % 5 == 0)
            key.words[0] = HX_DRAW_ORDERED;
        if (random % 11 == 0)
            number = random % 1000;
        if (random % 7 == 0)
            hx_draw_prepare(argument->engine, &key, number + 20);
        if (hx_draw_copy(argument->engine, &key, number, argument->seed, targets, &report) ==
            HX_OK) {
            position = key.words[0] ? number % ORDERED_DRAWS : number;
            for (uint32_t row = 0; row < ROWS; row++)
                CHECK(rows[row] == row_at(key.words[0], key.words[1], position * ROWS + row));
            number += 1;
        } else {
            CHECK(report.trouble == HX_DRAW_FAILED);
            hx_draw_report_clear(&report);
        }
    }
    return NULL;
}

static struct hx_arena *start(pthread_t *threads, struct worker_argument *arguments)
{
    const struct hx_arena_config config = {.slot_count = SLOTS,
                                           .worker_count = WORKERS,
                                           .group_count = 1,
                                           .batch_capacity = WORKERS + 1,
                                           .is_batched = 1,
                                           .slot_nbytes = BLOCK_DRAWS * ROWS * sizeof(uint64_t)};
    struct hx_arena *arena;
    CHECK(hx_arena_create(&config, &arena) == HX_OK);
    for (uint32_t i = 0; i < WORKERS; i++) {
        arguments[i] = (struct worker_argument){.arena = arena, .number = i};
        CHECK(pthread_create(&threads[i], NULL, work, &arguments[i]) == 0);
    }
    return arena;
}

static void stop(struct hx_arena *arena, pthread_t *threads)
{
    hx_arena_close(arena);
    for (uint32_t i = 0; i < WORKERS; i++)
        pthread_join(threads[i], NULL);
    hx_arena_release(arena);
}

/* A forked child gives up its copy of an engine; looking for engines still works there. */
static void give_up_in_fork(struct hx_draw *engine, uint64_t id)
{
    int status;
    const pid_t pid = fork();
    CHECK(pid >= 0);
    if (pid == 0) {
        hx_draw_abandon(engine);
        hx_draw_close(engine);
        hx_draw_release(engine);
        CHECK(hx_draw_find(id + 1) == NULL);
        _exit(0);
    }
    CHECK(waitpid(pid, &status, 0) == pid && WIFEXITED(status) && WEXITSTATUS(status) == 0);
}

void stress_draws(uint64_t seed, uint64_t draw_count)
{
    const struct hx_draw_array array = {.offset = 0, .draw_nbytes = ROWS * sizeof(uint64_t)};
    const struct hx_draw_config config = {.block_draws = BLOCK_DRAWS,
                                          .draw_items = ROWS,
                                          .ahead = 2,
                                          .array_count = 1,
                                          .ordered_draws = ORDERED_DRAWS,
                                          .timeout_ns = HX_FOREVER};
    pthread_t workers[WORKERS], drawers[DRAWERS];
    struct worker_argument worker_arguments[WORKERS];
    struct drawer_argument drawer_arguments[DRAWERS];
    struct hx_draw *engine, *found;
    struct hx_arena *arena;
    uint64_t id;
    CHECK(hx_draw_create(&config, &array, NULL, &engine, &id) == HX_OK);
    give_up_in_fork(engine, id);
    arena = start(workers, worker_arguments);
    CHECK(hx_draw_attach(engine, arena) == HX_OK);
    for (uint32_t i = 0; i < DRAWERS; i++) {
        drawer_arguments[i] = (struct drawer_argument){engine, seed * DRAWERS + i + 1, draw_count};
        CHECK(pthread_create(&drawers[i], NULL, draw, &drawer_arguments[i]) == 0);
    }
    while (hx_draw_blocks_requested(engine) < draw_count / 2)
        sched_yield();
    CHECK(hx_draw_attach(engine, NULL) == HX_OK);
    stop(arena, workers);
    arena = start(workers, worker_arguments);
    CHECK(hx_draw_attach(engine, arena) == HX_OK);
    for (uint32_t i = 0; i < DRAWERS; i++)
        pthread_join(drawers[i], NULL);
    found = hx_draw_find(id);
    CHECK(found == engine);
    hx_draw_release(found);
    hx_draw_close(engine);
    CHECK(hx_draw_find(id) == NULL);
    stop(arena, workers);
    hx_draw_release(engine);
}
