/* How often the user has interrupted (SIGINT), for waits on threads that no signal reaches. */
#ifndef HX_INTERRUPT_H
#define HX_INTERRUPT_H

#include <stdint.h>

#include "hx_status.h"

/* Take notice of SIGINT in the process, before whoever handles it now; called again it makes sure
 * of it. A program that draws while one comes is ended. Returns HX_OK, HX_SYSTEM. */
enum hx_status hx_interrupt_watch(void);

/* SIGINTs since then. Any thread, no GIL. */
uint32_t hx_interrupt_count(void);

#endif
