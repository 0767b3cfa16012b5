/* XLA FFI handlers over the core: decode, check, call hx_*, return. */
#include "hx_xla.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "xla/ffi/api/c_api.h"

#include "hx_draw.h"

/* Arrays of a draw that need no memory of their own here. */
#define FEW_ARRAYS 32

static XLA_FFI_Error *make_error(const XLA_FFI_Api *api, XLA_FFI_Error_Code code,
                                 const char *message)
{
    XLA_FFI_Error_Create_Args args;
    memset(&args, 0, sizeof args);
    args.struct_size = XLA_FFI_Error_Create_Args_STRUCT_SIZE;
    args.message = message;
    args.errc = code;
    return api->XLA_FFI_Error_Create(&args);
}

/* XLA asks what a handler was built for before it calls it. */
static XLA_FFI_Error *answer_metadata(XLA_FFI_CallFrame *frame)
{
    XLA_FFI_Metadata *metadata = ((XLA_FFI_Metadata_Extension *)frame->extension_start)->metadata;
    metadata->api_version.major_version = XLA_FFI_API_MAJOR;
    metadata->api_version.minor_version = XLA_FFI_API_MINOR;
    return NULL;
}

/* Bytes of one element, 0 for a dtype that no array of a draw has. */
static uint64_t itemsize(XLA_FFI_DataType dtype)
{
    switch (dtype) {
    case XLA_FFI_DataType_S16:
    case XLA_FFI_DataType_U16:
    case XLA_FFI_DataType_F16:
    case XLA_FFI_DataType_BF16:
        return 2;
    case XLA_FFI_DataType_S32:
    case XLA_FFI_DataType_U32:
    case XLA_FFI_DataType_F32:
        return 4;
    case XLA_FFI_DataType_S64:
    case XLA_FFI_DataType_U64:
    case XLA_FFI_DataType_F64:
    case XLA_FFI_DataType_C64:
        return 8;
    case XLA_FFI_DataType_C128:
        return 16;
    case XLA_FFI_DataType_INVALID:
    case XLA_FFI_DataType_TOKEN:
    case XLA_FFI_DataType_S1:
    case XLA_FFI_DataType_S2:
    case XLA_FFI_DataType_S4:
    case XLA_FFI_DataType_U1:
    case XLA_FFI_DataType_U2:
    case XLA_FFI_DataType_U4:
    case XLA_FFI_DataType_F4E2M1FN:
        return 0;
    default: /* bool, 8-bit integers and floats */
        return 1;
    }
}

static uint64_t nbytes_of(const XLA_FFI_Buffer *buffer)
{
    uint64_t nbytes = itemsize(buffer->dtype);
    for (int64_t i = 0; i < buffer->rank; i++)
        nbytes *= (uint64_t)buffer->dims[i];
    return nbytes;
}

/* The number of the engine, or 0. */
static uint64_t engine_id(const XLA_FFI_Attrs *attrs)
{
    static const char name[] = "engine";
    for (int64_t i = 0; i < attrs->size; i++) {
        const XLA_FFI_ByteSpan *span = attrs->names[i];
        if (span->len == sizeof name - 1 && memcmp(span->ptr, name, span->len) == 0 &&
            attrs->types[i] == XLA_FFI_AttrType_SCALAR) {
            const XLA_FFI_Scalar *scalar = attrs->attrs[i];
            if (scalar->dtype == XLA_FFI_DataType_S64)
                return (uint64_t) * (const int64_t *)scalar->value;
        }
    }
    return 0;
}

/* Identifies the execution of a program; 0 where XLA does not tell. */
static uint64_t run_of(const XLA_FFI_CallFrame *frame)
{
    XLA_FFI_RunId_Get_Args args;
    XLA_FFI_Error *error;
    memset(&args, 0, sizeof args);
    args.struct_size = XLA_FFI_RunId_Get_Args_STRUCT_SIZE;
    args.ctx = frame->ctx;
    error = frame->api->XLA_FFI_RunId_Get(&args);
    if (error != NULL) {
        XLA_FFI_Error_Destroy_Args destroy;
        memset(&destroy, 0, sizeof destroy);
        destroy.struct_size = XLA_FFI_Error_Destroy_Args_STRUCT_SIZE;
        destroy.error = error;
        frame->api->XLA_FFI_Error_Destroy(&destroy);
        return 0;
    }
    return (uint64_t)args.run_id;
}

/* Check buffers against the engine. Returns the number of draws, or -1 with a reason. */
static int64_t check_call(const XLA_FFI_CallFrame *frame, const struct hx_draw *engine,
                          const char **reason)
{
    const struct hx_draw_config *config = hx_draw_get_config(engine);
    const XLA_FFI_Buffer *numbers, *states;
    uint64_t count;
    if (frame->args.size != 2 || frame->rets.size != (int64_t)config->array_count) {
        *reason = "hydrax_draw: wrong number of arguments or results";
        return -1;
    }
    numbers = frame->args.args[0];
    states = frame->args.args[1];
    count = nbytes_of(numbers) / sizeof(uint32_t);
    if (numbers->dtype != XLA_FFI_DataType_U32 || states->dtype != XLA_FFI_DataType_U32 ||
        nbytes_of(states) != count * HX_DRAW_STATE_WORDS * sizeof(uint32_t)) {
        *reason = "hydrax_draw: the state has the wrong dtype or shape";
        return -1;
    }
    for (uint32_t i = 0; i < config->array_count; i++) {
        if (nbytes_of(frame->rets.rets[i]) != count * hx_draw_arrays(engine)[i].draw_nbytes) {
            *reason = "hydrax_draw: a result has the wrong dtype or shape";
            return -1;
        }
    }
    return (int64_t)count;
}

