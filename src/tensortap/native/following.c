/* The part of capture that runs at every call of a module, in C.

   `Follower` is `capture.follower.Follower`, and `Taker` is `capture.recorder.Recorder.take` for small tensors in host
   memory. The Python versions say what is done and why; here is only what C makes quicker. Whatever is not common goes
   to Python: a function returns 0, and its caller takes the careful way. Nothing here depends on a framework: tensors
   are used through their Python attributes.

   The functions return 1 (done), 0 (not done, nothing changed) or -1 (a Python exception is set). */

#define PY_SSIZE_T_CLEAN
#include <Python.h>
#include <stdint.h>
#include <string.h>
#include <time.h>

#define MOST_PLAIN 8

/* --- names ------------------------------------------------------------------------------------------------------- */
#define NAMES(X)                                                                                                       \
    X(_batch) X(_cdata) X(_end) X(_host_rows) X(_items_at) X(_known) X(_next) X(_node) X(_note_gradient) X(_seq)       \
    X(_append_copy) X(_size) X(_version) X(_weak_ref) X(_references) X(_held) X(_numbers) X(_copies)                   \
    X(_device_readers) X(acquire) X(arguments) X(autograd) X(batch) X(begin_planned) X(call) X(callbacks)              \
    X(compares_gradients) X(data_ptr) X(dtype) X(edges_of_planned) X(elements) X(end) X(end_planned) X(entries)        \
    X(handle) X(input_slots) X(inputs) X(is_contiguous) X(is_cpu) X(is_neg) X(keep) X(kind) X(layout) X(likely)        \
    X(listening) X(lock) X(name) X(nbytes) X(note_planned_arguments) X(on_gradient) X(opens) X(outermost) X(outputs)   \
    X(output_slots) X(path) X(param_grad) X(phase) X(placer) X(plain) X(plain_tensors) X(reached_inputs)               \
    X(reached_outputs) X(recomputed) X(recomputing) X(record_carefully) X(records_gradients) X(release)                \
    X(requires_grad) X(row) X(seconds) X(shape) X(site) X(slot) X(state) X(step) X(summary) X(take) X(text)            \
    X(unchanged) X(untyped_storage) X(used) X(values) X(version) X(versions) X(watched)

#define DECLARE(name) static PyObject *s_##name;
NAMES(DECLARE)

