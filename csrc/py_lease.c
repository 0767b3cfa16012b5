/* Types Lease (a slot that the trainer holds) and Tensor (one array in it, for DLPack). */
#include "hx_dlpack.h"
#include "hx_slot.h"
#include "py_common.h"
#include "py_errors.h"

#define CAPSULE_NAME "dltensor"
#define CAPSULE_NAME_VERSIONED "dltensor_versioned"

struct lease_object {
    PyObject_HEAD struct hx_arena *arena; /* kept mapped by the lease reference that is owned */
    uint32_t slot;
};

struct tensor_object {
    PyObject_HEAD struct hx_arena *arena; /* kept mapped by the lease reference that is owned */
    uint32_t slot;
    struct hx_dlpack_spec spec;
};

PyObject *core_lease_new(struct core_state *state, struct hx_arena *arena, uint32_t slot)
{
    allocfunc allocate = (allocfunc)PyType_GetSlot(state->lease_type, Py_tp_alloc);
    struct lease_object *self = (struct lease_object *)allocate(state->lease_type, 0);
    if (self == NULL) {
        hx_slot_release(arena, slot);
        return NULL;
    }
    self->arena = arena;
    self->slot = slot;
    return (PyObject *)self;
}

static void lease_dealloc(PyObject *object)
{
    struct lease_object *self = (struct lease_object *)object;
    if (self->arena != NULL)
        hx_slot_release(self->arena, self->slot);
    core_free_instance(object);
}

static int lease_getbuffer(PyObject *object, Py_buffer *view, int flags)
{
    struct lease_object *self = (struct lease_object *)object;
    return PyBuffer_FillInfo(view, object, hx_slot_data(self->arena, self->slot),
                             (Py_ssize_t)self->arena->header->slot_nbytes, 0, flags);
}

/* Check a tensor's place against its slot. Returns -1 with an exception. */
static int check_extent(const struct hx_arena *arena, const struct hx_dlpack_spec *spec)
{
    const uint64_t limit = arena->header->slot_nbytes;
    uint64_t nbytes = (spec->dtype.bits + 7u) / 8u;
    int is_inside = spec->offset <= limit;
    for (int32_t i = 0; i < spec->ndim; i++) {
        if (spec->shape[i] == 0)
            return is_inside ? 0 : (PyErr_SetString(PyExc_ValueError, "outside the slot"), -1);
    }
    for (int32_t i = 0; is_inside && i < spec->ndim; i++) {
        is_inside = spec->shape[i] > 0 && nbytes <= limit / (uint64_t)spec->shape[i];
        nbytes *= (uint64_t)spec->shape[i];
    }
    if (!is_inside || nbytes > limit - spec->offset) {
        PyErr_SetString(PyExc_ValueError, "the array does not fit into the slot");
        return -1;
    }
    return 0;
}

static int parse_spec(PyObject *const *args, Py_ssize_t nargs, struct hx_dlpack_spec *spec)
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
    return PyErr_Occurred() ? -1 : 0;
}

