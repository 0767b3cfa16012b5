/* Keyed permutation of [0, count): a Feistel network over mixed radices, with cycle walking.
 *
 * A value x is written as (l, r) with l below `left` and r below `right`, both about the square
 * root of count. Each round adds a keyed function of one half to the other, modulo that half's
 * size, which is a bijection whatever the function is. left * right exceeds count by less than
 * left, so a walk outside [0, count) is rare; it goes on until it is back inside, which keeps the
 * whole a bijection (Black and Rogaway, "Ciphers with Arbitrary Finite Domains", 2002).
 *
 * A few values are shuffled by Fisher and Yates's method instead: with both halves of odd size all
 * rounds are even permutations, which leaves out half of the orders. That can be seen in a handful
 * of batches, and in nothing larger.
 */
#include "hx_permute.h"

/* Small alphabets take more rounds to mix, and cost little. */
enum { ROUNDS = 8, ROUNDS_FEW = 16, FEW = 4096 };

/* The 64-bit finaliser of MurmurHash3 with the constants of SplitMix64 (Steele et al., 2014). */
static inline uint64_t finalise(uint64_t x)
{
    x ^= x >> 30;
    x *= UINT64_C(0xbf58476d1ce4e5b9);
    x ^= x >> 27;
    x *= UINT64_C(0x94d049bb133111eb);
    return x ^ (x >> 31);
}

uint64_t hx_mix(uint64_t a, uint64_t b)
{
    return finalise(finalise(a + UINT64_C(0x9e3779b97f4a7c15)) ^
                    (b * UINT64_C(0xd1342543de82ef95) + UINT64_C(0x632be59bd9b4e019)));
}

/* A number below size (size at most 2**32) that depends on all bits of x. */
static inline uint64_t below(uint64_t x, uint64_t size)
{
    return ((finalise(x) >> 32) * size) >> 32;
}

/* The smallest root with root * root >= value, for values of at most 63 bits (Newton's method from
 * above, in whole numbers). */
static uint64_t square_root_up(uint64_t value)
{
    uint64_t root = UINT64_C(1) << 32;
    uint64_t next = (root + value / root) / 2;
    while (next < root) {
        root = next;
        next = (root + value / root) / 2;
    }
    return root * root < value ? root + 1 : root;
}

static void shuffle(struct hx_permutation *permutation)
{
    for (uint64_t i = 0; i < permutation->count; i++) {
        const uint64_t j = below(hx_mix(permutation->key, i), i + 1);
        permutation->small[i] = permutation->small[j];
        permutation->small[j] = (uint8_t)i;
    }
}

struct hx_permutation hx_permutation_make(uint64_t key, uint64_t count)
{
    struct hx_permutation permutation = {.count = count, .left = 1, .right = 1, .key = key};
    permutation.rounds = count < FEW ? ROUNDS_FEW : ROUNDS;
    if (count <= HX_PERMUTE_SMALL) {
        shuffle(&permutation);
    } else {
        permutation.left = square_root_up(count);
        permutation.right = (count + permutation.left - 1) / permutation.left;
    }
    return permutation;
}

uint64_t hx_permutation_at(const struct hx_permutation *permutation, uint64_t position)
{
    const uint64_t left = permutation->left;
    const uint64_t right = permutation->right;
    uint64_t x = position;
    if (permutation->count <= HX_PERMUTE_SMALL)
        return permutation->small[position];
    do {
        uint64_t l = x / right;
        uint64_t r = x - l * right;
        uint64_t round_key = permutation->key;
        for (uint32_t round = 0; round < permutation->rounds; round += 2) {
            round_key += UINT64_C(0x9e3779b97f4a7c15);
            l += below(round_key ^ (r * UINT64_C(0xd1342543de82ef95)), left);
            if (l >= left)
                l -= left;
            round_key += UINT64_C(0x9e3779b97f4a7c15);
            r += below(round_key ^ (l * UINT64_C(0xd1342543de82ef95)), right);
            if (r >= right)
                r -= right;
        }
        x = l * right + r;
    } while (x >= permutation->count);
    return x;
}
