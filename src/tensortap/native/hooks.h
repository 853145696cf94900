/* Hooks that follow a plan, or call the careful hook; see `capture.watching.hook_guard`. */

#pragma once

#include "follower.h"

typedef enum { BEGIN, END, GRADIENT, PARAMETER_GRADIENT } What;

typedef struct {
    PyObject_HEAD
    Follower *follower;
    PyObject *first, *name, *careful; /* first: the site, or the slot of a gradient */
    What what;
} Hook;

static double now(void)
{
    struct timespec time;
    clock_gettime(CLOCK_MONOTONIC, &time);
    return (double)time.tv_sec + 1e-9 * (double)time.tv_nsec;
}

static int follow(Hook *self, PyObject *const *args, Py_ssize_t count)
{
    Follower *follower = self->follower;
    PyObject *first = count > 0 ? args[0] : NULL;
    if (!follower->following) { /* another thread may have left the plan while this one waited */
        return 0;
    }
    switch (self->what) {
    case BEGIN:
        if (count != 2 || !PyTuple_Check(first) || !PyDict_Check(args[1]) || !follower->depth) {
            return 0;
        }
        return follow_begin(follower, self->first, first, args[1]);
    case END:
        return count == 1 ? follow_end(follower, self->first, first) : 0;
    case GRADIENT:
        return count == 1 ? follow_gradient(follower, self->first, first) : 0;
    default:
        return count == 1 ? follow_parameter_gradient(follower, self->first, self->name, first) : 0;
    }
}

/* Follow under the guard: one hook at a time, with its time added up and its errors handled. */
static int follow_guarded(Hook *self, PyObject *const *args, Py_ssize_t count)
{
    PyObject *guard = self->follower->guard;
    HookLock *lock = self->follower->lock;
    if (GET(HookGuard, guard, listening) != Py_True) {
        return 0;
    }
    double started = now();
    Py_INCREF(guard);
    Py_INCREF(lock);
    acquire_lock(lock);
    int result = follow(self, args, count);
    result = release_lock(lock) ? -1 : result;
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
    lock->seconds += result > 0 ? now() - started : 0;
    Py_DECREF(guard);
    Py_DECREF(lock);
    return result;
}

static PyObject *run_hook(Hook *self, PyObject *const *args, Py_ssize_t count, PyObject *kwargs)
{
    PyObject *guard = self->follower->guard;
    if (guard != NULL && GET(HookGuard, guard, listening) == Py_False && GET(HookGuard, guard, interrupt) == Py_None) {
        Py_RETURN_NONE;
    }
    if (self->follower->following && guard != NULL) {
        int done = follow_guarded(self, args, count);
        if (done < 0) {
            return NULL;
        }
        if (done) {
            Py_RETURN_NONE;
        }
    }
    Py_ssize_t own = self->name == NULL ? 1 : 2;
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
        Py_INCREF(args[i]);
        PyTuple_SET_ITEM(all, own + i, args[i]);
    }
    PyObject *result = PyObject_Call(self->careful, all, kwargs);
    Py_DECREF(all);
    return result;
}

static PyObject *call_gradient_hook(PyObject *hook, PyObject *gradient)
{
    return run_hook((Hook *)hook, &gradient, 1, NULL); /* `place_hook` takes no others */
}

static PyObject *Hook_call(Hook *self, PyObject *args, PyObject *kwargs)
{
    return run_hook(self, ((PyTupleObject *)args)->ob_item, PyTuple_GET_SIZE(args), kwargs);
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
    {"forget_open", (PyCFunction)Follower_forget_open, METH_NOARGS, "Forget the calls in progress."},
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
    {Py_tp_doc, "Follower(framework, work, kinds, arguments)\n--\n\n"
                "Follows plans, as `capture.watching.follower.Follower` does."},
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
    {Py_tp_doc, "A hook that follows a plan, or calls the careful hook."},
    {Py_tp_call, Hook_call},
    {Py_tp_traverse, Hook_traverse},
    {Py_tp_dealloc, Hook_dealloc},
    {0, NULL},
};
static PyType_Spec hook_spec = {"tensortap.native.Hook", sizeof(Hook), 0, Py_TPFLAGS_DEFAULT | Py_TPFLAGS_HAVE_GC,
                                hook_slots};
