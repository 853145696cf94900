/* The rows of a step, and the copies of its tensors: `RowEntries` and `TensorCopies` of `capture.recording.host_rows`. */

#pragma once

#include "views.h"

enum { COLUMNS = 4 }; /* the place of a row's batch in `batches`, its row there, the tensor's number, the row's seq */

typedef struct {
    PyObject_HEAD
    PyObject *slots, *kinds, *batches;
    int64_t *numbers;
    Py_ssize_t room;
} Entries;

static PyTypeObject *EntriesType;

static int append_entry(Entries *self, PyObject *slot, PyObject *kind, PyObject *batch, int64_t row, int64_t tensor,
                        int64_t seq)
{
    Py_ssize_t count = PyList_GET_SIZE(self->slots), place = PyList_GET_SIZE(self->batches) - 1;
    if (count == self->room) {
        Py_ssize_t room = count ? 2 * count : 512;
        int64_t *numbers = PyMem_Realloc(self->numbers, (size_t)room * COLUMNS * sizeof(int64_t));
        if (numbers == NULL) {
            PyErr_NoMemory();
            return -1;
        }
        self->numbers = numbers;
        self->room = room;
    }
    while (place >= 0 && PyList_GET_ITEM(self->batches, place) != batch) {
        place--;
    }
    if (place < 0) {
        place = PyList_GET_SIZE(self->batches);
        if (PyList_Append(self->batches, batch)) {
            return -1;
        }
    }
    if (PyList_Append(self->kinds, kind) || PyList_Append(self->slots, slot)) {
        return -1;
    }
    int64_t *numbers = self->numbers + count * COLUMNS;
    numbers[0] = place;
    numbers[1] = row;
    numbers[2] = tensor;
    numbers[3] = seq;
    return 0;
}

static PyObject *Entries_append(Entries *self, PyObject *args)
{
    PyObject *slot, *copied;
    long long seq, row, tensor;
    if (!PyArg_ParseTuple(args, "OO!L", &slot, CopiedTensor, &copied, &seq)) {
        return NULL;
    }
    row = PyLong_AsLongLong(GET(CopiedTensor, copied, row));
    tensor = PyLong_AsLongLong(GET(CopiedTensor, copied, number));
    if (PyErr_Occurred() || append_entry(self, slot, GET(CopiedTensor, copied, kind), GET(CopiedTensor, copied, batch),
                                         row, tensor, seq)) {
        return NULL;
    }
    Py_RETURN_NONE;
}

static PyObject *Entries_numbers(Entries *self, PyObject *unused)
{
    Py_ssize_t count = PyList_GET_SIZE(self->slots) * COLUMNS * (Py_ssize_t)sizeof(int64_t);
    return PyBytes_FromStringAndSize((const char *)self->numbers, count);
}

static int Entries_init(Entries *self, PyObject *args, PyObject *kwargs)
{
    if (self->slots != NULL) {
        PyErr_SetString(PyExc_TypeError, "Entries are made once");
        return -1;
    }
    self->slots = PyList_New(0);
    self->kinds = PyList_New(0);
    self->batches = PyList_New(0);
    return self->slots == NULL || self->kinds == NULL || self->batches == NULL ? -1 : 0;
}

static Py_ssize_t Entries_length(Entries *self)
{
    return PyList_GET_SIZE(self->slots);
}

static int Entries_traverse(Entries *self, visitproc visit, void *arg)
{
    Py_VISIT(Py_TYPE(self));
    Py_VISIT(self->slots);
    Py_VISIT(self->kinds);
    Py_VISIT(self->batches);
    return 0;
}

/* Without a tp_clear: its lists are cleared themselves. */
static void Entries_dealloc(Entries *self)
{
    PyTypeObject *type = Py_TYPE(self);
    PyObject_GC_UnTrack(self);
    Py_XDECREF(self->slots);
    Py_XDECREF(self->kinds);
    Py_XDECREF(self->batches);
    PyMem_Free(self->numbers);
    type->tp_free((PyObject *)self);
    Py_DECREF(type);
}

