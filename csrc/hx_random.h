/* A source of random numbers that starts anew with each item.
 *
 * Stands in front of the generator behind numpy.random's global functions, through NumPy's C
 * interface for bit generators (numpy/random/bitgen.h). Starting anew costs four multiplications,
 * so that a loader which never draws pays next to nothing.
 */
#ifndef HX_RANDOM_H
#define HX_RANDOM_H

#include <stdint.h>

/* bitgen_t of NumPy's C interface. */
struct hx_bitgen {
    void *state;
    uint64_t (*next_uint64)(void *state);
    uint32_t (*next_uint32)(void *state);
    double (*next_double)(void *state);
    uint64_t (*next_raw)(void *state);
};

struct hx_item_random {
    uint64_t words[4];        /* state of xoshiro256** */
    struct hx_bitgen inner;   /* the generator that the user seeds himself; borrowed */
    uint32_t is_inner_chosen; /* the user has seeded: draw from `inner` until the next item */
    uint32_t is_drawn;        /* something was drawn since the item began */
};

/* Begin an item: what is drawn from now on depends on seed alone. */
void hx_item_random_begin(struct hx_item_random *random, uint64_t seed);

/* A bit generator that draws from `random`, which must outlive it. */
struct hx_bitgen hx_item_random_bitgen(struct hx_item_random *random);

#endif
