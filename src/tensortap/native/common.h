/* Names, fields of Python objects, and help. */

#pragma once

#define PY_SSIZE_T_CLEAN
#include <Python.h>
#include <limits.h>
#include <stdint.h>
#include <string.h>
#include <structmember.h>
#include <time.h>

#define MOST_PLAIN 8

#define NAMES(X)                                                                                                      \
    X(__dict__) X(_free) X(add) X(_backward_pre_hooks) X(_forward_hooks) X(relation) X(_append_copy)                  \
    X(_backward_hooks) X(_cdata) X(_finish) X(_cuda_getCurrentRawStream) X(_cuda_getDevice)                           \
    X(_cuda_isCurrentStreamCapturing) X(_current_graph_task_id) X(_is_view) X(_base) X(watch_view)                    \
    X(_register_hook_dict) X(get_device) X(grad_fn) X(pop) X(_device_readers) X(_end) X(_items_at) X(_next)           \
    X(_note_gradient) X(_read_due) X(_read_waiting) X(_references) X(_size) X(_forward_pre_hooks)                     \
    X(_global_backward_hooks) X(_global_backward_pre_hooks) X(_global_forward_hooks) X(_global_forward_pre_hooks)     \
    X(_version) X(_weak_ref) X(backward) X(begin) X(begin_planned) X(check) X(data_ptr) X(detach) X(dtype)            \
    X(edges_of_planned) X(end) X(end_planned) X(forward) X(graph_task) X(handle) X(input) X(is_contiguous) X(is_cpu)  \
    X(is_neg) X(is_leaf) X(note_planned_arguments) X(on_gradient) X(param_grad) X(plain_tensors) X(recomputing)       \
    X(record_carefully) X(records_gradients) X(requires_grad) X(shape) X(state) X(summary) X(take)                    \
    X(untyped_storage) X(values) X(version)

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


/* --- fields of Python objects ---------------------------------------------------------------------------------------- */
/* Classes with __slots__, and where in their objects each slot is: reading it there takes a tenth of an attribute's
   time. `configure` fills the table in. */
#define FIELDS(X)                                                                                                     \
    X(RecordSlot, used) X(RecordSlot, likely) X(RecordSlot, keep) X(RecordSlot, phase) X(RecordSlot, kind)            \
    X(RecordSlot, site) X(RecordSlot, path) X(RecordSlot, read) X(RecordSlot, micro) X(RecordSlot, place)             \
    X(RecordSlot, in_graph) X(TensorKind, dtype) X(TensorKind, shape) X(TensorKind, name) X(TensorKind, elements)     \
    X(TensorKind, nbytes) X(TensorKind, layout) X(CopiedTensor, number) X(CopiedTensor, batch) X(CopiedTensor, row)   \
    X(CopiedTensor, kind) X(Recorder, placer) X(Recorder, _gather) X(Recorder, _host_rows) X(Recorder, _pending)      \
    X(Recorder, _seq) X(Recorder, read_order) X(Recorder, compares_gradients) X(Recorder, _in_snapshot)               \
    X(HostRows, step) X(HostRows, entries) X(PlannedCall, site) X(PlannedCall, call) X(PlannedCall, watched)          \
    X(PlannedCall, recomputing) X(PlannedCall, outermost) X(PlannedCall, inputs) X(PlannedCall, input_slots)          \
    X(PlannedCall, reached_inputs) X(PlannedCall, end) X(PlannedEnd, outputs) X(PlannedEnd, output_slots)             \
    X(PlannedEnd, reached_outputs) X(PlannedEnd, unchanged) X(PlannedEnd, callbacks) X(ModuleCall, autograd)          \
    X(ModuleCall, opens) X(ModuleCall, recomputed) X(Template, _node) X(Template, arguments)                          \
    X(Template, text) X(Site, name) X(HookGuard, interrupt) X(HookGuard, listening) X(HookGuard, lock)                \
    X(Placer, batch) X(SlotPlacement, base) X(SlotPlacement, batch) X(SlotPlacement, number) X(SlotPlacement, shape)