static PyMethodDef entries_methods[] = {
    {"append", (PyCFunction)Entries_append, METH_VARARGS, "Add a row."},
    {"numbers", (PyCFunction)Entries_numbers, METH_NOARGS, "Return four numbers of each row, in 8 bytes each."},
    {NULL},
};
static PyMemberDef entries_members[] = {
    {"slots", T_OBJECT_EX, offsetof(Entries, slots), READONLY, "The slot of each row."},
    {"kinds", T_OBJECT_EX, offsetof(Entries, kinds), READONLY, "The kind of each row's tensor."},
    {"batches", T_OBJECT_EX, offsetof(Entries, batches), READONLY, "The batches that hold the copies."},
    {NULL},
};
static PyType_Slot entries_slots[] = {
    {Py_tp_doc, "The rows of a step, as `capture.recording.host_rows.RowEntries` has them."},
    {Py_tp_new, PyType_GenericNew},
    {Py_tp_init, Entries_init},
    {Py_tp_methods, entries_methods},
    {Py_tp_members, entries_members},
    {Py_sq_length, Entries_length},
    {Py_tp_traverse, Entries_traverse},
    {Py_tp_dealloc, Entries_dealloc},
    {0, NULL},
};
static PyType_Spec entries_spec = {"tensortap.native.Entries", sizeof(Entries), 0,
                                   Py_TPFLAGS_DEFAULT | Py_TPFLAGS_HAVE_GC, entries_slots};


/* --- copies ---------------------------------------------------------------------------------------------------------- */
enum { ITEM = 8, PROBE_COUNT = 64, PROBE_BYTES = 512, ALIGNED = 64 }; /* see kernels.summary.items and .batch */
enum { FIRST_TABLE = 1024 };

typedef struct {
    int64_t kind, version, storage, address; /* the identity token; storage is 0 in an empty place */
    PyObject *batch;                         /* borrowed from `batches` */
    int64_t items, row, tensor;
} Copy;

typedef struct {
    PyObject_HEAD
    PyObject *numbers, *held, *references, *batches;
    PyObject *batch; /* the newest, NULL if nothing can be added to it; borrowed from `batches` */
    long long items, size, next, end;
    Copy *table; /* open addressing */
    size_t room, count;
    long long most_rows, most_known;
    long long most_copied, chunk, record; /* `READ_LIMITS` of kernels.summary.batch */
} Copies;

static PyTypeObject *CopiesType;

static size_t place_of(const Copies *self, const Copy *wanted)
{
    uint64_t mixed = (uint64_t)wanted->address ^ (uint64_t)wanted->kind * 0x9E3779B97F4A7C15u ^
                     (uint64_t)wanted->version * 0xC2B2AE3D27D4EB4Fu ^ (uint64_t)wanted->storage;
    mixed = (mixed ^ (mixed >> 29)) * 0xBF58476D1CE4E5B9u;
    size_t place = (size_t)(mixed >> 20) & (self->room - 1);
    while (self->table[place].storage &&
           (self->table[place].address != wanted->address || self->table[place].kind != wanted->kind ||
            self->table[place].version != wanted->version || self->table[place].storage != wanted->storage)) {
        place = (place + 1) & (self->room - 1);
    }
    return place;
}

static int grow_table(Copies *self)
{
    size_t room = self->room ? 2 * self->room : FIRST_TABLE;
    Copy *before = self->table, *table = PyMem_Calloc(room, sizeof(Copy));
    if (table == NULL) {
        PyErr_NoMemory();
        return -1;
    }
    size_t old = self->room;
    self->table = table;
    self->room = room;
    for (size_t i = 0; i < old; i++) {
        if (before[i].storage) {
            table[place_of(self, &before[i])] = before[i];
        }
    }
    PyMem_Free(before);
    return 0;
}

/* Tell the newest batch its size, and add nothing to it any more. */
static int finish_batch(Copies *self)
{
    if (self->batch == NULL) {
        return 0;
    }
    PyObject *size = PyLong_FromLongLong(self->size);
    int result = size == NULL ? -1 : PyObject_SetAttr(self->batch, s__size, size);
    Py_XDECREF(size);
    self->batch = NULL;
    return result;
}

static int new_batch(Copies *self)
{
    if (finish_batch(self)) {
        return -1;
    }
    PyObject *batch = PyObject_CallNoArgs((PyObject *)SummaryBatch);
    if (batch == NULL || number(batch, s__items_at, &self->items) || number(batch, s__size, &self->size) ||
        number(batch, s__next, &self->next) || number(batch, s__end, &self->end) ||
        PyList_Append(self->batches, batch)) {
        Py_XDECREF(batch);
        return -1;
    }
    self->batch = batch;
    Py_DECREF(batch); /* `batches` holds it */
    return 0;
}

/* Recognise no tensor from before. Batches that are not finished stay. */
static int forget(Copies *self)
{
    if (self->count) {
        memset(self->table, 0, self->room * sizeof(Copy));
        self->count = 0;
    }
    Py_ssize_t keep = self->batch != NULL;
    if (PyList_SetSlice(self->batches, 0, PyList_GET_SIZE(self->batches) - keep, NULL)) {
        return -1;
    }
    return free_storages(self->references, self->held);
}

/* Return the offset of an element that shows whether an array has changed, as `items._probed` does. */
static int64_t sampled_at(int64_t part, const int64_t *item)
{
    int64_t step = item[1] / PROBE_COUNT;
    return (part * step + part * 0x9E3779B1 % step) * item[3];
}

