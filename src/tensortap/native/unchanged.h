/* Whether the attributes of modules are those of the step before, as `capture.modules.unchanged` finds it. */

#pragma once

#include "common.h"

/* Whether a dictionary is that of its owner, and has its size and these values. `entry` is a `WatchedItems`. */
static int has_items(PyObject *entry)
{
    PyObject *owner, *values, *names, *known;
    Py_ssize_t size;
    if (!PyArg_ParseTuple(entry, "OO!nO!O!", &owner, &PyDict_Type, &values, &size, &PyTuple_Type, &names, &PyTuple_Type,
                          &known)) {
        return -1;
    }
    if (owner != Py_None) {
        PyObject *own = PyObject_GetAttr(owner, s___dict__);
        Py_XDECREF(own);
        if (own != values) {
            return own == NULL ? -1 : 0;
        }
    }
    if ((size >= 0 && PyDict_GET_SIZE(values) != size) || PyTuple_GET_SIZE(names) != PyTuple_GET_SIZE(known)) {
        return 0;
    }
    for (Py_ssize_t i = 0; i < PyTuple_GET_SIZE(names); i++) {
        PyObject *now = PyDict_GetItemWithError(values, PyTuple_GET_ITEM(names, i));
        if (now != PyTuple_GET_ITEM(known, i)) {
            return now == NULL && PyErr_Occurred() ? -1 : 0;
        }
    }
    return 1;
}

static PyObject *changed_items(PyObject *module, PyObject *entries)
{
    if (!PyList_Check(entries)) {
        return PyErr_Format(PyExc_TypeError, "entries must be a list");
    }
    PyObject *found = PyList_New(0);
    for (Py_ssize_t i = 0; found != NULL && i < PyList_GET_SIZE(entries); i++) {
        int same = has_items(PyList_GET_ITEM(entries, i));
        PyObject *place = same ? NULL : PyLong_FromSsize_t(i);
        if (same < 0 || (!same && (place == NULL || PyList_Append(found, place)))) {
            Py_CLEAR(found);
        }
        Py_XDECREF(place);
    }
    return found;
}

typedef struct {
    uint64_t *numbers;
    Py_ssize_t count, room;
} Numbers;

static int add_number(Numbers *all, uint64_t value)
{
    if (all->count == all->room) {
        Py_ssize_t room = all->room ? 2 * all->room : 1024;
        uint64_t *larger = PyMem_Realloc(all->numbers, room * sizeof *larger);
        if (larger == NULL) {
            PyErr_NoMemory();
            return -1;
        }
        all->numbers = larger;
        all->room = room;
    }
    all->numbers[all->count++] = value;
    return 0;
}

/* Add the dictionary of a tensor's hooks, and the number of its only hook. Whether it has at most that one. */
static int add_hooks(Numbers *all, PyObject *tensor, PyObject *attribute)
{
    PyObject *hooks = PyObject_GetAttr(tensor, attribute), *key, *hook;
    Py_ssize_t at = 0;
    int result = hooks == NULL || add_number(all, (uint64_t)(uintptr_t)hooks) ? -1 : 1;
    if (result == 1 && hooks != Py_None) {
        result = PyDict_Check(hooks) && PyDict_GET_SIZE(hooks) == 1 && PyDict_Next(hooks, &at, &key, &hook);
        result = result && add_number(all, PyLong_AsUnsignedLongLong(key)) ? -1 : result;
    }
    Py_XDECREF(hooks);
    return result < 0 || PyErr_Occurred() ? -1 : result;
}

static int add_flag(Numbers *all, PyObject *tensor, PyObject *name)
{
    int is = flag(tensor, name);
    return is < 0 || add_number(all, is) ? -1 : 1;
}

static int add_values(Numbers *all, PyObject *values, PyObject *hooks, int flagged)
{
    PyObject *key, *value;
    Py_ssize_t at = 0;
    int result = add_number(all, PyDict_GET_SIZE(values)) ? -1 : 1;
    while (result == 1 && PyDict_Next(values, &at, &key, &value)) {
        if (add_number(all, (uint64_t)(uintptr_t)value)) {
            return -1;
        }
        if (hooks != Py_None && value != Py_None) {
            result = add_hooks(all, value, hooks);
        }
        if (result == 1 && flagged && value != Py_None) {
            result = add_flag(all, value, s_requires_grad);
        }
    }
    return result;
}

static PyObject *identify_values(PyObject *module, PyObject *args)
{
    PyObject *owners, *attribute, *hooks;
    Numbers all = {0};
    int result = 1, tensors;
    if (!PyArg_ParseTuple(args, "O!UOp", &PyList_Type, &owners, &attribute, &hooks, &tensors)) {
        return NULL;
    }
    for (Py_ssize_t i = 0; result == 1 && i < PyList_GET_SIZE(owners); i++) {
        PyObject *values = PyObject_GetAttr(PyList_GET_ITEM(owners, i), attribute);
        result = values == NULL ? -1 : PyDict_Check(values) ? add_values(&all, values, hooks, tensors) : 0;
        Py_XDECREF(values);
    }
    PyObject *found = NULL;
    if (result == 1) {
        found = PyBytes_FromStringAndSize((const char *)all.numbers, all.count * (Py_ssize_t)sizeof *all.numbers);
    }
    else if (!result) {
        found = Py_NewRef(Py_None);
    }
    PyMem_Free(all.numbers);
    return found;
}
