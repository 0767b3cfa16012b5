/* An array in counted memory as a DLPack tensor, and its deleter. */
#include "hx_dlpack.h"

#include <stdlib.h>

#include "hx_slot.h"

static void retain_slot(void *arena, uint32_t slot)
{
    hx_slot_retain(arena, slot);
}

static void release_slot(void *arena, uint32_t slot)
{
    hx_slot_release(arena, slot);
}

struct hx_dlpack_memory hx_dlpack_slot(struct hx_arena *arena, uint32_t slot)
{
    return (struct hx_dlpack_memory){.data = hx_slot_data(arena, slot),
                                     .nbytes = arena->header->slot_nbytes,
                                     .owner = arena,
                                     .part = slot,
                                     .retain = retain_slot,
                                     .release = release_slot};
}

static void retain_mapping(void *mapping, uint32_t part)
{
    (void)part;
    hx_mapping_retain(mapping);
}

static void release_mapping(void *mapping, uint32_t part)
{
    (void)part;
    hx_mapping_release(mapping);
}

struct hx_dlpack_memory hx_dlpack_mapping(struct hx_mapping *mapping, uint64_t offset)
{
    return (struct hx_dlpack_memory){.data = mapping->data + offset,
                                     .nbytes = mapping->nbytes - offset,
                                     .owner = mapping,
                                     .part = 0,
                                     .retain = retain_mapping,
                                     .release = release_mapping};
}

/* Both forms carry the same record behind them, found through ->context. */
struct tensor_record {
    void *owner; /* one reference on `part` is owned, which keeps the memory mapped */
    uint32_t part;
    void (*release)(void *owner, uint32_t part);
    int64_t dims[]; /* shape, then strides */
};

static struct tensor_record *new_record(const struct hx_dlpack_memory *memory,
                                        const struct hx_dlpack_spec *spec)
{
    struct tensor_record *record =
        malloc(sizeof *record + 2 * (size_t)spec->ndim * sizeof record->dims[0]);
    int64_t stride = 1;
    if (record == NULL)
        return NULL;
    record->owner = memory->owner;
    record->part = memory->part;
    record->release = memory->release;
    for (int32_t i = spec->ndim - 1; i >= 0; i--) {
        record->dims[i] = spec->shape[i];
        record->dims[spec->ndim + i] = stride;
        stride *= spec->shape[i];
    }
    memory->retain(memory->owner, memory->part);
    return record;
}

static void fill_tensor(struct hx_dlpack_tensor *tensor, struct tensor_record *record,
                        const struct hx_dlpack_memory *memory, const struct hx_dlpack_spec *spec)
{
    tensor->data = memory->data + spec->offset;
    tensor->device = (struct hx_dlpack_device){HX_DLPACK_CPU, 0};
    tensor->ndim = spec->ndim;
    tensor->dtype = spec->dtype;
    tensor->shape = record->dims;
    tensor->strides = record->dims + spec->ndim;
    tensor->byte_offset = 0;
}

static void end_record(struct tensor_record *record)
{
    record->release(record->owner, record->part);
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

struct hx_dlpack_managed *hx_dlpack_export(const struct hx_dlpack_memory *memory,
                                           const struct hx_dlpack_spec *spec)
{
    struct tensor_record *record = NULL;
    struct hx_dlpack_managed *managed = calloc(1, sizeof *managed);
    if (managed == NULL)
        return NULL;
    record = new_record(memory, spec);
    if (record == NULL) {
        free(managed);
        return NULL;
    }
    fill_tensor(&managed->tensor, record, memory, spec);
    managed->context = record;
    managed->deleter = delete_managed;
    return managed;
}

struct hx_dlpack_managed_versioned *
hx_dlpack_export_versioned(const struct hx_dlpack_memory *memory, const struct hx_dlpack_spec *spec)
{
    struct tensor_record *record = NULL;
    struct hx_dlpack_managed_versioned *managed = calloc(1, sizeof *managed);
    if (managed == NULL)
        return NULL;
    record = new_record(memory, spec);
    if (record == NULL) {
        free(managed);
        return NULL;
    }
    managed->version.major = HX_DLPACK_MAJOR;
    managed->version.minor = HX_DLPACK_MINOR;
    fill_tensor(&managed->tensor, record, memory, spec);
    managed->context = record;
    managed->deleter = delete_versioned;
    return managed;
}
