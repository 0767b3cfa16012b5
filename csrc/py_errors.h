/* Status code -> Python exception. */
#ifndef HX_PY_ERRORS_H
#define HX_PY_ERRORS_H

#include "py_common.h"

/* Set the exception that belongs to a failed status, and return NULL. `what` says what was being
 * done, as the beginning of the message. HX_SYSTEM reads errno, so call it at once. */
PyObject *core_raise(enum hx_status status, const char *what);

#endif
