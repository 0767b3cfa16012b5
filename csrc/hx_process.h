/* What a loader process asks of the kernel for itself, and the trainer of a loader process. */
#ifndef HX_PROCESS_H
#define HX_PROCESS_H

#include <stdbool.h>
#include <stdint.h>

#include "hx_status.h"

/* End this process, and the others of the process group that it leads, as soon as the process
 * behind trainer_fd has ended, whatever they are doing then: a thread of its own waits for it.
 * Takes trainer_fd. Returns HX_OK, HX_SYSTEM. */
enum hx_status hx_process_guard(int trainer_fd);

/* Whether this process was forked from one that has a guard: from a loader process, by its loader
 * function. It has the memory, the descriptors and the work of that one, and must leave the work
 * alone. */
bool hx_process_is_foreign(void);

/* Let threads with the usual time slice preempt the calling thread when they wake, by taking
 * slices of slice_ns instead (sched_setattr(2), Linux 6.12 and later). Where the kernel does not
 * know that, nothing changes. Child threads and processes inherit it. */
void hx_process_take_slices(uint64_t slice_ns);

/* Send a signal to one thread of a process, and to no other of its threads. The caller sees to it
 * that the process is still the one it means: a child that has not been waited for. Returns HX_OK,
 * HX_SYSTEM. */
enum hx_status hx_process_signal_thread(int process, int thread, int signum);

#endif
