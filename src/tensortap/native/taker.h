/* `Recorder.take`, for plain tensors in host memory and for those on a device whose read may wait. */

#pragma once

#include "copies.h"
#include "deferred.h"

typedef struct {
    PyObject_HEAD
    PyObject *recorder, *careful, *device_readers;
    Copies *copies;
    Plain plain;
    long long most_read, most_pending;
} Taker;

static PyTypeObject *TakerType;

enum { GATHERED = 32 << 10 }; /* bytes of the largest tensor that is copied, `kernels.summary.batch.MOST_COPIED` */

/* Give a copy its row, as `Recorder._append_copy` does. */
static int append_copy(Taker *self, PyObject *slot, PyObject *kind, const Copy *copy, PyObject *step)
{
    PyObject *rows = GET(Recorder, self->recorder, _host_rows);
    int used = is_equal(GET(RecordSlot, slot, used), step), here = 0;
    if (used == 0 && IS(HostRows, rows)) {
        here = is_equal(GET(HostRows, rows, step), step);
    }
    if (used < 0 || here < 0) {
        return -1;
    }
    Entries *entries = here ? (Entries *)GET(HostRows, rows, entries) : NULL;
    if (!here || Py_TYPE(entries) != EntriesType || PyList_GET_SIZE(entries->slots) == self->most_pending) {
        PyObject *copied = as_copied_tensor(kind, copy);
        if (copied == NULL) {
            return -1;
        }
        int failed = effect(PyObject_CallMethodObjArgs(self->recorder, s__append_copy, slot, copied, step, NULL));
        Py_DECREF(copied);
        return failed;
    }
    PyObject **seq = &GET(Recorder, self->recorder, _seq);
    long long number_here;
    if (get_count(*seq, &number_here)) {
        return -1;
    }
    if (append_entry(entries, slot, kind, copy->batch, copy->row, copy->tensor, number_here) ||
        put_count(seq, number_here + 1)) {
        return -1;
    }
    put(&GET(RecordSlot, slot, used), step);
    return 0;
}

/* Distinguishes tensors of one storage whose elements are not neighbours, as `TensorReading.gathered` does. */
static int identity_of_view(const View *view, int64_t *identity)
{
    PyObject *parts = PyTuple_New(view->ndim + 2);
    for (int i = 0; parts != NULL && i < view->ndim + 2; i++) {
        int64_t stride = i < 2 ? 0 : view->shape[i - 2] > 1 ? view->strides[i - 2] : 0;
        PyObject *part = i ? PyLong_FromLongLong(stride) : PyLong_FromVoidPtr((void *)first_element(view));
        if (part == NULL) {
            Py_CLEAR(parts);
        }
        else {
            PyTuple_SET_ITEM(parts, i, part);
        }
    }
    *identity = parts == NULL ? -1 : PyObject_Hash(parts);
    Py_XDECREF(parts);
    return *identity == -1 && PyErr_Occurred() ? -1 : 0;
}

/* Read the identity token of a tensor in host memory, if it is of this kind. `source` is where its elements are neighbours:
   those of a small tensor are copied into `gathered` if they are not. */
static int read_token(Taker *self, PyObject *tensor, PyObject *kind, Copy *copy, char *gathered, const char **source)
{
    long long address;
    int is = lies_as(tensor, kind, HOST, &address);
    if (is == 1) {
        copy->address = address;
        *source = (const char *)(intptr_t)address;
    }
    else if (is == 0) {
        View view;
        long long nbytes, elements;
        if (get_count(GET(TensorKind, kind, nbytes), &nbytes) || get_count(GET(TensorKind, kind, elements), &elements)) {
            return -1;
        }
        if (nbytes > GATHERED || nbytes > self->copies->most_copied || (is = is_on_host(tensor, kind, &view)) < 1) {
            return is;
        }
        if (identity_of_view(&view, &copy->address)) {
            return -1;
        }
        gather(&view, 0, nbytes / elements, first_element(&view), gathered);
        *source = gathered;
    }
    else {
        return is;
    }
    long long version;
    if (version_of(tensor, &version) || storage_of(tensor, &copy->storage)) {
        return -1;
    }
    copy->kind = (int64_t)(intptr_t)kind;
    copy->version = version;
    return copy->storage != 0;
}

