/* Calls of torch's modules, without the interpreter between a module's hooks and its forward.

   Where a module has hooks, `Module._call_impl` runs Python code that takes as long as the hooks themselves. It stays the
   function that compilers trace and that other code calls or replaces. Only what runs when the interpreter calls it is
   replaced, while something follows, and only for modules without hooks of others. `frameworks.torch.module_calls` has what
   is left to do if that changes during a call. */

#pragma once

#include "module_hooks.h"

/* `Module._call_impl`, its globals, and the functions of `frameworks.torch.module_calls`; NULL if calls are not replaced. */
static struct {
    PyObject *function, *globals, *finish, *fail;
    vectorcallfunc interpret;
    Py_ssize_t holders;
    char replaced;
} calls;

static int has_no_hooks(PyObject *owner, PyObject *name)
{
    PyObject *hooks = PyDict_GetItemWithError(owner, name);
    return hooks != NULL && PyDict_Check(hooks) && PyDict_GET_SIZE(hooks) == 0;
}

/* The only hook of this name on a module, if it is one of this class and of this very module; else NULL. Borrowed. */
static PyObject *only_hook(PyObject *fields, PyObject *name, PyTypeObject *cls, PyObject *module)
{
    Py_ssize_t at = 0;
    PyObject *hooks = PyDict_GetItemWithError(fields, name), *key, *hook;
    if (hooks == NULL || !PyDict_Check(hooks) || PyDict_GET_SIZE(hooks) != 1 || !PyDict_Next(hooks, &at, &key, &hook) ||
        !IS(cls, hook) || !IS(HookType, GET(CallHook, hook, _report)) ||
        PyLong_AsVoidPtr(GET(CallHook, hook, _module)) != module) {
        return NULL;
    }
    return hook;
}

/* Whether a compiler or a tracer runs the code of modules itself. */
static int is_traced(void)
{
#if PY_VERSION_HEX >= 0x030F0000
    return 1; /* these functions may have other names there */
#else
    return tensor_access == NULL || tensor_access->is_tracing() ||
           PyDict_GetItemWithError(compiling_flags, compiling_flag) != Py_False ||
           _PyInterpreterState_GetEvalFrameFunc(PyInterpreterState_Get()) != _PyEval_EvalFrameDefault;
#endif
}

/* A call that runs. All objects are references of its own. */
typedef struct {
    PyObject *module, *fields, *given, *keywords, *begins, *ends;
} Call;

/* Whether a module still has this hook after its forward, and no other. */
static int ends_alone(const Call *call)
{
    return only_hook(call->fields, s__forward_hooks, EndHook, call->module) == call->ends &&
           has_no_hooks(calls.globals, s__global_forward_hooks);
}

static PyObject *run_end_hook(const Call *call, PyObject *result)
{
    PyObject *args[] = {call->ends, call->module, call->given, call->keywords, result};
    return call_module_hook(EndHook_call, args, 5, NULL);
}

/* Pass an exception on, as torch does: hooks that are always called come first. `ended`: whether its own hook was called. */
static PyObject *fail_call(const Call *call, int ended)
{
    PyObject *type, *value, *trace, *none = NULL;
    if (!PyErr_ExceptionMatches(PyExc_Exception)) {
        return NULL;
    }
    PyErr_Fetch(&type, &value, &trace);
    if (ended || (ends_alone(call) && (none = run_end_hook(call, Py_None)) != NULL)) {
        PyErr_Restore(type, value, trace);
        Py_XDECREF(none);
        return NULL;
    }
    if (PyErr_Occurred() && !PyErr_ExceptionMatches(PyExc_Exception)) { /* an interrupt in the hook comes first */
        Py_XDECREF(type);
        Py_XDECREF(value);
        Py_XDECREF(trace);
        return NULL;
    }
    PyErr_Clear();
    PyErr_NormalizeException(&type, &value, &trace);
    if (trace != NULL) {
        PyException_SetTraceback(value, trace);
    }
    none = PyObject_CallFunctionObjArgs(calls.fail, value, call->module, call->given, call->keywords, NULL);
    Py_XDECREF(none); /* it always raises */
    Py_XDECREF(type);
    Py_XDECREF(value);
    Py_XDECREF(trace);
    return NULL;
}

/* Take the arguments that a hook returns instead of those given. */
static int replace_arguments(Call *call, PyObject *changed)
{
    if (!PyTuple_Check(changed) || PyTuple_GET_SIZE(changed) != 2) {
        PyErr_Format(PyExc_RuntimeError, "forward pre-hook must return None or a tuple of (new_args, new_kwargs), but got %R",
                     changed);
        return -1;
    }
    PyObject *given = PySequence_Tuple(PyTuple_GET_ITEM(changed, 0)), *keywords = given == NULL ? NULL : PyDict_New();
    if (keywords == NULL || PyDict_Update(keywords, PyTuple_GET_ITEM(changed, 1))) {
        Py_XDECREF(given);
        Py_XDECREF(keywords);
        return -1;
    }
    Py_SETREF(call->given, given);
    Py_SETREF(call->keywords, keywords);
    return 0;
}

