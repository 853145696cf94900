/* The properties of a tensor that hooks read at every call, as functions of C: `torch_access.cpp` has them for torch.

   Through the attributes of a Python object, reading one takes longer than all that the hooks do with it. */

#pragma once

#define PY_SSIZE_T_CLEAN
#include <Python.h>
#include <stdint.h>

enum { CPU_DEVICE = 1, CUDA_DEVICE = 2 }; /* as in DLPack */

/* `DLTensor` of DLPack 1. */
typedef struct {
    void *data;
    int32_t device_type, device_id, ndim;
    uint8_t code, bits;
    uint16_t lanes;
    int64_t *shape, *strides;
    uint64_t byte_offset;
} View;

/* The memory and the version of a tensor, which outlive it. Both are pointers that `hold` and `release` own. */
typedef struct {
    void *storage, *version;
} HeldMemory;

#define ACCESS_NAME "tensortap.tensor_access"

/* Calls a hook with a gradient, or None; returns None (a new reference), or NULL if an exception is set. */
typedef PyObject *(*CallHook)(PyObject *hook, PyObject *gradient);

/* All functions need the interpreter lock. None raises: a function that returns an int returns 0 if it has no answer. The
   tensor's attributes are then read, and may raise. Tensors are of plain classes. */
typedef struct {
    int (*view)(PyObject *tensor, View *view); /* of a tensor whose memory holds its elements as they are */
    int (*version)(PyObject *tensor, int64_t *version);
    int (*storage)(PyObject *tensor, int64_t *address);
    int (*weak_storage)(PyObject *tensor, int64_t *reference); /* as `UntypedStorage._weak_ref` */
    int64_t (*weak_reference)(const HeldMemory *held);         /* the same */
    void (*free_weak_storage)(int64_t reference);
    int (*requires_gradient)(PyObject *tensor);
    int (*is_computed)(PyObject *tensor, int *is_view); /* whether it is no leaf */
    int (*hold)(PyObject *tensor, HeldMemory *held);    /* until it is released */
    void (*release)(HeldMemory *held);
    int64_t (*held_version)(const HeldMemory *held);
    const void *(*held_memory)(const HeldMemory *held);
    PyObject *(*held_tensor)(const HeldMemory *held, PyObject *dtype, int64_t offset, int32_t ndim,
                             const int64_t *shape); /* `offset` bytes into the memory; its elements are neighbours; may raise */
    int (*records_gradients)(void);
    int (*is_tracing)(void); /* whether `torch.jit.trace` runs */
    int (*graph_task)(void);                                            /* -1 outside of a backward */
    int (*current_stream)(int32_t device, int32_t *current, int64_t *stream); /* the current device, and its stream's id */
    PyObject *(*new_hooks)(CallHook call); /* hooks on gradients that are removed together, by a call without arguments; may raise */
    int (*place_hook)(PyObject *hooks, PyObject *tensor, PyObject *hook); /* 0 for leaves and tensors with other hooks */
    void (*check_views)(PyObject *hooks); /* among the tensors of `place_hook`, for views that were changed in place since */
} TensorAccess;
