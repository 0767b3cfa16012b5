/* Types Plan (one batch to load) and Run (items of it that a worker has taken). */
#include "hx_atomic.h"
#include "hx_plan.h"
#include "hx_process.h"
#include "hx_slot.h"
#include "py_common.h"
#include "py_errors.h"

struct plan_object {
    PyObject_HEAD struct hx_plan plan;
};

struct run_object {
    PyObject_HEAD struct hx_arena *arena; /* owned reference */
    struct hx_run run;
    uint32_t worker;
    int is_ended;
};

const struct hx_plan *core_plan_get(struct core_state *state, PyObject *object)
{
    if (!PyObject_TypeCheck(object, state->plan_type)) {
        PyErr_SetString(PyExc_TypeError, "expected a Plan");
        return NULL;
    }
    return &((struct plan_object *)object)->plan;
}

static PyObject *plan_new(PyTypeObject *type, PyObject *args, PyObject *kwargs)
{
    static char *names[] = {"serial",      "epoch",       "first_position", "order_key",
                            "order_count", "seed_key",    "seed_start",     "group",
                            "item_count",  "valid_count", "kind",           NULL};
    unsigned long long serial, epoch, first, order_key, order_count, seed_key, seed_start;
    unsigned int group, item_count, valid_count, kind;
    allocfunc allocate = (allocfunc)PyType_GetSlot(type, Py_tp_alloc);
    struct plan_object *self;
    if (!PyArg_ParseTupleAndKeywords(args, kwargs, "KKKKKKKIIII", names, &serial, &epoch, &first,
                                     &order_key, &order_count, &seed_key, &seed_start, &group,
                                     &item_count, &valid_count, &kind))
        return NULL;
    if (valid_count < 1 || valid_count > item_count) {
        PyErr_SetString(PyExc_ValueError, "valid_count must be from 1 to item_count");
        return NULL;
    }
    self = (struct plan_object *)allocate(type, 0);
    if (self != NULL) {
        self->plan = (struct hx_plan){
            .serial = serial,
            .epoch = epoch,
            .first_position = first,
            .order_key = order_key,
            .order_count = order_count,
            .seed_key = seed_key,
            .seed_start = seed_start,
            .group = group,
            .item_count = item_count,
            .valid_count = valid_count,
            .kind = kind,
        };
    }
    return (PyObject *)self;
}

/* Items or seeds of a plan as a new list of ints. */
static PyObject *plan_list(const struct hx_plan *plan, uint32_t first, uint32_t count, int is_seeds)
{
    PyObject *list = NULL;
    int64_t *values = PyMem_Malloc((count + 1) * sizeof *values);
    if (values == NULL)
        return PyErr_NoMemory();
    hx_plan_items(plan, first, count, is_seeds ? NULL : values, is_seeds ? values : NULL);
    list = PyList_New((Py_ssize_t)count);
    for (uint32_t i = 0; list != NULL && i < count; i++) {
        PyObject *value = PyLong_FromLongLong(values[i]);
        if (value == NULL)
            Py_CLEAR(list);
        else
            PyList_SetItem(list, (Py_ssize_t)i, value); /* steals value */
    }
    PyMem_Free(values);
    return list;
}

/* Items or seeds of a plan into a writable buffer of count int64. */
static PyObject *plan_fill(const struct hx_plan *plan, uint32_t first, uint32_t count,
                           PyObject *target, int is_seeds)
{
    Py_buffer view;
    if (PyObject_GetBuffer(target, &view, PyBUF_WRITABLE) != 0)
        return NULL;
    if (view.len != (Py_ssize_t)(count * sizeof(int64_t))) {
        PyErr_Format(PyExc_ValueError, "expected a buffer of %u int64", count);
        PyBuffer_Release(&view);
        return NULL;
    }
    hx_plan_items(plan, first, count, is_seeds ? NULL : view.buf, is_seeds ? view.buf : NULL);
    PyBuffer_Release(&view);
    return Py_NewRef(Py_None);
}

static PyObject *plan_indices(PyObject *self, PyObject *unused)
{
    const struct hx_plan *plan = &((struct plan_object *)self)->plan;
    (void)unused;
    return plan_list(plan, 0, plan->item_count, 0);
}

static PyObject *plan_seeds(PyObject *self, PyObject *unused)
{
    const struct hx_plan *plan = &((struct plan_object *)self)->plan;
    (void)unused;
    return plan_list(plan, 0, plan->item_count, 1);
}

static PyObject *plan_get_serial(PyObject *self, void *closure)
{
    (void)closure;
    return PyLong_FromUnsignedLongLong(((struct plan_object *)self)->plan.serial);
}

static void plan_dealloc(PyObject *self)
{
    core_free_instance(self);
}

static PyGetSetDef plan_getset[] = {
    {"serial", plan_get_serial, NULL, "Order of delivery.", NULL},
    {NULL, NULL, NULL, NULL, NULL},
};

static PyMethodDef plan_methods[] = {
    {"indices", plan_indices, METH_NOARGS, "indices()\n--\n\nItem index of each position."},
    {"seeds", plan_seeds, METH_NOARGS, "seeds()\n--\n\nSeed of each position."},
    {NULL, NULL, 0, NULL},
};

