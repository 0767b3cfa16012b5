/* Type Draws (an engine that draws from arenas), and the XLA handler that draws. */
#include <stdlib.h>
#include <string.h>
#include <time.h>

#include "hx_atomic.h"
#include "hx_draw.h"
#include "hx_interrupt.h"
#include "hx_wait.h"
#include "hx_xla.h"
#include "py_common.h"
#include "py_errors.h"

struct draws_object {
    PyObject_HEAD struct hx_draw *engine; /* owned reference */
    uint64_t id;
};

static struct hx_draw *engine_of(PyObject *object)
{
    return ((struct draws_object *)object)->engine;
}

/* The text of a Python str as a new C string, or NULL. */
static char *copy_text(PyObject *text)
{
    Py_ssize_t length;
    const char *bytes = PyUnicode_AsUTF8AndSize(text, &length);
    char *copy = bytes == NULL ? NULL : malloc((size_t)length + 1);
    if (copy != NULL) {
        memcpy(copy, bytes, (size_t)length);
        copy[length] = '\0';
    }
    return copy;
}

/* Ask Python what to say about trouble. Takes the GIL. */
static char *describe_in_python(void *context, const struct hx_draw_report *report)
{
    const PyGILState_STATE gil = PyGILState_Ensure();
    PyObject *function = Py_XNewRef((PyObject *)hx_draw_context(context));
    PyObject *payload = NULL, *key = NULL, *text = NULL;
    char *copy = NULL;
    if (function == NULL)
        goto cleanup;
    payload = report->payload == NULL
                  ? Py_NewRef(Py_None)
                  : PyBytes_FromStringAndSize(report->payload, (Py_ssize_t)report->payload_nbytes);
    key = PyBytes_FromStringAndSize((const char *)report->key.words, sizeof report->key.words);
    if (payload == NULL || key == NULL)
        goto cleanup;
    text = PyObject_CallFunction(function, "iIiKOKO", (int)report->trouble,
                                 (unsigned int)report->worker, (int)report->has_no_memory,
                                 (unsigned long long)report->generation, key,
                                 (unsigned long long)report->draw, payload);
    if (text != NULL)
        copy = copy_text(text);

cleanup:
    if (PyErr_Occurred() && PyErr_ExceptionMatches(PyExc_KeyboardInterrupt)) {
        /* It is for the program's caller, and comes again there. */
        PyErr_Clear();
        PyErr_SetInterrupt();
    } else if (PyErr_Occurred()) {
        PyErr_WriteUnraisable(function);
    }
    Py_XDECREF(text);
    Py_XDECREF(key);
    Py_XDECREF(payload);
    Py_XDECREF(function);
    PyGILState_Release(gil);
    return copy;
}

/* Threads in describe(), and whether the interpreter ends: a thread that asks it for the GIL then is
 * ended, which XLA's threads do not survive. */
static _Atomic uint32_t describing;
static _Atomic uint32_t is_ending;

/* An hx_draw_describe. Takes the GIL while there is one. */
static char *describe(void *context, const struct hx_draw_report *report)
{
    char *text;
    /* Announce, then look; core_end_descriptions() does it the other way round. */
    hx_add_seq_cst_u32(&describing, 1);
    text = hx_load_seq_cst_u32(&is_ending) ? NULL : describe_in_python(context, report);
    hx_sub_acq_rel_u32(&describing, 1);
    return text;
}

PyObject *core_end_descriptions(PyObject *module, PyObject *unused)
{
    const struct timespec pause = {.tv_nsec = 1000000};
    (void)module;
    (void)unused;
    hx_store_seq_cst_u32(&is_ending, 1);
    Py_BEGIN_ALLOW_THREADS for (int i = 0; i < 1000 && hx_load_seq_cst_u32(&describing) != 0; i++)
        nanosleep(&pause, NULL);
    Py_END_ALLOW_THREADS return Py_NewRef(Py_None);
}

