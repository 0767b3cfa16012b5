/* Type Items: reads a list or tuple without writing to the objects in it.
 *
 * Taking a reference writes to an object, and in a forked process the first write to a page copies
 * it: a loader that takes each item of a list of millions of strings ends up with a list of its
 * own. So an item is handed out as a copy, made from references that are only borrowed. No other
 * code can run while it is made: the types are exact, no thread gets the GIL, and no garbage is
 * collected meanwhile, so what is borrowed stays.
 */
#include <wchar.h>

#include "py_common.h"

/* An object that so many others refer to is handed out itself: its page is copied once for all of
 * them, and what all items share stays shared. */
#define SHARED_REFERENCE_COUNT 1000

/* An object of this size costs little more than itself when its first page is copied. */
#define LARGE_LENGTH (1 << 16)

/* Elements that are copied for one item, and how deep they may lie. */
#define ELEMENT_COUNT_LIMIT 4096
#define DEPTH_LIMIT 8

#define STACK_LENGTH 512

struct items_object {
    PyObject_HEAD PyObject *sequence; /* owned; exactly a list or a tuple */
};

/* What is known while one item is copied. */
struct copying {
    Py_ssize_t elements_left;
    int is_borrowing; /* an object that is not shared was handed out itself */
};

static PyObject *copy_object(PyObject *object, int depth, struct copying *copying);

/* The object itself. */
static PyObject *hand_out(PyObject *object, struct copying *copying)
{
    copying->is_borrowing = 1;
    return Py_NewRef(object);
}

static PyObject *copy_str(PyObject *object, struct copying *copying)
{
    wchar_t on_stack[STACK_LENGTH];
    wchar_t *buffer = on_stack;
    PyObject *copy = NULL;
    const Py_ssize_t length = PyUnicode_GetLength(object);
    if (length > LARGE_LENGTH)
        return hand_out(object, copying);
    if (length > STACK_LENGTH)
        buffer = PyMem_Malloc((size_t)length * sizeof *buffer);
    if (buffer == NULL)
        return PyErr_NoMemory();
    /* A wchar_t holds every character: surrogates stay what they are. */
    if (PyUnicode_AsWideChar(object, buffer, length) == length)
        copy = PyUnicode_FromWideChar(buffer, length);
    if (buffer != on_stack)
        PyMem_Free(buffer);
    return copy;
}

static PyObject *copy_bytes(PyObject *object, struct copying *copying)
{
    const Py_ssize_t length = PyBytes_Size(object);
    if (length > LARGE_LENGTH)
        return hand_out(object, copying);
    return PyBytes_FromStringAndSize(PyBytes_AsString(object), length);
}

static PyObject *copy_int(PyObject *object, struct copying *copying)
{
    int overflow;
    const long long value = PyLong_AsLongLongAndOverflow(object, &overflow);
    return overflow != 0 ? hand_out(object, copying) : PyLong_FromLongLong(value);
}

static PyObject *copy_tuple(PyObject *object, int depth, struct copying *copying)
{
    const Py_ssize_t length = PyTuple_Size(object);
    PyObject *copy = PyTuple_New(length);
    for (Py_ssize_t i = 0; copy != NULL && i < length; i++) {
        PyObject *element = copy_object(PyTuple_GetItem(object, i), depth + 1, copying);
        if (element == NULL)
            Py_CLEAR(copy);
        else
            PyTuple_SetItem(copy, i, element); /* steals element */
    }
    return copy;
}

static PyObject *copy_list(PyObject *object, int depth, struct copying *copying)
{
    const Py_ssize_t length = PyList_Size(object);
    PyObject *copy = PyList_New(length);
    for (Py_ssize_t i = 0; copy != NULL && i < length; i++) {
        PyObject *element = copy_object(PyList_GetItem(object, i), depth + 1, copying);
        if (element == NULL)
            Py_CLEAR(copy);
        else
            PyList_SetItem(copy, i, element); /* steals element */
    }
    return copy;
}

/* Whether hashing and comparing a key runs code of these types only. */
static int is_plain_key(PyObject *key)
{
    return PyUnicode_CheckExact(key) || PyLong_CheckExact(key) || PyBytes_CheckExact(key);
}

static PyObject *copy_dict(PyObject *object, int depth, struct copying *copying)
{
    PyObject *key, *value; /* borrowed */
    PyObject *copy = PyDict_New();
    Py_ssize_t position = 0;
    while (copy != NULL && PyDict_Next(object, &position, &key, &value)) {
        PyObject *own_key = NULL, *own_value = NULL;
        int error;
        if (!is_plain_key(key)) {
            Py_DECREF(copy);
            return hand_out(object, copying);
        }
        own_key = copy_object(key, depth + 1, copying);
        own_value = own_key == NULL ? NULL : copy_object(value, depth + 1, copying);
        error = own_value == NULL || PyDict_SetItem(copy, own_key, own_value) != 0;
        Py_XDECREF(own_key);
        Py_XDECREF(own_value);
        if (error)
            Py_CLEAR(copy);
    }
    return copy;
}

/* A copy of a borrowed object, or the object itself where a copy would not do. New reference, or
 * NULL with an exception. */
