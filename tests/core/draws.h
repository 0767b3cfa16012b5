/* Draws under load; part of the stress program. */
#ifndef DRAWS_H
#define DRAWS_H

#include <stdint.h>

/* Let threads draw that many draws each, while others load; aborts if one is wrong. */
void stress_draws(uint64_t seed, uint64_t draw_count);

#endif
