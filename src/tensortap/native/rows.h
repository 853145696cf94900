/* The rows of a step's tensors on a device, and which tensors they are of: `DeviceEntries` of `capture.recording.deferred.entries`. */

#pragma once

#include "views.h"

enum { NEW, SAME, PROBED, READ }; /* relation of a ticket to that of its earlier sighting; see `frameworks.torch.cuda.results` */
enum { NUMBERS = 4, TICKET = 5, FIRST_ROWS = 1024, NOWHERE = -1 };

/* A tensor that a row is of. The table has open addressing, and `storage` is not 0 in a place that is taken. */
typedef struct {
    int64_t kind, version, address, placement, storage, row;
} KnownTensor;

typedef struct WaitingTensors WaitingTensors;

typedef struct {
    PyObject_HEAD
    PyObject *slots, *kinds, *batches, *hold, *references, *others;
    WaitingTensors *waiting; /* of which some may not be in the table yet */
    int64_t *numbers;        /* step, seq, row of the earlier sighting and number of the placement of each row */
    int64_t *tickets;        /* place of the batch in `batches`, number there, elements, earlier row, relation to it */
    Py_ssize_t room;
    KnownTensor *table;
    size_t places, known;
    char released;
} DeviceEntries;

static PyTypeObject *DeviceEntriesType;

/* Put those that wait into the table: only then does Python find them. */
static int make_all_known(WaitingTensors *waiting);


/* --- tensors --------------------------------------------------------------------------------------------------------- */
static size_t first_place(const DeviceEntries *self, const KnownTensor *wanted)
{
    uint64_t mixed = (uint64_t)wanted->address ^ (uint64_t)wanted->kind * 0x9E3779B97F4A7C15u ^
                     (uint64_t)wanted->version * 0xC2B2AE3D27D4EB4Fu ^ (uint64_t)wanted->placement * 0x165667B19E3779F9u;
    mixed = (mixed ^ (mixed >> 29)) * 0xBF58476D1CE4E5B9u;
    return (size_t)(mixed >> 20) & (self->places - 1);
}

static int is_alike(const KnownTensor *known, const KnownTensor *wanted)
{
    return known->address == wanted->address && known->kind == wanted->kind && known->version == wanted->version &&
           known->placement == wanted->placement;
}

/* Where a tensor is in the table, or could be put. */
static KnownTensor *find_place(const DeviceEntries *self, const KnownTensor *wanted)
{
    size_t place = first_place(self, wanted);
    while (self->table[place].storage &&
           !(is_alike(&self->table[place], wanted) && self->table[place].storage == wanted->storage)) {
        place = (place + 1) & (self->places - 1);
    }
    return &self->table[place];
}

/* Whether the table has a tensor that differs in its storage at most: otherwise, the storage need not be asked for. */
static int may_be_known(const DeviceEntries *self, const KnownTensor *wanted)
{
    for (size_t place = first_place(self, wanted); self->table[place].storage; place = (place + 1) & (self->places - 1)) {
        if (is_alike(&self->table[place], wanted)) {
            return 1;
        }
    }
    return 0;
}

static int grow_known(DeviceEntries *self)
{
    size_t before = self->places, places = before ? 2 * before : FIRST_ROWS;
    KnownTensor *old = self->table, *table = PyMem_Calloc(places, sizeof *table);
    if (table == NULL) {
        PyErr_NoMemory();
        return -1;
    }
    self->table = table;
    self->places = places;
    for (size_t i = 0; i < before; i++) {
        if (old[i].storage) {
            *find_place(self, &old[i]) = old[i];
        }
    }
    PyMem_Free(old);
    return 0;
}

/* Put a tensor whose storage is held into the table. */
static int remember(DeviceEntries *self, const KnownTensor *known)
{
    if (self->known * 2 >= self->places && grow_known(self)) {
        return -1;
    }
    KnownTensor *place = find_place(self, known);
    self->known += !place->storage;
    *place = *known;
    return 0;
}

/* Let later sightings of a tensor refer to a row. The storage's address stays its own until all are released. */
static int remember_tensor(DeviceEntries *self, const KnownTensor *known, PyObject *tensor)
{
    return hold_storage(self->references, tensor) || remember(self, known) ? -1 : 0;
}

