/* Module hydrax._core: initialisation, state, functions. */
#include "py_common.h"

#include "hx_draw.h"
#include "hx_permute.h"

PyDoc_STRVAR(permute_doc, "permute(key, count, position, /)\n--\n\n"
                          "Value at position of the keyed permutation of [0, count).");

static PyObject *core_permute(PyObject *module, PyObject *const *args, Py_ssize_t nargs)
{
    uint64_t key, count, position;
    struct hx_permutation permutation;
    (void)module;
    if (nargs != 3) {
        PyErr_SetString(PyExc_TypeError, "permute takes key, count and position");
        return NULL;
    }
    key = PyLong_AsUnsignedLongLongMask(args[0]);
    count = PyLong_AsUnsignedLongLong(args[1]);
    position = PyLong_AsUnsignedLongLong(args[2]);
    if (PyErr_Occurred())
        return NULL;
    if (count > HX_PERMUTE_MAX || position >= count) {
        PyErr_SetString(PyExc_ValueError,
                        "permute needs position < count and count of at most 2**63 - 1");
        return NULL;
    }
    permutation = hx_permutation_make(key, count);
    return PyLong_FromUnsignedLongLong(hx_permutation_at(&permutation, position));
}

PyDoc_STRVAR(mix_doc, "mix(a, b, /)\n--\n\nA well-mixed 64-bit function of two integers.");

static PyObject *core_mix(PyObject *module, PyObject *const *args, Py_ssize_t nargs)
{
    uint64_t a, b;
    (void)module;
    if (nargs != 2) {
        PyErr_SetString(PyExc_TypeError, "mix takes two integers");
        return NULL;
    }
    a = PyLong_AsUnsignedLongLongMask(args[0]);
    b = PyLong_AsUnsignedLongLongMask(args[1]);
    if (PyErr_Occurred())
        return NULL;
    return PyLong_FromUnsignedLongLong(hx_mix(a, b));
}

PyDoc_STRVAR(checksum_doc, "checksum(buffer, seed, /)\n--\n\nXXH64 of a buffer's bytes.");
PyDoc_STRVAR(guard_doc, "start_guard(trainer_fd, /)\n--\n\n"
                        "End this process when the process behind the pidfd ends.\n\n"
                        "Takes the descriptor.");
PyDoc_STRVAR(signal_thread_doc,
             "signal_thread(process, thread, signum, /)\n--\n\n"
             "Send a signal to one thread of another process, given by its ids.");
PyDoc_STRVAR(slices_doc, "take_slices(nanoseconds, /)\n--\n\n"
                         "Let threads with the usual time slice preempt this one when they wake.");
PyDoc_STRVAR(capsule_doc, "random_capsule(inner, /)\n--\n\n"
                          "A NumPy bit generator capsule that starts anew with each item.\n\n"
                          "``inner`` is the capsule to draw from once the user has seeded.");
PyDoc_STRVAR(draw_handler_doc, "draw_handler()\n--\n\n"
                               "Capsule of the XLA FFI handler that draws mini-batches.");
PyDoc_STRVAR(watch_doc, "watch_interrupts()\n--\n\n"
                        "Let SIGINT end programs that draw, before Python handles it.");
PyDoc_STRVAR(choose_inner_doc,
             "random_choose_inner()\n--\n\n"
             "Draw from the inner generator until the next item begins.\n\n"
             "Returns the item's seed in 32 bits, or None if it was chosen already.");
PyDoc_STRVAR(restart_doc, "random_restart()\n--\n\nBegin the current item anew.");
PyDoc_STRVAR(take_seed_doc, "random_take_seed()\n--\n\n"
                            "The seed of the current item, once per item; then None.");

static PyMethodDef core_functions[] = {
    {"permute", (PyCFunction)(void (*)(void))core_permute, METH_FASTCALL, permute_doc},
    {"mix", (PyCFunction)(void (*)(void))core_mix, METH_FASTCALL, mix_doc},
    {"checksum", (PyCFunction)(void (*)(void))core_checksum, METH_FASTCALL, checksum_doc},
    {"start_guard", core_start_guard, METH_O, guard_doc},
    {"take_slices", core_take_slices, METH_O, slices_doc},
    {"signal_thread", core_signal_thread, METH_VARARGS, signal_thread_doc},
    {"draw_handler", core_draw_handler, METH_NOARGS, draw_handler_doc},
    {"watch_interrupts", core_watch_interrupts, METH_NOARGS, watch_doc},
    {"end_descriptions", core_end_descriptions, METH_NOARGS,
     "end_descriptions()\n--\n\nThe interpreter ends: draws that fail ask Python nothing any "
     "more."},
    {"random_capsule", core_random_capsule, METH_O, capsule_doc},
    {"random_choose_inner", core_random_choose_inner, METH_NOARGS, choose_inner_doc},
    {"random_restart", core_random_restart, METH_NOARGS, restart_doc},
    {"random_take_seed", core_random_take_seed, METH_NOARGS, take_seed_doc},
    {NULL, NULL, 0, NULL},
};