/* Return whether the elements at `source` are those of an item; if it was read, whether a few of them are. */
static int is_item(const int64_t *item, const char *source)
{
    const char *kept = (const char *)(intptr_t)item[0];
    if (!item[7]) {
        return !memcmp(source, kept, (size_t)item[2]);
    }
    for (int64_t part = 0; part < PROBE_COUNT; part++) {
        if (memcmp(source + sampled_at(part, item), kept + part * item[3], (size_t)item[3])) {
            return 0;
        }
    }
    return 1;
}

/* Read the chunks of the array that an item describes. Python runs meanwhile, so `self` may be another afterwards. */
static int read_item(int64_t *item, const char *source, const Copy *found)
{
    for (int64_t part = 0; part < PROBE_COUNT; part++) {
        memcpy((char *)(intptr_t)item[0] + part * item[3], source + sampled_at(part, item), (size_t)item[3]);
    }
    Py_INCREF(found->batch);
    int failed = effect(PyObject_CallMethod(found->batch, "read", "LL", (long long)found->row,
                                            (long long)(intptr_t)source));
    Py_DECREF(found->batch);
    return failed;
}

/* Copy or read a tensor, or find its copy. `found` has its token, and `source` is where its elements are. `remembered` as in
   `TensorCopies.take`. */
static int copy_tensor(Copies *self, PyObject *kind, PyObject *owner, const char *source, Copy *found, int remembered)
{
    size_t place = 0;
    if (remembered) {
        if (self->count * 2 >= self->room && grow_table(self)) {
            return -1;
        }
        place = place_of(self, found);
        const Copy *known = &self->table[place];
        if (known->storage) {
            if (is_item((const int64_t *)(intptr_t)known->items + known->row * ITEM, source)) {
                *found = *known;
                return 0;
            }
        }
        else if ((long long)self->count == self->most_known) {
            if (forget(self)) {
                return -1;
            }
            place = place_of(self, found);
        }
    }
    long long elements = PyLong_AsLongLong(GET(TensorKind, kind, elements));
    long long nbytes = PyLong_AsLongLong(GET(TensorKind, kind, nbytes));
    long long layout = PyLong_AsLongLong(GET(TensorKind, kind, layout));
    if (PyErr_Occurred()) {
        return -1;
    }
    long long chunks = nbytes > self->most_copied ? (elements + self->chunk - 1) / self->chunk : 0;
    long long room = chunks ? PROBE_BYTES + chunks * self->record : nbytes;
    if ((self->batch == NULL || self->size == self->most_rows || self->next + room > self->end) && new_batch(self)) {
        return -1;
    }
    if (self->next + room > self->end) {
        PyErr_SetString(PyExc_ValueError, "a new batch has room for the largest copy");
        return -1;
    }
    PyObject *tensor = PyIter_Next(self->numbers);
    if (tensor == NULL) {
        return -1;
    }
    found->tensor = PyLong_AsLongLong(tensor);
    Py_DECREF(tensor);
    int64_t *item = (int64_t *)(intptr_t)self->items + self->size * ITEM;
    item[0] = self->next;
    item[1] = elements;
    item[2] = nbytes;
    memcpy(item + 3, (const void *)(intptr_t)layout, 4 * sizeof(int64_t));
    item[7] = chunks;
    found->batch = self->batch;
    found->items = self->items;
    found->row = self->size++;
    self->next += (room + ALIGNED - 1) / ALIGNED * ALIGNED;
    if (!chunks) {
        memcpy((void *)(intptr_t)item[0], source, (size_t)nbytes);
    }
    else if (read_item(item, source, found)) {
        return -1;
    }
    if (remembered) {
        place = place_of(self, found);
        if (hold_storage(self->references, owner)) {
            return -1;
        }
        self->count += !self->table[place].storage;
        self->table[place] = *found;
    }
    return 0;
}

/* The copy as an object. */
static PyObject *as_copied_tensor(PyObject *kind, const Copy *copy)
{
    return PyObject_CallFunction((PyObject *)CopiedTensor, "LOLO", (long long)copy->tensor, copy->batch,
                                 (long long)copy->row, kind);
}

