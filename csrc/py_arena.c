/* Type Arena: the trainer's and the workers' view of one shared-memory arena. */
#include "hx_atomic.h"
#include "hx_slot.h"
#include "hx_wait.h"
#include "py_common.h"
#include "py_errors.h"

struct arena_object {
    PyObject_HEAD struct hx_arena *arena; /* owned reference */
    Py_ssize_t data_nbytes;               /* shape of exported buffers */
};

static struct hx_arena *arena_of(PyObject *object)
{
    return ((struct arena_object *)object)->arena;
}

struct hx_arena *core_arena_get(struct core_state *state, PyObject *object)
{
    if (!PyObject_TypeCheck(object, state->arena_type)) {
        PyErr_SetString(PyExc_TypeError, "expected an Arena");
        return NULL;
    }
    return arena_of(object);
}

/* Wrap an arena, whose reference it takes, on failure too. */
static PyObject *wrap(PyTypeObject *type, struct hx_arena *arena)
{
    allocfunc allocate = (allocfunc)PyType_GetSlot(type, Py_tp_alloc);
    struct arena_object *self = (struct arena_object *)allocate(type, 0);
    if (self == NULL) {
        hx_arena_release(arena);
        return NULL;
    }
    self->arena = arena;
    self->data_nbytes = (Py_ssize_t)(arena->header->slot_count * arena->header->slot_nbytes);
    return (PyObject *)self;
}

static int parse_config(PyObject *args, PyObject *kwargs, struct hx_arena_config *config)
{
    static char *names[] = {"slot_count",  "slot_nbytes",    "worker_count",
                            "group_count", "batch_capacity", "is_batched",
                            NULL};
    unsigned long long slot_nbytes;
    unsigned int slot_count, worker_count, group_count, batch_capacity;
    int is_batched;
    if (!PyArg_ParseTupleAndKeywords(args, kwargs, "IKIIIp", names, &slot_count, &slot_nbytes,
                                     &worker_count, &group_count, &batch_capacity, &is_batched))
        return -1;
    if (slot_count < 1 || slot_nbytes < 1 || worker_count < 1 || group_count < 1 ||
        batch_capacity < 1) {
        PyErr_SetString(PyExc_ValueError, "an arena's sizes and counts must be at least 1");
        return -1;
    }
    if (worker_count > HX_MAX_WORKERS) {
        PyErr_Format(PyExc_ValueError, "an arena has at most %d workers", HX_MAX_WORKERS);
        return -1;
    }
    if (slot_nbytes > (unsigned long long)INT64_MAX / 2 / slot_count) {
        PyErr_SetString(PyExc_OverflowError, "the arena is larger than any address space");
        return -1;
    }
    *config = (struct hx_arena_config){
        .slot_count = slot_count,
        .worker_count = worker_count,
        .group_count = group_count,
        .batch_capacity = batch_capacity,
        .is_batched = (uint32_t)is_batched,
        .slot_nbytes = slot_nbytes,
    };
    return 0;
}

static PyObject *arena_new(PyTypeObject *type, PyObject *args, PyObject *kwargs)
{
    struct hx_arena_config config;
    struct hx_arena *arena;
    enum hx_status status;
    if (parse_config(args, kwargs, &config) != 0)
        return NULL;
    status = hx_arena_create(&config, &arena);
    if (status != HX_OK)
        return core_raise(status, "making an arena");
    return wrap(type, arena);
}

static PyObject *arena_required_nbytes(PyObject *unused, PyObject *args, PyObject *kwargs)
{
    struct hx_arena_config config;
    (void)unused;
    if (parse_config(args, kwargs, &config) != 0)
        return NULL;
    return PyLong_FromUnsignedLongLong(hx_arena_nbytes(&config));
}

static PyObject *arena_attach(PyObject *type, PyObject *args)
{
    int memory_fd, results_fd, work_fd, ready_fd;
    struct hx_arena *arena;
    enum hx_status status;
    if (!PyArg_ParseTuple(args, "iiii", &memory_fd, &results_fd, &work_fd, &ready_fd))
        return NULL;
    status = hx_arena_attach(memory_fd, results_fd, work_fd, ready_fd, &arena);
    if (status != HX_OK)
        return core_raise(status, "attaching to an arena");
    return wrap((PyTypeObject *)type, arena);
}

