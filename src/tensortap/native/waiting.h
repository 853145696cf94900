/* Tensors that wait until they are read together: `WaitingTensors` of `frameworks.torch.cuda.waiting`. */

#pragma once

#include "rows.h"

#define MOST_WAITING 64

typedef struct {
    PyObject *tensor, *kind, *bound; /* new references; the tensor is an alias */
    DeviceEntries *entries;          /* where it becomes known when it is read; NULL if it is known */
    KnownTensor token;               /* without its storage */
    long long number, address, version, came, last, due, base;
} Waiting;

struct WaitingTensors {
    PyObject_HEAD
    Py_ssize_t count;
    int64_t addresses[MOST_WAITING]; /* side by side, because they are searched for every tensor */
    Waiting tensors[MOST_WAITING];
};

static PyTypeObject *WaitingTensorsType;

static void drop_waiting(Waiting *one)
{
    Py_CLEAR(one->tensor);
    Py_CLEAR(one->kind);
    Py_CLEAR(one->bound);
    Py_CLEAR(one->entries);
}

/* Move all of them elsewhere, so that nothing is left if dropping one of them runs other code. */
static Py_ssize_t take_waiting(WaitingTensors *self, Waiting *taken)
{
    Py_ssize_t count = self->count;
    memcpy(taken, self->tensors, (size_t)count * sizeof *taken);
    self->count = 0;
    return count;
}

static void drop_all(Waiting *taken, Py_ssize_t count)
{
    for (Py_ssize_t i = 0; i < count; i++) {
        drop_waiting(&taken[i]);
    }
}

/* Room for one more; NULL with an exception if there is none. */
static Waiting *next_waiting(WaitingTensors *self, int64_t address)
{
    if (self->count == MOST_WAITING) {
        PyErr_SetString(PyExc_AssertionError, "more tensors wait than one launch reads");
        return NULL;
    }
    Waiting *one = &self->tensors[self->count];
    memset(one, 0, sizeof *one);
    self->addresses[self->count++] = one->address = address;
    return one;
}

static int make_all_known(WaitingTensors *self)
{
    for (Py_ssize_t i = 0; i < self->count; i++) {
        Waiting *one = &self->tensors[i];
        if (one->entries == NULL || one->entries->released) {
            continue;
        }
        if (storage_of(one->tensor, &one->token.storage) || remember_tensor(one->entries, &one->token, one->tensor)) {
            return -1;
        }
        Py_CLEAR(one->entries);
    }
    return 0;
}

/* Find the row of a tensor; NOWHERE if the step has not shown it. While a tensor waits, no other one has its memory. */
static int find_row(DeviceEntries *entries, const WaitingTensors *waiting, PyObject *tensor, KnownTensor *token)
{
    for (Py_ssize_t i = 0; i < waiting->count; i++) {
        const Waiting *one = &waiting->tensors[i];
        if (waiting->addresses[i] == token->address && one->entries == entries && is_alike(&one->token, token)) {
            token->row = one->token.row;
            return 0;
        }
    }
    token->row = NOWHERE;
    if (!may_be_known(entries, token)) {
        return 0;
    }
    if (storage_of(tensor, &token->storage)) {
        return -1;
    }
    const KnownTensor *found = find_place(entries, token);
    token->row = found->storage ? found->row : NOWHERE;
    return 0;
}


/* --- as Python sees them --------------------------------------------------------------------------------------------- */
static PyObject *WaitingTensors_add(WaitingTensors *self, PyObject *args)
{
    PyObject *given;
    long long number_there, address, version, came, last, due, base;
    if (!PyArg_ParseTuple(args, "LO!", &number_there, WaitingTensor, &given) ||
        get_count(GET(WaitingTensor, given, address), &address) || get_count(GET(WaitingTensor, given, version), &version) ||
        get_count(GET(WaitingTensor, given, came), &came) || get_count(GET(WaitingTensor, given, last), &last) ||
        get_count(GET(WaitingTensor, given, due), &due) || get_count(GET(WaitingTensor, given, base), &base)) {
        return NULL;
    }
    Waiting *one = next_waiting(self, address);
    if (one == NULL) {
        return NULL;
    }
    put(&one->tensor, GET(WaitingTensor, given, tensor));
    put(&one->kind, GET(WaitingTensor, given, kind));
    put(&one->bound, GET(WaitingTensor, given, bound));
    one->number = number_there;
    one->version = version;
    one->came = came;
    one->last = last;
    one->due = due;
    one->base = base;
    Py_RETURN_NONE;
}

static PyObject *WaitingTensors_bounds(WaitingTensors *self, PyObject *unused)
{
    long long last = PY_SSIZE_T_MAX, due = PY_SSIZE_T_MAX;
    for (Py_ssize_t i = 0; i < self->count; i++) {
        last = self->tensors[i].last < last ? self->tensors[i].last : last;
        due = self->tensors[i].due < due ? self->tensors[i].due : due;
    }
    return Py_BuildValue("LL", last, due);
}

