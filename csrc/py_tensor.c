/* Type Tensor: one array in counted memory, for DLPack; and the capsules themselves. */
#include "py_tensor.h"

#define CAPSULE_NAME "dltensor"
#define CAPSULE_NAME_VERSIONED "dltensor_versioned"

struct tensor_object {
    PyObject_HEAD struct hx_dlpack_memory memory; /* a reference is owned, if owner is set */
    struct hx_dlpack_spec spec;
};

/* Check a tensor's place against its memory. Returns -1 with an exception. */
static int check_extent(const struct hx_dlpack_memory *memory, const struct hx_dlpack_spec *spec)
{
    const uint64_t limit = memory->nbytes;
    uint64_t nbytes = (spec->dtype.bits + 7u) / 8u;
    int is_inside = spec->offset <= limit;
    for (int32_t i = 0; i < spec->ndim; i++) {
        if (spec->shape[i] == 0)
            return is_inside ? 0
                             : (PyErr_SetString(PyExc_ValueError, "outside the slot or file"), -1);
    }
    for (int32_t i = 0; is_inside && i < spec->ndim; i++) {
        is_inside = spec->shape[i] > 0 && nbytes <= limit / (uint64_t)spec->shape[i];
        nbytes *= (uint64_t)spec->shape[i];
    }
    if (!is_inside || nbytes > limit - spec->offset) {
        PyErr_SetString(PyExc_ValueError, "the array does not fit into the slot or file");
        return -1;
    }
    return 0;
}

/* Read offset, shape, type code and bits, and check them. Returns -1 with an exception. */
static int parse_spec(const struct hx_dlpack_memory *memory, PyObject *const *args,
                      Py_ssize_t nargs, struct hx_dlpack_spec *spec)
{
    Py_ssize_t ndim;
    if (nargs != 4 || !PyTuple_Check(args[1])) {
        PyErr_SetString(PyExc_TypeError, "expected offset, shape tuple, type code and bits");
        return -1;
    }
    ndim = PyTuple_Size(args[1]);
    if (ndim > HX_DLPACK_MAX_NDIM) {
        PyErr_SetString(PyExc_ValueError, "arrays have at most 64 dimensions");
        return -1;
    }
    spec->offset = PyLong_AsUnsignedLongLong(args[0]);
    spec->ndim = (int32_t)ndim;
    for (Py_ssize_t i = 0; i < ndim; i++)
        spec->shape[i] = PyLong_AsLongLong(PyTuple_GetItem(args[1], i)); /* borrowed */
    spec->dtype.code = (uint8_t)PyLong_AsUnsignedLong(args[2]);
    spec->dtype.bits = (uint8_t)PyLong_AsUnsignedLong(args[3]);
    spec->dtype.lanes = 1;
    return PyErr_Occurred() ? -1 : check_extent(memory, spec);
}

/* Destructor of a capsule that nobody consumed; a consumer renames it. */
static void end_capsule(PyObject *capsule)
{
    struct hx_dlpack_managed *managed;
    if (!PyCapsule_IsValid(capsule, CAPSULE_NAME))
        return;
    managed = PyCapsule_GetPointer(capsule, CAPSULE_NAME);
    managed->deleter(managed);
}

static void end_capsule_versioned(PyObject *capsule)
{
    struct hx_dlpack_managed_versioned *managed;
    if (!PyCapsule_IsValid(capsule, CAPSULE_NAME_VERSIONED))
        return;
    managed = PyCapsule_GetPointer(capsule, CAPSULE_NAME_VERSIONED);
    managed->deleter(managed);
}

/* A new, unversioned capsule over an array; NULL with an exception. */
static PyObject *make_capsule(const struct hx_dlpack_memory *memory,
                              const struct hx_dlpack_spec *spec)
{
    struct hx_dlpack_managed *managed = hx_dlpack_export(memory, spec);
    PyObject *capsule;
    if (managed == NULL)
        return PyErr_NoMemory();
    capsule = PyCapsule_New(managed, CAPSULE_NAME, end_capsule);
    if (capsule == NULL)
        managed->deleter(managed);
    return capsule;
}

static PyObject *make_capsule_versioned(const struct hx_dlpack_memory *memory,
                                        const struct hx_dlpack_spec *spec)
{
    struct hx_dlpack_managed_versioned *managed = hx_dlpack_export_versioned(memory, spec);
    PyObject *capsule;
    if (managed == NULL)
        return PyErr_NoMemory();
    capsule = PyCapsule_New(managed, CAPSULE_NAME_VERSIONED, end_capsule_versioned);
    if (capsule == NULL)
        managed->deleter(managed);
    return capsule;
}

