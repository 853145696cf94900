/* The events of a plan that is followed, as in `capture.watching.follower.Follower`. */

#pragma once

#include "hook_lock.h"
#include "taker.h"
#include "templates.h"

/* A call in progress. All objects are new references; those without gradients of inputs to watch have no `edges`. */
typedef struct {
    PyObject *planned, *mark, *edges;
    Py_ssize_t first; /* of its inputs */
} OpenCall;

typedef struct {
    const PyObject *tensor; /* only its address: the call keeps it alive */
    long long version;
} InputVersion;

typedef struct {
    PyObject_HEAD
    PyObject *work, *arguments, *records_gradients, *recomputing, *version, *on_gradient, *graph_task;
    PyObject *partial, *watch_view; /* the latter is NULL where views are not watched in C */
    PyObject *guard;
    HookLock *lock;
    PyObject *take, *hooks, *step;
    PyObject *placed; /* hooks on gradients that `tensor_access` placed in this step; NULL if there are none */
    PyObject *events;
    OpenCall *open;
    InputVersion *inputs; /* of all open calls */
    Py_ssize_t depth, open_room, inputs_count, inputs_room;
    Plain plain;
    Py_ssize_t at;
    char watches_outputs, watches_inputs, checks_reach, following;
    char holds_calls;     /* whether it holds `calls` of `module_calls.h` */
    char has_torch_hooks; /* whether tensors keep hooks as torch's do */
    char accesses;        /* whether `tensor_access` answers for the framework */
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
static int record_all(Follower *self, PyObject *slots, PyObject *tensors)
{
    PyObject *listed = PySequence_Fast(slots, "slots are a sequence");
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

/* Whether a call without arguments returns this object, True or False. */
static int returns(PyObject *function, PyObject *expected)
{
    PyObject *now = PyObject_CallNoArgs(function);
    if (now == NULL) {
        return -1;
    }
    Py_DECREF(now);
    return now == expected;
}

/* Whether autograd is on, as planned. */
static int autograd_is(Follower *self, PyObject *expected)
{
    return self->accesses ? tensor_access->records_gradients() == (expected == Py_True)
                          : returns(self->records_gradients, expected);
}

/* Whether a backward runs, as planned. `graph_task` is torch's function, and -1 its result outside of one. */
static int recomputes_as(Follower *self, PyObject *expected)
{
    if (self->accesses) {
        return (tensor_access->graph_task() != -1) == (expected == Py_True);
    }
    if (self->graph_task == NULL) {
        return returns(self->recomputing, expected);
    }
    PyObject *task = PyObject_CallNoArgs(self->graph_task);
    long number_now = task == NULL ? -1 : PyLong_AsLong(task);
    Py_XDECREF(task);
    return number_now == -1 && PyErr_Occurred() ? -1 : (number_now != -1) == (expected == Py_True);
}

/* Whether autograd reaches each tensor as planned. */
static int reached_as(PyObject *flags, PyObject *tensors)
{
    int same = PyList_Check(flags) && PyList_GET_SIZE(flags) == PyList_GET_SIZE(tensors);
    for (Py_ssize_t i = 0; same == 1 && i < PyList_GET_SIZE(tensors); i++) {
        int reached = requires_gradient(PyList_GET_ITEM(tensors, i));
        same = reached < 0 ? -1 : reached == (PyList_GET_ITEM(flags, i) == Py_True);
    }
    return same;
}

/* The version of a tensor, as `Framework.version` returns it. */
static int known_version(Follower *self, PyObject *tensor, long long *version)
{
    int64_t found;
    if (is_accessible(tensor) && tensor_access->version(tensor, &found)) {
        *version = found;
        return 0;
    }
    PyObject *now = PyObject_CallFunctionObjArgs(self->version, tensor, NULL);
    int failed = now == NULL || get_count(now, version);
    Py_XDECREF(now);
    return failed ? -1 : 0;
}


/* --- open calls ------------------------------------------------------------------------------------------------------ */
/* Make room for one more item of an array. */
static int make_room(void **array, Py_ssize_t count, Py_ssize_t *room, size_t each)
{
    if (count < *room) {
        return 0;
    }
    Py_ssize_t wanted = *room ? 2 * *room : 64;
    void *grown = PyMem_Realloc(*array, (size_t)wanted * each);
    if (grown == NULL) {
        PyErr_NoMemory();
        return -1;
    }
    *array = grown;
    *room = wanted;
    return 0;
}

static int add_inputs(Follower *self, PyObject *tensors)
{
    for (Py_ssize_t i = 0; i < PyList_GET_SIZE(tensors); i++) {
        PyObject *tensor = PyList_GET_ITEM(tensors, i);
        long long version;
        if (known_version(self, tensor, &version) ||
            make_room((void **)&self->inputs, self->inputs_count, &self->inputs_room, sizeof *self->inputs)) {
            return -1;
        }
        self->inputs[self->inputs_count++] = (InputVersion){tensor, version};
    }
    return 0;
}

/* Add a call that begins. It takes over `mark` and `edges`. */
static int add_open(Follower *self, PyObject *planned, PyObject *mark, PyObject *edges, Py_ssize_t first)
{
    if (make_room((void **)&self->open, self->depth, &self->open_room, sizeof *self->open)) {
        Py_XDECREF(mark);
        Py_XDECREF(edges);
        return -1;
    }
    self->open[self->depth++] = (OpenCall){Py_NewRef(planned), mark, edges, first};
    return 0;
}

/* Remove the newest call; its references go to the caller. */
static OpenCall take_open(Follower *self)
{
    OpenCall open = self->open[--self->depth];
    self->inputs_count = open.first;
    return open;
}

static void drop_open(OpenCall *open)
{
    Py_CLEAR(open->planned);
    Py_CLEAR(open->mark);
    Py_CLEAR(open->edges);
}

static void drop_all_open(Follower *self)
{
    while (self->depth) {
        OpenCall open = take_open(self);
        drop_open(&open);
    }
}

/* Whether a tensor is among the inputs of the newest call, with the version that it had. */
static int is_unchanged(Follower *self, PyObject *tensor)
{
    for (Py_ssize_t i = self->open[self->depth - 1].first; i < self->inputs_count; i++) {
        if (self->inputs[i].tensor == tensor) {
            long long before = self->inputs[i].version, now;
            return known_version(self, tensor, &now) ? -1 : now == before;
        }
    }
    return 0;
}

/* Whether the outputs that are inputs, unchanged, are those of the plan. */
static int unchanged_as(Follower *self, PyObject *unchanged, PyObject *tensors)
{
    int same = PyList_Check(unchanged) && PyList_GET_SIZE(unchanged) == PyList_GET_SIZE(tensors);
    for (Py_ssize_t i = 0; same == 1 && i < PyList_GET_SIZE(tensors); i++) {
        int is = is_unchanged(self, PyList_GET_ITEM(tensors, i));
        same = is < 0 ? -1 : is == (PyList_GET_ITEM(unchanged, i) == Py_True);
    }
    return same;
}

/* Take note of plain arguments, if they differ from those of the module's call before. */
static int note_arguments(Follower *self, PyObject *planned, PyObject *template, PyObject *site)
{
    PyObject *last = PyDict_GetItemWithError(self->arguments, GET(Site, site, name));
    int differs;
    if (last == NULL) {
        differs = PyErr_Occurred() ? -1 : PyObject_IsTrue(GET(Template, template, arguments));
    }
    else {
        int same = is_equal(last, GET(Template, template, text));
        differs = same < 0 ? -1 : !same;
    }
    if (differs < 1) {
        return differs;
    }
    return effect(PyObject_CallMethodObjArgs(self->work, s_note_planned_arguments, planned, NULL));
}

static int follow_begin(Follower *self, PyObject *site, PyObject *args, PyObject *kwargs)
{
    PyObject *planned = next_event(self), *tensors = NULL, *mark = NULL, *edges = NULL;
    Py_ssize_t first = self->inputs_count;
    if (planned == NULL || !IS(PlannedCall, planned) || GET(PlannedCall, planned, site) != site || !IS(Site, site)) {
        return 0;
    }
    PyObject *call = GET(PlannedCall, planned, call), *template = GET(PlannedCall, planned, inputs);
    if (!IS(ModuleCall, call) || !IS(Template, template)) {
        return 0;
    }
    PyObject *autograd = GET(ModuleCall, call, autograd);
    int is, watched = GET(PlannedCall, planned, watched) == Py_True, result = -1;
    Py_INCREF(planned);
    Py_INCREF(call);
    Py_INCREF(template);
    if ((is = autograd_is(self, autograd)) < 1 ||
        (is = recomputes_as(self, GET(PlannedCall, planned, recomputing))) < 1) {
        result = is;
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
        is = reached_as(GET(PlannedCall, planned, reached_inputs), tensors);
    }
    if (is < 1) {
        result = is;
        goto done;
    }
    self->at++;
    if (watched && self->watches_outputs && add_inputs(self, tensors)) {
        self->inputs_count = first;
        goto done;
    }
    if (watched && self->watches_inputs && autograd == Py_True) {
        PyObject *both = PyObject_CallMethodObjArgs(self->work, s_edges_of_planned, planned, tensors, NULL);
        int split = both != NULL && PyArg_ParseTuple(both, "OO", &mark, &edges);
        Py_XINCREF(mark);
        Py_XINCREF(edges);
        Py_XDECREF(both);
        if (!split) {
            self->inputs_count = first;
            goto done;
        }
    }
    int failed = add_open(self, planned, mark, edges, first);
    mark = edges = NULL;
    if (failed) {
        goto done;
    }
    if (GET(ModuleCall, call, opens) == Py_True &&
        effect(PyObject_CallMethodObjArgs(self->work, s_begin_planned, planned, tensors, NULL))) {
        goto done;
    }
    if (watched && GET(ModuleCall, call, recomputed) != Py_True && note_arguments(self, planned, template, site)) {
        goto done;
    }
    result = record_all(self, GET(PlannedCall, planned, input_slots), tensors) ? -1 : 1;
done:
    Py_DECREF(planned);
    Py_DECREF(call);
    Py_DECREF(template);
    Py_XDECREF(tensors);
    Py_XDECREF(mark);
    Py_XDECREF(edges);
    return result;
}

/* Whether a tensor was computed, so that a hook can be placed here. */
static int is_computed(PyObject *tensor, int *is_view)
{
    int is;
    if (is_accessible(tensor)) {
        return tensor_access->is_computed(tensor, is_view);
    }
    if ((is = flag(tensor, s_is_leaf)) || (*is_view = method_flag(tensor, s__is_view)) < 0) {
        return is > 0 ? 0 : -1;
    }
    return 1;
}

/* The dictionary of a tensor's hooks (a new reference), which is made if there is none. */
static PyObject *hooks_of(PyObject *tensor)
{
    /* First of all: if a view's memory has changed since its node was made, torch makes a new node now. */
    PyObject *node = PyObject_GetAttr(tensor, s_grad_fn);
    PyObject *hooks = node == NULL ? NULL : PyObject_GetAttr(tensor, s__backward_hooks);
    if (hooks == Py_None) {
        Py_DECREF(hooks);
        hooks = PyObject_CallNoArgs((PyObject *)&PyODict_Type); /* torch keeps weak references to such dicts */
        if (hooks != NULL && (PyObject_SetAttr(tensor, s__backward_hooks, hooks) ||
                              effect(PyObject_CallMethodOneArg(node, s__register_hook_dict, tensor)))) {
            Py_CLEAR(hooks);
        }
    }
    Py_XDECREF(node);
    return hooks;
}

/* The number of a view's elements; 0 if they are not neighbours in memory. */
static int64_t count_neighbours(const View *view)
{
    int64_t count = 1;
    for (int i = view->ndim - 1; i >= 0; i--) {
        if (view->shape[i] != 1 && view->strides[i] != count) {
            return 0;
        }
        count *= view->shape[i];
    }
    return count;
}

/* Whether a tensor has all elements of its base, in the same order; see `base_of` of `frameworks.torch.graph`. */
static int is_whole(PyObject *base, PyObject *tensor)
{
    View left, right;
    int checked;
    if (!view_tensor(base, &left, &checked) || !view_tensor(tensor, &right, &checked) ||
        (left.ndim && left.strides == NULL) || (right.ndim && right.strides == NULL)) {
        return 0;
    }
    size_t size = (size_t)left.ndim * sizeof *left.shape;
    if (left.ndim == right.ndim && !memcmp(left.shape, right.shape, size) && !memcmp(left.strides, right.strides, size)) {
        return 1; /* in any memory format */
    }
    int64_t count = count_neighbours(&left);
    return count && count == count_neighbours(&right);
}

/* The node of the base of a view that has the same elements, as `GradientHooks.place` finds it (a new reference). */
static int find_base_node(PyObject *view, PyObject **node)
{
    PyObject *base = PyObject_GetAttr(view, s__base);
    int result = base == NULL ? -1 : 0;
    if (!result && base != Py_None && is_whole(base, view)) {
        *node = PyObject_GetAttr(base, s_grad_fn);
        result = *node == NULL ? -1 : 0;
        if (*node == Py_None) {
            Py_CLEAR(*node);
        }
    }
    Py_XDECREF(base);
    return result;
}

static PyObject *call_gradient_hook(PyObject *hook, PyObject *gradient); /* in `hooks.h` */

/* Place a hook without a Python object, on a tensor that takes one. */
static int place_quickly(Follower *self, PyObject *tensor, PyObject *hook)
{
    if (!self->accesses || !is_accessible(tensor)) {
        return 0;
    }
    if (self->placed == NULL && ((self->placed = tensor_access->new_hooks(call_gradient_hook)) == NULL ||
                                 PyList_Append(self->hooks, self->placed))) {
        return -1;
    }
    return tensor_access->place_hook(self->placed, tensor, hook);
}

/* Call a hook with the gradient of an output, as `GradientHooks.place` has it done, without the Python code of torch's
   `register_hook`. Leaves are left to that. */
static int place_hook(Follower *self, PyObject *tensor, PyObject *hook)
{
    int is, is_view = 0;
    if (!self->has_torch_hooks || Py_TYPE(hook) != HookType || !is_plain(&self->plain, tensor)) {
        return 0;
    }
    if ((is = place_quickly(self, tensor, hook))) {
        return is;
    }
    if ((is = requires_gradient(tensor)) < 1) {
        return is < 0 ? -1 : 1; /* it gets no gradient */
    }
    if ((is = is_computed(tensor, &is_view)) < 1 || (is_view && self->watch_view == NULL)) {
        return is < 0 ? -1 : 0;
    }
    PyObject *hooks = hooks_of(tensor), *base_node = NULL, *pop = NULL, *remove = NULL;
    int failed = hooks == NULL || (is_view && find_base_node(tensor, &base_node)) || PyObject_SetItem(hooks, hook, hook);
    if (!failed && base_node != NULL) {
        remove = PyObject_CallFunctionObjArgs(self->watch_view, tensor, hook, base_node, hooks, NULL);
    }
    else if (!failed && (pop = PyObject_GetAttr(hooks, s_pop)) != NULL) {
        remove = PyObject_CallFunctionObjArgs(self->partial, pop, hook, Py_None, NULL);
    }
    failed = remove == NULL || PyList_Append(self->hooks, remove);
    Py_XDECREF(hooks);
    Py_XDECREF(base_node);
    Py_XDECREF(pop);
    Py_XDECREF(remove);
    return failed ? -1 : 1;
}

/* Watch for the gradients of the outputs. */
static int hook_outputs(Follower *self, PyObject *callbacks, PyObject *unchanged, PyObject *tensors)
{
    PyObject *given = PySequence_Fast(callbacks, "callbacks are a sequence");
    PyObject *skipped = given == NULL ? NULL : PySequence_Fast(unchanged, "unchanged is a sequence");
    int result = skipped == NULL ? -1 : 0;
    for (Py_ssize_t i = 0; !result && i < PyList_GET_SIZE(tensors) && i < PySequence_Fast_GET_SIZE(given) &&
                           i < PySequence_Fast_GET_SIZE(skipped);
         i++) {
        if (PySequence_Fast_GET_ITEM(skipped, i) == Py_True) {
            continue;
        }
        PyObject *tensor = PyList_GET_ITEM(tensors, i), *callback = PySequence_Fast_GET_ITEM(given, i);
        int placed = place_hook(self, tensor, callback);
        if (placed) {
            result = placed < 0 ? -1 : 0;
            continue;
        }
        PyObject *remove = PyObject_CallFunctionObjArgs(self->on_gradient, tensor, callback, NULL);
        result = remove == NULL || (remove != Py_None && PyList_Append(self->hooks, remove)) ? -1 : 0;
        Py_XDECREF(remove);
    }
    Py_XDECREF(given);
    Py_XDECREF(skipped);
    return result;
}

/* Set the mark and the edges of a call that has none. */
static int complete_open(OpenCall *open)
{
    if (open->mark == NULL) {
        open->mark = PyLong_FromLong(0);
    }
    if (open->edges == NULL) {
        open->edges = PyTuple_New(0);
    }
    return open->mark == NULL || open->edges == NULL ? -1 : 0;
}

static int end_planned(Follower *self, OpenCall *open, PyObject *tensors)
{
    return complete_open(open) ||
                   effect(PyObject_CallMethodObjArgs(self->work, s_end_planned, open->planned, tensors, open->mark,
                                                     open->edges, NULL))
               ? -1
               : 0;
}

static int follow_end(Follower *self, PyObject *site, PyObject *output)
{
    PyObject *event = next_event(self), *tensors = NULL;
    if (self->depth == 0 || event == NULL) {
        return 0;
    }
    PyObject *planned = self->open[self->depth - 1].planned;
    OpenCall open = {NULL, NULL, NULL, 0};
    if (GET(PlannedCall, planned, end) != event || GET(PlannedCall, planned, site) != site || !IS(PlannedEnd, event)) {
        return 0;
    }
    PyObject *template = GET(PlannedEnd, event, outputs), *unchanged = GET(PlannedEnd, event, unchanged);
    int is, result = -1;
    Py_INCREF(planned); /* it holds its end */
    if (template == Py_None) {
        is = (tensors = PyList_New(0)) == NULL ? -1 : 1;
    }
    else {
        is = tensors_of(&self->plain, template, output, &tensors);
    }
    if (is == 1 && self->checks_reach) {
        is = reached_as(GET(PlannedEnd, event, reached_outputs), tensors);
    }
    if (is == 1 && self->watches_outputs && GET(PlannedCall, planned, watched) == Py_True) {
        is = unchanged_as(self, unchanged, tensors);
    }
    if (is < 1) {
        result = is;
        goto done;
    }
    self->at++;
    open = take_open(self);
    if (record_all(self, GET(PlannedEnd, event, output_slots), tensors) ||
        hook_outputs(self, GET(PlannedEnd, event, callbacks), unchanged, tensors)) {
        goto done;
    }
    PyObject *name = GET(Site, site, name);
    int more = GET(PlannedCall, planned, outermost) == Py_True || PyUnicode_GetLength(name) == 0 ||
               (open.edges != NULL && PyObject_IsTrue(open.edges) == 1);
    result = more && end_planned(self, &open, tensors) ? -1 : 1;
done:
    drop_open(&open);
    Py_DECREF(planned);
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
        if (!IS(NoGradient, event) || PyTuple_GET_ITEM(event, 0) != slot) {
            return 0;
        }
        self->at++;
        return 1;
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
    if (slot == NULL || gradient == Py_None || !IS(RecordSlot, slot) || GET(RecordSlot, slot, site) != site) {
        return 0;
    }
    int is = is_equal(GET(RecordSlot, slot, path), name);
    if (is < 1 || (is = is_equal(GET(RecordSlot, slot, kind), s_param_grad)) < 1) {
        return is;
    }
    self->at++;
    Py_INCREF(slot);
    is = record_one(self, slot, gradient) ? -1 : 1;
    Py_DECREF(slot);
    return is;
}