/* The arrays of a draw from a sequence of (offset, draw_nbytes); new from malloc, or NULL. */
static struct hx_draw_array *parse_arrays(PyObject *sequence, uint32_t *count)
{
    const Py_ssize_t length = PySequence_Size(sequence);
    struct hx_draw_array *arrays;
    if (length < 0)
        return NULL;
    arrays = malloc(((size_t)length + 1) * sizeof *arrays);
    if (arrays == NULL) {
        PyErr_NoMemory();
        return NULL;
    }
    for (Py_ssize_t i = 0; i < length; i++) {
        unsigned long long offset, nbytes;
        PyObject *pair = PySequence_GetItem(sequence, i);
        const int is_parsed = pair != NULL && PyArg_ParseTuple(pair, "KK", &offset, &nbytes);
        Py_XDECREF(pair);
        if (!is_parsed) {
            free(arrays);
            return NULL;
        }
        arrays[i] = (struct hx_draw_array){.offset = offset, .draw_nbytes = nbytes};
    }
    *count = (uint32_t)length;
    return arrays;
}

static PyObject *draws_new(PyTypeObject *type, PyObject *args, PyObject *kwargs)
{
    static char *names[] = {"describe", "arrays",        "fingerprint", "block_draws", "draw_items",
                            "ahead",    "ordered_draws", "timeout_ns",  NULL};
    allocfunc allocate = (allocfunc)PyType_GetSlot(type, Py_tp_alloc);
    unsigned int fingerprint, block_draws, draw_items, ahead;
    unsigned long long ordered_draws;
    PyObject *function, *sequence, *timeout;
    struct hx_draw_config config;
    struct hx_draw_array *arrays = NULL;
    struct draws_object *self = NULL;
    enum hx_status status;
    memset(&config, 0, sizeof config);
    if (!PyArg_ParseTupleAndKeywords(args, kwargs, "OOIIIIKO", names, &function, &sequence,
                                     &fingerprint, &block_draws, &draw_items, &ahead,
                                     &ordered_draws, &timeout))
        return NULL;
    if (block_draws < 1 || draw_items < 1 || ordered_draws < 1) {
        PyErr_SetString(PyExc_ValueError, "counts must be at least 1");
        return NULL;
    }
    config.timeout_ns = timeout == Py_None ? HX_FOREVER : PyLong_AsUnsignedLongLong(timeout);
    if (PyErr_Occurred())
        return NULL;
    config.fingerprint = fingerprint;
    config.block_draws = block_draws;
    config.draw_items = draw_items;
    config.ahead = ahead;
    config.ordered_draws = ordered_draws;
    arrays = parse_arrays(sequence, &config.array_count);
    if (arrays == NULL)
        return NULL;
    self = (struct draws_object *)allocate(type, 0);
    if (self == NULL)
        goto cleanup;
    status = hx_draw_create(&config, arrays, describe, &self->engine, &self->id);
    if (status != HX_OK) {
        core_raise(status, "making an engine");
        Py_CLEAR(self);
        goto cleanup;
    }
    hx_draw_set_context(self->engine, Py_NewRef(function));

cleanup:
    free(arrays);
    return (PyObject *)self;
}

static void draws_dealloc(PyObject *object)
{
    struct hx_draw *engine = engine_of(object);
    if (engine != NULL) {
        PyObject *function = hx_draw_context(engine);
        hx_draw_set_context(engine, NULL);
        Py_XDECREF(function);
        hx_draw_close(engine);
        hx_draw_release(engine);
    }
    core_free_instance(object);
}

static PyObject *draws_attach(PyObject *object, PyObject *argument)
{
    struct hx_arena *arena = NULL;
    enum hx_status status;
    if (argument != Py_None) {
        arena = core_arena_get(core_state_of(Py_TYPE(object)), argument);
        if (arena == NULL)
            return NULL;
    }
    status = hx_draw_attach(engine_of(object), arena);
    return status == HX_OK ? Py_NewRef(Py_None) : core_raise(status, "attaching an arena");
}

