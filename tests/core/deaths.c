/* A worker is killed between any two of its instructions, and nothing is lost by it.
 *
 * A child process plays worker 0. It is single-stepped (ptrace) through one run, from claiming it to
 * having completed it, to learn its instructions. Then, for each of them, a fresh child comes as
 * far as that instruction, by a breakpoint, and is killed there. This process takes its place,
 * plays worker 1 and the trainer too, and every batch must come, in order, whole. In pairs of
 * deaths the successor is killed as well, while it makes good for the first.
 *
 *     deaths [PAIRS]      all single deaths, then so many random pairs of deaths; 500 if not said
 *
 * Exits with status 77 where processes may not be traced.
 */
#include <elf.h>
#include <errno.h>
#include <inttypes.h>
#include <signal.h>
#include <stddef.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/auxv.h>
#include <sys/ptrace.h>
#include <sys/user.h>
#include <sys/wait.h>
#include <unistd.h>

#include "hx_arena.h"
#include "hx_atomic.h"
#include "hx_permute.h"
#include "hx_plan.h"
#include "hx_slot.h"
#include "hx_wait.h"

/* With as many workers as slots, a run is half of a batch. */
enum {
    NOT_ALLOWED = 77,
    SLOTS = 2,
    WORKERS = 2,
    ITEMS = 4,
    BATCHES = 6,
    FAILING = 3,
    TRACED_RUNS = 9,
    MAX_STEPS = 9999
};

