/* XLA FFI handlers over the core. */
#ifndef HX_XLA_H
#define HX_XLA_H

struct XLA_FFI_CallFrame;
struct XLA_FFI_Error;

/* Handler "hydrax_draw": copies draws into the results of a custom call.
 *
 * Arguments: the number that hx_draw_create() gave, uint32 (...) with equal elements, so that
 * programs differ in no attribute; the numbers of the draws, uint32 (...); and the rest of their
 * states, uint32 (..., HX_DRAW_STATE_WORDS): the fingerprint, the key, and the high word of the
 * number. Results: the arrays of the engine, each with the leading dimensions of the arguments.
 * Runs on any thread of XLA, without the GIL, which it takes to describe an error.
 */
struct XLA_FFI_Error *hx_xla_draw(struct XLA_FFI_CallFrame *frame);

#endif