static int run_begin_hook(Call *call)
{
    PyObject *args[] = {call->begins, call->module, call->given, call->keywords};
    PyObject *changed = call_module_hook(BeginHook_call, args, 4, NULL);
    int failed = changed == NULL || (changed != Py_None && replace_arguments(call, changed));
    Py_XDECREF(changed);
    return failed ? -1 : 0;
}

/* Run the hooks after the forward, of which there may be others by now. `result` is consumed. */
static PyObject *end_call(const Call *call, PyObject *result)
{
    if (!ends_alone(call)) {
        PyObject *final = PyObject_CallFunctionObjArgs(calls.finish, call->module, call->given, call->keywords, result, NULL);
        Py_DECREF(result);
        return final;
    }
    PyObject *changed = run_end_hook(call, result);
    if (changed == Py_None) {
        Py_DECREF(changed);
        return result;
    }
    Py_DECREF(result);
    return changed == NULL ? fail_call(call, 1) : changed;
}

static PyObject *run_call(Call *call)
{
    PyObject *forward = PyObject_GetAttr(call->module, s_forward); /* before any hook may replace it, as in torch */
    if (forward == NULL) {
        return NULL;
    }
    PyObject *result = NULL;
    if (!run_begin_hook(call)) {
        result = PyObject_Call(forward, call->given, PyDict_GET_SIZE(call->keywords) ? call->keywords : NULL);
    }
    Py_DECREF(forward);
    return result == NULL ? fail_call(call, 0) : end_call(call, result);
}

static PyObject *keywords_of(PyObject *names, PyObject *const *values)
{
    PyObject *keywords = PyDict_New();
    for (Py_ssize_t i = 0; keywords != NULL && names != NULL && i < PyTuple_GET_SIZE(names); i++) {
        if (PyDict_SetItem(keywords, PyTuple_GET_ITEM(names, i), values[i])) {
            Py_CLEAR(keywords);
        }
    }
    return keywords;
}

/* Find the two hooks of a module (borrowed). Whether it has no others, and its call is none of a compiler or a tracer. */
static int find_hooks(PyObject *module, PyObject *fields, PyObject **begins, PyObject **ends)
{
    PyObject *globals = calls.globals;
    return (*begins = only_hook(fields, s__forward_pre_hooks, BeginHook, module)) != NULL &&
           (*ends = only_hook(fields, s__forward_hooks, EndHook, module)) != NULL &&
           has_no_hooks(fields, s__backward_hooks) && has_no_hooks(fields, s__backward_pre_hooks) &&
           has_no_hooks(globals, s__global_forward_hooks) && has_no_hooks(globals, s__global_forward_pre_hooks) &&
           has_no_hooks(globals, s__global_backward_hooks) && has_no_hooks(globals, s__global_backward_pre_hooks) &&
           !is_traced();
}

static PyObject *call_module(PyObject *function, PyObject *const *args, size_t flags, PyObject *names)
{
    Py_ssize_t count = PyVectorcall_NARGS(flags);
    PyObject *module = count > 0 ? args[0] : NULL, *begins = NULL, *ends = NULL;
    PyObject *fields = module == NULL ? NULL : PyObject_GenericGetDict(module, NULL);
    if (fields == NULL || !find_hooks(module, fields, &begins, &ends)) {
        Py_XDECREF(fields);
        PyErr_Clear();
        return calls.interpret(function, args, flags, names);
    }
    Call call = {Py_NewRef(module), fields, PyTuple_New(count - 1), keywords_of(names, args + count), Py_NewRef(begins),
                 Py_NewRef(ends)};
    PyObject *result = NULL;
    if (call.given != NULL && call.keywords != NULL) {
        for (Py_ssize_t i = 1; i < count; i++) {
            PyTuple_SET_ITEM(call.given, i - 1, Py_NewRef(args[i]));
        }
        result = run_call(&call);
    }
    Py_DECREF(call.module);
    Py_DECREF(call.fields);
    Py_XDECREF(call.given);
    Py_XDECREF(call.keywords);
    Py_DECREF(call.begins);
    Py_DECREF(call.ends);
    return result;
}

static void hold_calls(void)
{
    calls.holders++;
    if (calls.function != NULL && !calls.replaced) {
        calls.interpret = ((PyFunctionObject *)calls.function)->vectorcall;
        calls.replaced = 1;
        replace_vectorcall(calls.function, call_module);
    }
}

static void release_calls(void)
{
    calls.holders--;
    if (!calls.holders && calls.replaced && ((PyFunctionObject *)calls.function)->vectorcall == call_module) {
        calls.replaced = 0;
        replace_vectorcall(calls.function, calls.interpret);
    }
}

static PyObject *configure_calls(PyObject *module, PyObject *args)
{
    if (calls.function != NULL) {
        Py_RETURN_NONE;
    }
    if (!PyArg_ParseTuple(args, "O!OO", &PyFunction_Type, &calls.function, &calls.finish, &calls.fail)) {
        return NULL;
    }
    calls.globals = PyFunction_GET_GLOBALS(calls.function);
    Py_INCREF(calls.function); /* all of them are held for ever */
    Py_INCREF(calls.finish);
    Py_INCREF(calls.fail);
    Py_RETURN_NONE;
}