struct core_state *core_state_of(PyTypeObject *type)
{
    return PyType_GetModuleState(type);
}

void core_free_instance(PyObject *self)
{
    PyTypeObject *type = Py_TYPE(self);
    freefunc release = (freefunc)PyType_GetSlot(type, Py_tp_free);
    release(self);
    Py_DECREF(type);
}

static int add_type(PyObject *module, PyTypeObject **place, PyTypeObject *type)
{
    *place = type; /* the state owns it */
    return type == NULL ? -1 : PyModule_AddType(module, type);
}

static int core_exec(PyObject *module)
{
    struct core_state *state = PyModule_GetState(module);
    if (add_type(module, &state->plan_type, core_make_plan_type(module)) < 0 ||
        add_type(module, &state->run_type, core_make_run_type(module)) < 0 ||
        add_type(module, &state->tensor_type, core_make_tensor_type(module)) < 0 ||
        add_type(module, &state->lease_type, core_make_lease_type(module)) < 0 ||
        add_type(module, &state->items_type, core_make_items_type(module)) < 0 ||
        add_type(module, &state->mapping_type, core_make_mapping_type(module)) < 0 ||
        add_type(module, &state->arena_type, core_make_arena_type(module)) < 0 ||
        add_type(module, &state->draws_type, core_make_draws_type(module)) < 0)
        return -1;
    if (PyModule_AddIntConstant(module, "TIMED_OUT", -1) < 0 ||
        PyModule_AddIntConstant(module, "INTERRUPTED", -2) < 0 ||
        PyModule_AddIntConstant(module, "CLOSED", -3) < 0 ||
        PyModule_AddIntConstant(module, "SLOT_READY", HX_SLOT_READY) < 0 ||
        PyModule_AddIntConstant(module, "SLOT_LEASED", HX_SLOT_LEASED) < 0 ||
        PyModule_AddIntConstant(module, "DRAW_FAILED", HX_DRAW_FAILED) < 0 ||
        PyModule_AddIntConstant(module, "DRAW_TIMED_OUT", HX_DRAW_TIMED_OUT) < 0 ||
        PyModule_AddIntConstant(module, "DRAW_WORKER_ENDED", HX_DRAW_WORKER_ENDED) < 0 ||
        PyModule_AddIntConstant(module, "DRAW_RELEASED", HX_DRAW_RELEASED) < 0 ||
        PyModule_AddIntConstant(module, "DRAW_INTERRUPTED", HX_DRAW_INTERRUPTED) < 0 ||
        PyModule_AddIntConstant(module, "DRAW_MISFIT", HX_DRAW_MISFIT) < 0 ||
        PyModule_AddIntConstant(module, "TRAINING", HX_PLAN_TRAINING) < 0 ||
        PyModule_AddIntConstant(module, "VALIDATION", HX_PLAN_VALIDATION) < 0 ||
        PyModule_AddIntConstant(module, "RECORD_ADDITIONAL", HX_RECORD_ADDITIONAL) < 0 ||
        PyModule_AddIntConstant(module, "RECORD_ERROR", HX_RECORD_ERROR) < 0 ||
        PyModule_AddIntConstant(module, "RECORD_NO_MEMORY", HX_RECORD_NO_MEMORY) < 0)
        return -1;
    return 0;
}

static int core_traverse(PyObject *module, visitproc visit, void *arg)
{
    struct core_state *state = PyModule_GetState(module);
    Py_VISIT(state->arena_type);
    Py_VISIT(state->items_type);
    Py_VISIT(state->draws_type);
    Py_VISIT(state->lease_type);
    Py_VISIT(state->mapping_type);
    Py_VISIT(state->plan_type);
    Py_VISIT(state->run_type);
    Py_VISIT(state->tensor_type);
    return 0;
}

static int core_clear(PyObject *module)
{
    struct core_state *state = PyModule_GetState(module);
    Py_CLEAR(state->arena_type);
    Py_CLEAR(state->items_type);
    Py_CLEAR(state->draws_type);
    Py_CLEAR(state->lease_type);
    Py_CLEAR(state->mapping_type);
    Py_CLEAR(state->plan_type);
    Py_CLEAR(state->run_type);
    Py_CLEAR(state->tensor_type);
    return 0;
}

static PyModuleDef_Slot core_slots[] = {
    {Py_mod_exec, core_exec},
    {0, NULL},
};

PyDoc_STRVAR(core_doc, "The shared-memory arena, its scheduling and its hand-over, in C.");

static PyModuleDef core_module = {
    .m_base = PyModuleDef_HEAD_INIT,
    .m_name = "hydrax._core",
    .m_doc = core_doc,
    .m_size = sizeof(struct core_state),
    .m_methods = core_functions,
    .m_slots = core_slots,
    .m_traverse = core_traverse,
    .m_clear = core_clear,
};

PyMODINIT_FUNC PyInit__core(void)
{
    return PyModuleDef_Init(&core_module);
}
