/* What the py_* files share: the module's state and the types they define.
 *
 * py_* files translate between Python and hx_*; they hold no algorithms. They return None as
 * Py_NewRef(Py_None): built with the headers of a later Python, Py_RETURN_NONE takes None for
 * immortal, which it is not in the oldest Python that the limited API serves. Formats have no
 * '#', for which the oldest Python wants functions that the headers of later ones do not name.
 */
#ifndef HX_PY_COMMON_H
#define HX_PY_COMMON_H

#include <Python.h>

#include "hx_arena.h"

/* State of the module: its types, owned. */
struct core_state {
    PyTypeObject *arena_type;
    PyTypeObject *items_type;
    PyTypeObject *draws_type;
    PyTypeObject *lease_type;
    PyTypeObject *mapping_type;
    PyTypeObject *plan_type;
    PyTypeObject *run_type;
    PyTypeObject *tensor_type;
};

/* Each makes one type for the module; new reference, or NULL with an exception. */
PyTypeObject *core_make_arena_type(PyObject *module);
PyTypeObject *core_make_items_type(PyObject *module);
PyTypeObject *core_make_draws_type(PyObject *module);
PyTypeObject *core_make_lease_type(PyObject *module);
PyTypeObject *core_make_mapping_type(PyObject *module);
PyTypeObject *core_make_plan_type(PyObject *module);
PyTypeObject *core_make_run_type(PyObject *module);
PyTypeObject *core_make_tensor_type(PyObject *module);

/* State of the module that defined `type`; borrowed. */
struct core_state *core_state_of(PyTypeObject *type);

/* The arena behind an Arena object, borrowed; NULL with TypeError for any other object. */
struct hx_arena *core_arena_get(struct core_state *state, PyObject *object);

/* A Lease over `slot`, whose single lease reference it takes, on failure too. */
PyObject *core_lease_new(struct core_state *state, struct hx_arena *arena, uint32_t slot);

/* A Run over items that `worker` has claimed. The items stay claimed if this fails. */
struct hx_run;
PyObject *core_run_new(struct core_state *state, struct hx_arena *arena, uint32_t worker,
                       const struct hx_run *run);

/* The plan behind a Plan object, borrowed; NULL with TypeError for any other object. */
struct hx_plan;
const struct hx_plan *core_plan_get(struct core_state *state, PyObject *object);

/* Begin an item for the generators behind random and numpy.random; see py_random.c. Returns
 * whether the latter was drawn from in the item before. */
int core_random_begin(uint64_t seed);

/* Functions of the module, defined next to what they are about. */
PyObject *core_draw_handler(PyObject *module, PyObject *unused);
PyObject *core_watch_interrupts(PyObject *module, PyObject *unused);
PyObject *core_end_descriptions(PyObject *module, PyObject *unused);
PyObject *core_checksum(PyObject *module, PyObject *const *args, Py_ssize_t nargs);
PyObject *core_start_guard(PyObject *module, PyObject *argument);
PyObject *core_take_slices(PyObject *module, PyObject *argument);
PyObject *core_signal_thread(PyObject *module, PyObject *args);
PyObject *core_random_capsule(PyObject *module, PyObject *inner);
PyObject *core_random_choose_inner(PyObject *module, PyObject *unused);
PyObject *core_random_restart(PyObject *module, PyObject *unused);
PyObject *core_random_take_seed(PyObject *module, PyObject *unused);

/* End a heap type's instance: free it and drop its reference to the type. */
void core_free_instance(PyObject *self);

#endif
