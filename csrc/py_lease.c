/* Type Lease: a slot that the trainer holds. */
#include "hx_slot.h"
#include "py_errors.h"
#include "py_tensor.h"

struct lease_object {
    PyObject_HEAD struct hx_arena *arena; /* kept mapped by the lease reference that is owned */
    uint32_t slot;
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

static PyObject *lease_tensor(PyObject *object, PyObject *const *args, Py_ssize_t nargs)
{
    struct lease_object *self = (struct lease_object *)object;
    const struct hx_dlpack_memory memory = hx_dlpack_slot(self->arena, self->slot);
    return core_tensor_new(core_state_of(Py_TYPE(object)), &memory, args, nargs);
}

static PyObject *lease_capsule(PyObject *object, PyObject *const *args, Py_ssize_t nargs)
{
    struct lease_object *self = (struct lease_object *)object;
    const struct hx_dlpack_memory memory = hx_dlpack_slot(self->arena, self->slot);
    return core_capsule_new(&memory, args, nargs);
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
