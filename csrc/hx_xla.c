/* XLA FFI handlers over the core: decode, check, call hx_*, return. */
#include "hx_xla.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "xla/ffi/api/c_api.h"

#include "hx_draw.h"

/* Arrays of a draw that need no memory of their own here. */
#define FEW_ARRAYS 32

#define ARGUMENT_COUNT 3

/* JAX makes a JaxRuntimeError of this code, and other exceptions of some others. */
static XLA_FFI_Error *make_error(const XLA_FFI_Api *api, const char *message)
{
    XLA_FFI_Error_Create_Args args;
    memset(&args, 0, sizeof args);
    args.struct_size = XLA_FFI_Error_Create_Args_STRUCT_SIZE;
    args.message = message;
    args.errc = XLA_FFI_Error_Code_INTERNAL;
    return api->XLA_FFI_Error_Create(&args);
}

/* XLA refuses handlers of a newer version than its own, and minor versions only add to what there
 * is. So it is told the version that has all that is used here, that of the oldest jaxlib there may
 * be, and not the one of the header: one build runs with every later one too. */
#define API_MINOR 3
#if XLA_FFI_API_MAJOR != 0 || XLA_FFI_API_MINOR < API_MINOR
#error "written for the XLA FFI 0.3 and later minor versions"
#endif

/* XLA asks what a handler was built for before it calls it. */
static XLA_FFI_Error *answer_metadata(XLA_FFI_CallFrame *frame)
{
    XLA_FFI_Metadata *metadata = ((XLA_FFI_Metadata_Extension *)frame->extension_start)->metadata;
    metadata->api_version.major_version = XLA_FFI_API_MAJOR;
    metadata->api_version.minor_version = API_MINOR;
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

/* The number of the engine, which is the first argument, or 0. */
static uint64_t engine_id(const XLA_FFI_Args *args)
{
    const XLA_FFI_Buffer *buffer = args->size == ARGUMENT_COUNT ? args->args[0] : NULL;
    if (buffer == NULL || buffer->dtype != XLA_FFI_DataType_U32 || nbytes_of(buffer) == 0)
        return 0;
    return *(const uint32_t *)buffer->data;
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
    if (frame->args.size != ARGUMENT_COUNT || frame->rets.size != (int64_t)config->array_count) {
        *reason = "hydrax_draw: wrong number of arguments or results";
        return -1;
    }
    numbers = frame->args.args[1];
    states = frame->args.args[2];
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

static XLA_FFI_Error *report_error(const XLA_FFI_Api *api, struct hx_draw *engine,
                                   struct hx_draw_report *report)
{
    char *message = hx_draw_describe_report(engine, report);
    XLA_FFI_Error *error = make_error(api, message != NULL ? message : "a draw failed");
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
    const uint32_t *numbers = ((const XLA_FFI_Buffer *)frame->args.args[1])->data;
    const uint32_t *states = ((const XLA_FFI_Buffer *)frame->args.args[2])->data;
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
    engine = hx_draw_find(engine_id(&frame->args));
    if (engine == NULL) {
        error = make_error(frame->api,
                           "the data loader that this program draws from has been released; make "
                           "a new one and trace the program again");
        goto cleanup;
    }
    array_count = hx_draw_get_config(engine)->array_count;
    if (array_count > FEW_ARRAYS) {
        targets = many = malloc(array_count * sizeof *many);
        if (many == NULL) {
            error = make_error(frame->api, "hydrax_draw: no memory");
            goto cleanup;
        }
    }
    count = check_call(frame, engine, &reason);
    if (count < 0) {
        error = make_error(frame->api, reason);
        goto cleanup;
    }
    error = draw_all(frame, engine, count, targets);

cleanup:
    free(many);
    if (engine != NULL)
        hx_draw_release(engine);
    return error;
}