static XLA_FFI_Error_Code code_of(enum hx_draw_trouble trouble)
{
    switch (trouble) {
    case HX_DRAW_TIMED_OUT:
        return XLA_FFI_Error_Code_DEADLINE_EXCEEDED;
    case HX_DRAW_WORKER_ENDED:
        return XLA_FFI_Error_Code_UNAVAILABLE;
    case HX_DRAW_RELEASED:
        return XLA_FFI_Error_Code_FAILED_PRECONDITION;
    case HX_DRAW_INTERRUPTED:
        return XLA_FFI_Error_Code_CANCELLED;
    case HX_DRAW_MISFIT:
    case HX_DRAW_BAD_CALL:
        return XLA_FFI_Error_Code_INVALID_ARGUMENT;
    default:
        return XLA_FFI_Error_Code_INTERNAL;
    }
}

static XLA_FFI_Error *report_error(const XLA_FFI_Api *api, struct hx_draw *engine,
                                   struct hx_draw_report *report)
{
    char *message = hx_draw_describe_report(engine, report);
    XLA_FFI_Error *error =
        make_error(api, code_of(report->trouble), message != NULL ? message : "a draw failed");
    free(message);
    hx_draw_report_clear(report);
    return error;
}

/* A draw's key from its state. */
static struct hx_draw_key key_of(const uint32_t *state)
{
    struct hx_draw_key key;
    memcpy(key.words, state + 1, sizeof key.words);
    return key;
}

static uint64_t number_of(uint32_t low, const uint32_t *state)
{
    return low | (uint64_t)state[HX_DRAW_STATE_WORDS - 1] << 32;
}

/* Copy all draws of a call. NULL, or the error. */
static XLA_FFI_Error *draw_all(const XLA_FFI_CallFrame *frame, struct hx_draw *engine,
                               int64_t count, uint8_t **targets)
{
    const struct hx_draw_config *config = hx_draw_get_config(engine);
    const uint32_t *numbers = ((const XLA_FFI_Buffer *)frame->args.args[0])->data;
    const uint32_t *states = ((const XLA_FFI_Buffer *)frame->args.args[1])->data;
    const uint64_t run = run_of(frame);
    struct hx_draw_report report;

    for (int64_t i = 0; count > 1 && i < count; i++) {
        const uint32_t *state = states + i * HX_DRAW_STATE_WORDS;
        const struct hx_draw_key key = key_of(state);
        if (state[0] == config->fingerprint)
            hx_draw_prepare(engine, &key, number_of(numbers[i], state));
    }
    for (int64_t i = 0; i < count; i++) {
        const uint32_t *state = states + i * HX_DRAW_STATE_WORDS;
        const struct hx_draw_key key = key_of(state);
        const uint64_t number = number_of(numbers[i], state);
        if (state[0] != config->fingerprint) {
            memset(&report, 0, sizeof report);
            report.trouble = HX_DRAW_MISFIT;
            return report_error(frame->api, engine, &report);
        }
        for (uint32_t j = 0; j < config->array_count; j++)
            targets[j] = (uint8_t *)((XLA_FFI_Buffer *)frame->rets.rets[j])->data +
                         (uint64_t)i * hx_draw_arrays(engine)[j].draw_nbytes;
        if (hx_draw_copy(engine, &key, number, run, targets, &report) != HX_OK)
            return report_error(frame->api, engine, &report);
    }
    return NULL;
}

XLA_FFI_Error *hx_xla_draw(XLA_FFI_CallFrame *frame)
{
    XLA_FFI_Error *error = NULL;
    const char *reason = NULL;
    uint8_t *few[FEW_ARRAYS];
    uint8_t **targets = few, **many = NULL;
    struct hx_draw *engine = NULL;
    uint32_t array_count;
    int64_t count;

    if (frame->extension_start != NULL &&
        frame->extension_start->type == XLA_FFI_Extension_Metadata)
        return answer_metadata(frame);
    if (frame->stage != XLA_FFI_ExecutionStage_EXECUTE)
        return NULL;
    engine = hx_draw_find(engine_id(&frame->attrs));
    if (engine == NULL) {
        error = make_error(frame->api, XLA_FFI_Error_Code_FAILED_PRECONDITION,
                           "the data loader that this program draws from has been released; make "
                           "a new one and trace the program again");
        goto cleanup;
    }
    array_count = hx_draw_get_config(engine)->array_count;
    if (array_count > FEW_ARRAYS) {
        targets = many = malloc(array_count * sizeof *many);
        if (many == NULL) {
            error = make_error(frame->api, XLA_FFI_Error_Code_RESOURCE_EXHAUSTED,
                               "hydrax_draw: no memory");
            goto cleanup;
        }
    }
    count = check_call(frame, engine, &reason);
    if (count < 0) {
        error = make_error(frame->api, XLA_FFI_Error_Code_INVALID_ARGUMENT, reason);
        goto cleanup;
    }
    error = draw_all(frame, engine, count, targets);

cleanup:
    free(many);
    if (engine != NULL)
        hx_draw_release(engine);
    return error;
}