PyObject *core_tensor_new(struct core_state *state, const struct hx_dlpack_memory *memory,
                          PyObject *const *args, Py_ssize_t nargs)
{
    allocfunc allocate = (allocfunc)PyType_GetSlot(state->tensor_type, Py_tp_alloc);
    struct hx_dlpack_spec spec;
    struct tensor_object *tensor;
    if (parse_spec(memory, args, nargs, &spec) != 0)
        return NULL;
    tensor = (struct tensor_object *)allocate(state->tensor_type, 0);
    if (tensor != NULL) {
        memory->retain(memory->owner, memory->part);
        tensor->memory = *memory;
        tensor->spec = spec;
    }
    return (PyObject *)tensor;
}

PyObject *core_capsule_new(const struct hx_dlpack_memory *memory, PyObject *const *args,
                           Py_ssize_t nargs)
{
    struct hx_dlpack_spec spec;
    return parse_spec(memory, args, nargs, &spec) == 0 ? make_capsule(memory, &spec) : NULL;
}

static void tensor_dealloc(PyObject *object)
{
    struct tensor_object *self = (struct tensor_object *)object;
    if (self->memory.owner != NULL)
        self->memory.release(self->memory.owner, self->memory.part);
    core_free_instance(object);
}

static PyObject *tensor_dlpack(PyObject *object, PyObject *args, PyObject *kwargs)
{
    static char *names[] = {"stream", "max_version", "dl_device", "copy", NULL};
    struct tensor_object *self = (struct tensor_object *)object;
    PyObject *stream = Py_None, *max_version = Py_None, *device = Py_None, *copy = Py_None;
    PyObject *empty = NULL, *result = NULL;
    long major = 0;
    /* The protocol's arguments are keyword-only. */
    if (PyTuple_Size(args) != 0) {
        PyErr_SetString(PyExc_TypeError, "__dlpack__() takes keyword arguments only");
        goto cleanup;
    }
    empty = PyTuple_New(0);
    if (empty == NULL || !PyArg_ParseTupleAndKeywords(empty, kwargs, "|OOOO", names, &stream,
                                                      &max_version, &device, &copy))
        goto cleanup;
    if (stream != Py_None) {
        PyErr_SetString(PyExc_BufferError, "memory of the CPU has no stream");
        goto cleanup;
    }
    if (copy == Py_True) {
        PyErr_SetString(PyExc_BufferError, "a batch array is exported without a copy only");
        goto cleanup;
    }
    if (device != Py_None) {
        long type, id;
        if (!PyArg_ParseTuple(device, "ll", &type, &id))
            goto cleanup;
        if (type != HX_DLPACK_CPU || id != 0) {
            PyErr_SetString(PyExc_BufferError, "a batch array is on the CPU");
            goto cleanup;
        }
    }
    if (max_version != Py_None) {
        long minor;
        if (!PyArg_ParseTuple(max_version, "ll", &major, &minor))
            goto cleanup;
    }
    result = major >= HX_DLPACK_MAJOR ? make_capsule_versioned(&self->memory, &self->spec)
                                      : make_capsule(&self->memory, &self->spec);

cleanup:
    Py_XDECREF(empty);
    return result;
}

static PyObject *tensor_dlpack_device(PyObject *object, PyObject *unused)
{
    (void)object;
    (void)unused;
    return Py_BuildValue("(ii)", HX_DLPACK_CPU, 0);
}

static PyMethodDef tensor_methods[] = {
    {"__dlpack__", (PyCFunction)(void (*)(void))tensor_dlpack, METH_VARARGS | METH_KEYWORDS,
     "__dlpack__(*, stream=None, max_version=None, dl_device=None, copy=None)\n--\n\n"
     "A new DLPack capsule."},
    {"__dlpack_device__", tensor_dlpack_device, METH_NOARGS, "__dlpack_device__()\n--\n\nThe CPU."},
    {NULL, NULL, 0, NULL},
};

static PyType_Slot tensor_slots[] = {
    {Py_tp_doc, "One array of a batch, for consumers of DLPack."},
    {Py_tp_dealloc, tensor_dealloc},
    {Py_tp_methods, tensor_methods},
    {0, NULL},
};

static PyType_Spec tensor_spec = {
    .name = "hydrax._core.Tensor",
    .basicsize = sizeof(struct tensor_object),
    .flags = Py_TPFLAGS_DEFAULT | Py_TPFLAGS_IMMUTABLETYPE | Py_TPFLAGS_DISALLOW_INSTANTIATION,
    .slots = tensor_slots,
};

PyTypeObject *core_make_tensor_type(PyObject *module)
{
    return (PyTypeObject *)PyType_FromModuleAndSpec(module, &tensor_spec, NULL);
}
