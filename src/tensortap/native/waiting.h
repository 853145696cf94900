/* Tensors that wait until they are read together: `WaitingTensors` of `frameworks.torch.cuda.waiting`. */

#pragma once

#include "rows.h"

enum { MOST_WAITING = 64, MOST_DIMS = 64 };

typedef struct {
    PyObject *tensor, *kind, *bound; /* new references; the tensor is an alias, and NULL if its memory is held without one */
    const TensorAccess *access;      /* which holds the memory; NULL if there is an alias */
    HeldMemory held;
    const void *memory; /* where that begins */
    DeviceEntries *entries;          /* where it becomes known when it is read; NULL if it is known */
    KnownTensor token;               /* without its storage */
    long long number, address, version, came, last, due, base;
} Waiting;

struct WaitingTensors {
    PyObject_HEAD
    long long came, seen, last, due, most;
    Py_ssize_t count;
    int64_t addresses[MOST_WAITING]; /* side by side, because they are searched for every tensor */
    Waiting tensors[MOST_WAITING];
};

static PyTypeObject *WaitingTensorsType;

static void drop_waiting(Waiting *one)
{
    if (one->access != NULL) {
        one->access->release(&one->held);
        one->access = NULL;
    }
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

/* Keep the memory of a tensor, out of the graph. `version` is that of the tensor. */
static int keep_memory(Waiting *one, PyObject *tensor, long long version)
{
    if (is_accessible(tensor) && tensor_access->hold(tensor, &one->held)) {
        one->access = tensor_access;
        one->memory = tensor_access->held_memory(&one->held);
        one->version = version;
        return 0;
    }
    one->tensor = PyObject_CallMethodNoArgs(tensor, s_detach);
    /* Below autograd, as in compiled code, the alias may have a version of its own. */
    return one->tensor == NULL ? -1 : version_of(one->tensor, &one->version);
}

/* Whether a tensor has not changed since it came. */
static int has_stayed(const Waiting *one)
{
    if (one->access != NULL) {
        return one->access->held_version(&one->held) == one->version && one->access->held_memory(&one->held) == one->memory;
    }
    long long version, address;
    if (version_of(one->tensor, &version) || current_address(one->tensor, &address)) {
        return -1;
    }
    return version == one->version && address == one->address;
}

/* A tensor with the memory that is kept (a new reference). */
static PyObject *tensor_of(const Waiting *one)
{
    if (one->access == NULL) {
        return Py_NewRef(one->tensor);
    }
    PyObject *shape = GET(TensorKind, one->kind, shape);
    int64_t sizes[MOST_DIMS];
    Py_ssize_t ndim = PyTuple_GET_SIZE(shape);
    for (Py_ssize_t i = 0; i < ndim && ndim <= MOST_DIMS; i++) {
        long long size;
        if (get_count(PyTuple_GET_ITEM(shape, i), &size)) {
            return NULL;
        }
        sizes[i] = size;
    }
    if (ndim > MOST_DIMS) {
        return PyErr_Format(PyExc_AssertionError, "a tensor of %zd dimensions waits", ndim);
    }
    /* Where it was in the memory then: `has_stayed` in Python must see that the memory has moved. */
    int64_t offset = one->address - (int64_t)(intptr_t)one->memory;
    return one->access->held_tensor(&one->held, GET(TensorKind, one->kind, dtype), offset, (int32_t)ndim, sizes);
}

/* Let a row be found by its tensor. */
static int make_known(Waiting *one)
{
    if (one->access == NULL) {
        return storage_of(one->tensor, &one->token.storage) || remember_tensor(one->entries, &one->token, one->tensor);
    }
    one->token.storage = (int64_t)(intptr_t)one->held.storage;
    PyObject *reference = PyLong_FromVoidPtr((void *)(intptr_t)one->access->weak_reference(&one->held));
    return append_reference(one->entries->references, reference) || remember(one->entries, &one->token);
}

static int make_all_known(WaitingTensors *self)
{
    for (Py_ssize_t i = 0; i < self->count; i++) {
        Waiting *one = &self->tensors[i];
        if (one->entries == NULL || one->entries->released) {
            continue;
        }
        if (make_known(one)) {
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
        PyObject *tensor = tensor_of(one);
        PyObject *waiting = tensor == NULL
                                ? NULL
                                : PyObject_CallFunction((PyObject *)WaitingTensor, "NOLLLLLOL", tensor, one->kind, one->address,
                                                        one->version, one->came, one->last, one->due, one->bound, one->base);
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

static int WaitingTensors_init(WaitingTensors *self, PyObject *args, PyObject *kwargs)
{
    return PyArg_ParseTuple(args, "L", &self->most) ? 0 : -1;
}

static PyMemberDef waiting_members[] = {
    {"came", T_LONGLONG, offsetof(WaitingTensors, came), 0, "Number of tensors so far."},
    {"seen", T_LONGLONG, offsetof(WaitingTensors, seen), 0, "Bytes of all tensors so far."},
    {"last", T_LONGLONG, offsetof(WaitingTensors, last), 0, "Number of tensors before which none must be read."},
    {"due", T_LONGLONG, offsetof(WaitingTensors, due), 0, "The same in bytes."},
    {"most", T_LONGLONG, offsetof(WaitingTensors, most), 0, "Bytes that may come after a tensor before it must be read."},
    {NULL},
};
static PyMethodDef waiting_methods[] = {
    {"add", (PyCFunction)WaitingTensors_add, METH_VARARGS, "Let a tensor wait whose result has this number."},
    {"bounds", (PyCFunction)WaitingTensors_bounds, METH_NOARGS, "Return the tensors and bytes at which one must be read."},
    {"numbers", (PyCFunction)WaitingTensors_numbers, METH_NOARGS, "Return the numbers of their results."},
    {"take_all", (PyCFunction)WaitingTensors_take_all, METH_NOARGS, "Remove and return all of them."},
    {"clear", (PyCFunction)WaitingTensors_clear, METH_NOARGS, "Release all of them."},
    {NULL},
};
static PyType_Slot waiting_slots[] = {
    {Py_tp_doc, "WaitingTensors(most)\n--\n\n"
                "The deferred tensors of a lane, as `frameworks.torch.cuda.waiting` has them."},
    {Py_tp_new, PyType_GenericNew},
    {Py_tp_init, WaitingTensors_init},
    {Py_tp_members, waiting_members},
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
