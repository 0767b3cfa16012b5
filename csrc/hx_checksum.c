/* XXH64. */
#include "hx_checksum.h"

#include <string.h>

#define PRIME_1 UINT64_C(0x9E3779B185EBCA87)
#define PRIME_2 UINT64_C(0xC2B2AE3D27D4EB4F)
#define PRIME_3 UINT64_C(0x165667B19E3779F9)
#define PRIME_4 UINT64_C(0x85EBCA77C2B2AE63)
#define PRIME_5 UINT64_C(0x27D4EB2F165667C5)

enum { LANES = 4, LANE_NBYTES = 8, STRIPE_NBYTES = LANES * LANE_NBYTES };

static uint64_t rotate_left(uint64_t value, int count)
{
    return value << count | value >> (64 - count);
}

/* The specification reads little-endian words wherever they lie. */
static uint64_t read_u64(const uint8_t *bytes)
{
    uint64_t word;
    memcpy(&word, bytes, sizeof word);
#if __BYTE_ORDER__ == __ORDER_BIG_ENDIAN__
    word = __builtin_bswap64(word);
#endif
    return word;
}

static uint64_t read_u32(const uint8_t *bytes)
{
    uint32_t word;
    memcpy(&word, bytes, sizeof word);
#if __BYTE_ORDER__ == __ORDER_BIG_ENDIAN__
    word = __builtin_bswap32(word);
#endif
    return word;
}

static uint64_t mix_round(uint64_t lane, uint64_t word)
{
    return rotate_left(lane + word * PRIME_2, 31) * PRIME_1;
}

static uint64_t merge_lane(uint64_t hash, uint64_t lane)
{
    return (hash ^ mix_round(0, lane)) * PRIME_1 + PRIME_4;
}

uint64_t hx_checksum(const void *data, size_t nbytes, uint64_t seed)
{
    const uint8_t *next = data;
    size_t left = nbytes;
    uint64_t hash = seed + PRIME_5;
    if (left >= STRIPE_NBYTES) {
        uint64_t a = seed + PRIME_1 + PRIME_2, b = seed + PRIME_2, c = seed, d = seed - PRIME_1;
        for (; left >= STRIPE_NBYTES; left -= STRIPE_NBYTES, next += STRIPE_NBYTES) {
            a = mix_round(a, read_u64(next));
            b = mix_round(b, read_u64(next + 8));
            c = mix_round(c, read_u64(next + 16));
            d = mix_round(d, read_u64(next + 24));
        }
        hash = rotate_left(a, 1) + rotate_left(b, 7) + rotate_left(c, 12) + rotate_left(d, 18);
        hash = merge_lane(merge_lane(merge_lane(merge_lane(hash, a), b), c), d);
    }
    hash += nbytes;
    for (; left >= 8; left -= 8, next += 8)
        hash = rotate_left(hash ^ mix_round(0, read_u64(next)), 27) * PRIME_1 + PRIME_4;
    if (left >= 4) {
        hash = rotate_left(hash ^ (read_u32(next) * PRIME_1), 23) * PRIME_2 + PRIME_3;
        left -= 4;
        next += 4;
    }
    for (; left > 0; left--, next++)
        hash = rotate_left(hash ^ (*next * PRIME_5), 11) * PRIME_1;
    hash = (hash ^ hash >> 33) * PRIME_2;
    hash = (hash ^ hash >> 29) * PRIME_3;
    return hash ^ hash >> 32;
}
