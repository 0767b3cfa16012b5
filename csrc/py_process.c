/* What a worker process needs of the system beyond Python's os module. */
#include "hx_wait.h"
#include "py_common.h"
#include "py_errors.h"

PyObject *core_start_guard(PyObject *module, PyObject *argument) {
  enum hx_status status;
  const long fd = PyLong_AsLong(argument);
  (void)module;
  if (fd == -1 && PyErr_Occurred())
    return NULL;
  status = hx_guard_start((int)fd);
  if (status != HX_OK)
    return core_raise(status, "starting the guard of a loader process");
  return Py_NewRef(Py_None);
}
