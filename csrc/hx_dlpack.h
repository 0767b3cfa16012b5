/* One array of a leased slot as a DLPack tensor, and its deleter.
 *
 * The structs follow the DLPack specification (https://dmlc.github.io/dlpack/latest/c_api.html),
 * version 1.0 and the unversioned form before it.
 */
#ifndef HX_DLPACK_H
#define HX_DLPACK_H

#include "hx_arena.h"

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

/* What is exported: a C-contiguous array inside a leased slot. */
struct hx_dlpack_spec {
    uint64_t offset; /* bytes from the start of the slot */
    int32_t ndim;
    struct hx_dlpack_dtype dtype;
    int64_t shape[HX_DLPACK_MAX_NDIM];
};

/* Make a tensor over part of a leased slot. The caller holds a reference to the lease; the
 * tensor takes one of its own and gives it back in its deleter, which needs no GIL and may run
 * on any thread and after the arena was closed.
 *
 * Returns new, to be ended through ->deleter, or NULL if memory is short.
 */
struct hx_dlpack_managed *hx_dlpack_export(struct hx_arena *arena, uint32_t slot,
                                           const struct hx_dlpack_spec *spec);
struct hx_dlpack_managed_versioned *hx_dlpack_export_versioned(struct hx_arena *arena,
                                                               uint32_t slot,
                                                               const struct hx_dlpack_spec *spec);

#endif
