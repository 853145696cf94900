/* The Python class around `events.h`. Its table of methods is in `hooks.h`. */

#pragma once

#include "events.h"

/* Let calls of modules run without the interpreter until all that hold them have released them; in `module_calls.h`. */
static void hold_calls(void);
static void release_calls(void);

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
        PyObject *tensor = PyList_GET_ITEM(tensors, i), *id = PyLong_FromVoidPtr(tensor);
        PyObject *before = id == NULL ? NULL : PyDict_GetItemWithError(inputs, id);
        long long then, now;
        int is = before != NULL;
        Py_XDECREF(id);
        if (PyErr_Occurred() || (is && (get_count(before, &then) || known_version(self, tensor, &now))) ||
            PyList_Append(found, is && now == then ? Py_True : Py_False)) {
            Py_DECREF(found);
            return NULL;
        }
    }
    return found;
}

static PyObject *Follower_start(Follower *self, PyObject *args)
{
    PyObject *step, *take_function, *hooks;
    int checks_reach;
    if (!PyArg_ParseTuple(args, "O!OO!p", &PyLong_Type, &step, &take_function, &PyList_Type, &hooks, &checks_reach)) {
        return NULL;
    }
    put(&self->step, step);
    put(&self->take, take_function);
    put(&self->hooks, hooks);
    Py_CLEAR(self->placed);
    drop_all_open(self);
    self->accesses = (char)(tensor_access != NULL && self->plain.count && is_plain_type(&accessed, self->plain.types[0]));
    self->checks_reach = (char)checks_reach;
    self->at = 0;
    self->following = 1;
    Py_RETURN_NONE;
}

static PyObject *Follower_use(Follower *self, PyObject *guard)
{
    if (!IS(HookGuard, guard) || Py_TYPE(GET(HookGuard, guard, lock)) != HookLockType) {
        Py_CLEAR(self->guard); /* the hooks are followed from Python */
        Py_RETURN_NONE;
    }
    put(&self->guard, guard);
    put((PyObject **)&self->lock, GET(HookGuard, guard, lock));
    Py_RETURN_NONE;
}

static int Follower_init(Follower *self, PyObject *args, PyObject *kwargs)
{
    PyObject *framework, *work, *kinds, *arguments;
    if (!PyArg_ParseTuple(args, "OOOO!", &framework, &work, &kinds, &PyDict_Type, &arguments)) {
        return -1;
    }
    if (self->work != NULL) {
        PyErr_SetString(PyExc_TypeError, "a Follower is made once");
        return -1;
    }
    if ((self->records_gradients = PyObject_GetAttr(framework, s_records_gradients)) == NULL ||
        (self->recomputing = PyObject_GetAttr(framework, s_recomputing)) == NULL ||
        (self->version = PyObject_GetAttr(framework, s_version)) == NULL ||
        (self->on_gradient = PyObject_GetAttr(framework, s_on_gradient)) == NULL ||
        read_plain(&self->plain, framework)) {
        return -1;
    }
    if ((self->graph_task = PyObject_GetAttr(framework, s_graph_task)) == NULL) {
        PyErr_Clear(); /* another framework */
    }
    if ((self->watch_view = PyObject_GetAttr(framework, s_watch_view)) == NULL) {
        PyErr_Clear();
    }
    PyObject *outputs = PyUnicode_FromString("grad_output"), *inputs = PyUnicode_FromString("grad_input");
    int watches_outputs = outputs == NULL ? -1 : PySequence_Contains(kinds, outputs);
    int watches_inputs = inputs == NULL ? -1 : PySequence_Contains(kinds, inputs);
    Py_XDECREF(outputs);
    Py_XDECREF(inputs);
    if (watches_outputs < 0 || watches_inputs < 0 || (self->events = PyList_New(0)) == NULL) {
        return -1;
    }
    self->has_torch_hooks =
        (char)(self->plain.count && PyObject_HasAttr((PyObject *)self->plain.types[0], s__backward_hooks));
    PyObject *functools = PyImport_ImportModule("functools");
    self->partial = functools == NULL ? NULL : PyObject_GetAttrString(functools, "partial");
    Py_XDECREF(functools);
    if (self->partial == NULL) {
        return -1;
    }
    self->watches_outputs = (char)watches_outputs;
    self->watches_inputs = (char)watches_inputs;
    put(&self->work, work);
    put(&self->arguments, arguments);
    hold_calls();
    self->holds_calls = 1;
    return 0;
}

static int Follower_traverse(Follower *self, visitproc visit, void *arg)
{
    Py_VISIT(Py_TYPE(self));
    for (PyObject **field = &self->work; field <= &self->events; field++) {
        Py_VISIT(*field);
    }
    for (Py_ssize_t i = 0; i < self->depth; i++) {
        Py_VISIT(self->open[i].planned);
        Py_VISIT(self->open[i].mark);
        Py_VISIT(self->open[i].edges);
    }
    return 0;
}

static int Follower_clear(Follower *self)
{
    self->following = 0;
    drop_all_open(self);
    for (PyObject **field = &self->work; field <= &self->events; field++) {
        Py_CLEAR(*field);
    }
    return 0;
}

static void Follower_dealloc(Follower *self)
{
    PyTypeObject *type = Py_TYPE(self);
    PyObject_GC_UnTrack(self);
    if (self->holds_calls) {
        release_calls();
    }
    Follower_clear(self);
    PyMem_Free(self->open);
    PyMem_Free(self->inputs);
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
    put(&self->events, events);
    return 0;
}

/* The versions of the inputs of an open call, by the ids of the tensors. */
static PyObject *versions_of(const Follower *self, Py_ssize_t place)
{
    Py_ssize_t end = place + 1 < self->depth ? self->open[place + 1].first : self->inputs_count;
    PyObject *found = PyDict_New();
    for (Py_ssize_t i = self->open[place].first; found != NULL && i < end; i++) {
        PyObject *id = PyLong_FromVoidPtr((void *)self->inputs[i].tensor);
        PyObject *version = PyLong_FromLongLong(self->inputs[i].version);
        if (id == NULL || version == NULL || PyDict_SetItem(found, id, version)) {
            Py_CLEAR(found);
        }
        Py_XDECREF(id);
        Py_XDECREF(version);
    }
    return found;
}

static PyObject *get_open(Follower *self, void *closure)
{
    PyObject *listed = PyList_New(0);
    for (Py_ssize_t i = 0; listed != NULL && i < self->depth; i++) {
        PyObject *inputs = versions_of(self, i), *open = NULL;
        if (inputs != NULL && !complete_open(&self->open[i])) {
            open = PyTuple_Pack(4, self->open[i].planned, inputs, self->open[i].mark, self->open[i].edges);
        }
        if (open == NULL || PyList_Append(listed, open)) {
            Py_CLEAR(listed);
        }
        Py_XDECREF(inputs);
        Py_XDECREF(open);
    }
    return listed;
}

static PyObject *Follower_forget_open(Follower *self, PyObject *unused)
{
    drop_all_open(self);
    Py_RETURN_NONE;
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
    {"open", (getter)get_open, NULL, "A list of the calls in progress, while a plan is followed.", NULL},
    {"at", (getter)get_at, NULL, "The number of events of the plan that have come.", NULL},
    {"following", (getter)get_following, (setter)set_following, "Whether a plan is followed.", NULL},
    {NULL},
};
