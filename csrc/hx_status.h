/* Status codes of the whole core, one line each.
 *
 * Every hx_* function that can fail returns one of these; py_errors.c turns them into Python
 * exceptions. HX_SYSTEM leaves the reason in errno.
 */
#ifndef HX_STATUS_H
#define HX_STATUS_H

enum hx_status {
    HX_OK = 0,       /* done */
    HX_NOTHING,      /* nothing to do right now: no run to claim, ring full */
    HX_TIMEOUT,      /* the deadline passed */
    HX_CLOSED,       /* the arena was closed, or the process on the other side ended */
    HX_INTERRUPTED,  /* a signal came, or hx_arena_kick() was called */
    HX_WORKER_ENDED, /* a watched worker process ended */
    HX_NO_MEMORY,    /* memory could not be reserved */
    HX_BAD_ARENA,    /* the file is not an arena of this layout version */
    HX_SYSTEM        /* a system call failed; see errno */
};

#endif
