/* C11 atomics with the memory order as part of each name.
 *
 * Words that several processes share are touched only through these. There are no free-standing
 * fences: ThreadSanitizer does not model them, so where two words must be seen in one order
 * (announce, then look again), both sides use the seq_cst operations.
 */
#ifndef HX_ATOMIC_H
#define HX_ATOMIC_H

#include <stdatomic.h>
#include <stdint.h>

static inline uint32_t hx_load_relaxed_u32(const _Atomic uint32_t *word)
{
    return atomic_load_explicit(word, memory_order_relaxed);
}

static inline uint32_t hx_load_acquire_u32(const _Atomic uint32_t *word)
{
    return atomic_load_explicit(word, memory_order_acquire);
}

static inline uint32_t hx_load_seq_cst_u32(const _Atomic uint32_t *word)
{
    return atomic_load_explicit(word, memory_order_seq_cst);
}

static inline void hx_store_relaxed_u32(_Atomic uint32_t *word, uint32_t value)
{
    atomic_store_explicit(word, value, memory_order_relaxed);
}

static inline void hx_store_release_u32(_Atomic uint32_t *word, uint32_t value)
{
    atomic_store_explicit(word, value, memory_order_release);
}

static inline void hx_store_seq_cst_u32(_Atomic uint32_t *word, uint32_t value)
{
    atomic_store_explicit(word, value, memory_order_seq_cst);
}

/* These return the value from before the operation. */
static inline uint32_t hx_add_relaxed_u32(_Atomic uint32_t *word, uint32_t value)
{
    return atomic_fetch_add_explicit(word, value, memory_order_relaxed);
}

static inline uint32_t hx_add_seq_cst_u32(_Atomic uint32_t *word, uint32_t value)
{
    return atomic_fetch_add_explicit(word, value, memory_order_seq_cst);
}

static inline uint32_t hx_sub_acq_rel_u32(_Atomic uint32_t *word, uint32_t value)
{
    return atomic_fetch_sub_explicit(word, value, memory_order_acq_rel);
}

static inline uint64_t hx_load_relaxed_u64(const _Atomic uint64_t *word)
{
    return atomic_load_explicit(word, memory_order_relaxed);
}

static inline uint64_t hx_load_seq_cst_u64(const _Atomic uint64_t *word)
{
    return atomic_load_explicit(word, memory_order_seq_cst);
}

static inline void hx_store_relaxed_u64(_Atomic uint64_t *word, uint64_t value)
{
    atomic_store_explicit(word, value, memory_order_relaxed);
}

static inline void hx_store_seq_cst_u64(_Atomic uint64_t *word, uint64_t value)
{
    atomic_store_explicit(word, value, memory_order_seq_cst);
}

static inline void hx_set_bits_seq_cst_u64(_Atomic uint64_t *word, uint64_t bits)
{
    atomic_fetch_or_explicit(word, bits, memory_order_seq_cst);
}

static inline void hx_clear_bits_seq_cst_u64(_Atomic uint64_t *word, uint64_t bits)
{
    atomic_fetch_and_explicit(word, ~bits, memory_order_seq_cst);
}

static inline uint64_t hx_add_relaxed_u64(_Atomic uint64_t *word, uint64_t value)
{
    return atomic_fetch_add_explicit(word, value, memory_order_relaxed);
}

/* Keep the stores before this and after it in this order in the program. A process dies between
 * two instructions, and what came before has happened: for whoever goes on after a death the order
 * of the program is all that counts, so this orders the compiler and not the processor. */
static inline void hx_order_steps(void)
{
    atomic_signal_fence(memory_order_seq_cst);
}

#endif