/* Read a token as `CudaReader.describe` makes it, with the number of its placement. Whether it is one. */
static int read_device_token(PyObject *token, KnownTensor *tensor)
{
    long long version, storage, address, placement = NOWHERE;
    if (PyTuple_Check(token) && PyTuple_GET_SIZE(token) == 2) {
        if (get_count(PyTuple_GET_ITEM(token, 0), &placement)) {
            return -1;
        }
        token = PyTuple_GET_ITEM(token, 1);
    }
    if (!PyTuple_Check(token) || PyTuple_GET_SIZE(token) != 4 || !IS(TensorKind, PyTuple_GET_ITEM(token, 0))) {
        return 0;
    }
    if (get_count(PyTuple_GET_ITEM(token, 1), &version) || get_count(PyTuple_GET_ITEM(token, 2), &storage) ||
        get_count(PyTuple_GET_ITEM(token, 3), &address)) {
        return -1;
    }
    *tensor = (KnownTensor){(int64_t)(intptr_t)PyTuple_GET_ITEM(token, 0), version, address, placement, storage, NOWHERE};
    return storage != 0;
}

static PyObject *DeviceEntries_find(DeviceEntries *self, PyObject *token)
{
    KnownTensor wanted;
    int is = self->waiting == NULL || !make_all_known(self->waiting) ? read_device_token(token, &wanted) : -1;
    if (is < 0) {
        return NULL;
    }
    if (is) {
        const KnownTensor *found = self->released ? NULL : find_place(self, &wanted);
        return PyLong_FromLongLong(found != NULL && found->storage ? found->row : NOWHERE);
    }
    PyObject *row = PyDict_GetItemWithError(self->others, token);
    if (row == NULL) {
        return PyErr_Occurred() ? NULL : PyLong_FromLong(NOWHERE);
    }
    Py_INCREF(row);
    return row;
}

static PyObject *DeviceEntries_remember(DeviceEntries *self, PyObject *args)
{
    PyObject *tensor, *token, *row = NULL;
    KnownTensor known;
    if (!PyArg_ParseTuple(args, "OO", &tensor, &token)) {
        return NULL;
    }
    int is = read_device_token(token, &known), failed = is < 0;
    if (self->released) {
        Py_RETURN_NONE;
    }
    if (is == 1) {
        known.row = PyList_GET_SIZE(self->slots) - 1;
        failed = remember_tensor(self, &known, tensor);
    }
    else if (!failed) {
        row = PyLong_FromSsize_t(PyList_GET_SIZE(self->slots) - 1);
        failed = row == NULL || PyDict_SetItem(self->others, token, row) ||
                 effect(PyObject_CallMethodOneArg(self->hold, s_add, tensor));
    }
    Py_XDECREF(row);
    if (failed) {
        return NULL;
    }
    Py_RETURN_NONE;
}

static PyObject *DeviceEntries_forget(DeviceEntries *self, PyObject *token)
{
    KnownTensor wanted;
    int is = self->waiting == NULL || !make_all_known(self->waiting) ? read_device_token(token, &wanted) : -1;
    if (is < 0) {
        return NULL;
    }
    if (is && !self->released) {
        find_place(self, &wanted)->row = NOWHERE; /* a place that is not taken has no row either */
    }
    else if (PyDict_Contains(self->others, token) == 1 && PyDict_DelItem(self->others, token)) {
        return NULL;
    }
    Py_RETURN_NONE;
}

static PyObject *DeviceEntries_release(DeviceEntries *self, PyObject *unused)
{
    self->released = 1;
    Py_CLEAR(self->waiting);
    PyMem_Free(self->table);
    self->table = NULL;
    self->places = self->known = 0;
    PyDict_Clear(self->others);
    if (free_storages(self->references, self->hold)) {
        return NULL;
    }
    Py_RETURN_NONE;
}


/* --- rows ------------------------------------------------------------------------------------------------------------ */
typedef struct {
    PyObject *slot, *kind, *batch; /* borrowed */
    int64_t number, elements, step, seq, before, placement, relation;
} DeviceRow;

