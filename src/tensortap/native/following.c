/* The part of capture that runs at every call of a module, in C.

   `Follower` is `capture.watching.follower.Follower`. `Copies` and `Entries` are `TensorCopies` and `RowEntries` of
   `capture.recording.host_rows`, and `Taker` is `Recorder.take`. The Python versions document the behaviour and the reasons; here is only the part that C
   makes quicker. Uncommon cases go to Python: a function returns 0, and its caller takes the careful way.
   Tensors are used through their Python attributes, through DLPack's exchange interface, or through `TensorAccess`, which
   another module provides, so that no framework is needed to build this; `collecting.h`, `deferred.h`, `launches.h`,
   `rows.h` and `waiting.h` alone know what `frameworks.torch.cuda` keeps.

   In a hot loop, Python would do. Between two hooks of a training step, though, the interpreter's data leaves the
   caches, so the number of objects that are created and read counts.

   The functions return 1 (done), 0 (not done, nothing changed) or -1 (a Python exception is set). */

#include "collecting.h"
#include "module_calls.h"
#include "unchanged.h"

static PyMethodDef functions[] = {
    {"configure", configure, METH_O, "Take the classes whose objects are used, by name."},
    {"configure_hooks", configure_hooks, METH_VARARGS,
     "Take the classes of module hooks, and a dictionary and name of the flag that a graph is being traced."},
    {"configure_calls", configure_calls, METH_VARARGS,
     "Take the function that calls a module, and what continues or fails a call with other hooks."},
    {"configure_views", configure_views, METH_VARARGS, "Take the exchange interface of tensors of these classes."},
    {"configure_access", configure_access, METH_VARARGS,
     "Take a framework's own answers about tensors of these classes, in a capsule; None to ask Python instead."},
    {"configure_device", configure_device, METH_VARARGS,
     "Take classes, the module torch._C and limits, for reads on a device."},
    {"changed_items", changed_items, METH_O, "Return the places of the watched items that have changed."},
    {"identify_values", identify_values, METH_VARARGS, "Identify the values of an attribute of several objects."},
    {"collect_results", collect_results, METH_VARARGS, "Fill in the columns of results that have arrived."},
    {"join_numbers", join_numbers, METH_VARARGS, "Fill in the numbers of rows in several steps."},
    {"read_waiting", read_waiting, METH_O, "Read the waiting tensors of a lane; return whether that was done."},
    {NULL},
};
static struct PyModuleDef definition = {PyModuleDef_HEAD_INIT, "following",
                                        "Follows the plan of a step and copies small tensors.", -1, functions};

static PyTypeObject *add_type(PyObject *module, const char *name, PyType_Spec *spec)
{
    PyObject *type = PyType_FromSpec(spec);
    if (type != NULL && PyModule_AddObjectRef(module, name, type)) {
        Py_CLEAR(type);
    }
    return (PyTypeObject *)type; /* one reference is held for ever */
}

PyMODINIT_FUNC PyInit_following(void)
{
    PyObject *module = PyModule_Create(&definition);
    if (module == NULL || make_names() || (EntriesType = add_type(module, "Entries", &entries_spec)) == NULL ||
        (CopiesType = add_type(module, "Copies", &copies_spec)) == NULL ||
        (DeviceEntriesType = add_type(module, "DeviceEntries", &device_entries_spec)) == NULL ||
        (WaitingTensorsType = add_type(module, "WaitingTensors", &waiting_spec)) == NULL ||
        (TakerType = add_type(module, "Taker", &taker_spec)) == NULL ||
        (HookLockType = add_type(module, "HookLock", &hook_lock_spec)) == NULL ||
        (HookType = add_type(module, "Hook", &hook_spec)) == NULL ||
        PyObject_SetAttrString((PyObject *)HookType, "__torch_unserializable__", Py_True) || /* as `_TensorHook` */
        add_type(module, "Follower", &follower_spec) == NULL) {
        Py_XDECREF(module);
        return NULL;
    }
    return module;
}