static PyObject *draws_close(PyObject *object, PyObject *unused)
{
    (void)unused;
    hx_draw_close(engine_of(object));
    return Py_NewRef(Py_None);
}

static PyObject *draws_abandon(PyObject *object, PyObject *unused)
{
    (void)unused;
    hx_draw_abandon(engine_of(object));
    return Py_NewRef(Py_None);
}

/* Read a key from a bytes object, borrowed. Returns 0, or -1 with an exception. */
static int read_key(PyObject *words, struct hx_draw_key *key)
{
    if (PyBytes_Size(words) != (Py_ssize_t)sizeof key->words) {
        PyErr_Format(PyExc_ValueError, "a key has %zu bytes", sizeof key->words);
        return -1;
    }
    memcpy(key->words, PyBytes_AsString(words), sizeof key->words);
    return 0;
}

static PyObject *draws_prepare(PyObject *object, PyObject *args)
{
    struct hx_draw_key key;
    unsigned long long draw;
    PyObject *words;
    if (!PyArg_ParseTuple(args, "SK", &words, &draw) || read_key(words, &key) != 0)
        return NULL;
    hx_draw_prepare(engine_of(object), &key, draw);
    return Py_NewRef(Py_None);
}

static void release_views(Py_buffer *views, Py_ssize_t count)
{
    for (Py_ssize_t i = 0; i < count; i++)
        PyBuffer_Release(&views[i]);
}

static PyObject *draws_copy(PyObject *object, PyObject *args)
{
    struct hx_draw *engine = engine_of(object);
    const struct hx_draw_config *config = hx_draw_get_config(engine);
    struct hx_draw_report report;
    struct hx_draw_key key;
    unsigned long long draw;
    Py_ssize_t view_count = 0;
    PyObject *words, *targets, *result = NULL;
    Py_buffer *views = NULL;
    uint8_t **pointers = NULL;
    enum hx_status status;
    char *message = NULL;
    if (!PyArg_ParseTuple(args, "SKO", &words, &draw, &targets) || read_key(words, &key) != 0)
        return NULL;
    if (PySequence_Size(targets) != (Py_ssize_t)config->array_count) {
        PyErr_SetString(PyExc_ValueError, "copy takes a key, a draw and one target per array");
        return NULL;
    }
    views = malloc((config->array_count + 1) * sizeof *views);
    pointers = malloc((config->array_count + 1) * sizeof *pointers);
    if (views == NULL || pointers == NULL) {
        PyErr_NoMemory();
        goto cleanup;
    }
    for (uint32_t i = 0; i < config->array_count; i++) {
        PyObject *target = PySequence_GetItem(targets, i);
        const int error =
            target == NULL ? -1 : PyObject_GetBuffer(target, &views[i], PyBUF_WRITABLE);
        Py_XDECREF(target); /* the view holds it */
        if (error != 0)
            goto cleanup;
        view_count += 1;
        if (views[i].len != (Py_ssize_t)hx_draw_arrays(engine)[i].draw_nbytes) {
            PyErr_SetString(PyExc_ValueError, "a target has the wrong size");
            goto cleanup;
        }
        pointers[i] = views[i].buf;
    }
    Py_BEGIN_ALLOW_THREADS status = hx_draw_copy(engine, &key, draw, 0, pointers, &report);
    Py_END_ALLOW_THREADS if (status == HX_OK)
    {
        result = Py_NewRef(Py_None);
        goto cleanup;
    }
    message = hx_draw_describe_report(engine, &report);
    hx_draw_report_clear(&report);
    /* After an interrupt it is its handler that says what happens. */
    if (PyErr_CheckSignals() == 0)
        PyErr_SetString(PyExc_RuntimeError, message != NULL ? message : "a draw failed");
    free(message);

cleanup:
    if (views != NULL)
        release_views(views, view_count);
    free(pointers);
    free(views);
    return result;
}

