/* The structure of arguments and outputs, as `capture.watching.templates` checks it. */

#pragma once

#include "common.h"

enum { TENSOR, EQUAL, ALIKE, SEQUENCE, MAPPING, FIELDS, FLOAT }; /* see capture.watching.templates.Node */

static int collect_all(const Plain *plain, PyObject *values, PyObject *nodes, PyObject *found);

/* Whether two floats are the same number: -0.0 equals 0.0, but is another one. */
static int same_bits(PyObject *value, PyObject *known)
{
    double both[2] = {PyFloat_AS_DOUBLE(value), PyFloat_AS_DOUBLE(known)};
    return !memcmp(&both[0], &both[1], sizeof *both);
}

/* The attributes of a value with these names, as a list; None for one that it lacks. */
static PyObject *read_fields(PyObject *value, PyObject *names)
{
    PyObject *parts = PyList_New(0);
    for (Py_ssize_t i = 0; parts != NULL && i < PyList_GET_SIZE(names); i++) {
        PyObject *part = PyObject_GetAttr(value, PyList_GET_ITEM(names, i));
        if (part == NULL && PyErr_ExceptionMatches(PyExc_AttributeError)) {
            PyErr_Clear();
            part = Py_NewRef(Py_None);
        }
        if (part == NULL || PyList_Append(parts, part)) {
            Py_CLEAR(parts);
        }
        Py_XDECREF(part);
    }
    return parts;
}

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
    if (what == FLOAT) {
        return value == known || (PyFloat_CheckExact(value) && same_bits(value, known));
    }
    if ((PyObject *)Py_TYPE(value) != known) {
        return 0;
    }
    if (what == ALIKE) {
        return 1;
    }
    PyObject *second = PyTuple_GET_ITEM(node, 2);
    if (what == SEQUENCE) {
        return collect_all(plain, value, second, found);
    }
    PyObject *parts;
    if (what == FIELDS) {
        parts = read_fields(value, second);
    } else {
        PyObject *keys = PySequence_List(value);
        int same = keys == NULL ? -1 : collect_all(plain, keys, second, found);
        Py_XDECREF(keys);
        if (same < 1) {
            return same;
        }
        PyObject *view = PyObject_CallMethodNoArgs(value, s_values);
        parts = view == NULL ? NULL : PySequence_List(view);
        Py_XDECREF(view);
    }
    int same = parts == NULL ? -1 : collect_all(plain, parts, PyTuple_GET_ITEM(node, 3), found);
    Py_XDECREF(parts);
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
    PyObject *node = GET(Template, template, _node);
    if ((*found = PyList_New(0)) == NULL) {
        return -1;
    }
    Py_INCREF(node);
    int same = collect(plain, value, node, *found);
    Py_DECREF(node);
    if (same < 1) {
        Py_CLEAR(*found);
    }
    return same;
}
