/* What worker processes and their trainer need of the system beyond Python's os module. */
#include "hx_process.h"
#include "py_common.h"
#include "py_errors.h"

PyObject *core_start_guard(PyObject *module, PyObject *argument)
{
    enum hx_status status;
    const long fd = PyLong_AsLong(argument);
    (void)module;
    if (fd == -1 && PyErr_Occurred())
        return NULL;
    status = hx_process_guard((int)fd);
    if (status != HX_OK)
        return core_raise(status, "starting the guard of a loader process");
    return Py_NewRef(Py_None);
}

PyObject *core_take_slices(PyObject *module, PyObject *argument)
{
    const uint64_t slice_ns = PyLong_AsUnsignedLongLong(argument);
    (void)module;
    if (PyErr_Occurred())
        return NULL;
    hx_process_take_slices(slice_ns);
    return Py_NewRef(Py_None);
}

PyObject *core_signal_thread(PyObject *module, PyObject *args)
{
    int process, thread, signum;
    enum hx_status status;
    (void)module;
    if (!PyArg_ParseTuple(args, "iii:signal_thread", &process, &thread, &signum))
        return NULL;
    status = hx_process_signal_thread(process, thread, signum);
    if (status != HX_OK)
        return core_raise(status, "sending a signal to a thread");
    return Py_NewRef(Py_None);
}
