/* A source of random numbers that starts anew with each item. */
#include "hx_random.h"

#include "hx_permute.h"

void hx_item_random_begin(struct hx_item_random *random, uint64_t seed)
{
    for (uint64_t i = 0; i < 4; i++)
        random->words[i] = hx_mix(seed, i);
    random->is_inner_chosen = 0;
    random->is_drawn = 0;
}

static inline uint64_t rotate_left(uint64_t x, int bits)
{
    return (x << bits) | (x >> (64 - bits));
}

/* xoshiro256** (Blackman and Vigna, "Scrambled Linear Pseudorandom Number Generators", 2021). */
static uint64_t next_word(struct hx_item_random *random)
{
    uint64_t *s = random->words;
    const uint64_t result = rotate_left(s[1] * 5, 7) * 9;
    const uint64_t t = s[1] << 17;
    s[2] ^= s[0];
    s[3] ^= s[1];
    s[1] ^= s[2];
    s[0] ^= s[3];
    s[2] ^= t;
    s[3] = rotate_left(s[3], 45);
    return result;
}

static uint64_t next_uint64(void *state)
{
    struct hx_item_random *random = state;
    random->is_drawn = 1;
    return random->is_inner_chosen ? random->inner.next_uint64(random->inner.state)
                                   : next_word(random);
}

static uint32_t next_uint32(void *state)
{
    struct hx_item_random *random = state;
    random->is_drawn = 1;
    return random->is_inner_chosen ? random->inner.next_uint32(random->inner.state)
                                   : (uint32_t)(next_word(random) >> 32);
}

static double next_double(void *state)
{
    struct hx_item_random *random = state;
    random->is_drawn = 1;
    return random->is_inner_chosen ? random->inner.next_double(random->inner.state)
                                   : (double)(next_word(random) >> 11) * 0x1.0p-53;
}

static uint64_t next_raw(void *state)
{
    struct hx_item_random *random = state;
    random->is_drawn = 1;
    return random->is_inner_chosen ? random->inner.next_raw(random->inner.state)
                                   : next_word(random);
}

struct hx_bitgen hx_item_random_bitgen(struct hx_item_random *random)
{
    return (struct hx_bitgen){
        .state = random,
        .next_uint64 = next_uint64,
        .next_uint32 = next_uint32,
        .next_double = next_double,
        .next_raw = next_raw,
    };
}
