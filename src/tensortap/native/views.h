/* The properties of a tensor: through `TensorAccess` where a framework's own code provides it; else, where its elements are,
   from the exchange interface of DLPack, which is one call without an object, and the rest from the tensor's attributes. */

#pragma once

#include "common.h"
#include "tensor_access.h"

#define HOST (-1)
#define MOST_DTYPES 32

/* `DLPackExchangeAPI` of DLPack 1. */
typedef struct {
    uint32_t major, minor;
    void *previous, *allocate, *export_tensor, *import_tensor;
    int (*view)(void *tensor, View *view);
} Exchange;

static int (*exchange_view)(void *tensor, View *view); /* NULL where attributes must do */
static const TensorAccess *tensor_access;              /* NULL where Python must do */
static Plain viewed, accessed;                         /* the classes whose tensors they take */

/* The code of each dtype that was seen: DLPack's, or that of `TensorAccess`. */
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
    exchange_view = exchange->major == 1 ? exchange->view : NULL;
    Py_RETURN_NONE;
}

static PyObject *configure_access(PyObject *module, PyObject *args)
{
    PyObject *capsule, *types;
    if (!PyArg_ParseTuple(args, "OO", &capsule, &types)) {
        return NULL;
    }
    const TensorAccess *found = capsule == Py_None ? NULL : PyCapsule_GetPointer(capsule, ACCESS_NAME);
    if ((found == NULL && capsule != Py_None) || read_types(&accessed, types)) {
        return NULL;
    }
    if (found != tensor_access) {
        known_count = 0; /* it has codes of its own */
        tensor_access = found;
    }
    Py_RETURN_NONE;
}

/* Whether `tensor_access` knows tensors of this class. */
static int is_accessible(PyObject *tensor)
{
    return tensor_access != NULL && is_plain(&accessed, tensor);
}

/* Fill in a view of a tensor's elements. `checked`: whether elements with a lazy sign are known to have none. */
static int view_tensor(PyObject *tensor, View *view, int *checked)
{
    if (is_accessible(tensor)) {
        return *checked = tensor_access->view(tensor, view);
    }
    *checked = 0;
    if (exchange_view != NULL && is_plain(&viewed, tensor) && !exchange_view(tensor, view)) {
        return 1;
    }
    PyErr_Clear(); /* a tensor of another sort: its attributes tell */
    return 0;
}

static int version_of(PyObject *tensor, long long *version)
{
    int64_t found;
    if (is_accessible(tensor) && tensor_access->version(tensor, &found)) {
        *version = found;
        return 0;
    }
    return number(tensor, s__version, version);
}

static int requires_gradient(PyObject *tensor)
{
    return is_accessible(tensor) ? tensor_access->requires_gradient(tensor) : flag(tensor, s_requires_grad);
}

/* The address of a tensor's storage. */
static int storage_of(PyObject *tensor, int64_t *address)
{
    long long at;
    if (is_accessible(tensor) && tensor_access->storage(tensor, address)) {
        return 0;
    }
    PyObject *storage = PyObject_CallMethodNoArgs(tensor, s_untyped_storage);
    int failed = storage == NULL || number(storage, s__cdata, &at);
    Py_XDECREF(storage);
    *address = failed ? 0 : at;
    return failed ? -1 : 0;
}

/* Append a weak reference to a list. `reference` is a new reference or NULL. */
static int append_reference(PyObject *references, PyObject *reference)
{
    int failed = reference == NULL || PyList_Append(references, reference);
    Py_XDECREF(reference);
    return failed ? -1 : 0;
}

/* Append a weak reference to a tensor's storage: its address stays its own until that is freed. */
static int hold_storage(PyObject *references, PyObject *tensor)
{
    int64_t address;
    if (is_accessible(tensor) && tensor_access->weak_storage(tensor, &address)) {
        return append_reference(references, PyLong_FromVoidPtr((void *)(intptr_t)address));
    }
    PyObject *storage = PyObject_CallMethodNoArgs(tensor, s_untyped_storage);
    int failed = storage == NULL ||
                 append_reference(references, PyObject_CallMethodNoArgs(storage, s__weak_ref));
    Py_XDECREF(storage);
    return failed ? -1 : 0;
}

