/* One array of a leased slot as a DLPack tensor, and its deleter. */
#include "hx_dlpack.h"

#include <stdlib.h>

#include "hx_slot.h"

/* Both forms carry the same record behind them, found through ->context. */
struct lease_record {
    struct hx_arena *arena; /* one lease reference on `slot`, which keeps the arena mapped */
    uint32_t slot;
    int64_t dims[]; /* shape, then strides */
};

static struct lease_record *new_record(struct hx_arena *arena, uint32_t slot,
                                       const struct hx_dlpack_spec *spec)
{
    struct lease_record *record =
        malloc(sizeof *record + 2 * (size_t)spec->ndim * sizeof record->dims[0]);
    int64_t stride = 1;
    if (record == NULL)
        return NULL;
    record->arena = arena;
    record->slot = slot;
    for (int32_t i = spec->ndim - 1; i >= 0; i--) {
        record->dims[i] = spec->shape[i];
        record->dims[spec->ndim + i] = stride;
        stride *= spec->shape[i];
    }
    hx_slot_retain(arena, slot);
    return record;
}

static void fill_tensor(struct hx_dlpack_tensor *tensor, struct lease_record *record,
                        const struct hx_dlpack_spec *spec)
{
    tensor->data = hx_slot_data(record->arena, record->slot) + spec->offset;
    tensor->device = (struct hx_dlpack_device){HX_DLPACK_CPU, 0};
    tensor->ndim = spec->ndim;
    tensor->dtype = spec->dtype;
    tensor->shape = record->dims;
    tensor->strides = record->dims + spec->ndim;
    tensor->byte_offset = 0;
}

static void end_record(struct lease_record *record)
{
    hx_slot_release(record->arena, record->slot);
    free(record);
}

static void delete_managed(struct hx_dlpack_managed *self)
{
    end_record(self->context);
    free(self);
}

static void delete_versioned(struct hx_dlpack_managed_versioned *self)
{
    end_record(self->context);
    free(self);
}

struct hx_dlpack_managed *hx_dlpack_export(struct hx_arena *arena, uint32_t slot,
                                           const struct hx_dlpack_spec *spec)
{
    struct lease_record *record = NULL;
    struct hx_dlpack_managed *managed = calloc(1, sizeof *managed);
    if (managed == NULL)
        return NULL;
    record = new_record(arena, slot, spec);
    if (record == NULL) {
        free(managed);
        return NULL;
    }
    fill_tensor(&managed->tensor, record, spec);
    managed->context = record;
    managed->deleter = delete_managed;
    return managed;
}

struct hx_dlpack_managed_versioned *
hx_dlpack_export_versioned(struct hx_arena *arena, uint32_t slot, const struct hx_dlpack_spec *spec)
{
    struct lease_record *record = NULL;
    struct hx_dlpack_managed_versioned *managed = calloc(1, sizeof *managed);
    if (managed == NULL)
        return NULL;
    record = new_record(arena, slot, spec);
    if (record == NULL) {
        free(managed);
        return NULL;
    }
    managed->version.major = HX_DLPACK_MAJOR;
    managed->version.minor = HX_DLPACK_MINOR;
    fill_tensor(&managed->tensor, record, spec);
    managed->context = record;
    managed->deleter = delete_versioned;
    return managed;
}