static void arena_dealloc(PyObject *object)
{
    if (arena_of(object) != NULL)
        hx_arena_release(arena_of(object));
    core_free_instance(object);
}

static int arena_getbuffer(PyObject *object, Py_buffer *view, int flags)
{
    struct arena_object *self = (struct arena_object *)object;
    return PyBuffer_FillInfo(view, object, self->arena->data, self->data_nbytes, 0, flags);
}

static PyObject *arena_publish(PyObject *object, PyObject *plan_object)
{
    const struct hx_plan *plan = core_plan_get(core_state_of(Py_TYPE(object)), plan_object);
    struct hx_arena *arena = arena_of(object);
    if (plan == NULL)
        return NULL;
    if (plan->group >= arena->header->group_count || plan->item_count < 1 ||
        plan->item_count > arena->header->batch_capacity) {
        PyErr_SetString(PyExc_ValueError, "the plan does not fit the arena");
        return NULL;
    }
    return PyBool_FromLong(hx_plan_publish(arena, plan) == HX_OK);
}

static PyObject *arena_watch(PyObject *object, PyObject *args)
{
    struct hx_arena *arena = arena_of(object);
    unsigned int worker;
    int fd;
    if (!PyArg_ParseTuple(args, "Ii", &worker, &fd))
        return NULL;
    if (worker >= arena->header->worker_count) {
        PyErr_SetString(PyExc_IndexError, "no such worker");
        return NULL;
    }
    arena->worker_fds[worker] = fd;
    return Py_NewRef(Py_None);
}

/* Serial argument: an int, or None for any. Returns -1 with an exception. */
static int parse_serial(PyObject *argument, uint64_t *serial)
{
    if (argument == Py_None) {
        *serial = HX_ANY_SERIAL;
        return 0;
    }
    *serial = PyLong_AsUnsignedLongLong(argument);
    return PyErr_Occurred() ? -1 : 0;
}

static PyObject *arena_take(PyObject *object, PyObject *argument)
{
    uint64_t serial;
    uint32_t slot;
    if (parse_serial(argument, &serial) != 0)
        return NULL;
    if (hx_trainer_take(arena_of(object), serial, &slot) != HX_OK)
        return Py_NewRef(Py_None);
    return core_lease_new(core_state_of(Py_TYPE(object)), arena_of(object), slot);
}

static PyObject *arena_wait(PyObject *object, PyObject *const *args, Py_ssize_t nargs)
{
    struct hx_arena *arena = arena_of(object);
    uint64_t serial, deadline;
    uint32_t slot, worker = 0;
    enum hx_status status;
    if (nargs != 2) {
        PyErr_SetString(PyExc_TypeError, "wait takes serial and deadline_ns");
        return NULL;
    }
    if (parse_serial(args[0], &serial) != 0)
        return NULL;
    deadline = args[1] == Py_None ? HX_FOREVER : PyLong_AsUnsignedLongLong(args[1]);
    if (PyErr_Occurred())
        return NULL;
    Py_BEGIN_ALLOW_THREADS status = hx_trainer_wait(arena, serial, deadline, &slot, &worker);
    Py_END_ALLOW_THREADS
        /* A signal: let its handler run; it may raise, or ask to stop. */
        if (status == HX_INTERRUPTED && PyErr_CheckSignals() != 0) return NULL;
    switch (status) {
    case HX_OK:
        return core_lease_new(core_state_of(Py_TYPE(object)), arena, slot);
    case HX_TIMEOUT:
        return PyLong_FromLong(-1);
    case HX_INTERRUPTED:
        return PyLong_FromLong(-2);
    case HX_CLOSED:
        return PyLong_FromLong(-3);
    case HX_WORKER_ENDED:
        return PyLong_FromUnsignedLong(worker);
    default:
        return core_raise(status, "waiting for a batch");
    }
}