/* Free all references that `hold_storage` appended. Each is freed once, also if one of them fails. `hold` has the list. */
static int free_storages(PyObject *references, PyObject *hold)
{
    Py_ssize_t count = PyList_GET_SIZE(references);
    if (!count) {
        return 0;
    }
    PyObject *freed = PyList_GetSlice(references, 0, count), *free = NULL;
    int failed = freed == NULL || PyList_SetSlice(references, 0, count, NULL) ||
                 (tensor_access == NULL && (free = PyObject_GetAttr(hold, s__free)) == NULL);
    for (Py_ssize_t i = 0; !failed && i < count; i++) {
        if (tensor_access != NULL) {
            tensor_access->free_weak_storage((int64_t)(intptr_t)PyLong_AsVoidPtr(PyList_GET_ITEM(freed, i)));
        }
        else {
            failed = effect(PyObject_CallOneArg(free, PyList_GET_ITEM(freed, i)));
        }
    }
    Py_XDECREF(free);
    Py_XDECREF(freed);
    return failed ? -1 : 0;
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

/* Whether a view has this shape, and elements. */
static int has_shape(const View *view, PyObject *shape)
{
    if (view->ndim != PyTuple_GET_SIZE(shape) || (view->ndim && view->strides == NULL)) {
        return 0;
    }
    for (int i = 0; i < view->ndim; i++) {
        long long size;
        if (get_count(PyTuple_GET_ITEM(shape, i), &size)) {
            return -1;
        }
        if (size != view->shape[i] || !size) {
            return 0;
        }
    }
    return 1;
}

/* Whether the elements of a view are neighbours in memory. */
static int is_contiguous(const View *view)
{
    int64_t stride = 1;
    for (int i = view->ndim - 1; i >= 0; i--) {
        if (view->shape[i] != 1 && view->strides[i] != stride) {
            return 0;
        }
        stride *= view->shape[i];
    }
    return 1;
}

static const char *first_element(const View *view)
{
    return (const char *)view->data + view->byte_offset;
}

/* Copy the elements of a view, from this dimension on, to where they are neighbours. Return the end of the copy. */
static char *gather(const View *view, int dimension, int64_t itemsize, const char *from, char *to)
{
    if (dimension == view->ndim) {
        memcpy(to, from, (size_t)itemsize);
        return to + itemsize;
    }
    int64_t size = view->shape[dimension], stride = view->strides[dimension] * itemsize;
    if (dimension < view->ndim - 1) {
        for (int64_t i = 0; i < size; i++) {
            to = gather(view, dimension + 1, itemsize, from + i * stride, to);
        }
        return to;
    }
#define GATHER_ROW(width)                                                                                              \
    case width:                                                                                                        \
        for (int64_t i = 0; i < size; i++) {                                                                           \
            memcpy(to + i * width, from + i * stride, width);                                                          \
        }                                                                                                              \
        break;
    switch (itemsize) {
        GATHER_ROW(1)
        GATHER_ROW(2)
        GATHER_ROW(4)
        GATHER_ROW(8)
    default:
        for (int64_t i = 0; i < size; i++) {
            memcpy(to + i * itemsize, from + i * stride, (size_t)itemsize);
        }
    }
    return to + size * itemsize;
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
    int checked;
    if (!view_tensor(tensor, &view, &checked)) {
        return address_of(tensor, address);
    }
    *address = (long long)(intptr_t)first_element(&view);
    return 0;
}

/* Whether a tensor is of this kind, on this device or the host, and its elements are neighbours in memory of its own, at
   `address`. */
static int lies_as(PyObject *tensor, PyObject *kind, long long device, long long *address)
{
    View view;
    int is, checked;
    if (!view_tensor(tensor, &view, &checked)) {
        is = attributes_lie(tensor, kind, device, address);
    }
    else {
        int cuda = view.device_type == CUDA_DEVICE;
        if ((!cuda && view.device_type != CPU_DEVICE) || (cuda ? view.device_id : HOST) != device || view.data == NULL) {
            return 0;
        }
        *address = (long long)(intptr_t)first_element(&view);
        is = has_shape(&view, GET(TensorKind, kind, shape));
        is = is == 1 ? is_contiguous(&view) : is;
        is = is == 1 ? has_dtype(&view, tensor, GET(TensorKind, kind, dtype)) : is;
    }
    if (is < 1 || checked || (is = method_flag(tensor, s_is_neg)) < 0) {
        return is;
    }
    return !is;
}

/* Whether a tensor is of this kind, in host memory, wherever its elements are in it. */
static int is_on_host(PyObject *tensor, PyObject *kind, View *view)
{
    int checked;
    if (!view_tensor(tensor, view, &checked) || view->device_type != CPU_DEVICE || view->data == NULL) {
        return 0;
    }
    int is = has_shape(view, GET(TensorKind, kind, shape));
    is = is == 1 ? has_dtype(view, tensor, GET(TensorKind, kind, dtype)) : is;
    if (is < 1 || checked || (is = method_flag(tensor, s_is_neg)) < 0) {
        return is;
    }
    return !is;
}