static PyObject *WaitingTensors_numbers(WaitingTensors *self, PyObject *unused)
{
    PyObject *numbers = PyList_New(self->count);
    for (Py_ssize_t i = 0; numbers != NULL && i < self->count; i++) {
        PyObject *number_there = PyLong_FromLongLong(self->tensors[i].number);
        if (number_there == NULL) {
            Py_CLEAR(numbers);
            break;
        }
        PyList_SET_ITEM(numbers, i, number_there);
    }
    return numbers;
}

static PyObject *WaitingTensors_take_all(WaitingTensors *self, PyObject *unused)
{
    Waiting taken[MOST_WAITING];
    if (make_all_known(self)) {
        return NULL;
    }
    PyObject *found = PyList_New(0);
    Py_ssize_t count = take_waiting(self, taken);
    for (Py_ssize_t i = 0; found != NULL && i < count; i++) {
        const Waiting *one = &taken[i];
        PyObject *waiting =
            PyObject_CallFunction((PyObject *)WaitingTensor, "OOLLLLLOL", one->tensor, one->kind, one->address, one->version,
                                  one->came, one->last, one->due, one->bound, one->base);
        PyObject *both = waiting == NULL ? NULL : Py_BuildValue("LO", one->number, waiting);
        if (both == NULL || PyList_Append(found, both)) {
            Py_CLEAR(found);
        }
        Py_XDECREF(waiting);
        Py_XDECREF(both);
    }
    drop_all(taken, count);
    return found;
}

static PyObject *WaitingTensors_clear(WaitingTensors *self, PyObject *unused)
{
    Waiting taken[MOST_WAITING];
    drop_all(taken, take_waiting(self, taken));
    Py_RETURN_NONE;
}

static int WaitingTensors_contains(WaitingTensors *self, PyObject *number_there)
{
    long long wanted;
    if (get_count(number_there, &wanted)) {
        return -1;
    }
    for (Py_ssize_t i = 0; i < self->count; i++) {
        if (self->tensors[i].number == wanted) {
            return 1;
        }
    }
    return 0;
}

static Py_ssize_t WaitingTensors_length(WaitingTensors *self)
{
    return self->count;
}

static int WaitingTensors_traverse(WaitingTensors *self, visitproc visit, void *arg)
{
    Py_VISIT(Py_TYPE(self));
    for (Py_ssize_t i = 0; i < self->count; i++) {
        Py_VISIT(self->tensors[i].tensor);
        Py_VISIT(self->tensors[i].kind);
        Py_VISIT(self->tensors[i].bound);
        Py_VISIT(self->tensors[i].entries);
    }
    return 0;
}

static int WaitingTensors_drop(WaitingTensors *self)
{
    Waiting taken[MOST_WAITING];
    drop_all(taken, take_waiting(self, taken));
    return 0;
}

static void WaitingTensors_dealloc(WaitingTensors *self)
{
    PyTypeObject *type = Py_TYPE(self);
    PyObject_GC_UnTrack(self);
    WaitingTensors_drop(self);
    type->tp_free((PyObject *)self);
    Py_DECREF(type);
}

static PyMethodDef waiting_methods[] = {
    {"add", (PyCFunction)WaitingTensors_add, METH_VARARGS, "Let a tensor wait whose result has this number."},
    {"bounds", (PyCFunction)WaitingTensors_bounds, METH_NOARGS, "Return the tensors and bytes at which one must be read."},
    {"numbers", (PyCFunction)WaitingTensors_numbers, METH_NOARGS, "Return the numbers of their results."},
    {"take_all", (PyCFunction)WaitingTensors_take_all, METH_NOARGS, "Remove and return all of them."},
    {"clear", (PyCFunction)WaitingTensors_clear, METH_NOARGS, "Release all of them."},
    {NULL},
};
static PyType_Slot waiting_slots[] = {
    {Py_tp_doc, "The deferred tensors of a lane, as `frameworks.torch.cuda.waiting` has them."},
    {Py_tp_new, PyType_GenericNew},
    {Py_tp_methods, waiting_methods},
    {Py_sq_length, WaitingTensors_length},
    {Py_sq_contains, WaitingTensors_contains},
    {Py_tp_traverse, WaitingTensors_traverse},
    {Py_tp_clear, WaitingTensors_drop},
    {Py_tp_dealloc, WaitingTensors_dealloc},
    {0, NULL},
};
static PyType_Spec waiting_spec = {"tensortap.native.WaitingTensors", sizeof(WaitingTensors), 0,
                                   Py_TPFLAGS_DEFAULT | Py_TPFLAGS_HAVE_GC, waiting_slots};
