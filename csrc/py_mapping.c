/* Type Mapping (a file of the disk cache, mapped), and the checksum of such files. */
#include "hx_checksum.h"
#include "hx_mapping.h"
#include "py_errors.h"
#include "py_tensor.h"

/* Below this, giving up the GIL costs more than it gains. */
#define SHORT_NBYTES 16384

struct mapping_object {
    PyObject_HEAD struct hx_mapping *mapping; /* a reference is owned, if not NULL */
    uint64_t offset;                          /* where the part that is shown begins */
};

static PyObject *refuse_range(void)
{
    PyErr_SetString(PyExc_ValueError, "a mapping has at least one byte and starts inside");
    return NULL;
}

static PyObject *mapping_new(PyTypeObject *type, PyObject *args, PyObject *kwargs)
{
    static char *names[] = {"fd", "nbytes", "offset", NULL};
    allocfunc allocate = (allocfunc)PyType_GetSlot(type, Py_tp_alloc);
    struct mapping_object *self;
    unsigned long long nbytes, offset;
    enum hx_status status;
    int fd;
    if (!PyArg_ParseTupleAndKeywords(args, kwargs, "iKK", names, &fd, &nbytes, &offset))
        return NULL;
    if (nbytes == 0 || offset > nbytes || nbytes > PY_SSIZE_T_MAX) {
        return refuse_range();
    }
    self = (struct mapping_object *)allocate(type, 0);
    if (self == NULL)
        return NULL;
    self->offset = offset;
    status = hx_mapping_open(fd, nbytes, &self->mapping);
    if (status != HX_OK) {
        core_raise(status, "mapping a file");
        Py_CLEAR(self);
    }
    return (PyObject *)self;
}

static PyObject *mapping_reopen(PyObject *type, PyObject *args)
{
    allocfunc allocate = (allocfunc)PyType_GetSlot((PyTypeObject *)type, Py_tp_alloc);
    struct mapping_object *self;
    struct hx_mapping *mapping = NULL;
    struct hx_file_stamp stamp;
    unsigned long long nbytes, offset, device, inode;
    long long modified_ns, changed_ns;
    PyObject *path;
    enum hx_status status;
    int may_wait;
    if (!PyArg_ParseTuple(args, "O&(KKLL)KKp", PyUnicode_FSConverter, &path, &device, &inode,
                          &modified_ns, &changed_ns, &nbytes, &offset, &may_wait))
        return NULL;
    if (nbytes == 0 || offset > nbytes || nbytes > PY_SSIZE_T_MAX) {
        Py_DECREF(path);
        return refuse_range();
    }
    stamp = (struct hx_file_stamp){device, inode, modified_ns, changed_ns};
    Py_BEGIN_ALLOW_THREADS status =
        hx_mapping_reopen(PyBytes_AsString(path), &stamp, nbytes, may_wait, &mapping);
    Py_END_ALLOW_THREADS Py_DECREF(path);
    if (status == HX_NOTHING)
        return Py_NewRef(Py_None);
    self = (struct mapping_object *)allocate((PyTypeObject *)type, 0);
    if (self == NULL) {
        hx_mapping_release(mapping);
        return NULL;
    }
    self->mapping = mapping;
    self->offset = offset;
    return (PyObject *)self;
}

static void mapping_dealloc(PyObject *object)
{
    struct mapping_object *self = (struct mapping_object *)object;
    if (self->mapping != NULL)
        hx_mapping_release(self->mapping);
    core_free_instance(object);
}

static struct hx_dlpack_memory memory_of(const struct mapping_object *self)
{
    return hx_dlpack_mapping(self->mapping, self->offset);
}

static int mapping_getbuffer(PyObject *object, Py_buffer *view, int flags)
{
    const struct hx_dlpack_memory memory = memory_of((struct mapping_object *)object);
    return PyBuffer_FillInfo(view, object, memory.data, (Py_ssize_t)memory.nbytes, 0, flags);
}

static PyObject *mapping_populate(PyObject *object, PyObject *unused)
{
    struct mapping_object *self = (struct mapping_object *)object;
    enum hx_status status;
    (void)unused;
    Py_BEGIN_ALLOW_THREADS status = hx_mapping_populate(self->mapping);
    Py_END_ALLOW_THREADS if (status != HX_OK) return core_raise(status, "reading a file");
    return Py_NewRef(Py_None);
}

