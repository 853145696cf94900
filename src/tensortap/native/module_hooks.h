/* The hooks on modules, from torch's call to what follows the plan, without a frame of the interpreter.

   `_BeginHook.__call__` and `_EndHook.__call__` of `frameworks.torch.framework` stay Python functions, whose code a
   compiler traces. Only what runs when the interpreter calls them is replaced. */

#pragma once

#include "hooks.h"

static PyTypeObject *BeginHook, *EndHook, *ViewHook;
static Py_ssize_t CallHook__module, CallHook__report, CallHook__views, ViewHook_tensor, ViewHook_version;
static PyObject *compiling_flags, *compiling_flag; /* the flag is in a dictionary, under this name */
static PyObject *BeginHook_call, *EndHook_call;
static vectorcallfunc interpret; /* runs a Python function */

/* The object of a weak reference (a new reference); NULL if it is gone, or if this is none. */
static PyObject *referent(PyObject *reference)
{
    PyObject *object = NULL;
    if (PyWeakref_CheckRef(reference)) {
#if PY_VERSION_HEX >= 0x030D0000
        if (PyWeakref_GetRef(reference, &object) < 0) {
            PyErr_Clear();
        }
#else
        object = PyWeakref_GetObject(reference);
        object = object == Py_None ? NULL : Py_NewRef(object);
#endif
    }
    return object;
}

/* Whether one of these views may have been changed in place since its hook was placed; see `GradientHooks.check_views`. */
static int views_changed(PyObject *views)
{
    int changed = !PyList_CheckExact(views);
    for (Py_ssize_t i = 0; !changed && i < PyList_GET_SIZE(views); i++) {
        PyObject *hook = PyList_GET_ITEM(views, i);
        if (!IS(ViewHook, hook)) {
            return 1;
        }
        PyObject *tensor = referent(GET(ViewHook, hook, tensor));
        if (tensor != NULL) {
            long long now, then;
            changed = version_of(tensor, &now) || get_count(GET(ViewHook, hook, version), &then) || now != then;
            Py_DECREF(tensor);
        }
    }
    PyErr_Clear();
    return changed;
}

static PyObject *call_module_hook(PyObject *function, PyObject *const *args, size_t flags, PyObject *names)
{
    Py_ssize_t count = PyVectorcall_NARGS(flags);
    PyObject *self = count > 0 ? args[0] : NULL;
    int begins = self != NULL && IS(BeginHook, self);
    if (names != NULL || self == NULL || count != (begins ? 4 : 5) || !(begins || IS(EndHook, self))) {
        return interpret(function, args, flags, names);
    }
    PyObject *report = GET(CallHook, self, _report), *flag_now = PyDict_GetItemWithError(compiling_flags, compiling_flag);
    if (flag_now != Py_False || !IS(HookType, report) || views_changed(GET(CallHook, self, _views))) {
        PyErr_Clear();
        return interpret(function, args, flags, names);
    }
    PyObject *placed = ((Hook *)report)->follower->placed;
    if (placed != NULL && tensor_access != NULL) {
        tensor_access->check_views(placed);
    }
    if (PyLong_AsVoidPtr(GET(CallHook, self, _module)) != args[1]) {
        Py_RETURN_NONE; /* the hook of a copy */
    }
    Py_INCREF(report);
    PyObject *result = begins ? run_hook((Hook *)report, args + 2, 2, NULL) : run_hook((Hook *)report, args + 4, 1, NULL);
    Py_DECREF(report);
    return result;
}

static void replace_vectorcall(PyObject *function, vectorcallfunc call)
{
#if PY_VERSION_HEX >= 0x030C0000
    PyFunction_SetVectorcall((PyFunctionObject *)function, call);
#else
    ((PyFunctionObject *)function)->vectorcall = call;
#endif
}

/* Replace what runs when hooks of a class are called. The function is held for ever. */
static int replace_call(PyTypeObject *cls, PyObject **function)
{
    PyObject *found = PyObject_GetAttrString((PyObject *)cls, "__call__");
    if (found == NULL || !PyFunction_Check(found)) {
        Py_XDECREF(found);
        PyErr_Format(PyExc_TypeError, "%s.__call__ is not a function", cls->tp_name);
        return -1;
    }
    Py_XSETREF(*function, found);
    vectorcallfunc before = ((PyFunctionObject *)found)->vectorcall;
    if (before != call_module_hook) {
        interpret = before;
        replace_vectorcall(found, call_module_hook);
    }
    return 0;
}

static PyObject *configure_hooks(PyObject *module, PyObject *args)
{
    if (!PyArg_ParseTuple(args, "O!O!O!O!O!", &PyType_Type, &BeginHook, &PyType_Type, &EndHook, &PyType_Type, &ViewHook,
                          &PyDict_Type, &compiling_flags, &PyUnicode_Type, &compiling_flag)) {
        return NULL;
    }
    Py_INCREF(BeginHook); /* all of them are held for ever */
    Py_INCREF(EndHook);
    Py_INCREF(ViewHook);
    Py_INCREF(compiling_flags);
    Py_INCREF(compiling_flag);
    if (find_field(BeginHook, "_module", &CallHook__module) || find_field(BeginHook, "_report", &CallHook__report) ||
        find_field(BeginHook, "_views", &CallHook__views) || find_field(ViewHook, "tensor", &ViewHook_tensor) ||
        find_field(ViewHook, "version", &ViewHook_version) || replace_call(BeginHook, &BeginHook_call) ||
        replace_call(EndHook, &EndHook_call)) {
        return NULL;
    }
    Py_RETURN_NONE;
}