PyDoc_STRVAR(plan_doc,
             "Plan(serial, epoch, first_position, order_key, order_count, seed_key, seed_start, "
             "group, item_count, valid_count, kind)\n--\n\nOne batch that is to be loaded.");

static PyType_Slot plan_slots[] = {
    {Py_tp_doc, (void *)plan_doc}, {Py_tp_new, plan_new},       {Py_tp_dealloc, plan_dealloc},
    {Py_tp_methods, plan_methods}, {Py_tp_getset, plan_getset}, {0, NULL},
};

static PyType_Spec plan_spec = {
    .name = "hydrax._core.Plan",
    .basicsize = sizeof(struct plan_object),
    .flags = Py_TPFLAGS_DEFAULT | Py_TPFLAGS_IMMUTABLETYPE,
    .slots = plan_slots,
};

PyTypeObject *core_make_plan_type(PyObject *module)
{
    return (PyTypeObject *)PyType_FromModuleAndSpec(module, &plan_spec, NULL);
}

PyObject *core_run_new(struct core_state *state, struct hx_arena *arena, uint32_t worker,
                       const struct hx_run *run)
{
    allocfunc allocate = (allocfunc)PyType_GetSlot(state->run_type, Py_tp_alloc);
    struct run_object *self = (struct run_object *)allocate(state->run_type, 0);
    if (self != NULL) {
        hx_arena_retain(arena);
        self->arena = arena;
        self->worker = worker;
        self->run = *run;
    }
    return (PyObject *)self;
}

static void run_dealloc(PyObject *object)
{
    struct run_object *self = (struct run_object *)object;
    if (self->arena != NULL)
        hx_arena_release(self->arena);
    core_free_instance(object);
}

static int check_open(struct run_object *self)
{
    if (self->is_ended) {
        PyErr_SetString(PyExc_RuntimeError, "the run has ended");
        return -1;
    }
    if (hx_process_is_foreign()) {
        PyErr_SetString(PyExc_RuntimeError,
                        "a process that was forked in a loader function has come back from it; "
                        "end it there with os._exit()");
        return -1;
    }
    return 0;
}

static PyObject *run_begin(PyObject *object, PyObject *const *args, Py_ssize_t nargs)
{
    struct run_object *self = (struct run_object *)object;
    unsigned long item;
    uint64_t seed;
    if (nargs != 2) {
        PyErr_SetString(PyExc_TypeError, "begin takes the item and its seed");
        return NULL;
    }
    item = PyLong_AsUnsignedLong(args[0]);
    seed = PyLong_AsUnsignedLongLongMask(args[1]);
    if (PyErr_Occurred() || check_open(self) != 0)
        return NULL;
    hx_store_relaxed_u32(&self->arena->workers[self->worker].item, (uint32_t)item);
    return PyBool_FromLong(core_random_begin(seed));
}

/* Keep bytes for the trainer; 0 and *nbytes == 0 for None. Returns -1 with an exception. */
static int write_results(struct run_object *self, PyObject *payload, uint64_t *offset,
                         uint64_t *nbytes)
{
    enum hx_status status;
    char *bytes;
    Py_ssize_t length;
    *offset = *nbytes = 0;
    if (payload == Py_None)
        return 0;
    if (PyBytes_AsStringAndSize(payload, &bytes, &length) != 0)
        return -1;
    status = hx_slot_results_write(self->arena, self->run.slot, bytes, (uint64_t)length, offset);
    if (status != HX_OK) {
        core_raise(status, "keeping additional results");
        return -1;
    }
    *nbytes = (uint64_t)length;
    return 0;
}

static PyObject *run_check(PyObject *object, PyObject *unused)
{
    (void)unused;
    return check_open((struct run_object *)object) == 0 ? Py_NewRef(Py_None) : NULL;
}

static PyObject *run_complete(PyObject *object, PyObject *payload)
{
    struct run_object *self = (struct run_object *)object;
    uint64_t offset, nbytes;
    if (check_open(self) != 0 || write_results(self, payload, &offset, &nbytes) != 0)
        return NULL;
    self->is_ended = 1;
    hx_run_complete(self->arena, self->worker, &self->run, offset, nbytes);
    return Py_NewRef(Py_None);
}

static PyObject *run_fail(PyObject *object, PyObject *const *args, Py_ssize_t nargs)
{
    struct run_object *self = (struct run_object *)object;
    unsigned long item;
    uint64_t offset, nbytes;
    if (nargs != 2) {
        PyErr_SetString(PyExc_TypeError, "fail takes the item and the error as bytes");
        return NULL;
    }
    item = PyLong_AsUnsignedLong(args[0]);
    if (PyErr_Occurred() || check_open(self) != 0)
        return NULL;
    if (write_results(self, args[1], &offset, &nbytes) != 0) {
        /* The batch must fail all the same, even if there is no room to say why. */
        PyErr_Clear();
        offset = nbytes = 0;
    }
    self->is_ended = 1;
    hx_run_fail(self->arena, self->worker, &self->run, (uint32_t)item, offset, nbytes,
                HX_RECORD_ERROR);
    return Py_NewRef(Py_None);
}

