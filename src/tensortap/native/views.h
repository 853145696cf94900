/* Where the elements of a tensor are: from the exchange interface of DLPack where a framework has one, which is one call
   without an object, or else from the tensor's attributes. */

#pragma once

#include "common.h"

#define HOST (-1)
#define MOST_DTYPES 32

/* `DLTensor` of DLPack 1. */
typedef struct {
    void *data;
    int32_t device_type, device_id, ndim;
    uint8_t code, bits;
    uint16_t lanes;
    int64_t *shape, *strides;
    uint64_t byte_offset;
} View;

/* `DLPackExchangeAPI` of DLPack 1. */
typedef struct {
    uint32_t major, minor;
    void *previous, *allocate, *export_tensor, *import_tensor;
    int (*view)(void *tensor, View *view);
} Exchange;

enum { CPU_DEVICE = 1, CUDA_DEVICE = 2 };

static int (*view_tensor)(void *tensor, View *view); /* NULL where attributes must do */
static Plain viewed;                                 /* the classes whose tensors it takes */

/* The code of each dtype that was seen. */
static struct {
    PyObject *dtype;
    uint8_t code, bits;
    uint16_t lanes;
} known_dtypes[MOST_DTYPES];
static int known_count;

static PyObject *configure_views(PyObject *module, PyObject *args)
{
    PyObject *capsule, *types;
    if (!PyArg_ParseTuple(args, "OO", &capsule, &types)) {
        return NULL;
    }
    Exchange *exchange = PyCapsule_GetPointer(capsule, "dlpack_exchange_api");
    if (exchange == NULL || read_types(&viewed, types)) {
        return NULL;
    }
    view_tensor = exchange->major == 1 ? exchange->view : NULL;
    Py_RETURN_NONE;
}

/* Whether a view has this dtype. A dtype is learned from the first tensor that has it. */
static int has_dtype(const View *view, PyObject *tensor, PyObject *dtype)
{
    for (int i = 0; i < known_count; i++) {
        if (known_dtypes[i].dtype == dtype) {
            return known_dtypes[i].code == view->code && known_dtypes[i].bits == view->bits &&
                   known_dtypes[i].lanes == view->lanes;
        }
    }
    int is = has(tensor, s_dtype, dtype);
    if (is == 1 && known_count < MOST_DTYPES) {
        Py_INCREF(dtype); /* held for ever */
        known_dtypes[known_count].dtype = dtype;
        known_dtypes[known_count].code = view->code;
        known_dtypes[known_count].bits = view->bits;
        known_dtypes[known_count++].lanes = view->lanes;
    }
    return is;
}

/* Whether a view has this shape, and its elements are neighbours in memory. */
static int has_shape(const View *view, PyObject *shape)
{
    if (view->ndim != PyTuple_GET_SIZE(shape) || (view->ndim && view->strides == NULL)) {
        return 0;
    }
    int64_t stride = 1;
    for (int i = view->ndim - 1; i >= 0; i--) {
        long long size;
        if (get_count(PyTuple_GET_ITEM(shape, i), &size)) {
            return -1;
        }
        if (size != view->shape[i] || !size || (size != 1 && view->strides[i] != stride)) {
            return 0;
        }
        stride *= size;
    }
    return 1;
}

static int attributes_lie(PyObject *tensor, PyObject *kind, long long device, long long *address)
{
    PyObject *there = PyObject_CallMethodNoArgs(tensor, s_get_device);
    long long index;
    int is = there == NULL || get_count(there, &index) ? -1 : index == device;
    Py_XDECREF(there);
    if (is == 1 && device == HOST) { /* other devices may have no index, too */
        is = flag(tensor, s_is_cpu);
    }
    if (is < 1 || (is = has(tensor, s_dtype, GET(TensorKind, kind, dtype))) < 1 ||
        (is = has(tensor, s_shape, GET(TensorKind, kind, shape))) < 1) {
        return is;
    }
    return address_of(tensor, address) ? -1 : *address ? method_flag(tensor, s_is_contiguous) : 0;
}

/* Where the elements of a tensor are now. */
static int current_address(PyObject *tensor, long long *address)
{
    View view;
    if (view_tensor == NULL || !is_plain(&viewed, tensor) || view_tensor(tensor, &view)) {
        PyErr_Clear(); /* a tensor of another sort: its attributes tell */
        return address_of(tensor, address);
    }
    *address = (long long)(intptr_t)view.data + (long long)view.byte_offset;
    return 0;
}

/* Whether a tensor is of this kind, on this device or the host, and its elements are neighbours in memory of its own, at
   `address`. */
static int lies_as(PyObject *tensor, PyObject *kind, long long device, long long *address)
{
    View view;
    int is;
    if (view_tensor == NULL || !is_plain(&viewed, tensor) || view_tensor(tensor, &view)) {
        PyErr_Clear(); /* a tensor of another sort: its attributes tell */
        is = attributes_lie(tensor, kind, device, address);
    }
    else {
        int cuda = view.device_type == CUDA_DEVICE;
        if ((!cuda && view.device_type != CPU_DEVICE) || (cuda ? view.device_id : HOST) != device || view.data == NULL) {
            return 0;
        }
        *address = (long long)(intptr_t)view.data + (long long)view.byte_offset;
        is = has_shape(&view, GET(TensorKind, kind, shape));
        is = is == 1 ? has_dtype(&view, tensor, GET(TensorKind, kind, dtype)) : is;
    }
    if (is < 1 || (is = method_flag(tensor, s_is_neg)) < 0) {
        return is;
    }
    return !is;
}
