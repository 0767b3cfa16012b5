/* How often the user has interrupted (SIGINT), for waits on threads that no signal reaches. */
#include "hx_interrupt.h"

#include <signal.h>
#include <sys/syscall.h>
#include <unistd.h>

#include "hx_atomic.h"

/* SIGINTs so far; written by the signal handler. */
static _Atomic uint32_t interrupt_count;
static struct sigaction previous_action;

static void on_interrupt(int signum, siginfo_t *info, void *context)
{
    /* A library that took the signal over from us may hand it back to us. The thread that is inside
     * is known by its number: thread-local data of a library may be allocated at the first use,
     * and here memory cannot be. */
    static _Atomic uint32_t inside;
    const uint32_t this_thread = (uint32_t)syscall(SYS_gettid);
    if (hx_load_relaxed_u32(&inside) == this_thread)
        return;
    hx_store_relaxed_u32(&inside, this_thread);
    hx_add_relaxed_u32(&interrupt_count, 1);
    if (previous_action.sa_flags & SA_SIGINFO)
        previous_action.sa_sigaction(signum, info, context);
    else if (previous_action.sa_handler != SIG_DFL && previous_action.sa_handler != SIG_IGN)
        previous_action.sa_handler(signum);
    hx_store_relaxed_u32(&inside, 0);
}

enum hx_status hx_interrupt_watch(void)
{
    struct sigaction current, ours;
    if (sigaction(SIGINT, NULL, &current) != 0)
        return HX_SYSTEM;
    if ((current.sa_flags & SA_SIGINFO) && current.sa_sigaction == on_interrupt)
        return HX_OK;
    /* Where nobody handles it the process ends by itself, or does not care. */
    if (!(current.sa_flags & SA_SIGINFO) &&
        (current.sa_handler == SIG_DFL || current.sa_handler == SIG_IGN))
        return HX_OK;
    previous_action = current;
    ours = current;
    ours.sa_flags |= SA_SIGINFO;
    ours.sa_sigaction = on_interrupt;
    return sigaction(SIGINT, &ours, NULL) == 0 ? HX_OK : HX_SYSTEM;
}

uint32_t hx_interrupt_count(void)
{
    return hx_load_relaxed_u32(&interrupt_count);
}
