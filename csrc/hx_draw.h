/* Drawing mini-batches out of an arena, by position, from any thread.
 *
 * A draw is a function of a key (which chain of draws) and a number (which draw of the chain).
 * Consecutive draws of a chain are loaded together, as one block in one slot. This keeps the table
 * of the blocks that are loaded or being loaded, asks the workers for blocks that are missing and
 * for those that come next, and copies a draw into the caller's buffers. Nothing here needs the
 * GIL; what goes wrong is described by a function that the owner gives.
 */
#ifndef HX_DRAW_H
#define HX_DRAW_H

#include <stddef.h>
#include <stdint.h>

#include "hx_arena.h"

#define HX_DRAW_KEY_WORDS 5
#define HX_DRAW_STATE_WORDS (1 + HX_DRAW_KEY_WORDS + 1)

/* Which chain: an options word (bit 31: in the data's own order) and the words of its seed. */
struct hx_draw_key {
    uint32_t words[HX_DRAW_KEY_WORDS];
};

#define HX_DRAW_ORDERED (UINT32_C(1) << 31)

/* One array of a draw: where block 0 of it lies in a slot, and the bytes of one draw. */
struct hx_draw_array {
    uint64_t offset;
    uint64_t draw_nbytes;
};

struct hx_draw_config {
    uint32_t fingerprint;   /* of what is drawn from; states carry it */
    uint32_t block_draws;   /* draws of one block, at least 1 */
    uint32_t draw_items;    /* items of one draw */
    uint32_t ahead;         /* blocks of a chain that are asked for before they are needed */
    uint32_t array_count;   /* arrays of a draw */
    uint64_t ordered_draws; /* draws of one pass in the data's own order; they repeat after it */
    uint64_t timeout_ns;    /* of one draw; HX_FOREVER waits for ever */
};

/* What went wrong, for the function that describes it. */
enum hx_draw_trouble {
    HX_DRAW_FAILED = 1,   /* a worker could not load the block; payload describes the error */
    HX_DRAW_TIMED_OUT,    /* the block did not come in time */
    HX_DRAW_WORKER_ENDED, /* a worker ended on its own */
    HX_DRAW_RELEASED,     /* the loader was released */
    HX_DRAW_INTERRUPTED,  /* the user interrupts */
    HX_DRAW_MISFIT,       /* the state belongs to other data */
    HX_DRAW_SYSTEM        /* a system call failed */
};

struct hx_draw_report {
    enum hx_draw_trouble trouble;
    uint32_t worker;        /* HX_DRAW_WORKER_ENDED: which one */
    uint32_t has_no_memory; /* HX_DRAW_FAILED: the slot's pages could not be reserved */
    uint64_t generation;    /* of the arena that it happened in */
    struct hx_draw_key key; /* the chain */
    uint64_t draw;          /* the draw that was asked for */
    void *payload;          /* owned by the report, from malloc; or NULL */
    uint64_t payload_nbytes;
};

struct hx_draw;

/* Describes trouble. Called without any lock. Returns a new text from malloc, or NULL. */
typedef char *hx_draw_describe(void *context, const struct hx_draw_report *report);

/* Make an engine without an arena. arrays is copied. *out is a new reference, which the caller
 * ends with hx_draw_release(); hx_draw_find() finds it under the number *id from now on.
 * Returns HX_OK, HX_NO_MEMORY, HX_SYSTEM. */
enum hx_status hx_draw_create(const struct hx_draw_config *config,
                              const struct hx_draw_array *arrays, hx_draw_describe *describe,
                              struct hx_draw **out, uint64_t *id);

/* The engine with this number as a new reference, or NULL if it was closed. Any thread. */
struct hx_draw *hx_draw_find(uint64_t id);

/* Give a reference back. Any thread. In a fork the memory stays. */
void hx_draw_release(struct hx_draw *engine);

/* Load from this arena from now on, which it retains; blocks of an earlier one are given up, and
 * who waits for them waits for the new ones. NULL: until the next one comes, draws wait.
 * Returns HX_OK, HX_NO_MEMORY. */
enum hx_status hx_draw_attach(struct hx_draw *engine, struct hx_arena *arena);

/* No more draws: every wait ends, the arena is given back, the number is forgotten. */
void hx_draw_close(struct hx_draw *engine);

/* In a process forked from the owner: refuse draws, touch nothing. */
void hx_draw_abandon(struct hx_draw *engine);

/* What describe() is called with. Guarded by the caller (the GIL). */
void hx_draw_set_context(struct hx_draw *engine, void *context);
void *hx_draw_context(const struct hx_draw *engine);

const struct hx_draw_config *hx_draw_get_config(const struct hx_draw *engine);
const struct hx_draw_array *hx_draw_arrays(const struct hx_draw *engine);

/* Ask for the block of a draw without waiting, so that several can be loaded at a time. */
void hx_draw_prepare(struct hx_draw *engine, const struct hx_draw_key *key, uint64_t draw);

/* Copy a draw into targets, one per array, each of draw_nbytes.
 *
 * run        identifies the program that draws, so that an interrupt ends those that were
 *            running when it came and no later ones; 0 stands for no program: an interrupt ends
 *            the draw if it comes during it
 * report     filled in unless the result is HX_OK; end it with hx_draw_report_clear()
 *
 * GIL: not needed; may block, so call without it. Any thread, many at a time.
 * Returns HX_OK, or HX_NOTHING with the reason in report.
 */
enum hx_status hx_draw_copy(struct hx_draw *engine, const struct hx_draw_key *key, uint64_t draw,
                            uint64_t run, uint8_t *const *targets, struct hx_draw_report *report);

/* Text for trouble, new from malloc, or NULL. Takes the GIL where describe() does. */
char *hx_draw_describe_report(struct hx_draw *engine, const struct hx_draw_report *report);

void hx_draw_report_clear(struct hx_draw_report *report);

/* Grows with each hx_draw_attach(). */
uint64_t hx_draw_generation(struct hx_draw *engine);

/* Blocks asked for so far: what tests of prefetching look at. */
uint64_t hx_draw_blocks_requested(struct hx_draw *engine);

#endif