static PyObject *copy_object(PyObject *object, int depth, struct copying *copying)
{
    const PyTypeObject *type = Py_TYPE(object);
    if (Py_REFCNT(object) >= SHARED_REFERENCE_COUNT || object == Py_None || type == &PyBool_Type)
        return Py_NewRef(object);
    if (type == &PyUnicode_Type)
        return copy_str(object, copying);
    if (type == &PyBytes_Type)
        return copy_bytes(object, copying);
    if (type == &PyLong_Type)
        return copy_int(object, copying);
    if (type == &PyFloat_Type)
        return PyFloat_FromDouble(PyFloat_AsDouble(object));
    if (type == &PyTuple_Type || type == &PyList_Type || type == &PyDict_Type) {
        const Py_ssize_t length = PyObject_Size(object);
        if (depth >= DEPTH_LIMIT || length > copying->elements_left)
            return hand_out(object, copying);
        copying->elements_left -= length;
        if (type == &PyTuple_Type)
            return copy_tuple(object, depth, copying);
        if (type == &PyList_Type)
            return copy_list(object, depth, copying);
        return copy_dict(object, depth, copying);
    }
    return hand_out(object, copying);
}

static PyObject *copy_item(PyObject *self, Py_ssize_t index, struct copying *copying)
{
    PyObject *sequence = ((struct items_object *)self)->sequence;
    const int was_collecting = PyGC_Disable();
    PyObject *copy = NULL;
    PyObject *item = PyList_CheckExact(sequence) ? PyList_GetItem(sequence, index)
                                                 : PyTuple_GetItem(sequence, index); /* borrowed */
    *copying = (struct copying){.elements_left = ELEMENT_COUNT_LIMIT};
    if (item != NULL)
        copy = copy_object(item, 0, copying);
    if (was_collecting)
        PyGC_Enable();
    return copy;
}

static PyObject *items_item(PyObject *self, Py_ssize_t index)
{
    struct copying copying;
    return copy_item(self, index, &copying);
}

static PyObject *items_is_apart(PyObject *self, PyObject *argument)
{
    struct copying copying;
    const Py_ssize_t index = PyLong_AsSsize_t(argument);
    PyObject *copy = PyErr_Occurred() ? NULL : copy_item(self, index, &copying);
    if (copy == NULL)
        return NULL;
    Py_DECREF(copy);
    return PyBool_FromLong(!copying.is_borrowing);
}

static Py_ssize_t items_length(PyObject *self)
{
    return PyObject_Size(((struct items_object *)self)->sequence);
}

static PyObject *items_new(PyTypeObject *type, PyObject *args, PyObject *kwargs)
{
    static char *names[] = {"sequence", NULL};
    allocfunc allocate = (allocfunc)PyType_GetSlot(type, Py_tp_alloc);
    struct items_object *self;
    PyObject *sequence;
    if (!PyArg_ParseTupleAndKeywords(args, kwargs, "O", names, &sequence))
        return NULL;
    if (!PyList_CheckExact(sequence) && !PyTuple_CheckExact(sequence)) {
        PyErr_SetString(PyExc_TypeError, "expected a list or a tuple");
        return NULL;
    }
    self = (struct items_object *)allocate(type, 0);
    if (self != NULL)
        self->sequence = Py_NewRef(sequence);
    return (PyObject *)self;
}

/* Items refers to a sequence that may hold anything, so cycles can go through it. */
static int items_traverse(PyObject *self, visitproc visit, void *arg)
{
    Py_VISIT(Py_TYPE(self));
    Py_VISIT(((struct items_object *)self)->sequence);
    return 0;
}

static int items_clear(PyObject *self)
{
    Py_CLEAR(((struct items_object *)self)->sequence);
    return 0;
}

static void items_dealloc(PyObject *self)
{
    PyObject_GC_UnTrack(self);
    items_clear(self);
    core_free_instance(self);
}

PyDoc_STRVAR(items_doc,
             "Items(sequence)\n--\n\n"
             "A list or tuple that is read without writing to the objects in it.\n\n"
             "items[i] is a copy of a str, bytes, int, float, bool, None, or of a tuple, list or\n"
             "dict of them; anything else, and what many objects refer to, is handed out itself.");

static PyMethodDef items_methods[] = {
    {"is_apart", items_is_apart, METH_O,
     "is_apart(index, /)\n--\n\nWhether reading the item writes to nothing that is its own."},
    {NULL, NULL, 0, NULL},
};

static PyType_Slot items_slots[] = {
    {Py_tp_doc, (void *)items_doc},   {Py_tp_new, items_new},     {Py_tp_dealloc, items_dealloc},
    {Py_tp_traverse, items_traverse}, {Py_tp_clear, items_clear}, {Py_tp_methods, items_methods},
    {Py_sq_length, items_length},     {Py_sq_item, items_item},   {0, NULL},
};

static PyType_Spec items_spec = {
    .name = "hydrax._core.Items",
    .basicsize = sizeof(struct items_object),
    .flags = Py_TPFLAGS_DEFAULT | Py_TPFLAGS_IMMUTABLETYPE | Py_TPFLAGS_HAVE_GC,
    .slots = items_slots,
};

PyTypeObject *core_make_items_type(PyObject *module)
{
    return (PyTypeObject *)PyType_FromModuleAndSpec(module, &items_spec, NULL);
}
