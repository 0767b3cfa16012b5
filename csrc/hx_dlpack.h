/* An array in counted memory as a DLPack tensor, and its deleter.
 *
 * The structs follow the DLPack specification (https://dmlc.github.io/dlpack/latest/c_api.html),
 * version 1.0 and the unversioned form before it.
 */
#ifndef HX_DLPACK_H
#define HX_DLPACK_H

#include "hx_arena.h"
#include "hx_mapping.h"

enum { HX_DLPACK_CPU = 1, HX_DLPACK_MAJOR = 1, HX_DLPACK_MINOR = 0, HX_DLPACK_MAX_NDIM = 64 };

struct hx_dlpack_device {
    int32_t type;
    int32_t id;
};

struct hx_dlpack_dtype {
    uint8_t code; /* DLDataTypeCode */
    uint8_t bits; /* per lane */
    uint16_t lanes;
};

struct hx_dlpack_tensor {
    void *data;
    struct hx_dlpack_device device;
    int32_t ndim;
    struct hx_dlpack_dtype dtype;
    int64_t *shape;
    int64_t *strides; /* in elements */
    uint64_t byte_offset;
};

/* DLManagedTensor */
struct hx_dlpack_managed {
    struct hx_dlpack_tensor tensor;
    void *context;
    void (*deleter)(struct hx_dlpack_managed *self);
};

/* DLManagedTensorVersioned */
struct hx_dlpack_managed_versioned {
    struct {
        uint32_t major;
        uint32_t minor;
    } version;
    void *context;
    void (*deleter)(struct hx_dlpack_managed_versioned *self);
    uint64_t flags;
    struct hx_dlpack_tensor tensor;
};

/* Memory that arrays lie in: a leased slot, or a mapped file. */
struct hx_dlpack_memory {
    uint8_t *data;
    uint64_t nbytes;
    void *owner; /* counts the references; borrowed */
    uint32_t part;
    /* Take and give back a reference to this part of the owner. Any thread, no GIL. */
    void (*retain)(void *owner, uint32_t part);
    void (*release)(void *owner, uint32_t part);
};

/* The memory of a leased slot; a reference is one to the lease. */
struct hx_dlpack_memory hx_dlpack_slot(struct hx_arena *arena, uint32_t slot);

/* The memory of a mapped file from a byte on. */
struct hx_dlpack_memory hx_dlpack_mapping(struct hx_mapping *mapping, uint64_t offset);

/* What is exported: a C-contiguous array in such memory. */
struct hx_dlpack_spec {
    uint64_t offset; /* bytes from the start of the memory */
    int32_t ndim;
    struct hx_dlpack_dtype dtype;
    int64_t shape[HX_DLPACK_MAX_NDIM];
};

/* Make a tensor over part of some memory. The caller holds a reference to it; the tensor takes
 * one of its own and gives it back in its deleter, which needs no GIL and may run on any thread
 * and after the arena was closed.
 *
 * Returns new, to be ended through ->deleter, or NULL if memory is short.
 */
struct hx_dlpack_managed *hx_dlpack_export(const struct hx_dlpack_memory *memory,
                                           const struct hx_dlpack_spec *spec);
struct hx_dlpack_managed_versioned *
hx_dlpack_export_versioned(const struct hx_dlpack_memory *memory,
                           const struct hx_dlpack_spec *spec);

#endif