static PyObject *arena_claim(PyObject *object, PyObject *const *args, Py_ssize_t nargs)
{
    struct hx_arena *arena = arena_of(object);
    struct hx_run run;
    unsigned long worker;
    long trainer_fd;
    uint64_t deadline;
    enum hx_status status;
    if (nargs != 3) {
        PyErr_SetString(PyExc_TypeError, "claim takes worker, trainer_fd and deadline_ns");
        return NULL;
    }
    worker = PyLong_AsUnsignedLong(args[0]);
    trainer_fd = PyLong_AsLong(args[1]);
    deadline = args[2] == Py_None ? HX_FOREVER : PyLong_AsUnsignedLongLong(args[2]);
    if (PyErr_Occurred())
        return NULL;
    if (worker >= arena->header->worker_count) {
        PyErr_SetString(PyExc_IndexError, "no such worker");
        return NULL;
    }
    for (;;) {
        /* Without the GIL from the start: a slot's pages may have to be reserved. */
        Py_BEGIN_ALLOW_THREADS status =
            hx_worker_next(arena, (uint32_t)worker, (int)trainer_fd, deadline, &run);
        Py_END_ALLOW_THREADS if (status == HX_INTERRUPTED && PyErr_CheckSignals() != 0) return NULL;
        /* A trainer that loads itself may have been asked to stop, or has a failed batch to see. */
        if (trainer_fd < 0 && (status == HX_INTERRUPTED || status == HX_NO_MEMORY))
            return Py_NewRef(Py_None);
        /* Without memory the batch has failed and says so; the next one may do better. */
        if (status != HX_INTERRUPTED && status != HX_NO_MEMORY)
            break;
    }
    switch (status) {
    case HX_OK:
        return core_run_new(core_state_of(Py_TYPE(object)), arena, (uint32_t)worker, &run);
    case HX_TIMEOUT:
    case HX_CLOSED:
        return Py_NewRef(Py_None);
    default:
        return core_raise(status, "waiting for work");
    }
}

static PyObject *arena_close(PyObject *object, PyObject *unused)
{
    (void)unused;
    hx_arena_close(arena_of(object));
    return Py_NewRef(Py_None);
}

static PyObject *arena_kick(PyObject *object, PyObject *unused)
{
    (void)unused;
    hx_arena_kick(arena_of(object));
    return Py_NewRef(Py_None);
}

/* The number of a worker of the arena. Returns 0, or -1 with an exception. */
static int parse_worker(const struct hx_arena *arena, PyObject *argument, uint32_t *worker)
{
    const unsigned long number = PyLong_AsUnsignedLong(argument);
    if (PyErr_Occurred())
        return -1;
    if (number >= arena->header->worker_count) {
        PyErr_SetString(PyExc_IndexError, "no such worker");
        return -1;
    }
    *worker = (uint32_t)number;
    return 0;
}

static PyObject *arena_set_started(PyObject *object, PyObject *argument)
{
    struct hx_arena *arena = arena_of(object);
    uint32_t worker;
    if (parse_worker(arena, argument, &worker) != 0)
        return NULL;
    hx_store_relaxed_u32(&arena->workers[worker].is_started, 1);
    return Py_NewRef(Py_None);
}

static PyObject *arena_bury(PyObject *object, PyObject *argument)
{
    struct hx_arena *arena = arena_of(object);
    uint32_t worker;
    if (parse_worker(arena, argument, &worker) != 0)
        return NULL;
    hx_arena_bury(arena, worker);
    return Py_NewRef(Py_None);
}

static PyObject *arena_worker_run(PyObject *object, PyObject *argument)
{
    struct hx_arena *arena = arena_of(object);
    const struct hx_worker *record;
    uint32_t slot_index;
    uint32_t worker;
    if (parse_worker(arena, argument, &worker) != 0)
        return NULL;
    record = &arena->workers[worker];
    slot_index = hx_load_acquire_u32(&record->slot);
    if (slot_index == HX_NO_SLOT)
        return Py_NewRef(Py_None);
    return Py_BuildValue("(KII)", (unsigned long long)arena->slots[slot_index].plan.serial,
                         (unsigned int)hx_load_relaxed_u32(&record->first),
                         (unsigned int)hx_load_relaxed_u32(&record->count));
}