static int grow_rows(DeviceEntries *self)
{
    Py_ssize_t room = self->room ? 2 * self->room : FIRST_ROWS;
    int64_t *numbers = PyMem_Realloc(self->numbers, (size_t)room * NUMBERS * sizeof(int64_t));
    if (numbers != NULL) {
        self->numbers = numbers;
    }
    int64_t *tickets = numbers == NULL ? NULL : PyMem_Realloc(self->tickets, (size_t)room * TICKET * sizeof(int64_t));
    if (tickets == NULL) {
        PyErr_NoMemory();
        return -1;
    }
    self->tickets = tickets;
    self->room = room;
    return 0;
}

static int append_device_row(DeviceEntries *self, const DeviceRow *row)
{
    Py_ssize_t count = PyList_GET_SIZE(self->slots), place = PyList_GET_SIZE(self->batches) - 1;
    if (count == self->room && grow_rows(self)) {
        return -1;
    }
    while (place >= 0 && PyList_GET_ITEM(self->batches, place) != row->batch) {
        place--;
    }
    if (place < 0) {
        place = PyList_GET_SIZE(self->batches);
        if (PyList_Append(self->batches, row->batch)) {
            return -1;
        }
    }
    if (PyList_Append(self->kinds, row->kind) || PyList_Append(self->slots, row->slot)) {
        return -1;
    }
    int64_t numbers[NUMBERS] = {row->step, row->seq, row->before, row->placement};
    int64_t ticket[TICKET] = {place, row->number, row->elements, row->before, row->relation};
    memcpy(self->numbers + count * NUMBERS, numbers, sizeof numbers);
    memcpy(self->tickets + count * TICKET, ticket, sizeof ticket);
    return 0;
}

static PyObject *DeviceEntries_append(DeviceEntries *self, PyObject *args)
{
    PyObject *ticket;
    long long step, seq, before, placement, number_there, elements, relation;
    DeviceRow row;
    if (!PyArg_ParseTuple(args, "OO!O!LLLL", &row.slot, TensorKind, &row.kind, CudaTicket, &ticket, &step, &seq, &before,
                          &placement) ||
        get_count(GET(CudaTicket, ticket, number), &number_there) ||
        get_count(GET(CudaTicket, ticket, elements), &elements) || number(ticket, s_relation, &relation)) {
        return NULL;
    }
    row.batch = GET(CudaTicket, ticket, batch);
    row.number = number_there;
    row.elements = elements;
    row.step = step;
    row.seq = seq;
    row.before = before;
    row.placement = placement;
    row.relation = relation;
    if (append_device_row(self, &row)) {
        return NULL;
    }
    Py_RETURN_NONE;
}

static PyObject *DeviceEntries_item(DeviceEntries *self, Py_ssize_t row)
{
    if (row < 0 || row >= PyList_GET_SIZE(self->slots)) {
        return PyErr_Format(PyExc_IndexError, "there is no row %zd", row);
    }
    const int64_t *ticket = self->tickets + row * TICKET;
    return PyObject_CallFunction((PyObject *)CudaTicket, "OLLO", PyList_GET_ITEM(self->batches, ticket[0]),
                                 (long long)ticket[1], (long long)ticket[2], Py_None);
}

static PyObject *DeviceEntries_numbers(DeviceEntries *self, PyObject *unused)
{
    Py_ssize_t count = PyList_GET_SIZE(self->slots) * NUMBERS * (Py_ssize_t)sizeof(int64_t);
    return PyBytes_FromStringAndSize((const char *)self->numbers, count);
}

static PyObject *DeviceEntries_ticket_columns(DeviceEntries *self, PyObject *unused)
{
    Py_ssize_t count = PyList_GET_SIZE(self->slots) * TICKET * (Py_ssize_t)sizeof(int64_t);
    return Py_BuildValue("Oy#", self->batches, (const char *)self->tickets, count);
}

static int DeviceEntries_init(DeviceEntries *self, PyObject *args, PyObject *kwargs)
{
    PyObject *hold;
    if (!PyArg_ParseTuple(args, "O", &hold)) {
        return -1;
    }
    if (self->hold != NULL) {
        PyErr_SetString(PyExc_TypeError, "DeviceEntries are made once");
        return -1;
    }
    if ((self->references = PyObject_GetAttr(hold, s__references)) == NULL) {
        return -1;
    }
    if (!PyList_Check(self->references)) {
        PyErr_SetString(PyExc_TypeError, "the hold has no list of references");
        return -1;
    }
    Py_INCREF(hold);
    self->hold = hold;
    self->slots = PyList_New(0);
    self->kinds = PyList_New(0);
    self->batches = PyList_New(0);
    self->others = PyDict_New();
    return self->slots == NULL || self->kinds == NULL || self->batches == NULL || self->others == NULL || grow_rows(self) ||
                   grow_known(self)
               ? -1
               : 0;
}

