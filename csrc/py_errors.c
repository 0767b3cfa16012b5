/* Status code -> Python exception: the only place that knows both. */
#include "py_errors.h"

#include <errno.h>
#include <string.h>

PyObject *core_raise(enum hx_status status, const char *what)
{
    const int error = errno;
    switch (status) {
    case HX_NO_MEMORY:
        PyErr_Format(PyExc_MemoryError, "%s: memory could not be reserved", what);
        break;
    case HX_TIMEOUT:
        PyErr_Format(PyExc_TimeoutError, "%s: the deadline passed", what);
        break;
    case HX_CLOSED:
        PyErr_Format(PyExc_RuntimeError, "%s: the arena is closed", what);
        break;
    case HX_BAD_ARENA:
        PyErr_Format(PyExc_ValueError, "%s: not an arena of layout version %u", what,
                     HX_LAYOUT_VERSION);
        break;
    case HX_SYSTEM:
        errno = error;
        PyErr_SetFromErrno(PyExc_OSError);
        break;
    default:
        PyErr_Format(PyExc_SystemError, "%s: unexpected status %d", what, (int)status);
        break;
    }
    return NULL;
}