static PyObject *arena_worker_state(PyObject *object, PyObject *argument)
{
    struct hx_arena *arena = arena_of(object);
    const struct hx_worker *record;
    const struct hx_slot *slot;
    uint32_t slot_index;
    uint32_t worker;
    if (parse_worker(arena, argument, &worker) != 0)
        return NULL;
    record = &arena->workers[worker];
    slot_index = hx_load_acquire_u32(&record->slot);
    if (slot_index == HX_NO_SLOT)
        return Py_BuildValue("(OOOKK)",
                             hx_load_relaxed_u32(&record->is_started) ? Py_True : Py_False, Py_None,
                             Py_None, (unsigned long long)hx_load_relaxed_u64(&record->item_count),
                             (unsigned long long)hx_load_relaxed_u64(&record->busy_ns));
    slot = &arena->slots[slot_index];
    return Py_BuildValue(
        "(O(KI)dKK)", hx_load_relaxed_u32(&record->is_started) ? Py_True : Py_False,
        (unsigned long long)slot->plan.serial, (unsigned int)hx_load_relaxed_u32(&record->item),
        (double)(hx_now_ns() - hx_load_relaxed_u64(&record->since_ns)) * 1e-9,
        (unsigned long long)hx_load_relaxed_u64(&record->item_count),
        (unsigned long long)hx_load_relaxed_u64(&record->busy_ns));
}

static PyObject *arena_worker_slot_wait(PyObject *object, PyObject *argument)
{
    struct hx_arena *arena = arena_of(object);
    uint32_t worker;
    if (parse_worker(arena, argument, &worker) != 0)
        return NULL;
    return PyLong_FromUnsignedLongLong(hx_worker_slot_wait(arena, worker));
}

static PyObject *arena_slot_states(PyObject *object, PyObject *unused)
{
    const struct hx_arena *arena = arena_of(object);
    PyObject *list = PyList_New((Py_ssize_t)arena->header->slot_count);
    (void)unused;
    for (uint32_t i = 0; list != NULL && i < arena->header->slot_count; i++) {
        PyObject *state = PyLong_FromUnsignedLong(hx_load_acquire_u32(&arena->slots[i].state));
        if (state == NULL)
            Py_CLEAR(list);
        else
            PyList_SetItem(list, (Py_ssize_t)i, state); /* steals state */
    }
    return list;
}

static PyObject *arena_lease_count(PyObject *object, PyObject *argument)
{
    struct hx_arena *arena = arena_of(object);
    const unsigned long slot = PyLong_AsUnsignedLong(argument);
    if (PyErr_Occurred())
        return NULL;
    if (slot >= arena->header->slot_count) {
        PyErr_SetString(PyExc_IndexError, "no such slot");
        return NULL;
    }
    /* Acquires what the readers did that have let go; pairs with hx_slot_release(). */
    return PyLong_FromUnsignedLong(hx_load_acquire_u32(&arena->lease_counts[slot]));
}

static PyObject *arena_get_nbytes(PyObject *object, void *closure)
{
    (void)closure;
    return PyLong_FromUnsignedLongLong(arena_of(object)->nbytes);
}

static PyObject *arena_get_slot_nbytes(PyObject *object, void *closure)
{
    (void)closure;
    return PyLong_FromUnsignedLongLong(arena_of(object)->header->slot_nbytes);
}

static PyObject *arena_get_address(PyObject *object, void *closure)
{
    (void)closure;
    return PyLong_FromVoidPtr(arena_of(object)->data);
}

static PyObject *arena_get_fds(PyObject *object, void *closure)
{
    const struct hx_arena *arena = arena_of(object);
    (void)closure;
    return Py_BuildValue("(iiii)", arena->memory_fd, arena->results_fd, arena->work_fd,
                         arena->ready_fd);
}

static PyGetSetDef arena_getset[] = {
    {"nbytes", arena_get_nbytes, NULL, "Bytes of the whole arena.", NULL},
    {"slot_nbytes", arena_get_slot_nbytes, NULL, "Bytes of one slot, whole pages.", NULL},
    {"address", arena_get_address, NULL, "Address of the first slot in this process.", NULL},
    {"fds", arena_get_fds, NULL, "Descriptors that attach() takes, in its order.", NULL},
    {NULL, NULL, NULL, NULL, NULL},
};