static PyObject *lease_tensor(PyObject *object, PyObject *const *args, Py_ssize_t nargs)
{
    struct lease_object *self = (struct lease_object *)object;
    struct core_state *state = core_state_of(Py_TYPE(object));
    allocfunc allocate = (allocfunc)PyType_GetSlot(state->tensor_type, Py_tp_alloc);
    struct hx_dlpack_spec spec;
    struct tensor_object *tensor;
    if (parse_spec(args, nargs, &spec) != 0 || check_extent(self->arena, &spec) != 0)
        return NULL;
    tensor = (struct tensor_object *)allocate(state->tensor_type, 0);
    if (tensor != NULL) {
        hx_slot_retain(self->arena, self->slot);
        tensor->arena = self->arena;
        tensor->slot = self->slot;
        tensor->spec = spec;
    }
    return (PyObject *)tensor;
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
static PyObject *make_capsule(struct hx_arena *arena, uint32_t slot,
                              const struct hx_dlpack_spec *spec)
{
    struct hx_dlpack_managed *managed = hx_dlpack_export(arena, slot, spec);
    PyObject *capsule;
    if (managed == NULL)
        return PyErr_NoMemory();
    capsule = PyCapsule_New(managed, CAPSULE_NAME, end_capsule);
    if (capsule == NULL)
        managed->deleter(managed);
    return capsule;
}

static PyObject *make_capsule_versioned(struct hx_arena *arena, uint32_t slot,
                                        const struct hx_dlpack_spec *spec)
{
    struct hx_dlpack_managed_versioned *managed = hx_dlpack_export_versioned(arena, slot, spec);
    PyObject *capsule;
    if (managed == NULL)
        return PyErr_NoMemory();
    capsule = PyCapsule_New(managed, CAPSULE_NAME_VERSIONED, end_capsule_versioned);
    if (capsule == NULL)
        managed->deleter(managed);
    return capsule;
}

static PyObject *lease_capsule(PyObject *object, PyObject *const *args, Py_ssize_t nargs)
{
    struct lease_object *self = (struct lease_object *)object;
    struct hx_dlpack_spec spec;
    if (parse_spec(args, nargs, &spec) != 0 || check_extent(self->arena, &spec) != 0)
        return NULL;
    return make_capsule(self->arena, self->slot, &spec);
}

static PyObject *lease_records(PyObject *object, PyObject *unused)
{
    struct lease_object *self = (struct lease_object *)object;
    const struct hx_slot *slot = &self->arena->slots[self->slot];
    const struct hx_record *records =
        self->arena->records + (uint64_t)self->slot * self->arena->header->batch_capacity;
    PyObject *list = PyList_New(0);
    (void)unused;
    for (uint32_t i = 0; list != NULL && i < slot->record_count; i++) {
        const struct hx_record *record = &records[i];
        PyObject *payload = PyBytes_FromStringAndSize(NULL, (Py_ssize_t)record->nbytes);
        PyObject *entry = NULL;
        int error = payload == NULL;
        if (!error) {
            const enum hx_status status = hx_slot_results_read(
                self->arena, self->slot, record->offset, PyBytes_AsString(payload), record->nbytes);
            if (status != HX_OK)
                core_raise(status, "reading additional results");
            else
                entry = Py_BuildValue("(IIO)", record->kind, record->first, payload);
            error = entry == NULL || PyList_Append(list, entry) != 0;
        }
        Py_XDECREF(entry);
        Py_XDECREF(payload);
        if (error)
            Py_CLEAR(list);
    }
    return list;
}

static PyObject *lease_get_slot(PyObject *object, void *closure)
{
    (void)closure;
    return PyLong_FromUnsignedLong(((struct lease_object *)object)->slot);
}

static PyObject *lease_get_serial(PyObject *object, void *closure)
{
    struct lease_object *self = (struct lease_object *)object;
    (void)closure;
    return PyLong_FromUnsignedLongLong(self->arena->slots[self->slot].plan.serial);
}

static PyObject *lease_get_has_records(PyObject *object, void *closure)
{
    struct lease_object *self = (struct lease_object *)object;
    (void)closure;
    return PyBool_FromLong(self->arena->slots[self->slot].record_count != 0);
}

static PyGetSetDef lease_getset[] = {
    {"slot", lease_get_slot, NULL, "Number of the slot.", NULL},
    {"serial", lease_get_serial, NULL, "Order of delivery of the batch.", NULL},
    {"has_records", lease_get_has_records, NULL, "Whether records() is not empty.", NULL},
    {NULL, NULL, NULL, NULL, NULL},
};

static PyMethodDef lease_methods[] = {
    {"tensor", (PyCFunction)(void (*)(void))lease_tensor, METH_FASTCALL,
     "tensor(offset, shape, code, bits, /)\n--\n\n"
     "One array of the slot, with the DLPack type code and bits; it holds the lease too."},
    {"capsule", (PyCFunction)(void (*)(void))lease_capsule, METH_FASTCALL,
     "capsule(offset, shape, code, bits, /)\n--\n\nThe DLPack capsule of such an array."},
    {"records", lease_records, METH_NOARGS,
     "records()\n--\n\nWhat the workers left: a list of (kind, first item, bytes)."},
    {NULL, NULL, 0, NULL},
};

static PyType_Slot lease_slots[] = {
    {Py_tp_doc, "A slot that the trainer holds; it is freed with the last lease, tensor, array\n"
                "or view of it. Its buffer is the slot's memory."},
    {Py_tp_dealloc, lease_dealloc},
    {Py_tp_methods, lease_methods},
    {Py_tp_getset, lease_getset},
    {Py_bf_getbuffer, lease_getbuffer},
    {0, NULL},
};

static PyType_Spec lease_spec = {
    .name = "hydrax._core.Lease",
    .basicsize = sizeof(struct lease_object),
    .flags = Py_TPFLAGS_DEFAULT | Py_TPFLAGS_IMMUTABLETYPE | Py_TPFLAGS_DISALLOW_INSTANTIATION,
    .slots = lease_slots,
};

PyTypeObject *core_make_lease_type(PyObject *module)
{
    return (PyTypeObject *)PyType_FromModuleAndSpec(module, &lease_spec, NULL);
}

static void tensor_dealloc(PyObject *object)
{
    struct tensor_object *self = (struct tensor_object *)object;
    if (self->arena != NULL)
        hx_slot_release(self->arena, self->slot);
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
    result = major >= HX_DLPACK_MAJOR ? make_capsule_versioned(self->arena, self->slot, &self->spec)
                                      : make_capsule(self->arena, self->slot, &self->spec);

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
    {Py_tp_doc, "One array of a leased slot, for consumers of DLPack."},
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