static PyObject *mapping_tensor(PyObject *object, PyObject *const *args, Py_ssize_t nargs)
{
    const struct hx_dlpack_memory memory = memory_of((struct mapping_object *)object);
    return core_tensor_new(core_state_of(Py_TYPE(object)), &memory, args, nargs);
}

static PyObject *mapping_capsule(PyObject *object, PyObject *const *args, Py_ssize_t nargs)
{
    const struct hx_dlpack_memory memory = memory_of((struct mapping_object *)object);
    return core_capsule_new(&memory, args, nargs);
}

static PyObject *mapping_get_address(PyObject *object, void *closure)
{
    (void)closure;
    return PyLong_FromVoidPtr(memory_of((struct mapping_object *)object).data);
}

static PyObject *mapping_get_nbytes(PyObject *object, void *closure)
{
    (void)closure;
    return PyLong_FromUnsignedLongLong(memory_of((struct mapping_object *)object).nbytes);
}

static PyGetSetDef mapping_getset[] = {
    {"address", mapping_get_address, NULL, "Address of the part that is shown.", NULL},
    {"nbytes", mapping_get_nbytes, NULL, "Bytes of the part that is shown.", NULL},
    {NULL, NULL, NULL, NULL, NULL},
};

static PyMethodDef mapping_methods[] = {
    {"populate", mapping_populate, METH_NOARGS,
     "populate()\n--\n\nRead the whole file into memory.\n\n"
     "Raises OSError where that fails: the disk, or a file that has become shorter."},
    {"reopen", mapping_reopen, METH_VARARGS | METH_CLASS,
     "reopen(path, stamp, nbytes, offset, may_wait, /)\n--\n\n"
     "The mapping of a file by name; None if it is not the one with this stamp and size.\n\n"
     "With may_wait it is read into memory, without it None is also what is not all there."},
    {"tensor", (PyCFunction)(void (*)(void))mapping_tensor, METH_FASTCALL,
     "tensor(offset, shape, code, bits, /)\n--\n\n"
     "One array of the part that is shown; it keeps the file mapped."},
    {"capsule", (PyCFunction)(void (*)(void))mapping_capsule, METH_FASTCALL,
     "capsule(offset, shape, code, bits, /)\n--\n\nThe DLPack capsule of such an array."},
    {NULL, NULL, 0, NULL},
};

static PyType_Slot mapping_slots[] = {
    {Py_tp_doc, "Mapping(fd, nbytes, offset)\n--\n\n"
                "The first nbytes of a file, privately mapped and shown from offset on.\n\n"
                "It is unmapped with the last object, tensor, array or view of it."},
    {Py_tp_new, mapping_new},
    {Py_tp_dealloc, mapping_dealloc},
    {Py_tp_methods, mapping_methods},
    {Py_tp_getset, mapping_getset},
    {Py_bf_getbuffer, mapping_getbuffer},
    {0, NULL},
};

static PyType_Spec mapping_spec = {
    .name = "hydrax._core.Mapping",
    .basicsize = sizeof(struct mapping_object),
    .flags = Py_TPFLAGS_DEFAULT | Py_TPFLAGS_IMMUTABLETYPE,
    .slots = mapping_slots,
};

PyTypeObject *core_make_mapping_type(PyObject *module)
{
    return (PyTypeObject *)PyType_FromModuleAndSpec(module, &mapping_spec, NULL);
}

PyObject *core_checksum(PyObject *module, PyObject *const *args, Py_ssize_t nargs)
{
    Py_buffer view;
    uint64_t seed, result;
    (void)module;
    if (nargs != 2) {
        PyErr_SetString(PyExc_TypeError, "checksum takes a buffer and a seed");
        return NULL;
    }
    seed = PyLong_AsUnsignedLongLong(args[1]);
    if (PyErr_Occurred() || PyObject_GetBuffer(args[0], &view, PyBUF_SIMPLE) != 0)
        return NULL;
    if (view.len < SHORT_NBYTES) {
        result = hx_checksum(view.buf, (size_t)view.len, seed);
    } else {
        Py_BEGIN_ALLOW_THREADS result = hx_checksum(view.buf, (size_t)view.len, seed);
        Py_END_ALLOW_THREADS
    }
    PyBuffer_Release(&view);
    return PyLong_FromUnsignedLongLong(result);
}