#define CLASSES(X)                                                                                                    \
    X(RecordSlot) X(TensorKind) X(CopiedTensor) X(Recorder) X(HostRows) X(PlannedCall) X(PlannedEnd) X(ModuleCall)    \
    X(Template) X(Site) X(NoGradient) X(SummaryBatch) X(HookGuard) X(Placer) X(SlotPlacement)

/* The same for reads on a device; `configure_device` fills them in. */
#define DEVICE_FIELDS(X)                                                                                              \
    X(CudaReader, _lane) X(CudaReader, _one_stream) X(CudaReader, _phase) X(Lane, index) X(Lane, _stream)             \
    X(Lane, _batch) X(Lane, _most) X(Lane, _partials_at) X(Lane, _pending) X(Lane, _together) X(Lane, _used)          \
    X(Lane, _waiting) X(Batch, _address) X(Batch, missed) X(Batch, size) X(BatchRead, _launch) X(BatchRead, _memory)  \
    X(BatchRead, _placed) X(BatchRead, _shares) X(BatchRead, _turns) X(BatchRead, _weights)                           \
    X(PreparedLaunch, packed) X(PieceCounters, _now) X(PieceCounters, _next) X(PieceCounters, _sure)                  \
    X(CudaTicket, batch) X(CudaTicket, number) X(CudaTicket, elements) X(WaitingTensor, tensor)                       \
    X(WaitingTensor, kind) X(WaitingTensor, address) X(WaitingTensor, version) X(WaitingTensor, came)                 \
    X(WaitingTensor, last) X(WaitingTensor, due) X(WaitingTensor, bound) X(WaitingTensor, base) X(ReadSlot, changed)  \
    X(ReadSlot, later_until) X(ReadSlot, safe_delay) X(ReadOrder, _recorded) X(ReadOrder, _step)                      \
    X(ReadOrder, snapshot) X(PendingRows, device_reader) X(PendingRows, entries)
#define DEVICE_CLASSES(X)                                                                                             \
    X(CudaReader) X(Lane) X(Batch) X(BatchRead) X(PreparedLaunch) X(PieceCounters) X(CudaTicket) X(WaitingTensor)     \
    X(ReadSlot) X(ReadOrder) X(PendingRows)

#define DECLARE_FIELD(cls, field) static Py_ssize_t cls##_##field;
FIELDS(DECLARE_FIELD)
DEVICE_FIELDS(DECLARE_FIELD)
#define DECLARE_CLASS(cls) static PyTypeObject *cls;
CLASSES(DECLARE_CLASS)
DEVICE_CLASSES(DECLARE_CLASS)
static PyTypeObject *HookType; /* see hooks.h */
static PyObject *core;         /* the module torch._C; NULL until the first device is read */

/* The content of a slot, borrowed. All of them are set when an object is made. */
#define GET(cls, object, field) (*(PyObject **)((char *)(object) + cls##_##field))
#define IS(cls, object) (Py_TYPE(object) == cls)

static void put(PyObject **field, PyObject *value)
{
    PyObject *before = *field;
    Py_INCREF(value);
    *field = value;
    Py_XDECREF(before);
}

static int find_field(PyTypeObject *cls, const char *name, Py_ssize_t *offset)
{
    PyObject *descriptor = PyObject_GetAttrString((PyObject *)cls, name);
    if (descriptor == NULL) {
        return -1;
    }
    int known = Py_TYPE(descriptor) == &PyMemberDescr_Type;
    if (known) {
        const PyMemberDef *member = ((PyMemberDescrObject *)descriptor)->d_member;
        known = member->type == T_OBJECT_EX;
        *offset = member->offset;
    }
    Py_DECREF(descriptor);
    if (!known) {
        PyErr_Format(PyExc_TypeError, "%s.%s is not a slot", cls->tp_name, name);
        return -1;
    }
    return 0;
}