static Py_ssize_t DeviceEntries_length(DeviceEntries *self)
{
    return PyList_GET_SIZE(self->slots);
}

static int DeviceEntries_traverse(DeviceEntries *self, visitproc visit, void *arg)
{
    Py_VISIT(Py_TYPE(self));
    Py_VISIT(self->slots);
    Py_VISIT(self->kinds);
    Py_VISIT(self->batches);
    Py_VISIT(self->hold);
    Py_VISIT(self->references);
    Py_VISIT(self->others);
    Py_VISIT(self->waiting);
    return 0;
}

static int DeviceEntries_clear(DeviceEntries *self)
{
    Py_CLEAR(self->waiting); /* tensors that wait hold their rows */
    return 0;
}

static void DeviceEntries_dealloc(DeviceEntries *self)
{
    PyTypeObject *type = Py_TYPE(self);
    PyObject_GC_UnTrack(self);
    Py_XDECREF(self->slots);
    Py_XDECREF(self->kinds);
    Py_XDECREF(self->batches);
    Py_XDECREF(self->hold);
    Py_XDECREF(self->references);
    Py_XDECREF(self->others);
    Py_XDECREF(self->waiting);
    PyMem_Free(self->numbers);
    PyMem_Free(self->tickets);
    PyMem_Free(self->table);
    type->tp_free((PyObject *)self);
    Py_DECREF(type);
}

static PyMethodDef device_entries_methods[] = {
    {"append", (PyCFunction)DeviceEntries_append, METH_VARARGS, "Add a row."},
    {"numbers", (PyCFunction)DeviceEntries_numbers, METH_NOARGS, "Return four numbers of each row, in 8 bytes each."},
    {"ticket_columns", (PyCFunction)DeviceEntries_ticket_columns, METH_NOARGS,
     "Return the batches, and five numbers of each ticket, as `TicketColumns` has them."},
    {"find", (PyCFunction)DeviceEntries_find, METH_O, "Return the row of a tensor, or -1."},
    {"remember", (PyCFunction)DeviceEntries_remember, METH_VARARGS, "Let later sightings refer to the newest row."},
    {"forget", (PyCFunction)DeviceEntries_forget, METH_O, "Take the tensor for another one from now on."},
    {"release", (PyCFunction)DeviceEntries_release, METH_NOARGS, "Forget all tensors."},
    {NULL},
};
static PyMemberDef device_entries_members[] = {
    {"slots", T_OBJECT_EX, offsetof(DeviceEntries, slots), READONLY, "The slot of each row."},
    {"batches", T_OBJECT_EX, offsetof(DeviceEntries, batches), READONLY, "The batches of all tickets."},
    {"kinds", T_OBJECT_EX, offsetof(DeviceEntries, kinds), READONLY, "The kind of each row's tensor."},
    {NULL},
};
static PyType_Slot device_entries_slots[] = {
    {Py_tp_doc, "DeviceEntries(hold)\n--\n\nRows of tensors on a device, as `capture.recording.deferred.entries` has them."},
    {Py_tp_new, PyType_GenericNew},
    {Py_tp_init, DeviceEntries_init},
    {Py_tp_methods, device_entries_methods},
    {Py_tp_members, device_entries_members},
    {Py_sq_length, DeviceEntries_length},
    {Py_sq_item, DeviceEntries_item},
    {Py_tp_traverse, DeviceEntries_traverse},
    {Py_tp_clear, DeviceEntries_clear},
    {Py_tp_dealloc, DeviceEntries_dealloc},
    {0, NULL},
};
static PyType_Spec device_entries_spec = {"tensortap.native.DeviceEntries", sizeof(DeviceEntries), 0,
                                          Py_TPFLAGS_DEFAULT | Py_TPFLAGS_HAVE_GC, device_entries_slots};