static PyObject *run_indices(PyObject *object, PyObject *unused)
{
    const struct hx_run *run = &((struct run_object *)object)->run;
    (void)unused;
    return plan_list(&run->plan, run->first, run->count, 0);
}

static PyObject *run_seeds(PyObject *object, PyObject *unused)
{
    const struct hx_run *run = &((struct run_object *)object)->run;
    (void)unused;
    return plan_list(&run->plan, run->first, run->count, 1);
}

static PyObject *run_fill_indices(PyObject *object, PyObject *target)
{
    const struct hx_run *run = &((struct run_object *)object)->run;
    return plan_fill(&run->plan, run->first, run->count, target, 0);
}

static PyObject *run_fill_seeds(PyObject *object, PyObject *target)
{
    const struct hx_run *run = &((struct run_object *)object)->run;
    return plan_fill(&run->plan, run->first, run->count, target, 1);
}

#define RUN_NUMBER(name, expression)                                                               \
    static PyObject *run_get_##name(PyObject *object, void *closure)                               \
    {                                                                                              \
        const struct hx_run *run = &((struct run_object *)object)->run;                            \
        (void)closure;                                                                             \
        return PyLong_FromUnsignedLongLong(expression);                                            \
    }

RUN_NUMBER(slot, run->slot)
RUN_NUMBER(first, run->first)
RUN_NUMBER(count, run->count)
RUN_NUMBER(group, run->plan.group)
RUN_NUMBER(epoch, run->plan.epoch)
RUN_NUMBER(serial, run->plan.serial)
RUN_NUMBER(kind, run->plan.kind)
RUN_NUMBER(first_position, run->plan.first_position)
RUN_NUMBER(seed_key, run->plan.seed_key)
RUN_NUMBER(seed_start, run->plan.seed_start)

static PyGetSetDef run_getset[] = {
    {"slot", run_get_slot, NULL, "Slot that is being filled.", NULL},
    {"first", run_get_first, NULL, "First item, counted within the batch.", NULL},
    {"count", run_get_count, NULL, "Number of items.", NULL},
    {"group", run_get_group, NULL, "Group of the batch.", NULL},
    {"epoch", run_get_epoch, NULL, "Epoch of the batch, or validation run.", NULL},
    {"serial", run_get_serial, NULL, "Order of delivery of the batch.", NULL},
    {"kind", run_get_kind, NULL, "TRAINING or VALIDATION.", NULL},
    {"first_position", run_get_first_position, NULL, "Position of the batch's first item.", NULL},
    {"seed_key", run_get_seed_key, NULL, "Key of the batch's seeds.", NULL},
    {"seed_start", run_get_seed_start, NULL, "Where the batch's seeds start.", NULL},
    {NULL, NULL, NULL, NULL, NULL},
};

static PyMethodDef run_methods[] = {
    {"begin", (PyCFunction)(void (*)(void))run_begin, METH_FASTCALL,
     "begin(item, seed, /)\n--\n\nSay which item is loaded now, counted within the batch.\n\n"
     "Returns whether numpy.random was drawn from since the last begin()."},
    {"check", run_check, METH_NOARGS,
     "check()\n--\n\nRaise if it has ended, or is the work of the process that forked this one."},
    {"complete", run_complete, METH_O,
     "complete(results, /)\n--\n\nEnd the run; results is bytes for the trainer, or None."},
    {"fail", (PyCFunction)(void (*)(void))run_fail, METH_FASTCALL,
     "fail(item, error, /)\n--\n\nEnd the run and fail its batch; error is bytes."},
    {"indices", run_indices, METH_NOARGS, "indices()\n--\n\nItem index of each position."},
    {"seeds", run_seeds, METH_NOARGS, "seeds()\n--\n\nSeed of each position."},
    {"fill_indices", run_fill_indices, METH_O,
     "fill_indices(target, /)\n--\n\nItem indices into a buffer of int64."},
    {"fill_seeds", run_fill_seeds, METH_O,
     "fill_seeds(target, /)\n--\n\nSeeds into a buffer of int64."},
    {NULL, NULL, 0, NULL},
};

static PyType_Slot run_slots[] = {
    {Py_tp_doc, "Items of a batch that this worker has taken to load."},
    {Py_tp_dealloc, run_dealloc},
    {Py_tp_methods, run_methods},
    {Py_tp_getset, run_getset},
    {0, NULL},
};

static PyType_Spec run_spec = {
    .name = "hydrax._core.Run",
    .basicsize = sizeof(struct run_object),
    .flags = Py_TPFLAGS_DEFAULT | Py_TPFLAGS_IMMUTABLETYPE | Py_TPFLAGS_DISALLOW_INSTANTIATION,
    .slots = run_slots,
};

PyTypeObject *core_make_run_type(PyObject *module)
{
    return (PyTypeObject *)PyType_FromModuleAndSpec(module, &run_spec, NULL);
}
