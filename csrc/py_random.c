/* The per-item source of random numbers as a bit generator capsule for NumPy.
 *
 * There is one per process, since it stands behind process-wide generators; it is only used by
 * the thread that runs the loader function, which holds NumPy's lock for it.
 */
#include "hx_random.h"
#include "py_common.h"

#define CAPSULE_NAME "BitGenerator"

static struct hx_item_random item_random;
static struct hx_bitgen item_bitgen;
static uint64_t item_seed;
static int is_seed_pending;

int core_random_begin(uint64_t seed)
{
    const int is_drawn = (int)item_random.is_drawn;
    hx_item_random_begin(&item_random, seed);
    item_seed = seed;
    is_seed_pending = 1;
    return is_drawn;
}

PyObject *core_random_capsule(PyObject *module, PyObject *inner)
{
    const struct hx_bitgen *bitgen = PyCapsule_GetPointer(inner, CAPSULE_NAME);
    (void)module;
    if (bitgen == NULL)
        return NULL;
    item_random.inner = *bitgen;
    item_bitgen = hx_item_random_bitgen(&item_random);
    return PyCapsule_New(&item_bitgen, CAPSULE_NAME, NULL);
}

PyObject *core_random_choose_inner(PyObject *module, PyObject *unused)
{
    (void)module;
    (void)unused;
    item_random.is_drawn = 1; /* a state may have brought a normal draw with it */
    if (item_random.is_inner_chosen)
        return Py_NewRef(Py_None);
    item_random.is_inner_chosen = 1;
    return PyLong_FromUnsignedLongLong(item_seed & UINT32_MAX);
}

PyObject *core_random_restart(PyObject *module, PyObject *unused)
{
    (void)module;
    (void)unused;
    return PyBool_FromLong(core_random_begin(item_seed));
}

PyObject *core_random_take_seed(PyObject *module, PyObject *unused)
{
    (void)module;
    (void)unused;
    if (!is_seed_pending)
        return Py_NewRef(Py_None);
    is_seed_pending = 0;
    return PyLong_FromUnsignedLongLong(item_seed);
}