#define CHECK(condition)                                                                           \
    do {                                                                                           \
        if (!(condition)) {                                                                        \
            fprintf(stderr, "%s:%d: not so: %s (run %d, step %ld, then step %ld)\n", __FILE__,     \
                    __LINE__, #condition, current.run, current.step, current.second_step);         \
            abort();                                                                               \
        }                                                                                          \
    } while (0)

/* What is being tried, for the message of a failure. */
static struct {
    int run;
    long step, second_step;
} current;

static uint64_t word_of(uint64_t serial, uint32_t item)
{
    return hx_mix(serial + 1, item);
}

static void load(struct hx_arena *arena, uint32_t worker, const struct hx_run *run)
{
    uint64_t *words = (uint64_t *)hx_slot_data(arena, run->slot);
    const uint64_t result = run->plan.serial;
    uint64_t offset;
    for (uint32_t i = run->first; i < run->first + run->count; i++)
        words[i] = word_of(run->plan.serial, i);
    CHECK(hx_slot_results_write(arena, run->slot, &result, sizeof result, &offset) == HX_OK);
    if (run->plan.serial == FAILING && run->first == 0)
        hx_run_fail(arena, worker, run, run->first, offset, sizeof result, HX_RECORD_ERROR);
    else
        hx_run_complete(arena, worker, run, offset, sizeof result);
}

/* The child: stops itself before each run, and when there is none. */
static void be_worker(struct hx_arena *arena)
{
    if (ptrace(PTRACE_TRACEME, 0, NULL, NULL) != 0)
        _exit(NOT_ALLOWED);
    for (;;) {
        struct hx_run run;
        raise(SIGSTOP);
        if (hx_worker_next(arena, 0, -1, hx_now_ns(), &run) == HX_OK)
            load(arena, 0, &run);
    }
}

static void check_batch(struct hx_arena *arena, uint32_t slot, uint64_t serial)
{
    const struct hx_slot *shared = &arena->slots[slot];
    const struct hx_record *records = arena->records + slot * arena->header->batch_capacity;
    const uint64_t *words = (const uint64_t *)hx_slot_data(arena, slot);
    const int is_failed = serial == FAILING;
    CHECK(shared->plan.serial == serial && shared->plan.first_position == serial * ITEMS);
    CHECK(shared->is_failed == (uint32_t)is_failed);
    CHECK(shared->completed == ITEMS && shared->claimed == ITEMS);
    CHECK(is_failed ? shared->record_count >= 1 : shared->record_count == 2);
    for (uint32_t i = 0; i < shared->record_count; i++) {
        uint64_t result;
        CHECK(records[i].kind == (uint32_t)(is_failed && records[i].first == 0
                                                ? HX_RECORD_ERROR
                                                : HX_RECORD_ADDITIONAL));
        CHECK(hx_slot_results_read(arena, slot, records[i].offset, &result, sizeof result) ==
              HX_OK);
        CHECK(result == serial);
    }
    for (uint32_t i = 0; !is_failed && i < ITEMS; i++)
        CHECK(words[i] == word_of(serial, i));
}

struct trainer {
    struct hx_arena *arena;
    uint64_t published, delivered;
};

static void publish(struct trainer *trainer)
{
    while (trainer->published < BATCHES) {
        struct hx_plan plan;
        memset(&plan, 0, sizeof plan);
        plan.serial = trainer->published;
        plan.first_position = trainer->published * ITEMS;
        plan.item_count = plan.valid_count = ITEMS;
        if (hx_plan_publish(trainer->arena, &plan) != HX_OK)
            break;
        trainer->published += 1;
    }
}

/* Take what is ready. Returns how many batches that were. */
static int deliver(struct trainer *trainer)
{
    uint32_t slot;
    int count = 0;
    publish(trainer);
    while (hx_trainer_take(trainer->arena, trainer->delivered, &slot) == HX_OK) {
        check_batch(trainer->arena, slot, trainer->delivered);
        hx_slot_release(trainer->arena, slot);
        trainer->delivered += 1;
        count += 1;
        publish(trainer);
    }
    return count;
}

static pid_t start_worker(struct hx_arena *arena)
{
    int status;
    const pid_t pid = fork();
    CHECK(pid >= 0);
    if (pid == 0)
        be_worker(arena);
    CHECK(waitpid(pid, &status, 0) == pid);
    if (WIFEXITED(status) && WEXITSTATUS(status) == NOT_ALLOWED)
        exit(NOT_ALLOWED);
    CHECK(WIFSTOPPED(status));
    return pid;
}

/* Let a stopped worker do a whole run. */
static void resume(pid_t pid)
{
    int status;
    CHECK(ptrace(PTRACE_CONT, pid, NULL, NULL) == 0);
    CHECK(waitpid(pid, &status, 0) == pid && WIFSTOPPED(status) && WSTOPSIG(status) == SIGSTOP);
}

/* The instructions of a run: where each lies, and how often control has been there by then. */
struct trace {
    long count;
    uint64_t addresses[MAX_STEPS];
    int occurrences[MAX_STEPS];
};

#if defined(__x86_64__)
enum { PROGRAM_COUNTER = offsetof(struct user_regs_struct, rip), BREAKPOINT = 0xCC };
#else
#error "written for x86-64"
#endif

static uint64_t program_counter(pid_t pid)
{
    return (uint64_t)ptrace(PTRACE_PEEKUSER, pid, (void *)PROGRAM_COUNTER, NULL);
}

/* Let a stopped worker do one instruction. Returns whether it was one of the run. */
static int step(pid_t pid)
{
    int status;
    CHECK(ptrace(PTRACE_SINGLESTEP, pid, NULL, NULL) == 0);
    CHECK(waitpid(pid, &status, 0) == pid && WIFSTOPPED(status));
    return WSTOPSIG(status) == SIGTRAP;
}

/* Whether an address lies in the code that the kernel maps into a process for reading the time: it
 * loops for as long as the clock is being set, which to a worker that is stepped through can be
 * often, and changes nothing of the arena's. */
static int is_of_kernel(uint64_t address)
{
    const Elf64_Ehdr *image = (const Elf64_Ehdr *)getauxval(AT_SYSINFO_EHDR);
    const Elf64_Phdr *segments;
    int is_inside = 0;
    if (image == NULL)
        return 0;
    segments = (const Elf64_Phdr *)((const char *)image + image->e_phoff);
    for (int i = 0; i < image->e_phnum; i++)
        is_inside |= segments[i].p_type == PT_LOAD &&
                     address - (uint64_t)image - segments[i].p_offset < segments[i].p_memsz;
    return is_inside;
}

/* Step a stopped worker through its run, until it is back where it stopped itself. */
static void record_trace(pid_t pid, struct trace *trace)
{
    trace->count = 0;
    do {
        const uint64_t address = program_counter(pid);
        long before = trace->count;
        if (is_of_kernel(address))
            continue;
        while (before > 0 && trace->addresses[before - 1] != address)
            before -= 1;
        CHECK(trace->count < MAX_STEPS);
        trace->addresses[trace->count] = address;
        trace->occurrences[trace->count] = before > 0 ? trace->occurrences[before - 1] + 1 : 1;
        trace->count += 1;
    } while (step(pid) && program_counter(pid) != trace->addresses[0]);
}

/* Let a stopped worker come as far as an instruction of its run. Returns whether it came there. */
static int advance(pid_t pid, uint64_t address, int occurrence)
{
    const long original = ptrace(PTRACE_PEEKTEXT, pid, (void *)address, NULL);
    const long broken = (original & ~0xFFL) | BREAKPOINT;
    int status;
    if (program_counter(pid) == address && --occurrence == 0)
        return 1;
    for (;;) {
        if (program_counter(pid) == address && !step(pid))
            return 0;
        CHECK(ptrace(PTRACE_POKETEXT, pid, (void *)address, (void *)broken) == 0);
        CHECK(ptrace(PTRACE_CONT, pid, NULL, NULL) == 0);
        CHECK(waitpid(pid, &status, 0) == pid && WIFSTOPPED(status));
        CHECK(ptrace(PTRACE_POKETEXT, pid, (void *)address, (void *)original) == 0);
        if (WSTOPSIG(status) != SIGTRAP)
            return 0;
        CHECK(ptrace(PTRACE_POKEUSER, pid, (void *)PROGRAM_COUNTER, (void *)address) == 0);
        if (--occurrence == 0)
            return 1;
    }
}

static int count_ready(const struct hx_arena *arena)
{
    int count = 0;
    for (uint32_t i = 0; i < SLOTS; i++)
        count += hx_load_seq_cst_u32(&arena->slots[i].state) == HX_SLOT_READY;
    return count;
}

/* Kill worker 0. If it has left the last words of a batch in the journal, then whoever makes them
 * good has to wake the trainer, which sleeps by then, as it has looked after the death. */
static void kill_worker(struct hx_arena *arena, pid_t pid)
{
    uint64_t wakes = 0;
    int status, ready_count;
    kill(pid, SIGKILL);
    CHECK(waitpid(pid, &status, 0) == pid && WIFSIGNALED(status));
    hx_arena_bury(arena, 0);
    hx_store_seq_cst_u32(&arena->header->is_trainer_waiting, 1);
    ready_count = count_ready(arena);
    hx_arena_lock(arena);
    hx_arena_unlock(arena);
    CHECK(count_ready(arena) == ready_count ||
          read(arena->ready_fd, &wakes, sizeof wakes) == sizeof wakes);
    hx_store_seq_cst_u32(&arena->header->is_trainer_waiting, 0);
}

/* Be both workers until every batch is there. */
static void finish(struct trainer *trainer)
{
    struct hx_arena *arena = trainer->arena;
    while (trainer->delivered < BATCHES) {
        int is_stuck = deliver(trainer) == 0;
        for (uint32_t worker = WORKERS; worker-- > 0;) {
            struct hx_run run;
            if (hx_run_claim(arena, worker, &run) == HX_OK) {
                load(arena, worker, &run);
                is_stuck = 0;
            }
        }
        CHECK(!is_stuck);
    }
    for (uint32_t i = 0; i < WORKERS; i++)
        CHECK(hx_load_relaxed_u32(&arena->workers[i].slot) == HX_NO_SLOT);
    for (uint32_t i = 0; i < SLOTS; i++)
        CHECK(hx_load_relaxed_u32(&arena->slots[i].state) == HX_SLOT_FREE);
    CHECK(hx_load_relaxed_u32(&arena->header->journal.kind) == HX_CHANGE_NONE);
    CHECK(hx_load_seq_cst_u64(&arena->header->idle_workers[0]) == 0);
}

/* An arena with plans in it, and a worker that has done so many runs. */
static pid_t set_up(struct trainer *trainer, int run)
{
    const struct hx_arena_config config = {
        .slot_count = SLOTS,
        .worker_count = WORKERS,
        .group_count = 1,
        .batch_capacity = ITEMS,
        .is_batched = 1,
        .slot_nbytes = ITEMS * sizeof(uint64_t),
    };
    pid_t pid;
    memset(trainer, 0, sizeof *trainer);
    CHECK(hx_arena_create(&config, &trainer->arena) == HX_OK);
    publish(trainer);
    pid = start_worker(trainer->arena);
    for (int i = 0; i < run; i++) {
        resume(pid);
        /* Not after every run, so that slots run out, too. */
        if (i % 4 == 3)
            deliver(trainer);
    }
    return pid;
}

/* Kill worker 0 before an instruction of a run and, where `second` is not negative, its successor
 * before one of what it does first. Returns whether the first died where it was to. */
static int try_death(const struct trace *trace, int run, long first, long second)
{
    struct trainer trainer;
    pid_t pid = set_up(&trainer, run);
    int is_there;
    current.run = run;
    current.step = first;
    current.second_step = second;
    is_there = advance(pid, trace->addresses[first], trace->occurrences[first]);
    kill_worker(trainer.arena, pid);
    if (second >= 0) {
        pid = start_worker(trainer.arena);
        advance(pid, trace->addresses[second], trace->occurrences[second]);
        kill_worker(trainer.arena, pid);
    }
    finish(&trainer);
    hx_arena_release(trainer.arena);
    return is_there;
}

int main(int argc, char **argv)
{
    const long pair_count = argc > 1 ? strtol(argv[1], NULL, 10) : 500;
    static struct trace traces[TRACED_RUNS];
    long count = 0, missed = 0;
    /* Run 0 reserves a slot, 1 completes a batch, 2 and 3 the same in the other slot, 4 finds no
     * slot and would sleep, 5 opens a slot that is reserved already, 8 is the failing one. */
    for (int run = 0; run < TRACED_RUNS; run++) {
        struct trainer trainer;
        const pid_t pid = set_up(&trainer, run);
        current.run = run;
        record_trace(pid, &traces[run]);
        kill_worker(trainer.arena, pid);
        hx_arena_release(trainer.arena);
        for (long i = 0; i < traces[run].count; i++) {
            count += 1;
            missed += !try_death(&traces[run], run, i, -1);
        }
    }
    for (long i = 0; i < pair_count; i++) {
        const uint64_t random = hx_mix((uint64_t)i, 7);
        const int run = (int)(random % TRACED_RUNS);
        const uint64_t steps = (uint64_t)traces[run].count;
        try_death(&traces[run], run, (long)(random / 16 % steps), (long)(random / 65536 % steps));
    }
    CHECK(missed == 0);
    printf("%ld deaths, one at every instruction, and %ld pairs of deaths: nothing was lost\n",
           count, pair_count);
    return 0;
}
