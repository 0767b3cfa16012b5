/* What a loader process asks of the kernel for itself, and the trainer of a loader process. */
#include "hx_process.h"

#include <errno.h>
#include <poll.h>
#include <pthread.h>
#include <signal.h>
#include <string.h>
#include <sys/syscall.h>
#include <unistd.h>

/* struct sched_attr of sched_setattr(2), which the C library may or may not declare. */
struct scheduling {
    uint32_t size;
    uint32_t policy;
    uint64_t flags;
    int32_t nice;
    uint32_t priority;
    uint64_t runtime; /* for the usual policies: the time slice, in nanoseconds */
    uint64_t deadline;
    uint64_t period;
};

static bool is_foreign;

static void become_foreign(void)
{
    is_foreign = true;
}

bool hx_process_is_foreign(void)
{
    return is_foreign;
}

/* The guard's thread: argument is the pidfd, as a pointer-sized integer. */
static void *guard_main(void *argument)
{
    struct pollfd fd = {.fd = (int)(intptr_t)argument, .events = POLLIN};
    while (ppoll(&fd, 1, NULL, NULL) < 0 && errno == EINTR) {
    }
    /* What the loader function has started is in the group that this process leads. */
    if (getpgrp() == getpid())
        kill(0, SIGKILL);
    _exit(0);
}

enum hx_status hx_process_guard(int trainer_fd)
{
    enum hx_status status = HX_SYSTEM;
    pthread_attr_t attributes;
    pthread_t thread;
    sigset_t all, before;
    int error = pthread_atfork(NULL, NULL, become_foreign);
    if (error == 0)
        error = pthread_attr_init(&attributes);
    if (error == 0) {
        pthread_attr_setdetachstate(&attributes, PTHREAD_CREATE_DETACHED);
        pthread_attr_setstacksize(&attributes, (size_t)64 * 1024);
        /* The guard takes no signals: they are the main thread's. */
        sigfillset(&all);
        pthread_sigmask(SIG_SETMASK, &all, &before);
        error = pthread_create(&thread, &attributes, guard_main, (void *)(intptr_t)trainer_fd);
        if (error == EINVAL) {
            /* The libraries' thread-local data take more than so small a stack. */
            pthread_attr_destroy(&attributes);
            pthread_attr_init(&attributes);
            pthread_attr_setdetachstate(&attributes, PTHREAD_CREATE_DETACHED);
            error = pthread_create(&thread, &attributes, guard_main, (void *)(intptr_t)trainer_fd);
        }
        pthread_sigmask(SIG_SETMASK, &before, NULL);
        pthread_attr_destroy(&attributes);
    }
    if (error == 0) {
        status = HX_OK;
    } else {
        close(trainer_fd);
        errno = error;
    }
    return status;
}

void hx_process_take_slices(uint64_t slice_ns)
{
    struct scheduling scheduling;
    const int saved_errno = errno;
    memset(&scheduling, 0, sizeof scheduling);
    if (syscall(SYS_sched_getattr, 0, &scheduling, sizeof scheduling, 0) == 0) {
        scheduling.size = sizeof scheduling;
        scheduling.runtime = slice_ns;
        syscall(SYS_sched_setattr, 0, &scheduling, 0);
    }
    errno = saved_errno;
}

enum hx_status hx_process_signal_thread(int process, int thread, int signum)
{
    /* The C library has had a function for it only since glibc 2.30. */
    return syscall(SYS_tgkill, process, thread, signum) == 0 ? HX_OK : HX_SYSTEM;
}