static int make_names(void)
{
#define MAKE(name)                                                                                                     \
    if ((s_##name = PyUnicode_InternFromString(#name)) == NULL) {                                                      \
        return -1;                                                                                                     \
    }
    NAMES(MAKE)
    return 0;
}

/* --- help -------------------------------------------------------------------------------------------------------- */

/* Whether an attribute is true. Most are True or False. */
static int flag(PyObject *owner, PyObject *name)
{
    PyObject *value = PyObject_GetAttr(owner, name);
    if (value == NULL) {
        return -1;
    }
    int result = value == Py_True ? 1 : value == Py_False || value == Py_None ? 0 : PyObject_IsTrue(value);
    Py_DECREF(value);
    return result;
}

/* Whether an attribute is this object, or equal to it. */
static int attribute_is(PyObject *owner, PyObject *name, PyObject *expected)
{
    PyObject *value = PyObject_GetAttr(owner, name);
    if (value == NULL) {
        return -1;
    }
    int result = value == expected ? 1 : PyObject_RichCompareBool(value, expected, Py_EQ);
    Py_DECREF(value);
    return result;
}

static int is_identical(PyObject *owner, PyObject *name, PyObject *expected)
{
    PyObject *value = PyObject_GetAttr(owner, name);
    if (value == NULL) {
        return -1;
    }
    Py_DECREF(value);
    return value == expected;
}

/* An attribute that is an address or a count. */
static int number(PyObject *owner, PyObject *name, long long *result)
{
    PyObject *value = PyObject_GetAttr(owner, name);
    if (value == NULL) {
        return -1;
    }
    *result = PyLong_AsLongLong(value);
    Py_DECREF(value);
    return *result == -1 && PyErr_Occurred() ? -1 : 0;
}

static int set_number(PyObject *owner, PyObject *name, long long value)
{
    PyObject *boxed = PyLong_FromLongLong(value);
    if (boxed == NULL) {
        return -1;
    }
    int result = PyObject_SetAttr(owner, name, boxed);
    Py_DECREF(boxed);
    return result;
}

/* Call a method without arguments; whether its result is true. */
static int method_flag(PyObject *owner, PyObject *name)
{
    PyObject *value = PyObject_CallMethodNoArgs(owner, name);
    if (value == NULL) {
        return -1;
    }
    int result = PyObject_IsTrue(value);
    Py_DECREF(value);
    return result;
}

/* Call for its effect. `result` is a new reference or NULL. */
static int effect(PyObject *result)
{
    if (result == NULL) {
        return -1;
    }
    Py_DECREF(result);
    return 0;
}

typedef struct {
    PyTypeObject *types[MOST_PLAIN];
    Py_ssize_t count;
} Plain;

static int is_plain(const Plain *plain, PyObject *value)
{
    for (Py_ssize_t i = 0; i < plain->count; i++) {
        if (Py_TYPE(value) == plain->types[i]) {
            return 1;
        }
    }
    return 0;
}

static int read_plain(Plain *plain, PyObject *framework)
{
    PyObject *types = PyObject_GetAttr(framework, s_plain_tensors);
    PyObject *listed = types == NULL ? NULL : PySequence_List(types);
    Py_XDECREF(types);
    if (listed == NULL) {
        return -1;
    }
    plain->count = 0;
    for (Py_ssize_t i = 0; i < PyList_GET_SIZE(listed); i++) {
        PyObject *type = PyList_GET_ITEM(listed, i);
        if (!PyType_Check(type) || plain->count == MOST_PLAIN) {
            PyErr_SetString(PyExc_TypeError, "plain_tensors must be a few types");
            Py_DECREF(listed);
            return -1;
        }
        Py_INCREF(type); /* held for ever: they are classes of a framework */
        plain->types[plain->count++] = (PyTypeObject *)type;
    }
    Py_DECREF(listed);
    return 0;
}

/* --- Taker ------------------------------------------------------------------------------------------------------- */
enum { ITEM = 7, ALIGNED = 64 }; /* see kernels.summary.rows.ITEM and kernels.summary.batch */

typedef struct {
    PyObject_HEAD
    PyObject *recorder, *careful, *copies, *known, *references, *numbers, *device_readers, *copied_type;
    Plain plain;
    long long most_copied, most_rows, most_known, most_pending;
} Taker;

/* Copy a tensor into the batch, as `TensorCopies.take` does. Return the copy. */
static PyObject *copy_tensor(Taker *self, PyObject *tensor, PyObject *storage, PyObject *kind, PyObject *token,
                             long long address, long long nbytes, int remembered)
{
    PyObject *batch = NULL, *copied = NULL, *reference = NULL, *row_object = NULL, *count = NULL;
    long long items, row, at, end, elements, layout;
    if (remembered) {
        PyObject *before = PyDict_GetItemWithError(self->known, token);
        if (before == NULL && PyErr_Occurred()) {
            return NULL;
        }
        if (before != NULL) {
            if ((batch = PyObject_GetAttr(before, s_batch)) == NULL || number(before, s_row, &row) ||
                number(batch, s__items_at, &items)) {
                goto done;
            }
            const int64_t *item = (const int64_t *)(intptr_t)items + row * ITEM;
            if (memcmp((const void *)(intptr_t)address, (const void *)(intptr_t)item[0], (size_t)item[2]) == 0) {
                copied = before;
                Py_INCREF(copied);
                goto done;
            }
            Py_CLEAR(batch);
        }
    }
    if ((batch = PyObject_GetAttr(self->copies, s__batch)) == NULL) {
        goto done;
    }
    int room = batch != Py_None && PyDict_Size(self->known) < self->most_known;
    if (room) {
        if (number(batch, s__size, &row) || number(batch, s__next, &at) || number(batch, s__end, &end)) {
            goto done;
        }
        room = row < self->most_rows && at + nbytes <= end;
    }
    if (!room) {
        PyObject *boxed = PyLong_FromLongLong(address);
        PyObject *memory = boxed == NULL ? NULL : PyTuple_Pack(3, kind, boxed, token);
        Py_XDECREF(boxed);
        if (memory != NULL) {
            copied = PyObject_CallMethodObjArgs(self->copies, s_take, tensor, memory,
                                                remembered ? Py_True : Py_False, NULL);
            Py_DECREF(memory);
        }
        goto done;
    }
    if (number(batch, s__items_at, &items) || number(kind, s_elements, &elements) || number(kind, s_layout, &layout)) {
        goto done;
    }
    int64_t *item = (int64_t *)(intptr_t)items + row * ITEM;
    item[0] = at;
    item[1] = elements;
    item[2] = nbytes;
    memcpy(item + 3, (const void *)(intptr_t)layout, 4 * sizeof(int64_t));
    memcpy((void *)(intptr_t)at, (const void *)(intptr_t)address, (size_t)nbytes);
    if (set_number(batch, s__next, at + (nbytes + ALIGNED - 1) / ALIGNED * ALIGNED) ||
        set_number(batch, s__size, row + 1) || (count = PyIter_Next(self->numbers)) == NULL ||
        (row_object = PyLong_FromLongLong(row)) == NULL) {
        goto done;
    }
    copied = PyObject_CallFunctionObjArgs(self->copied_type, count, batch, row_object, kind, NULL);
    if (copied != NULL && remembered) {
        if ((reference = PyObject_CallMethodNoArgs(storage, s__weak_ref)) == NULL ||
            PyList_Append(self->references, reference) || PyDict_SetItem(self->known, token, copied)) {
            Py_CLEAR(copied);
        }
    }
done:
    Py_XDECREF(batch);
    Py_XDECREF(reference);
    Py_XDECREF(row_object);
    Py_XDECREF(count);
    return copied;
}

/* Give a copy its row, as `Recorder._append_copy` does. */
static int append_copy(Taker *self, PyObject *slot, PyObject *copied, PyObject *step)
{
    int result = -1;
    PyObject *seq = NULL, *entry = NULL, *entries = NULL, *rows = PyObject_GetAttr(self->recorder, s__host_rows);
    if (rows == NULL) {
        return -1;
    }
    int used = attribute_is(slot, s_used, step);
    int here = used == 0 && rows != Py_None ? attribute_is(rows, s_step, step) : used < 0 ? -1 : 0;
    if (here < 0) {
        goto done;
    }
    if (here && ((entries = PyObject_GetAttr(rows, s_entries)) == NULL || !PyList_Check(entries))) {
        goto done;
    }
    if (!here || PyList_GET_SIZE(entries) == self->most_pending) {
        result = effect(PyObject_CallMethodObjArgs(self->recorder, s__append_copy, slot, copied, step, NULL));
        goto done;
    }
    if (PyObject_SetAttr(slot, s_used, step) || (seq = PyObject_GetAttr(self->recorder, s__seq)) == NULL ||
        (entry = PyTuple_Pack(3, slot, copied, seq)) == NULL || PyList_Append(entries, entry)) {
        goto done;
    }
    long long next = PyLong_AsLongLong(seq);
    result = next == -1 && PyErr_Occurred() ? -1 : set_number(self->recorder, s__seq, next + 1);
done:
    Py_DECREF(rows);
    Py_XDECREF(entries);
    Py_XDECREF(seq);
    Py_XDECREF(entry);
    return result;
}

/* Copy a small tensor in host memory, of the same kind as the one before in this slot. */
static int take_copy(Taker *self, PyObject *tensor, PyObject *slot, PyObject *step)
{
    PyObject *kind = NULL, *version = NULL, *storage = NULL, *cdata = NULL, *boxed = NULL, *token = NULL,
             *copied = NULL, *expected = NULL;
    int result = 0, is;
    long long address, nbytes;
    if (!is_plain(&self->plain, tensor) || PyList_GET_SIZE(self->device_readers)) {
        return 0;
    }
    if ((is = is_identical(self->recorder, s_placer, Py_None)) < 1 ||
        (is = attribute_is(slot, s_keep, s_summary)) < 1 || (is = flag(tensor, s_is_cpu)) < 1) {
        return is;
    }
    if ((kind = PyObject_GetAttr(slot, s_likely)) == NULL) {
        return -1;
    }
    if (kind == Py_None) {
        goto done;
    }
    if ((expected = PyObject_GetAttr(kind, s_dtype)) == NULL || (is = is_identical(tensor, s_dtype, expected)) < 0) {
        goto failed;
    }
    Py_CLEAR(expected);
    if (!is) {
        goto done;
    }
    if ((expected = PyObject_GetAttr(kind, s_shape)) == NULL || (is = attribute_is(tensor, s_shape, expected)) < 0) {
        goto failed;
    }
    if (!is) {
        goto done;
    }
    if (number(kind, s_nbytes, &nbytes) || (boxed = PyObject_CallMethodNoArgs(tensor, s_data_ptr)) == NULL) {
        goto failed;
    }
    address = PyLong_AsLongLong(boxed);
    if (address == -1 && PyErr_Occurred()) {
        goto failed;
    }
    if (address == 0 || nbytes > self->most_copied) {
        goto done;
    }
    if ((is = method_flag(tensor, s_is_contiguous)) < 0) {
        goto failed;
    }
    if (!is) {
        goto done;
    }
    if ((is = method_flag(tensor, s_is_neg)) < 0) {
        goto failed;
    }
    if (is) {
        goto done;
    }
    if ((version = PyObject_GetAttr(tensor, s__version)) == NULL ||
        (storage = PyObject_CallMethodNoArgs(tensor, s_untyped_storage)) == NULL ||
        (cdata = PyObject_GetAttr(storage, s__cdata)) == NULL) {
        goto failed;
    }
    result = -1; /* from here on, an error is one of ours */
    if ((is = attribute_is(slot, s_phase, s_state)) < 0 ||
        (token = PyTuple_Pack(4, kind, version, cdata, boxed)) == NULL ||
        (copied = copy_tensor(self, tensor, storage, kind, token, address, nbytes, !is)) == NULL ||
        (is = attribute_is(slot, s_kind, s_param_grad)) < 0) {
        goto done;
    }
    if (is) {
        if ((is = flag(self->recorder, s_compares_gradients)) < 0 ||
            (is && effect(PyObject_CallMethodObjArgs(self->recorder, s__note_gradient, slot, copied, NULL)))) {
            goto done;
        }
    }
    result = append_copy(self, slot, copied, step) ? -1 : 1;
    goto done;
failed:
    /* A tensor without memory or without a version: the careful way knows what to do. */
    if (PyErr_ExceptionMatches(PyExc_RuntimeError)) {
        PyErr_Clear();
    }
    else {
        result = -1;
    }
done:
    Py_XDECREF(kind);
    Py_XDECREF(version);
    Py_XDECREF(storage);
    Py_XDECREF(cdata);
    Py_XDECREF(boxed);
    Py_XDECREF(token);
    Py_XDECREF(copied);
    Py_XDECREF(expected);
    return result;
}

static int take(Taker *self, PyObject *tensor, PyObject *slot, PyObject *step)
{
    int taken = take_copy(self, tensor, slot, step);
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
    PyObject *recorder, *framework, *copied_type, *held;
    if (!PyArg_ParseTuple(args, "OOOLLLL", &recorder, &framework, &copied_type, &self->most_copied, &self->most_rows,
                          &self->most_known, &self->most_pending)) {
        return -1;
    }
    if (self->recorder != NULL) {
        PyErr_SetString(PyExc_TypeError, "a Taker is made once");
        return -1;
    }
    if ((self->careful = PyObject_GetAttr(recorder, s_take)) == NULL ||
        (self->device_readers = PyObject_GetAttr(recorder, s__device_readers)) == NULL ||
        (self->copies = PyObject_GetAttr(recorder, s__copies)) == NULL ||
        (self->known = PyObject_GetAttr(self->copies, s__known)) == NULL ||
        (self->numbers = PyObject_GetAttr(self->copies, s__numbers)) == NULL ||
        (held = PyObject_GetAttr(self->copies, s__held)) == NULL) {
        return -1;
    }
    self->references = PyObject_GetAttr(held, s__references);
    Py_DECREF(held);
    if (self->references == NULL || read_plain(&self->plain, framework)) {
        return -1;
    }
    if (!PyDict_Check(self->known) || !PyList_Check(self->references) || !PyList_Check(self->device_readers) ||
        !PyIter_Check(self->numbers)) {
        PyErr_SetString(PyExc_TypeError, "the recorder is not made as following.c expects");
        return -1;
    }
    Py_INCREF(recorder);
    Py_INCREF(copied_type);
    self->recorder = recorder;
    self->copied_type = copied_type;
    return 0;
}

static int Taker_traverse(Taker *self, visitproc visit, void *arg)
{
    Py_VISIT(Py_TYPE(self));
    Py_VISIT(self->recorder);
    Py_VISIT(self->careful);
    Py_VISIT(self->copies);
    Py_VISIT(self->known);
    Py_VISIT(self->references);
    Py_VISIT(self->numbers);
    Py_VISIT(self->device_readers);
    Py_VISIT(self->copied_type);
    return 0;
}

static int Taker_clear(Taker *self)
{
    Py_CLEAR(self->recorder);
    Py_CLEAR(self->careful);
    Py_CLEAR(self->copies);
    Py_CLEAR(self->known);
    Py_CLEAR(self->references);
    Py_CLEAR(self->numbers);
    Py_CLEAR(self->device_readers);
    Py_CLEAR(self->copied_type);
    return 0;
}

static void Taker_dealloc(Taker *self)
{
    PyTypeObject *type = Py_TYPE(self);
    PyObject_GC_UnTrack(self);
    Taker_clear(self);
    type->tp_free((PyObject *)self);
    Py_DECREF(type);
}

static PyType_Slot taker_slots[] = {
    {Py_tp_doc, "Taker(recorder, framework, CopiedTensor, most_copied, most_rows, most_known, most_pending)\n--\n\n"
                "Records a tensor the quick way, as `Recorder.take` does."},
    {Py_tp_new, PyType_GenericNew},
    {Py_tp_init, Taker_init},
    {Py_tp_call, Taker_call},
    {Py_tp_traverse, Taker_traverse},
    {Py_tp_clear, Taker_clear},
    {Py_tp_dealloc, Taker_dealloc},
    {0, NULL},
};
static PyType_Spec taker_spec = {"tensortap.native.Taker", sizeof(Taker), 0, Py_TPFLAGS_DEFAULT | Py_TPFLAGS_HAVE_GC,
                                 taker_slots};
static PyTypeObject *TakerType;

/* --- templates --------------------------------------------------------------------------------------------------- */
enum { TENSOR, EQUAL, ALIKE, SEQUENCE, MAPPING }; /* see capture.templates.Node */

static int collect_all(const Plain *plain, PyObject *values, PyObject *nodes, PyObject *found);

/* Append the tensors of a value to `found`; whether the value is as `node` says. */
static int collect(const Plain *plain, PyObject *value, PyObject *node, PyObject *found)
{
    long what = PyLong_AsLong(PyTuple_GET_ITEM(node, 0));
    if (what == TENSOR) {
        return !is_plain(plain, value) ? 0 : PyList_Append(found, value) ? -1 : 1;
    }
    PyObject *known = PyTuple_GET_ITEM(node, 1);
    if (what == EQUAL) {
        return value == known ? 1 : Py_TYPE(value) != Py_TYPE(known) ? 0 : PyObject_RichCompareBool(value, known, Py_EQ);
    }
    if ((PyObject *)Py_TYPE(value) != known) {
        return 0;
    }
    if (what == ALIKE) {
        return 1;
    }
    if (what == SEQUENCE) {
        return collect_all(plain, value, PyTuple_GET_ITEM(node, 2), found);
    }
    PyObject *keys = PySequence_List(value);
    int same = keys == NULL ? -1 : PyObject_RichCompareBool(keys, PyTuple_GET_ITEM(node, 2), Py_EQ);
    Py_XDECREF(keys);
    if (same < 1) {
        return same;
    }
    PyObject *view = PyObject_CallMethodNoArgs(value, s_values), *values = view == NULL ? NULL : PySequence_List(view);
    Py_XDECREF(view);
    same = values == NULL ? -1 : collect_all(plain, values, PyTuple_GET_ITEM(node, 3), found);
    Py_XDECREF(values);
    return same;
}

/* `values` is a tuple or a list, `nodes` a list. */
static int collect_all(const Plain *plain, PyObject *values, PyObject *nodes, PyObject *found)
{
    Py_ssize_t count = PyList_GET_SIZE(nodes);
    if (PySequence_Fast_GET_SIZE(values) != count) {
        return 0;
    }
    for (Py_ssize_t i = 0; i < count && i < PySequence_Fast_GET_SIZE(values); i++) {
        PyObject *part = PySequence_Fast_GET_ITEM(values, i);
        Py_INCREF(part); /* code of the part may run, and change what holds it */
        int same = collect(plain, part, PyList_GET_ITEM(nodes, i), found);
        Py_DECREF(part);
        if (same < 1) {
            return same;
        }
    }
    return 1;
}

/* Set `found` to the tensors of a value, if it is as the template says. */
static int tensors_of(const Plain *plain, PyObject *template, PyObject *value, PyObject **found)
{
    PyObject *node = PyObject_GetAttr(template, s__node);
    if (node == NULL || (*found = PyList_New(0)) == NULL) {
        Py_XDECREF(node);
        return -1;
    }
    int same = collect(plain, value, node, *found);
    Py_DECREF(node);
    if (same < 1) {
        Py_CLEAR(*found);
    }
    return same;
}

/* --- Follower ---------------------------------------------------------------------------------------------------- */
typedef struct {
    PyObject_HEAD
    PyObject *work, *arguments, *records_gradients, *recomputing, *versions, *version, *on_gradient;
    PyObject *planned_call, *no_gradient, *record_slot;
    PyObject *guard, *lock;
    PyObject *take, *hooks, *step;
    PyObject *events, *open;
    Plain plain;
    Py_ssize_t at;
    char watches_outputs, watches_inputs, checks_reach, following;
} Follower;

/* The next event of the plan, borrowed; NULL if there is none. */
static PyObject *next_event(Follower *self)
{
    return self->at < PyList_GET_SIZE(self->events) ? PyList_GET_ITEM(self->events, self->at) : NULL;
}

static int record_one(Follower *self, PyObject *slot, PyObject *tensor)
{
    int taken;
    if (Py_TYPE(self->take) == TakerType) {
        taken = take((Taker *)self->take, tensor, slot, self->step);
    }
    else {
        PyObject *result = PyObject_CallFunctionObjArgs(self->take, tensor, slot, self->step, NULL);
        taken = result == NULL ? -1 : PyObject_IsTrue(result);
        Py_XDECREF(result);
    }
    if (taken) {
        return taken < 0 ? -1 : 0;
    }
    return effect(PyObject_CallMethodObjArgs(self->work, s_record_carefully, tensor, slot, self->step, NULL));
}

/* Record tensors into the slots of a planned event. A recomputation has none. */
static int record_all(Follower *self, PyObject *planned, PyObject *name, PyObject *tensors)
{
    PyObject *slots = PyObject_GetAttr(planned, name), *listed;
    if (slots == NULL) {
        return -1;
    }
    listed = PySequence_Fast(slots, "slots are a sequence");
    Py_DECREF(slots);
    if (listed == NULL) {
        return -1;
    }
    int result = 0;
    for (Py_ssize_t i = 0; !result && i < PySequence_Fast_GET_SIZE(listed) && i < PyList_GET_SIZE(tensors); i++) {
        result = record_one(self, PySequence_Fast_GET_ITEM(listed, i), PyList_GET_ITEM(tensors, i));
    }
    Py_DECREF(listed);
    return result;
}

/* Whether a call without arguments returns what an attribute of `owner` is, both of them True or False. */
static int agrees(PyObject *owner, PyObject *name, PyObject *function)
{
    PyObject *now = PyObject_CallNoArgs(function);
    int same = now == NULL ? -1 : is_identical(owner, name, now);
    Py_XDECREF(now);
    return same;
}

/* Whether autograd reaches each tensor as planned. */
static int reached_as(PyObject *planned, PyObject *name, PyObject *tensors)
{
    PyObject *flags = PyObject_GetAttr(planned, name);
    if (flags == NULL) {
        return -1;
    }
    int same = PyList_Check(flags) && PyList_GET_SIZE(flags) == PyList_GET_SIZE(tensors);
    for (Py_ssize_t i = 0; same == 1 && i < PyList_GET_SIZE(tensors); i++) {
        int reached = flag(PyList_GET_ITEM(tensors, i), s_requires_grad);
        same = reached < 0 ? -1 : reached == (PyList_GET_ITEM(flags, i) == Py_True);
    }
    Py_DECREF(flags);
    return same;
}

/* The version of each tensor by its id, as `Framework.versions` returns it. */
static PyObject *versions_of(Follower *self, PyObject *tensors)
{
    PyObject *found = PyDict_New();
    for (Py_ssize_t i = 0; found != NULL && i < PyList_GET_SIZE(tensors); i++) {
        PyObject *tensor = PyList_GET_ITEM(tensors, i);
        PyObject *version = PyObject_GetAttr(tensor, s__version), *id = NULL;
        if (version == NULL && PyErr_ExceptionMatches(PyExc_RuntimeError)) {
            PyErr_Clear();
            Py_DECREF(found);
            return PyObject_CallFunctionObjArgs(self->versions, tensors, NULL);
        }
        if (version == NULL || (id = PyLong_FromVoidPtr(tensor)) == NULL || PyDict_SetItem(found, id, version)) {
            Py_CLEAR(found);
        }
        Py_XDECREF(version);
        Py_XDECREF(id);
    }
    return found;
}

/* Whether a tensor is among the inputs with the version that it had. */
static int is_unchanged(Follower *self, PyObject *inputs, PyObject *tensor)
{
    if (!PyDict_GET_SIZE(inputs)) {
        return 0;
    }
    PyObject *id = PyLong_FromVoidPtr(tensor);
    PyObject *before = id == NULL ? NULL : PyDict_GetItemWithError(inputs, id);
    Py_XDECREF(id);
    if (before == NULL) {
        return PyErr_Occurred() ? -1 : 0;
    }
    PyObject *now = PyObject_CallFunctionObjArgs(self->version, tensor, NULL);
    int same = now == NULL ? -1 : PyObject_RichCompareBool(before, now, Py_EQ);
    Py_XDECREF(now);
    return same;
}

/* Whether the outputs that are inputs, unchanged, are those of the plan. */
static int unchanged_as(Follower *self, PyObject *unchanged, PyObject *inputs, PyObject *tensors)
{
    int same = PyList_Check(unchanged) && PyList_GET_SIZE(unchanged) == PyList_GET_SIZE(tensors);
    for (Py_ssize_t i = 0; same == 1 && i < PyList_GET_SIZE(tensors); i++) {
        int is = is_unchanged(self, inputs, PyList_GET_ITEM(tensors, i));
        same = is < 0 ? -1 : is == (PyList_GET_ITEM(unchanged, i) == Py_True);
    }
    return same;
}

/* Take note of plain arguments, if they differ from those of the module's call before. */
static int note_arguments(Follower *self, PyObject *planned, PyObject *template, PyObject *site)
{
    PyObject *name = PyObject_GetAttr(site, s_name);
    PyObject *last = name == NULL ? NULL : PyDict_GetItemWithError(self->arguments, name);
    Py_XDECREF(name);
    if (last == NULL && PyErr_Occurred()) {
        return -1;
    }
    int differs;
    if (last == NULL) {
        differs = flag(template, s_plain);
    }
    else {
        int same = attribute_is(template, s_text, last);
        differs = same < 1 ? (same < 0 ? -1 : 1) : is_identical(template, s_arguments, Py_None);
    }
    if (differs < 1) {
        return differs;
    }
    return effect(PyObject_CallMethodObjArgs(self->work, s_note_planned_arguments, planned, NULL));
}

static int follow_begin(Follower *self, PyObject *site, PyObject *args, PyObject *kwargs)
{
    PyObject *planned = next_event(self), *call = NULL, *template = NULL, *tensors = NULL, *inputs = NULL, *mark = NULL,
             *edges = NULL, *open = NULL;
    int is, watched, result = -1;
    if (planned == NULL || (PyObject *)Py_TYPE(planned) != self->planned_call) {
        return 0;
    }
    Py_INCREF(planned);
    if ((is = is_identical(planned, s_site, site)) < 1 || (call = PyObject_GetAttr(planned, s_call)) == NULL ||
        (is = agrees(call, s_autograd, self->records_gradients)) < 1 ||
        (is = agrees(planned, s_recomputing, self->recomputing)) < 1 ||
        (template = PyObject_GetAttr(planned, s_inputs)) == NULL) {
        result = PyErr_Occurred() ? -1 : 0;
        goto done;
    }
    if (PyTuple_GET_SIZE(args) == 1 && !PyDict_GET_SIZE(kwargs) && is_plain(&self->plain, PyTuple_GET_ITEM(args, 0))) {
        is = tensors_of(&self->plain, template, PyTuple_GET_ITEM(args, 0), &tensors);
    }
    else {
        PyObject *both = PyTuple_Pack(2, args, kwargs);
        is = both == NULL ? -1 : tensors_of(&self->plain, template, both, &tensors);
        Py_XDECREF(both);
    }
    if (is == 1 && self->checks_reach) {
        is = reached_as(planned, s_reached_inputs, tensors);
    }
    if (is < 1) {
        result = is;
        goto done;
    }
    self->at++;
    if ((watched = flag(planned, s_watched)) < 0) {
        goto done;
    }
    inputs = watched && self->watches_outputs ? versions_of(self, tensors) : PyDict_New();
    if (inputs == NULL) {
        goto done;
    }
    if (watched && self->watches_inputs) {
        if ((is = flag(call, s_autograd)) < 0) {
            goto done;
        }
        if (is) {
            PyObject *both = PyObject_CallMethodObjArgs(self->work, s_edges_of_planned, planned, tensors, NULL);
            int split = both != NULL && PyArg_ParseTuple(both, "OO", &mark, &edges);
            Py_XINCREF(mark);
            Py_XINCREF(edges);
            Py_XDECREF(both);
            if (!split) {
                goto done;
            }
        }
    }
    if (mark == NULL && ((mark = PyLong_FromLong(0)) == NULL || (edges = PyTuple_New(0)) == NULL)) {
        goto done;
    }
    if ((open = PyTuple_Pack(4, planned, inputs, mark, edges)) == NULL || PyList_Append(self->open, open) ||
        (is = flag(call, s_opens)) < 0 ||
        (is && effect(PyObject_CallMethodObjArgs(self->work, s_begin_planned, planned, tensors, NULL)))) {
        goto done;
    }
    if (watched && ((is = flag(call, s_recomputed)) < 0 || (!is && note_arguments(self, planned, template, site)))) {
        goto done;
    }
    result = record_all(self, planned, s_input_slots, tensors) ? -1 : 1;
done:
    Py_DECREF(planned);
    Py_XDECREF(call);
    Py_XDECREF(template);
    Py_XDECREF(tensors);
    Py_XDECREF(inputs);
    Py_XDECREF(mark);
    Py_XDECREF(edges);
    Py_XDECREF(open);
    return result;
}

/* Watch for the gradients of the outputs. */
static int hook_outputs(Follower *self, PyObject *end, PyObject *unchanged, PyObject *tensors)
{
    PyObject *callbacks = PyObject_GetAttr(end, s_callbacks);
    if (callbacks == NULL) {
        return -1;
    }
    PyObject *given = PySequence_Fast(callbacks, "callbacks are a sequence");
    Py_DECREF(callbacks);
    PyObject *skipped = given == NULL ? NULL : PySequence_Fast(unchanged, "unchanged is a sequence");
    int result = skipped == NULL ? -1 : 0;
    for (Py_ssize_t i = 0; !result && i < PyList_GET_SIZE(tensors) && i < PySequence_Fast_GET_SIZE(given) &&
                           i < PySequence_Fast_GET_SIZE(skipped);
         i++) {
        if (PySequence_Fast_GET_ITEM(skipped, i) == Py_True) {
            continue;
        }
        PyObject *remove = PyObject_CallFunctionObjArgs(self->on_gradient, PyList_GET_ITEM(tensors, i),
                                                        PySequence_Fast_GET_ITEM(given, i), NULL);
        result = remove == NULL || (remove != Py_None && PyList_Append(self->hooks, remove)) ? -1 : 0;
        Py_XDECREF(remove);
    }
    Py_XDECREF(given);
    Py_XDECREF(skipped);
    return result;
}

static int follow_end(Follower *self, PyObject *site, PyObject *output)
{
    Py_ssize_t depth = PyList_GET_SIZE(self->open);
    PyObject *event = next_event(self);
    if (depth == 0 || event == NULL) {
        return 0;
    }
    PyObject *open = PyList_GET_ITEM(self->open, depth - 1), *planned = PyTuple_GET_ITEM(open, 0);
    PyObject *inputs = PyTuple_GET_ITEM(open, 1), *edges = PyTuple_GET_ITEM(open, 3);
    PyObject *template = NULL, *unchanged = NULL, *tensors = NULL;
    int is, result = -1;
    Py_INCREF(open); /* it holds the other three */
    Py_INCREF(event);
    if ((is = is_identical(planned, s_end, event)) < 1 || (is = is_identical(planned, s_site, site)) < 1) {
        result = is;
        goto done;
    }
    if ((template = PyObject_GetAttr(event, s_outputs)) == NULL ||
        (unchanged = PyObject_GetAttr(event, s_unchanged)) == NULL) {
        goto done;
    }
    if (template == Py_None) {
        is = (tensors = PyList_New(0)) == NULL ? -1 : 1;
    }
    else {
        is = tensors_of(&self->plain, template, output, &tensors);
    }
    if (is == 1 && self->checks_reach) {
        is = reached_as(event, s_reached_outputs, tensors);
    }
    if (is == 1 && self->watches_outputs) {
        is = flag(planned, s_watched);
        is = is < 1 ? (is < 0 ? -1 : 1) : unchanged_as(self, unchanged, inputs, tensors);
    }
    if (is < 1) {
        result = is;
        goto done;
    }
    self->at++;
    if (PyList_SetSlice(self->open, depth - 1, depth, NULL) || record_all(self, event, s_output_slots, tensors) ||
        hook_outputs(self, event, unchanged, tensors)) {
        goto done;
    }
    int more = PyObject_IsTrue(edges);
    if (more == 0) {
        more = flag(planned, s_outermost);
    }
    if (more == 0) {
        PyObject *name = PyObject_GetAttr(site, s_name);
        more = name == NULL ? -1 : PyUnicode_Check(name) && PyUnicode_GET_LENGTH(name) == 0;
        Py_XDECREF(name);
    }
    if (more < 0 || (more && effect(PyObject_CallMethodObjArgs(self->work, s_end_planned, planned, tensors,
                                                               PyTuple_GET_ITEM(open, 2), edges, NULL)))) {
        goto done;
    }
    result = 1;
done:
    Py_DECREF(open);
    Py_DECREF(event);
    Py_XDECREF(template);
    Py_XDECREF(unchanged);
    Py_XDECREF(tensors);
    return result;
}

static int follow_gradient(Follower *self, PyObject *slot, PyObject *gradient)
{
    PyObject *event = next_event(self);
    if (event == NULL) {
        return 0;
    }
    if (gradient == Py_None) {
        if ((PyObject *)Py_TYPE(event) != self->no_gradient) {
            return 0;
        }
        int same = is_identical(event, s_slot, slot);
        self->at += same == 1;
        return same;
    }
    if (event != slot) {
        return 0;
    }
    self->at++;
    return record_one(self, slot, gradient) ? -1 : 1;
}

static int follow_parameter_gradient(Follower *self, PyObject *site, PyObject *name, PyObject *gradient)
{
    PyObject *slot = next_event(self);
    if (slot == NULL || gradient == Py_None || (PyObject *)Py_TYPE(slot) != self->record_slot) {
        return 0;
    }
    int is = is_identical(slot, s_site, site);
    if (is < 1 || (is = attribute_is(slot, s_path, name)) < 1 ||
        (is = attribute_is(slot, s_kind, s_param_grad)) < 1) {
        return is;
    }
    self->at++;
    Py_INCREF(slot);
    is = record_one(self, slot, gradient) ? -1 : 1;
    Py_DECREF(slot);
    return is;
}

static PyObject *as_bool(int result)
{
    return result < 0 ? NULL : PyBool_FromLong(result);
}

static PyObject *Follower_begin(Follower *self, PyObject *args)
{
    PyObject *site, *arguments, *keywords;
    if (!PyArg_ParseTuple(args, "OO!O!", &site, &PyTuple_Type, &arguments, &PyDict_Type, &keywords)) {
        return NULL;
    }
    return as_bool(follow_begin(self, site, arguments, keywords));
}

static PyObject *Follower_end(Follower *self, PyObject *args)
{
    PyObject *site, *output;
    return PyArg_UnpackTuple(args, "end", 2, 2, &site, &output) ? as_bool(follow_end(self, site, output)) : NULL;
}

static PyObject *Follower_gradient(Follower *self, PyObject *args)
{
    PyObject *slot, *gradient;
    return PyArg_UnpackTuple(args, "gradient", 2, 2, &slot, &gradient) ? as_bool(follow_gradient(self, slot, gradient))
                                                                       : NULL;
}

static PyObject *Follower_parameter_gradient(Follower *self, PyObject *args)
{
    PyObject *site, *name, *gradient;
    if (!PyArg_UnpackTuple(args, "parameter_gradient", 3, 3, &site, &name, &gradient)) {
        return NULL;
    }
    return as_bool(follow_parameter_gradient(self, site, name, gradient));
}

static PyObject *Follower_unchanged(Follower *self, PyObject *args)
{
    PyObject *inputs, *tensors, *found;
    if (!PyArg_ParseTuple(args, "O!O!", &PyDict_Type, &inputs, &PyList_Type, &tensors)) {
        return NULL;
    }
    if ((found = PyList_New(0)) == NULL) {
        return NULL;
    }
    for (Py_ssize_t i = 0; i < PyList_GET_SIZE(tensors); i++) {
        int is = is_unchanged(self, inputs, PyList_GET_ITEM(tensors, i));
        if (is < 0 || PyList_Append(found, is ? Py_True : Py_False)) {
            Py_DECREF(found);
            return NULL;
        }
    }
    return found;
}

static void replace(PyObject **field, PyObject *value)
{
    PyObject *before = *field;
    Py_INCREF(value);
    *field = value;
    Py_XDECREF(before);
}

static PyObject *Follower_start(Follower *self, PyObject *args)
{
    PyObject *step, *take_function, *hooks;
    int checks_reach;
    if (!PyArg_ParseTuple(args, "O!OO!p", &PyLong_Type, &step, &take_function, &PyList_Type, &hooks, &checks_reach)) {
        return NULL;
    }
    PyObject *open = PyList_New(0);
    if (open == NULL) {
        return NULL;
    }
    replace(&self->step, step);
    replace(&self->take, take_function);
    replace(&self->hooks, hooks);
    replace(&self->open, open);
    Py_DECREF(open);
    self->checks_reach = (char)checks_reach;
    self->at = 0;
    self->following = 1;
    Py_RETURN_NONE;
}

static PyObject *Follower_use(Follower *self, PyObject *guard)
{
    PyObject *lock = PyObject_GetAttr(guard, s_lock);
    if (lock == NULL) {
        if (!PyErr_ExceptionMatches(PyExc_AttributeError)) {
            return NULL;
        }
        PyErr_Clear(); /* not a HookGuard: the hooks are followed from Python */
        Py_CLEAR(self->guard);
        Py_RETURN_NONE;
    }
    replace(&self->guard, guard);
    replace(&self->lock, lock);
    Py_DECREF(lock);
    Py_RETURN_NONE;
}

static int Follower_init(Follower *self, PyObject *args, PyObject *kwargs)
{
    PyObject *framework, *work, *kinds, *arguments, *planned_call, *no_gradient, *record_slot;
    if (!PyArg_ParseTuple(args, "OOOO!OOO", &framework, &work, &kinds, &PyDict_Type, &arguments, &planned_call,
                          &no_gradient, &record_slot)) {
        return -1;
    }
    if (self->work != NULL) {
        PyErr_SetString(PyExc_TypeError, "a Follower is made once");
        return -1;
    }
    if ((self->records_gradients = PyObject_GetAttr(framework, s_records_gradients)) == NULL ||
        (self->recomputing = PyObject_GetAttr(framework, s_recomputing)) == NULL ||
        (self->versions = PyObject_GetAttr(framework, s_versions)) == NULL ||
        (self->version = PyObject_GetAttr(framework, s_version)) == NULL ||
        (self->on_gradient = PyObject_GetAttr(framework, s_on_gradient)) == NULL ||
        read_plain(&self->plain, framework)) {
        return -1;
    }
    PyObject *outputs = PyUnicode_FromString("grad_output"), *inputs = PyUnicode_FromString("grad_input");
    int watches_outputs = outputs == NULL ? -1 : PySequence_Contains(kinds, outputs);
    int watches_inputs = inputs == NULL ? -1 : PySequence_Contains(kinds, inputs);
    Py_XDECREF(outputs);
    Py_XDECREF(inputs);
    if (watches_outputs < 0 || watches_inputs < 0 || (self->events = PyList_New(0)) == NULL ||
        (self->open = PyList_New(0)) == NULL) {
        return -1;
    }
    self->watches_outputs = (char)watches_outputs;
    self->watches_inputs = (char)watches_inputs;
    replace(&self->work, work);
    replace(&self->arguments, arguments);
    replace(&self->planned_call, planned_call);
    replace(&self->no_gradient, no_gradient);
    replace(&self->record_slot, record_slot);
    return 0;
}

static int Follower_traverse(Follower *self, visitproc visit, void *arg)
{
    Py_VISIT(Py_TYPE(self));
    for (PyObject **field = &self->work; field <= &self->open; field++) {
        Py_VISIT(*field);
    }
    return 0;
}

static int Follower_clear(Follower *self)
{
    self->following = 0;
    for (PyObject **field = &self->work; field <= &self->open; field++) {
        Py_CLEAR(*field);
    }
    return 0;
}

static void Follower_dealloc(Follower *self)
{
    PyTypeObject *type = Py_TYPE(self);
    PyObject_GC_UnTrack(self);
    Follower_clear(self);
    type->tp_free((PyObject *)self);
    Py_DECREF(type);
}

static PyObject *get_events(Follower *self, void *closure)
{
    Py_INCREF(self->events);
    return self->events;
}

static int set_events(Follower *self, PyObject *events, void *closure)
{
    if (events == NULL || !PyList_Check(events)) {
        PyErr_SetString(PyExc_TypeError, "events must be a list");
        return -1;
    }
    replace(&self->events, events);
    return 0;
}

static PyObject *get_open(Follower *self, void *closure)
{
    Py_INCREF(self->open);
    return self->open;
}

static PyObject *get_at(Follower *self, void *closure)
{
    return PyLong_FromSsize_t(self->at);
}

static PyObject *get_following(Follower *self, void *closure)
{
    return PyBool_FromLong(self->following);
}

static int set_following(Follower *self, PyObject *value, void *closure)
{
    int following = value == NULL ? 0 : PyObject_IsTrue(value);
    if (following < 0) {
        return -1;
    }
    self->following = (char)following;
    return 0;
}

static PyGetSetDef follower_fields[] = {
    {"events", (getter)get_events, (setter)set_events, "The plan: calls, their ends, slots of gradients.", NULL},
    {"open", (getter)get_open, NULL, "The calls in progress, while a plan is followed.", NULL},
    {"at", (getter)get_at, NULL, "The number of events of the plan that have come.", NULL},
    {"following", (getter)get_following, (setter)set_following, "Whether a plan is followed.", NULL},
    {NULL},
};

/* --- hooks ------------------------------------------------------------------------------------------------------- */
typedef enum { BEGIN, END, GRADIENT, PARAMETER_GRADIENT } What;

typedef struct {
    PyObject_HEAD
    Follower *follower;
    PyObject *first, *name, *careful; /* first: the site, or the slot of a gradient */
    What what;
} Hook;

static PyTypeObject *HookType;

static double now(void)
{
    struct timespec time;
    clock_gettime(CLOCK_MONOTONIC, &time);
    return (double)time.tv_sec + 1e-9 * (double)time.tv_nsec;
}

static int add_seconds(PyObject *guard, double seconds)
{
    PyObject *before = PyObject_GetAttr(guard, s_seconds);
    PyObject *after = before == NULL ? NULL : PyFloat_FromDouble(PyFloat_AsDouble(before) + seconds);
    int result = after == NULL || PyErr_Occurred() ? -1 : PyObject_SetAttr(guard, s_seconds, after);
    Py_XDECREF(before);
    Py_XDECREF(after);
    return result;
}

static int follow(Hook *self, PyObject *args)
{
    Follower *follower = self->follower;
    Py_ssize_t count = PyTuple_GET_SIZE(args);
    PyObject *first = count > 0 ? PyTuple_GET_ITEM(args, 0) : NULL;
    if (!follower->following) { /* another thread may have left the plan while this one waited */
        return 0;
    }
    switch (self->what) {
    case BEGIN:
        if (count != 2 || !PyTuple_Check(first) || !PyDict_Check(PyTuple_GET_ITEM(args, 1)) ||
            !PyList_GET_SIZE(follower->open)) {
            return 0;
        }
        return follow_begin(follower, self->first, first, PyTuple_GET_ITEM(args, 1));
    case END:
        return count == 1 ? follow_end(follower, self->first, first) : 0;
    case GRADIENT:
        return count == 1 ? follow_gradient(follower, self->first, first) : 0;
    default:
        return count == 1 ? follow_parameter_gradient(follower, self->first, self->name, first) : 0;
    }
}

/* Follow under the guard: one hook at a time, with its time added up and its errors handled. */
static int follow_guarded(Hook *self, PyObject *args)
{
    PyObject *guard = self->follower->guard, *lock = self->follower->lock;
    int listening = flag(guard, s_listening);
    if (listening < 1) {
        return listening;
    }
    double started = now();
    Py_INCREF(guard);
    Py_INCREF(lock);
    int result = effect(PyObject_CallMethodNoArgs(lock, s_acquire)) ? -1 : 0;
    if (!result) {
        result = follow(self, args);
        PyObject *type, *value, *trace;
        PyErr_Fetch(&type, &value, &trace);
        int released = effect(PyObject_CallMethodNoArgs(lock, s_release));
        if (type != NULL) {
            PyErr_Restore(type, value, trace);
        }
        result = released ? -1 : result;
    }
    if (result < 0) {
        PyObject *type, *value, *trace;
        PyErr_Fetch(&type, &value, &trace);
        PyErr_NormalizeException(&type, &value, &trace);
        if (trace != NULL) {
            PyException_SetTraceback(value, trace);
        }
        result = effect(PyObject_CallMethodObjArgs(guard, s_handle, value, NULL)) ? -1 : 1;
        Py_XDECREF(type);
        Py_XDECREF(value);
        Py_XDECREF(trace);
    }
    if (result > 0 && add_seconds(guard, now() - started)) {
        result = -1;
    }
    Py_DECREF(guard);
    Py_DECREF(lock);
    return result;
}

static PyObject *Hook_call(Hook *self, PyObject *args, PyObject *kwargs)
{
    if (self->follower->following && self->follower->guard != NULL) {
        int done = follow_guarded(self, args);
        if (done < 0) {
            return NULL;
        }
        if (done) {
            Py_RETURN_NONE;
        }
    }
    Py_ssize_t own = self->name == NULL ? 1 : 2, count = PyTuple_GET_SIZE(args);
    PyObject *all = PyTuple_New(own + count);
    if (all == NULL) {
        return NULL;
    }
    Py_INCREF(self->first);
    PyTuple_SET_ITEM(all, 0, self->first);
    if (self->name != NULL) {
        Py_INCREF(self->name);
        PyTuple_SET_ITEM(all, 1, self->name);
    }
    for (Py_ssize_t i = 0; i < count; i++) {
        PyObject *given = PyTuple_GET_ITEM(args, i);
        Py_INCREF(given);
        PyTuple_SET_ITEM(all, own + i, given);
    }
    PyObject *result = PyObject_Call(self->careful, all, kwargs);
    Py_DECREF(all);
    return result;
}

static int Hook_traverse(Hook *self, visitproc visit, void *arg)
{
    Py_VISIT(Py_TYPE(self));
    Py_VISIT(self->follower);
    Py_VISIT(self->first);
    Py_VISIT(self->name);
    Py_VISIT(self->careful);
    return 0;
}

/* Nothing is cleared: the watcher's own cycle is broken elsewhere, and a hook may be called until it is gone. */
static void Hook_dealloc(Hook *self)
{
    PyTypeObject *type = Py_TYPE(self);
    PyObject_GC_UnTrack(self);
    Py_XDECREF(self->follower);
    Py_XDECREF(self->first);
    Py_XDECREF(self->name);
    Py_XDECREF(self->careful);
    type->tp_free((PyObject *)self);
    Py_DECREF(type);
}

static PyObject *make_hook(Follower *follower, What what, PyObject *first, PyObject *name, PyObject *careful)
{
    Hook *hook = PyObject_GC_New(Hook, HookType);
    if (hook == NULL) {
        return NULL;
    }
    Py_INCREF(follower);
    Py_INCREF(first);
    Py_XINCREF(name);
    Py_INCREF(careful);
    hook->follower = follower;
    hook->first = first;
    hook->name = name;
    hook->careful = careful;
    hook->what = what;
    PyObject_GC_Track((PyObject *)hook);
    return (PyObject *)hook;
}

static PyObject *make_plain_hook(Follower *self, What what, PyObject *args)
{
    PyObject *first, *careful;
    return PyArg_UnpackTuple(args, "hook", 2, 2, &first, &careful) ? make_hook(self, what, first, NULL, careful) : NULL;
}

static PyObject *Follower_before(Follower *self, PyObject *args)
{
    return make_plain_hook(self, BEGIN, args);
}

static PyObject *Follower_after(Follower *self, PyObject *args)
{
    return make_plain_hook(self, END, args);
}

static PyObject *Follower_on_gradient(Follower *self, PyObject *args)
{
    return make_plain_hook(self, GRADIENT, args);
}

static PyObject *Follower_on_parameter_gradient(Follower *self, PyObject *args)
{
    PyObject *site, *name, *careful;
    if (!PyArg_UnpackTuple(args, "on_parameter_gradient", 3, 3, &site, &name, &careful)) {
        return NULL;
    }
    return make_hook(self, PARAMETER_GRADIENT, site, name, careful);
}

static PyMethodDef follower_methods[] = {
    {"use", (PyCFunction)Follower_use, METH_O, "Tell what guards the hooks."},
    {"start", (PyCFunction)Follower_start, METH_VARARGS, "Follow the plan in a step."},
    {"before", (PyCFunction)Follower_before, METH_VARARGS, "Return a hook for calls of a module that begin."},
    {"after", (PyCFunction)Follower_after, METH_VARARGS, "Return a hook for calls of a module that end."},
    {"on_gradient", (PyCFunction)Follower_on_gradient, METH_VARARGS, "Return a hook for a gradient of an output."},
    {"on_parameter_gradient", (PyCFunction)Follower_on_parameter_gradient, METH_VARARGS,
     "Return a hook for a parameter's gradient."},
    {"begin", (PyCFunction)Follower_begin, METH_VARARGS, "Record a call that begins, if it is planned."},
    {"end", (PyCFunction)Follower_end, METH_VARARGS, "Record a call that ends, if it is planned."},
    {"gradient", (PyCFunction)Follower_gradient, METH_VARARGS, "Record the gradient of an output, if it is planned."},
    {"parameter_gradient", (PyCFunction)Follower_parameter_gradient, METH_VARARGS,
     "Record a parameter's gradient, if it is planned."},
    {"unchanged", (PyCFunction)Follower_unchanged, METH_VARARGS, "Return which tensors are inputs, unchanged."},
    {NULL},
};

static PyType_Slot follower_slots[] = {
    {Py_tp_doc, "Follower(framework, work, kinds, arguments, PlannedCall, NoGradient, RecordSlot)\n--\n\n"
                "Follows plans, as `capture.follower.Follower` does."},
    {Py_tp_new, PyType_GenericNew},
    {Py_tp_init, Follower_init},
    {Py_tp_methods, follower_methods},
    {Py_tp_getset, follower_fields},
    {Py_tp_traverse, Follower_traverse},
    {Py_tp_clear, Follower_clear},
    {Py_tp_dealloc, Follower_dealloc},
    {0, NULL},
};
static PyType_Spec follower_spec = {"tensortap.native.Follower", sizeof(Follower), 0,
                                    Py_TPFLAGS_DEFAULT | Py_TPFLAGS_HAVE_GC, follower_slots};

static PyType_Slot hook_slots[] = {
    {Py_tp_doc, "A hook that follows a plan, or calls what is careful."},
    {Py_tp_call, Hook_call},
    {Py_tp_traverse, Hook_traverse},
    {Py_tp_dealloc, Hook_dealloc},
    {0, NULL},
};
static PyType_Spec hook_spec = {"tensortap.native.Hook", sizeof(Hook), 0, Py_TPFLAGS_DEFAULT | Py_TPFLAGS_HAVE_GC,
                                hook_slots};

/* --- module ------------------------------------------------------------------------------------------------------ */
static struct PyModuleDef definition = {PyModuleDef_HEAD_INIT, "following",
                                        "Follows the plan of a step and copies small tensors.", -1, NULL};

PyMODINIT_FUNC PyInit_following(void)
{
    PyObject *module = PyModule_Create(&definition), *follower = NULL;
    if (module == NULL || make_names() || (TakerType = (PyTypeObject *)PyType_FromSpec(&taker_spec)) == NULL ||
        (HookType = (PyTypeObject *)PyType_FromSpec(&hook_spec)) == NULL ||
        (follower = PyType_FromSpec(&follower_spec)) == NULL ||
        PyModule_AddObjectRef(module, "Taker", (PyObject *)TakerType) ||
        PyModule_AddObjectRef(module, "Hook", (PyObject *)HookType) ||
        PyModule_AddObjectRef(module, "Follower", follower)) {
        Py_XDECREF(module);
        Py_XDECREF(follower);
        return NULL;
    }
    Py_DECREF(follower);
    return module;
}