static PyObject *draws_get_id(PyObject *object, void *closure)
{
    (void)closure;
    return PyLong_FromUnsignedLongLong(((struct draws_object *)object)->id);
}

static PyObject *draws_get_blocks_requested(PyObject *object, void *closure)
{
    (void)closure;
    return PyLong_FromUnsignedLongLong(hx_draw_blocks_requested(engine_of(object)));
}

static PyObject *draws_get_generation(PyObject *object, void *closure)
{
    (void)closure;
    return PyLong_FromUnsignedLongLong(hx_draw_generation(engine_of(object)));
}

static PyGetSetDef draws_getset[] = {
    {"generation", draws_get_generation, NULL, "Grows with each attach().", NULL},
    {"id", draws_get_id, NULL, "Number by which the XLA handler finds it.", NULL},
    {"blocks_requested", draws_get_blocks_requested, NULL, "Blocks asked for so far.", NULL},
    {NULL, NULL, NULL, NULL, NULL},
};

static PyMethodDef draws_methods[] = {
    {"attach", draws_attach, METH_O,
     "attach(arena, /)\n--\n\nLoad from this arena from now on; None makes draws wait."},
    {"close", draws_close, METH_NOARGS, "close()\n--\n\nEnd all draws, for good."},
    {"abandon", draws_abandon, METH_NOARGS,
     "abandon()\n--\n\nIn a fork of the owner: refuse draws, touch nothing."},
    {"prepare", draws_prepare, METH_VARARGS,
     "prepare(key, draw, /)\n--\n\nAsk for the block of a draw without waiting for it."},
    {"copy", draws_copy, METH_VARARGS,
     "copy(key, draw, targets, /)\n--\n\n"
     "Copy a draw into writable buffers; RuntimeError with the text of describe() if it fails."},
    {NULL, NULL, 0, NULL},
};

PyDoc_STRVAR(
    draws_doc,
    "Draws(describe, arrays, fingerprint, block_draws, draw_items, ahead, ordered_draws, "
    "timeout_ns)\n--\n\n"
    "Draws mini-batches from an arena by their numbers, for XLA programs.\n\n"
    "arrays is a sequence of (offset in a slot, bytes of one draw). describe is called as\n"
    "describe(trouble, worker, has_no_memory, generation, key, draw, payload), on any\n"
    "thread, when a draw fails, and returns the text of the error.");

static PyType_Slot draws_slots[] = {
    {Py_tp_doc, (void *)draws_doc}, {Py_tp_new, draws_new},       {Py_tp_dealloc, draws_dealloc},
    {Py_tp_methods, draws_methods}, {Py_tp_getset, draws_getset}, {0, NULL},
};

static PyType_Spec draws_spec = {
    .name = "hydrax._core.Draws",
    .basicsize = sizeof(struct draws_object),
    .flags = Py_TPFLAGS_DEFAULT | Py_TPFLAGS_IMMUTABLETYPE,
    .slots = draws_slots,
};

PyTypeObject *core_make_draws_type(PyObject *module)
{
    return (PyTypeObject *)PyType_FromModuleAndSpec(module, &draws_spec, NULL);
}

PyObject *core_draw_handler(PyObject *module, PyObject *unused)
{
    /* C has no conversion between pointers to functions and to objects; POSIX has the bytes. */
    struct XLA_FFI_Error *(*handler)(struct XLA_FFI_CallFrame *) = hx_xla_draw;
    void *pointer;
    (void)module;
    (void)unused;
    memcpy(&pointer, &handler, sizeof pointer);
    return PyCapsule_New(pointer, NULL, NULL);
}

PyObject *core_watch_interrupts(PyObject *module, PyObject *unused)
{
    enum hx_status status = hx_interrupt_watch();
    (void)module;
    (void)unused;
    return status == HX_OK ? Py_NewRef(Py_None) : core_raise(status, "watching for interrupts");
}
