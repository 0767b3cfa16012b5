/* Keyed permutation of [0, count) in O(1) memory.
 *
 * An epoch's order is a function from position to item, not an array: asking for any position
 * costs the same, and 10**9 items start as fast as 10**3.
 */
#ifndef HX_PERMUTE_H
#define HX_PERMUTE_H

#include <stdint.h>

/* Largest count that can be permuted. */
#define HX_PERMUTE_MAX ((uint64_t)INT64_MAX)

/* Up to so many values the order is shuffled outright, so that each one is equally likely. */
#define HX_PERMUTE_SMALL 16

/* What a permutation needs per evaluation, derived once from (key, count). */
struct hx_permutation {
    uint64_t count; /* values permuted */
    uint64_t left;  /* size of the left half's alphabet; left * right >= count */
    uint64_t right; /* size of the right half's alphabet */
    uint64_t key;
    uint32_t rounds;
    uint8_t small[HX_PERMUTE_SMALL]; /* the values, if there are so few */
};

/* Prepare the permutation of [0, count) that belongs to key; count at most HX_PERMUTE_MAX. */
struct hx_permutation hx_permutation_make(uint64_t key, uint64_t count);

/* Value at position; position must be below count. Never fails, takes no lock. */
uint64_t hx_permutation_at(const struct hx_permutation *permutation, uint64_t position);

/* A well-mixed 64-bit function of two words, for deriving keys. */
uint64_t hx_mix(uint64_t a, uint64_t b);

#endif