static PyObject *configure(PyObject *module, PyObject *classes)
{
    PyObject *found;
#define FIND_CLASS(cls)                                                                                                \
    if ((found = PyMapping_GetItemString(classes, #cls)) == NULL || !PyType_Check(found)) {                            \
        return found == NULL ? NULL : PyErr_Format(PyExc_TypeError, #cls " is not a class");                           \
    }                                                                                                                  \
    cls = (PyTypeObject *)found; /* held for ever */
    CLASSES(FIND_CLASS)
#define FIND_FIELD(cls, field)                                                                                         \
    if (find_field(cls, #field, &cls##_##field)) {                                                                     \
        return NULL;                                                                                                   \
    }
    FIELDS(FIND_FIELD)
    Py_RETURN_NONE;
}


/* --- help ------------------------------------------------------------------------------------------------------------ */
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

/* Python's comparison runs through a dozen functions, and hooks compare names and counts only. */
static int is_equal(PyObject *left, PyObject *right)
{
    if (left == right) {
        return 1;
    }
    if (PyUnicode_CheckExact(left) && PyUnicode_CheckExact(right) && PyUnicode_CHECK_INTERNED(left) &&
        PyUnicode_CHECK_INTERNED(right)) {
        return 0;
    }
    if (PyLong_CheckExact(left) && PyLong_CheckExact(right)) {
        int left_overflow, right_overflow;
        long long left_value = PyLong_AsLongLongAndOverflow(left, &left_overflow);
        long long right_value = PyLong_AsLongLongAndOverflow(right, &right_overflow);
        if (!left_overflow && !right_overflow) {
            return left_value == right_value;
        }
    }
    return PyObject_RichCompareBool(left, right, Py_EQ);
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

/* Numbers may be larger than 64 bits: a bound that is never reached. */
static int get_count(PyObject *value, long long *result)
{
    int overflow;
    *result = PyLong_AsLongLongAndOverflow(value, &overflow);
    if (overflow > 0) {
        *result = LLONG_MAX;
    }
    return *result == -1 && PyErr_Occurred() ? -1 : 0;
}

static int put_count(PyObject **field, long long value)
{
    PyObject *number_here = PyLong_FromLongLong(value);
    if (number_here == NULL) {
        return -1;
    }
    put(field, number_here);
    Py_DECREF(number_here);
    return 0;
}

/* Whether a tensor has an attribute of this value. */
static int has(PyObject *tensor, PyObject *name, PyObject *expected)
{
    PyObject *value = PyObject_GetAttr(tensor, name);
    int same = value == NULL ? -1 : is_equal(value, expected);
    Py_XDECREF(value);
    return same;
}

static int address_of(PyObject *tensor, long long *address)
{
    PyObject *value = PyObject_CallMethodNoArgs(tensor, s_data_ptr);
    *address = value == NULL ? -1 : PyLong_AsLongLong(value);
    Py_XDECREF(value);
    return *address == -1 && PyErr_Occurred() ? -1 : 0;
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

static int is_plain_type(const Plain *plain, PyTypeObject *type)
{
    for (Py_ssize_t i = 0; i < plain->count; i++) {
        if (type == plain->types[i]) {
            return 1;
        }
    }
    return 0;
}

static int is_plain(const Plain *plain, PyObject *value)
{
    return is_plain_type(plain, Py_TYPE(value));
}

static int read_types(Plain *plain, PyObject *types)
{
    PyObject *listed = PySequence_List(types);
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

static int read_plain(Plain *plain, PyObject *framework)
{
    PyObject *types = PyObject_GetAttr(framework, s_plain_tensors);
    int failed = types == NULL || read_types(plain, types);
    Py_XDECREF(types);
    return failed ? -1 : 0;
}