/* Copy or read a tensor in host memory, of the same kind as the one before in this slot. */
static int take_copy(Taker *self, PyObject *tensor, PyObject *slot, PyObject *step)
{
    Copy copy = {0};
    if (!is_plain(&self->plain, tensor) || PyList_GET_SIZE(self->device_readers) || !IS(RecordSlot, slot) ||
        GET(Recorder, self->recorder, placer) != Py_None) {
        return 0;
    }
    PyObject *kind = GET(RecordSlot, slot, likely);
    if (!IS(TensorKind, kind)) {
        return 0;
    }
    int result = is_equal(GET(RecordSlot, slot, keep), s_summary);
    if (result < 1) {
        return result;
    }
    long long elements, layout;
    if (get_count(GET(TensorKind, kind, elements), &elements) || get_count(GET(TensorKind, kind, layout), &layout)) {
        return -1;
    }
    if (elements > self->most_read || !layout) { /* the kind of a tensor on a device has no layout */
        return 0;
    }
    char gathered[GATHERED];
    const char *source;
    Py_INCREF(kind);
    result = read_token(self, tensor, kind, &copy, gathered, &source);
    if (result < 0 && PyErr_ExceptionMatches(PyExc_RuntimeError)) {
        PyErr_Clear(); /* a tensor without memory or without a version: the careful way knows what to do */
        result = 0;
    }
    if (result == 1) {
        int state = is_equal(GET(RecordSlot, slot, phase), s_state);
        int gradient = is_equal(GET(RecordSlot, slot, kind), s_param_grad);
        result = state < 0 || gradient < 0 || copy_tensor(self->copies, kind, tensor, source, &copy, !state) ? -1 : 1;
        if (result == 1 && gradient && GET(Recorder, self->recorder, compares_gradients) == Py_True) {
            PyObject *copied = as_copied_tensor(kind, &copy);
            if (copied == NULL ||
                effect(PyObject_CallMethodObjArgs(self->recorder, s__note_gradient, slot, copied, NULL))) {
                result = -1;
            }
            Py_XDECREF(copied);
        }
        if (result == 1 && append_copy(self, slot, kind, &copy, step)) {
            result = -1;
        }
    }
    Py_DECREF(kind);
    return result;
}

static int take(Taker *self, PyObject *tensor, PyObject *slot, PyObject *step)
{
    int taken = take_copy(self, tensor, slot, step);
    if (!taken && is_plain(&self->plain, tensor)) {
        taken = take_later(self->recorder, self->device_readers, tensor, slot, step);
    }
    if (taken) {
        return taken;
    }
    PyObject *result = PyObject_CallFunctionObjArgs(self->careful, tensor, slot, step, NULL);
    if (result == NULL) {
        return -1;
    }
    taken = PyObject_IsTrue(result);
    Py_DECREF(result);
    return taken;
}

static PyObject *Taker_call(Taker *self, PyObject *args, PyObject *kwargs)
{
    PyObject *tensor, *slot, *step;
    if (!PyArg_UnpackTuple(args, "take", 3, 3, &tensor, &slot, &step)) {
        return NULL;
    }
    int taken = take(self, tensor, slot, step);
    return taken < 0 ? NULL : PyBool_FromLong(taken);
}

static int Taker_init(Taker *self, PyObject *args, PyObject *kwargs)
{
    PyObject *recorder, *framework, *copies;
    if (!PyArg_ParseTuple(args, "O!OO!LL", Recorder, &recorder, &framework, CopiesType, &copies, &self->most_read,
                          &self->most_pending)) {
        return -1;
    }
    if (self->recorder != NULL) {
        PyErr_SetString(PyExc_TypeError, "a Taker is made once");
        return -1;
    }
    if ((self->careful = PyObject_GetAttr(recorder, s_take)) == NULL ||
        (self->device_readers = PyObject_GetAttr(recorder, s__device_readers)) == NULL ||
        read_plain(&self->plain, framework)) {
        return -1;
    }
    if (!PyList_Check(self->device_readers)) {
        PyErr_SetString(PyExc_TypeError, "the recorder has no list of device readers");
        return -1;
    }
    Py_INCREF(recorder);
    Py_INCREF(copies);
    self->recorder = recorder;
    self->copies = (Copies *)copies;
    return 0;
}

static int Taker_traverse(Taker *self, visitproc visit, void *arg)
{
    Py_VISIT(Py_TYPE(self));
    Py_VISIT(self->recorder);
    Py_VISIT(self->careful);
    Py_VISIT(self->device_readers);
    Py_VISIT(self->copies);
    return 0;
}

/* Without a tp_clear: the recorder does not hold it. */
static void Taker_dealloc(Taker *self)
{
    PyTypeObject *type = Py_TYPE(self);
    PyObject_GC_UnTrack(self);
    Py_XDECREF(self->recorder);
    Py_XDECREF(self->careful);
    Py_XDECREF(self->device_readers);
    Py_XDECREF(self->copies);
    type->tp_free((PyObject *)self);
    Py_DECREF(type);
}

static PyType_Slot taker_slots[] = {
    {Py_tp_doc, "Taker(recorder, framework, copies, most_read, most_pending)\n--\n\n"
                "Records a tensor the quick way, as `Recorder.take` does."},
    {Py_tp_new, PyType_GenericNew},
    {Py_tp_init, Taker_init},
    {Py_tp_call, Taker_call},
    {Py_tp_traverse, Taker_traverse},
    {Py_tp_dealloc, Taker_dealloc},
    {0, NULL},
};
static PyType_Spec taker_spec = {"tensortap.native.Taker", sizeof(Taker), 0, Py_TPFLAGS_DEFAULT | Py_TPFLAGS_HAVE_GC,
                                 taker_slots};