static PyObject *Copies_take(Copies *self, PyObject *args)
{
    PyObject *tensor, *kind, *token;
    Copy copy = {0};
    long long address, version, storage_at, identity;
    int remembered;
    if (!PyArg_ParseTuple(args, "O(O!LO)p", &tensor, TensorKind, &kind, &address, &token, &remembered)) {
        return NULL;
    }
    copy.address = address;
    copy.kind = (int64_t)(intptr_t)kind;
    remembered = remembered && token != Py_None;
    if (remembered) {
        PyObject *same;
        if (!PyArg_ParseTuple(token, "OLLL", &same, &version, &storage_at, &identity)) {
            return NULL;
        }
        copy.version = version;
        copy.storage = storage_at;
        copy.address = identity; /* elements that are not neighbours were gathered elsewhere */
    }
    int failed = copy_tensor(self, kind, tensor, (const char *)(intptr_t)address, &copy, remembered);
    return failed ? NULL : as_copied_tensor(kind, &copy);
}

static PyObject *Copies_forget_one(Copies *self, PyObject *args)
{
    PyObject *kind, *token, *same;
    Copy copy = {0};
    long long address, version, storage_at, identity;
    if (!PyArg_ParseTuple(args, "(O!LO)", TensorKind, &kind, &address, &token)) {
        return NULL;
    }
    if (token != Py_None) {
        if (!PyArg_ParseTuple(token, "OLLL", &same, &version, &storage_at, &identity)) {
            return NULL;
        }
        copy.kind = (int64_t)(intptr_t)kind;
        copy.version = version;
        copy.storage = storage_at;
        copy.address = identity;
        self->table[place_of(self, &copy)].kind = 0; /* no tensor's; its place stays taken, for those behind it */
    }
    Py_RETURN_NONE;
}

static PyObject *Copies_finish_batch(Copies *self, PyObject *unused)
{
    if (finish_batch(self)) {
        return NULL;
    }
    Py_RETURN_NONE;
}

static PyObject *Copies_forget(Copies *self, PyObject *unused)
{
    if (forget(self)) {
        return NULL;
    }
    Py_RETURN_NONE;
}

static int Copies_init(Copies *self, PyObject *args, PyObject *kwargs)
{
    PyObject *held, *numbers;
    if (!PyArg_ParseTuple(args, "OOLLLLL", &held, &numbers, &self->most_rows, &self->most_known, &self->most_copied,
                          &self->chunk, &self->record)) {
        return -1;
    }
    if (self->held != NULL || !PyIter_Check(numbers)) {
        PyErr_SetString(PyExc_TypeError, "Copies are made once, with an iterator");
        return -1;
    }
    if ((self->references = PyObject_GetAttr(held, s__references)) == NULL) {
        return -1;
    }
    if (!PyList_Check(self->references)) {
        PyErr_SetString(PyExc_TypeError, "the hold has no list of references");
        return -1;
    }
    Py_INCREF(held);
    Py_INCREF(numbers);
    self->held = held;
    self->numbers = numbers;
    self->batches = PyList_New(0);
    return self->batches == NULL ? -1 : grow_table(self);
}

static int Copies_traverse(Copies *self, visitproc visit, void *arg)
{
    Py_VISIT(Py_TYPE(self));
    Py_VISIT(self->numbers);
    Py_VISIT(self->held);
    Py_VISIT(self->references);
    Py_VISIT(self->batches);
    return 0;
}

/* Without a tp_clear: nothing that it holds leads back to it. */
static void Copies_dealloc(Copies *self)
{
    PyTypeObject *type = Py_TYPE(self);
    PyObject_GC_UnTrack(self);
    Py_XDECREF(self->numbers);
    Py_XDECREF(self->held);
    Py_XDECREF(self->references);
    Py_XDECREF(self->batches);
    PyMem_Free(self->table);
    type->tp_free((PyObject *)self);
    Py_DECREF(type);
}

static PyMethodDef copies_methods[] = {
    {"take", (PyCFunction)Copies_take, METH_VARARGS, "Return the copy of a tensor."},
    {"finish_batch", (PyCFunction)Copies_finish_batch, METH_NOARGS, "Add nothing to the newest batch from now on."},
    {"forget", (PyCFunction)Copies_forget, METH_NOARGS, "Recognise no tensor from before."},
    {"forget_one", (PyCFunction)Copies_forget_one, METH_VARARGS, "Do not recognise this tensor."},
    {NULL},
};
static PyType_Slot copies_slots[] = {
    {Py_tp_doc, "Copies(hold, numbers, most_rows, most_known, most_copied, chunk, record)\n--\n\n"
                "The copies of a step, as `TensorCopies` has them."},
    {Py_tp_new, PyType_GenericNew},
    {Py_tp_init, Copies_init},
    {Py_tp_methods, copies_methods},
    {Py_tp_traverse, Copies_traverse},
    {Py_tp_dealloc, Copies_dealloc},
    {0, NULL},
};
static PyType_Spec copies_spec = {"tensortap.native.Copies", sizeof(Copies), 0,
                                  Py_TPFLAGS_DEFAULT | Py_TPFLAGS_HAVE_GC, copies_slots};