static PyMethodDef arena_methods[] = {
    {"required_nbytes", (PyCFunction)(void (*)(void))arena_required_nbytes,
     METH_VARARGS | METH_KEYWORDS | METH_STATIC,
     "required_nbytes(slot_count, slot_nbytes, worker_count, group_count, batch_capacity, "
     "is_batched)\n--\n\nBytes that such an arena takes."},
    {"attach", arena_attach, METH_VARARGS | METH_CLASS,
     "attach(memory_fd, results_fd, work_fd, ready_fd, /)\n--\n\n"
     "Map another process's arena. Takes the descriptors."},
    {"publish", arena_publish, METH_O,
     "publish(plan, /)\n--\n\nAdd a planned batch; False if the ring is full."},
    {"watch", arena_watch, METH_VARARGS,
     "watch(worker, pidfd, /)\n--\n\nEnd waits when this process ends; -1 stops watching.\n\n"
     "The descriptor stays the caller's."},
    {"take", arena_take, METH_O,
     "take(serial, /)\n--\n\nLease of a ready batch (serial None: any), or None."},
    {"wait", (PyCFunction)(void (*)(void))arena_wait, METH_FASTCALL,
     "wait(serial, deadline_ns, /)\n--\n\n"
     "Wait for a batch: its Lease, or TIMED_OUT, INTERRUPTED, CLOSED, or the number of a worker\n"
     "that has ended. deadline_ns is on the monotonic clock; None waits for ever."},
    {"claim", (PyCFunction)(void (*)(void))arena_claim, METH_FASTCALL,
     "claim(worker, trainer_fd, deadline_ns, /)\n--\n\n"
     "Wait for items to load: a Run, or None on close, at the deadline, or, where trainer_fd is\n"
     "-1, when a signal or kick() came or a batch failed for want of memory."},
    {"close", arena_close, METH_NOARGS, "close()\n--\n\nEnd all waits in all processes."},
    {"kick", arena_kick, METH_NOARGS, "kick()\n--\n\nEnd the current or next wait()."},
    {"set_started", arena_set_started, METH_O,
     "set_started(worker, /)\n--\n\nSay that a worker has done its start-up."},
    {"bury", arena_bury, METH_O,
     "bury(worker, /)\n--\n\n"
     "Forget a process that has died; another one may now be worker, and finishes its run."},
    {"worker_run", arena_worker_run, METH_O,
     "worker_run(worker, /)\n--\n\n"
     "(serial, first item, items) of the run that a worker has taken, or None."},
    {"worker_state", arena_worker_state, METH_O,
     "worker_state(worker, /)\n--\n\n"
     "(is started, (serial, item) or None, seconds in the run or None, items loaded so far,\n"
     "nanoseconds in runs so far)."},
    {"worker_slot_wait_ns", arena_worker_slot_wait, METH_O,
     "worker_slot_wait_ns(worker, /)\n--\n\n"
     "Nanoseconds that a worker has waited for a free slot while a batch was planned."},
    {"lease_count", arena_lease_count, METH_O,
     "lease_count(slot, /)\n--\n\nHow many leases, tensors and arrays hold a slot."},
    {"slot_states", arena_slot_states, METH_NOARGS, "slot_states()\n--\n\nState of each slot."},
    {NULL, NULL, 0, NULL},
};

PyDoc_STRVAR(arena_doc,
             "Arena(slot_count, slot_nbytes, worker_count, group_count, batch_capacity, "
             "is_batched)\n--\n\n"
             "Shared memory of a trainer and its workers.\n\n"
             "Its buffer is the slots' memory, writable; slot i starts at i * slot_nbytes.");

static PyType_Slot arena_slots[] = {
    {Py_tp_doc, (void *)arena_doc},
    {Py_tp_new, arena_new},
    {Py_tp_dealloc, arena_dealloc},
    {Py_tp_methods, arena_methods},
    {Py_tp_getset, arena_getset},
    {Py_bf_getbuffer, arena_getbuffer},
    {0, NULL},
};

static PyType_Spec arena_spec = {
    .name = "hydrax._core.Arena",
    .basicsize = sizeof(struct arena_object),
    .flags = Py_TPFLAGS_DEFAULT | Py_TPFLAGS_IMMUTABLETYPE,
    .slots = arena_slots,
};

PyTypeObject *core_make_arena_type(PyObject *module)
{
    return (PyTypeObject *)PyType_FromModuleAndSpec(module, &arena_spec, NULL);
}
