/* An array in counted memory as a Python object: a Tensor, or a DLPack capsule.
 *
 * Both take offset, shape tuple, DLPack type code and bits, as `args`. They return a new reference,
 * or NULL with an exception; it holds a reference to the memory of its own.
 */
#ifndef HX_PY_TENSOR_H
#define HX_PY_TENSOR_H

#include "hx_dlpack.h"
#include "py_common.h"

PyObject *core_tensor_new(struct core_state *state, const struct hx_dlpack_memory *memory,
                          PyObject *const *args, Py_ssize_t nargs);
PyObject *core_capsule_new(const struct hx_dlpack_memory *memory, PyObject *const *args,
                           Py_ssize_t nargs);

#endif
