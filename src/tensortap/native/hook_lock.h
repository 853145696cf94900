/* A lock that one thread may take several times, as `threading.RLock`, and the time that hooks of C have taken: without
   objects, since each hook needs both.

   Its state changes only under the interpreter lock. */

#pragma once

#include "common.h"

typedef struct {
    PyObject_HEAD
    unsigned long owner;
    Py_ssize_t depth, waiting;
    PyThread_type_lock released; /* taken, but for the moment between a release and a thread that waited for it */
    char signalled;              /* whether `released` is free */
    double seconds;
} HookLock;

static PyTypeObject *HookLockType;

static void acquire_lock(HookLock *self)
{
    unsigned long thread = PyThread_get_thread_ident();
    while (self->depth && self->owner != thread) {
        self->waiting++;
        Py_BEGIN_ALLOW_THREADS
        PyThread_acquire_lock(self->released, WAIT_LOCK);
        Py_END_ALLOW_THREADS
        self->waiting--;
        self->signalled = 0;
    }
    self->owner = thread;
    self->depth++;
}

static int release_lock(HookLock *self)
{
    if (!self->depth || self->owner != PyThread_get_thread_ident()) {
        PyErr_SetString(PyExc_RuntimeError, "cannot release a lock that this thread has not taken");
        return -1;
    }
    if (!--self->depth && self->waiting && !self->signalled) {
        self->signalled = 1;
        PyThread_release_lock(self->released);
    }
    return 0;
}

static PyObject *HookLock_enter(HookLock *self, PyObject *unused)
{
    acquire_lock(self);
    Py_RETURN_TRUE;
}

static PyObject *HookLock_exit(HookLock *self, PyObject *args)
{
    if (release_lock(self)) {
        return NULL;
    }
    Py_RETURN_NONE;
}

static PyObject *HookLock_new(PyTypeObject *type, PyObject *args, PyObject *kwargs)
{
    HookLock *self = (HookLock *)PyType_GenericNew(type, args, kwargs);
    if (self == NULL) {
        return NULL;
    }
    if ((self->released = PyThread_allocate_lock()) == NULL) {
        Py_DECREF(self);
        return PyErr_NoMemory();
    }
    PyThread_acquire_lock(self->released, WAIT_LOCK);
    return (PyObject *)self;
}

static void HookLock_dealloc(HookLock *self)
{
    PyTypeObject *type = Py_TYPE(self);
    if (self->released != NULL) {
        if (!self->signalled) {
            PyThread_release_lock(self->released);
        }
        PyThread_free_lock(self->released);
    }
    type->tp_free((PyObject *)self);
    Py_DECREF(type);
}

static PyMemberDef hook_lock_members[] = {
    {"seconds", T_DOUBLE, offsetof(HookLock, seconds), READONLY, "The time that hooks of C have taken."},
    {NULL},
};
static PyMethodDef hook_lock_methods[] = {
    {"__enter__", (PyCFunction)HookLock_enter, METH_NOARGS, "Take the lock; wait for it."},
    {"__exit__", (PyCFunction)HookLock_exit, METH_VARARGS, "Release the lock."},
    {"acquire", (PyCFunction)HookLock_enter, METH_NOARGS, "Take the lock; wait for it."},
    {"release", (PyCFunction)HookLock_exit, METH_NOARGS, "Release the lock."},
    {NULL},
};
static PyType_Slot hook_lock_slots[] = {
    {Py_tp_doc, "A lock that one thread may take several times."},
    {Py_tp_new, HookLock_new},
    {Py_tp_members, hook_lock_members},
    {Py_tp_methods, hook_lock_methods},
    {Py_tp_dealloc, HookLock_dealloc},
    {0, NULL},
};
static PyType_Spec hook_lock_spec = {"tensortap.native.HookLock", sizeof(HookLock), 0, Py_TPFLAGS_DEFAULT, hook_lock_slots};
