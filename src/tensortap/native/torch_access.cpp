// `TensorAccess` for torch, compiled with the headers of the torch that is installed.
//
// Where it cannot be compiled, the hooks ask Python's attributes and DLPack instead: see `views.h`.

#include "tensor_access.h"

#include <atomic>
#include <memory>
#include <unordered_map>
#include <unordered_set>
#include <vector>

#include <c10/core/GradMode.h>
#include <c10/core/InferenceMode.h>
#include <c10/core/impl/DeviceGuardImplInterface.h>
#include <torch/csrc/Dtype.h>
#include <torch/csrc/Exceptions.h>
#include <torch/csrc/PyInterpreter.h>
#include <torch/csrc/autograd/function.h>
#include <torch/csrc/autograd/function_hook.h>
#include <torch/csrc/autograd/graph_task.h>
#include <torch/csrc/autograd/python_cpp_function.h>
#include <torch/csrc/autograd/python_variable.h>
#include <torch/csrc/autograd/variable.h>
#include <torch/csrc/dynamo/compiled_autograd.h>
#include <torch/csrc/jit/frontend/tracer.h>

namespace {

const at::Tensor &unpack(PyObject *tensor) { return THPVariable_Unpack(tensor); }

// Tensors whose elements are not, as they are, in a memory of their own: wrapped ones and those with a lazy sign.
const c10::DispatchKeySet unusual = c10::DispatchKeySet(
    {c10::DispatchKey::Conjugate, c10::DispatchKey::Negative, c10::DispatchKey::ZeroTensor, c10::DispatchKey::Functionalize,
     c10::DispatchKey::FuncTorchBatched, c10::DispatchKey::FuncTorchGradWrapper, c10::DispatchKey::Python,
     c10::DispatchKey::NestedTensor, c10::DispatchKey::BatchedNestedTensor});

bool is_usual(const c10::TensorImpl &tensor)
{
    return !tensor.key_set().has_any(unusual) && tensor.layout() == c10::kStrided && tensor.has_storage() &&
           !tensor.has_symbolic_sizes_strides();
}

// Run a function that answers; an exception is no answer.
template <typename Function> int answer(Function &&function) noexcept
{
    try {
        return function();
    }
    catch (...) {
        return 0;
    }
}

int view(PyObject *object, View *view)
{
    return answer([&] {
        const c10::TensorImpl &tensor = *unpack(object).unsafeGetTensorImpl();
        const c10::Device device = tensor.device();
        if (!is_usual(tensor) || !(device.is_cpu() || device.is_cuda()) || !tensor.storage_initialized()) {
            return 0;
        }
        view->data = const_cast<void *>(tensor.data());
        view->device_type = device.is_cuda() ? CUDA_DEVICE : CPU_DEVICE;
        view->device_id = device.is_cuda() ? device.index() : 0;
        view->ndim = static_cast<int32_t>(tensor.dim());
        view->code = static_cast<uint8_t>(c10::typeMetaToScalarType(tensor.dtype()));
        view->bits = 0;
        view->lanes = 0;
        view->shape = const_cast<int64_t *>(tensor.sizes().data());
        view->strides = const_cast<int64_t *>(tensor.strides().data());
        view->byte_offset = 0;
        return 1;
    });
}

int version(PyObject *object, int64_t *version)
{
    return answer([&] {
        c10::TensorImpl &tensor = *unpack(object).unsafeGetTensorImpl();
        if (tensor.is_inference() || tensor.key_set().has_any(unusual)) {
            return 0;
        }
        *version = tensor.version_counter().current_version();
        return 1;
    });
}

int storage(PyObject *object, int64_t *address)
{
    return answer([&] {
        const c10::TensorImpl &tensor = *unpack(object).unsafeGetTensorImpl();
        if (!is_usual(tensor)) {
            return 0;
        }
        *address = reinterpret_cast<int64_t>(tensor.unsafe_storage().unsafeGetStorageImpl());
        return 1;
    });
}

int weak_storage(PyObject *object, int64_t *reference)
{
    return answer([&] {
        const c10::TensorImpl &tensor = *unpack(object).unsafeGetTensorImpl();
        if (!is_usual(tensor)) {
            return 0;
        }
        *reference =
            reinterpret_cast<int64_t>(c10::raw::intrusive_ptr::make_weak(tensor.unsafe_storage().unsafeGetStorageImpl()));
        return 1;
    });
}

void free_weak_storage(int64_t reference)
{
    c10::raw::weak_intrusive_ptr::decref(reinterpret_cast<c10::StorageImpl *>(reference));
}

int requires_gradient(PyObject *object)
{
    return answer([&] { return static_cast<int>(unpack(object).requires_grad()); });
}

int is_computed(PyObject *object, int *is_view)
{
    return answer([&] {
        *is_view = unpack(object).is_view();
        return static_cast<int>(!unpack(object).is_leaf());
    });
}

static_assert(sizeof(c10::Storage) == sizeof(void *) && sizeof(c10::VariableVersion) == sizeof(void *));

const c10::Storage &storage_in(const HeldMemory *held) { return reinterpret_cast<const c10::Storage &>(held->storage); }

const c10::VariableVersion &version_in(const HeldMemory *held)
{
    return reinterpret_cast<const c10::VariableVersion &>(held->version);
}

int hold(PyObject *object, HeldMemory *held)
{
    return answer([&] {
        c10::TensorImpl &tensor = *unpack(object).unsafeGetTensorImpl();
        if (!is_usual(tensor) || tensor.is_inference()) {
            return 0;
        }
        new (&held->storage) c10::Storage(tensor.unsafe_storage());
        new (&held->version) c10::VariableVersion(tensor.version_counter());
        return 1;
    });
}

void release(HeldMemory *held)
{
    std::destroy_at(reinterpret_cast<c10::VariableVersion *>(&held->version));
    std::destroy_at(reinterpret_cast<c10::Storage *>(&held->storage));
}

int64_t held_version(const HeldMemory *held) { return version_in(held).current_version(); }

const void *held_memory(const HeldMemory *held) { return storage_in(held).data(); }

int64_t weak_reference(const HeldMemory *held)
{
    return reinterpret_cast<int64_t>(c10::raw::intrusive_ptr::make_weak(storage_in(held).unsafeGetStorageImpl()));
}

PyObject *held_tensor(const HeldMemory *held, PyObject *dtype, int64_t offset, int32_t ndim, const int64_t *shape)
{
    try {
        const c10::InferenceMode usual(false); // an inference tensor would have no version
        const auto type = c10::scalarTypeToTypeMeta(reinterpret_cast<THPDtype *>(dtype)->scalar_type);
        const c10::Storage &storage = storage_in(held);
        const auto key = storage.device().is_cuda() ? c10::DispatchKey::CUDA : c10::DispatchKey::CPU;
        at::Tensor tensor = at::detail::make_tensor<c10::TensorImpl>(c10::Storage(storage), c10::DispatchKeySet(key), type);
        c10::TensorImpl &made = *tensor.unsafeGetTensorImpl();
        made.set_version_counter(version_in(held));
        made.set_storage_offset(offset / static_cast<int64_t>(type.itemsize()));
        made.set_sizes_contiguous(c10::IntArrayRef(shape, ndim));
        return THPVariable_Wrap(std::move(tensor));
    }
    catch (const std::exception &error) {
        PyErr_SetString(PyExc_RuntimeError, error.what());
        return nullptr;
    }
}

int records_gradients() { return c10::GradMode::is_enabled(); }

int is_tracing() { return torch::jit::tracer::isTracing(); }

int graph_task() { return torch::autograd::get_current_graph_task_id(); }

int current_stream(int32_t device, int32_t *current, int64_t *stream)
{
    return answer([&] {
        const auto *guard = c10::impl::getDeviceGuardImpl(c10::DeviceType::CUDA);
        *current = guard->getDevice().index();
        *stream = guard->getStream(c10::Device(c10::DeviceType::CUDA, static_cast<c10::DeviceIndex>(device))).id();
        return 1;
    });
}

// A shared pointer of torch's own kind, which depends on its version, and its weak counterpart.
using NodePointer = std::decay_t<decltype(std::declval<const at::Tensor &>().grad_fn())>;
template <typename Pointer> struct WeakPointer;
template <typename Node> struct WeakPointer<std::shared_ptr<Node>> {
    using type = std::weak_ptr<Node>;
};
template <typename Node> struct WeakPointer<c10::intrusive_ptr<Node>> {
    using type = c10::weak_intrusive_ptr<Node>;
};

// Holds the interpreter lock. pybind11's own looks its state up in several places.
class InterpreterLock {
  public:
    InterpreterLock() : state(PyGILState_Ensure()) {}
    ~InterpreterLock() { PyGILState_Release(state); }
    InterpreterLock(const InterpreterLock &) = delete;
    InterpreterLock &operator=(const InterpreterLock &) = delete;

  private:
    PyGILState_STATE state;
};

// What the hooks on a view and on its base share. If the view is changed in place, the gradient of the value before arrives
// at its base; see `ViewHook` of `frameworks.torch.gradient_hooks`.
struct ViewState {
    std::vector<int64_t> shape;
    bool arrived = false; // at the view
};

// A view that may be changed in place, and the node of its base.
struct View {
    c10::weak_intrusive_ptr<c10::TensorImpl> tensor;
    uint32_t version;
    WeakPointer<NodePointer>::type node;
    size_t output;
    std::shared_ptr<ViewState> state;
    PyObject *hook; // borrowed from the `Hooks`
};

constexpr size_t most_views = 16; // the newest ones are looked at

// Hooks on gradients that are removed together. Nodes of a graph may outlive them: what those have then does nothing.
struct Hooks {
    PyObject_HEAD CallHook call;
    std::shared_ptr<std::atomic<bool>> placed;
    std::vector<PyObject *> held; // `GradientHook`s borrow these
    std::vector<View> views;
};

// A hook on an output of a node. Torch's own for Python's hooks make a dictionary, a list and a tuple for each of them.
class GradientHook : public torch::autograd::FunctionPreHook {
  public:
    // `view`: if it is on a view; `at_base`: on its base instead
    GradientHook(const Hooks &hooks, PyObject *hook, size_t output, std::shared_ptr<ViewState> view, bool at_base)
        : placed(hooks.placed), call(hooks.call), hook(hook), output(output), view(std::move(view)), at_base(at_base)
    {
    }

    torch::autograd::variable_list operator()(const torch::autograd::variable_list &gradients) override
    {
        if (placed->load(std::memory_order_relaxed)) {
            const InterpreterLock lock;
            if (placed->load()) { // it is set to false under the same lock
                const auto held = pybind11::reinterpret_borrow<pybind11::object>(hook); // also if an exception passes
                if (!pybind11::reinterpret_steal<pybind11::object>(report(gradients.at(output), held.ptr()))) {
                    throw python_error();
                }
            }
        }
        return gradients;
    }

    // Report a gradient, under the interpreter lock.
    PyObject *report(const at::Tensor &gradient, PyObject *held) const
    {
        if (view != nullptr) {
            const bool arrived = std::exchange(view->arrived, !at_base);
            if (at_base && (arrived || !gradient.defined())) { // not defined: the view was never used
                Py_RETURN_NONE;
            }
        }
        PyObject *seen = THPVariable_Wrap(at_base ? gradient.reshape(view->shape) : gradient);
        PyObject *none = seen == nullptr ? nullptr : call(held, seen);
        Py_XDECREF(seen);
        return none;
    }

    // Compiled autograd calls what is placed here. In some versions of torch this is not const.
    void compiled_args(torch::dynamo::autograd::CompiledNodeArgs &args) const { add_to(args); }
    void compiled_args(torch::dynamo::autograd::CompiledNodeArgs &args) { add_to(args); }

  private:
    void add_to(torch::dynamo::autograd::CompiledNodeArgs &args) const;

    std::shared_ptr<std::atomic<bool>> placed;
    CallHook call;
    PyObject *hook;
    size_t output;
    std::shared_ptr<ViewState> view;
    bool at_base;
};

// A hook on a view or on its base, as a Python function.
struct ViewCall {
    PyObject_HEAD GradientHook *inner;
    PyObject *hook;
};

PyTypeObject *view_call_type;

PyObject *call_view(PyObject *self, PyObject *args, PyObject *)
{
    const auto &known = *reinterpret_cast<ViewCall *>(self);
    PyObject *gradient;
    if (!PyArg_ParseTuple(args, "O", &gradient)) {
        return nullptr;
    }
    try {
        return known.inner->report(THPVariable_Check(gradient) ? unpack(gradient) : at::Tensor(), known.hook);
    }
    catch (const std::exception &error) {
        return PyErr_Format(PyExc_RuntimeError, "%s", error.what());
    }
}

void free_view_call(PyObject *self)
{
    auto *known = reinterpret_cast<ViewCall *>(self);
    PyTypeObject *type = Py_TYPE(self);
    delete known->inner;
    Py_XDECREF(known->hook);
    PyObject_Free(self);
    Py_DECREF(type);
}

PyType_Slot view_call_slots[] = {
    {Py_tp_doc, const_cast<char *>("A hook on the gradient of a view, or of its base.")},
    {Py_tp_call, reinterpret_cast<void *>(call_view)},
    {Py_tp_dealloc, reinterpret_cast<void *>(free_view_call)},
    {0, nullptr},
};
PyType_Spec view_call_spec = {"tensortap.native.ViewCall", sizeof(ViewCall), 0,
                              Py_TPFLAGS_DEFAULT | Py_TPFLAGS_DISALLOW_INSTANTIATION, view_call_slots};

void GradientHook::add_to(torch::dynamo::autograd::CompiledNodeArgs &args) const
{
    const InterpreterLock lock;
    if (!placed->load()) {
        return;
    }
    PyObject *function = Py_NewRef(hook); // the object takes over a reference
    if (view != nullptr) {
        auto *made = PyObject_New(ViewCall, view_call_type);
        if (made == nullptr) {
            Py_DECREF(function);
            throw python_error();
        }
        made->inner = new GradientHook(*this);
        made->hook = function;
        function = reinterpret_cast<PyObject *>(made);
    }
    args.add_tensor_pre_hook(c10::SafePyObject(function, getPyInterpreter()), static_cast<int>(output));
}

PyTypeObject *hooks_type;

PyObject *new_hooks(CallHook call)
{
    auto *hooks = PyObject_GC_New(Hooks, hooks_type);
    if (hooks != nullptr) {
        hooks->call = call;
        new (&hooks->placed) auto(std::make_shared<std::atomic<bool>>(true));
        new (&hooks->held) std::vector<PyObject *>();
        new (&hooks->views) std::vector<View>();
        PyObject_GC_Track(hooks);
    }
    return reinterpret_cast<PyObject *>(hooks);
}

int remove_hooks(PyObject *self)
{
    auto *hooks = reinterpret_cast<Hooks *>(self);
    hooks->placed->store(false);
    hooks->views.clear();
    std::vector<PyObject *> held;
    held.swap(hooks->held); // freeing one may run any code
    for (PyObject *hook : held) {
        Py_DECREF(hook);
    }
    return 0;
}

PyObject *call_hooks(PyObject *self, PyObject *, PyObject *)
{
    remove_hooks(self);
    Py_RETURN_NONE;
}

int traverse_hooks(PyObject *self, visitproc visit, void *arg)
{
    Py_VISIT(Py_TYPE(self));
    for (PyObject *hook : reinterpret_cast<Hooks *>(self)->held) {
        Py_VISIT(hook);
    }
    return 0;
}

void free_hooks(PyObject *self)
{
    auto *hooks = reinterpret_cast<Hooks *>(self);
    PyTypeObject *type = Py_TYPE(self);
    PyObject_GC_UnTrack(self);
    remove_hooks(self);
    std::destroy_at(&hooks->placed);
    std::destroy_at(&hooks->held);
    std::destroy_at(&hooks->views);
    PyObject_GC_Del(self);
    Py_DECREF(type);
}

PyType_Slot hooks_slots[] = {
    {Py_tp_doc, const_cast<char *>("Hooks on gradients. A call removes them.")},
    {Py_tp_call, reinterpret_cast<void *>(call_hooks)},
    {Py_tp_traverse, reinterpret_cast<void *>(traverse_hooks)},
    {Py_tp_clear, reinterpret_cast<void *>(remove_hooks)},
    {Py_tp_dealloc, reinterpret_cast<void *>(free_hooks)},
    {0, nullptr},
};
PyType_Spec hooks_spec = {"tensortap.native.GradientHooks", sizeof(Hooks), 0,
                          Py_TPFLAGS_DEFAULT | Py_TPFLAGS_HAVE_GC | Py_TPFLAGS_DISALLOW_INSTANTIATION, hooks_slots};

// Whether a view has all elements of its base, in the same order; see `base_of` of `frameworks.torch.graph`.
bool is_whole(const at::TensorBase &base, const at::TensorBase &view)
{
    return base.numel() == view.numel() && ((base.sizes() == view.sizes() && base.strides() == view.strides()) ||
                                            (base.is_contiguous() && view.is_contiguous()));
}

// Remember a view, if its gradient may arrive at its base. Returns what its hooks share.
std::shared_ptr<ViewState> remember_view(Hooks &hooks, const at::Tensor &tensor, PyObject *hook)
{
    const at::TensorBase &base = tensor._base();
    if (!is_whole(base, tensor) || base.grad_fn() == nullptr) {
        return nullptr;
    }
    auto state = std::make_shared<ViewState>();
    state->shape = tensor.sizes().vec();
    if (hooks.views.size() == most_views) {
        hooks.views.erase(hooks.views.begin());
    }
    hooks.views.push_back({c10::weak_intrusive_ptr<c10::TensorImpl>(tensor.getIntrusivePtr()),
                           tensor.unsafeGetTensorImpl()->version_counter().current_version(),
                           WeakPointer<NodePointer>::type(base.grad_fn()), static_cast<size_t>(base.output_nr()), state,
                           hook});
    return state;
}

int place_hook(PyObject *group, PyObject *object, PyObject *hook)
{
    return answer([&] {
        auto &hooks = *reinterpret_cast<Hooks *>(group);
        const at::Tensor &tensor = unpack(object);
        const auto *others = reinterpret_cast<THPVariable *>(object)->backward_hooks; // their order must not change
        if (others != nullptr || !hooks.placed->load()) {
            return 0;
        }
        const auto &node = tensor.grad_fn(); // a new one, if the memory of a view has changed since its node was made
        if (node == nullptr) {
            return 0;
        }
        hooks.held.reserve(hooks.held.size() + 1); // before anything is placed
        auto view = tensor.is_view() ? remember_view(hooks, tensor, hook) : nullptr;
        node->add_tensor_pre_hook(
            std::make_unique<GradientHook>(hooks, hook, tensor.output_nr(), std::move(view), false));
        hooks.held.push_back(Py_NewRef(hook));
        return 1;
    });
}

void check_views(PyObject *group)
{
    auto &hooks = *reinterpret_cast<Hooks *>(group);
    answer([&] {
        for (auto view = hooks.views.begin(); view != hooks.views.end();) {
            const auto tensor = view->tensor.lock();
            if (tensor && tensor->version_counter().current_version() == view->version) {
                ++view;
                continue;
            }
            const View gone = std::move(*view);
            view = hooks.views.erase(view);
            if (const auto node = tensor ? gone.node.lock() : nullptr) {
                node->add_tensor_pre_hook(
                    std::make_unique<GradientHook>(hooks, gone.hook, gone.output, gone.state, true));
            }
        }
        return 1;
    });
}

TensorAccess functions = {view,           version,      storage,     weak_storage, weak_reference, free_weak_storage,
                          requires_gradient, is_computed,  hold,        release,      held_version,   held_memory,
                          held_tensor,    records_gradients, is_tracing, graph_task,   current_stream, new_hooks,
                          place_hook,     check_views};

// --- the graph, for `frameworks.torch.graph`; these functions are called from Python and may raise ---

// Run a function that returns an object, or NULL if an exception is set.
template <typename Function> PyObject *attempt(Function &&function) noexcept
{
    try {
        return function();
    }
    catch (const std::exception &error) {
        if (!PyErr_Occurred()) {
            PyErr_SetString(PyExc_RuntimeError, error.what());
        }
        return nullptr;
    }
}

bool is_tensor(PyObject *object)
{
    if (!THPVariable_Check(object)) {
        PyErr_SetString(PyExc_TypeError, "expected a tensor");
        return false;
    }
    return true;
}

// gradient_edge(tensor): the node at which its gradient arrives, and the number of its output there.
PyObject *gradient_edge(PyObject *, PyObject *tensor)
{
    return attempt([&]() -> PyObject * {
        if (!is_tensor(tensor)) {
            return nullptr;
        }
        const auto edge = torch::autograd::impl::gradient_edge(unpack(tensor));
        PyObject *node = torch::autograd::functionToPyObject(edge.function);
        return node == nullptr ? nullptr : Py_BuildValue("NI", node, static_cast<unsigned>(edge.input_nr));
    });
}

// The edges that are searched for, by node. Nodes of Python's functions are known by their Python objects.
class WantedEdges {
  public:
    // Take the node, slot and place of each edge, and whether the search ends at its node.
    bool read(PyObject *listed)
    {
        for (Py_ssize_t i = 0; i < PyList_GET_SIZE(listed); i++) {
            PyObject *node;
            long slot, place;
            int ends_here;
            if (!PyArg_ParseTuple(PyList_GET_ITEM(listed, i), "Ollp", &node, &slot, &place, &ends_here)) {
                return false;
            }
            Target &target = targets[key_of(node)];
            has_python |= key_of(node) == node;
            target.places[slot] = place; // the last of equal ones counts
            target.ends_here |= ends_here != 0;
        }
        return true;
    }

    // The place of an edge; NULL if it is not wanted.
    const long *find(const NodePointer &node, long slot) const
    {
        const Target *target = target_of(node);
        const auto found = target == nullptr ? std::unordered_map<long, long>::const_iterator() : target->places.find(slot);
        return target == nullptr || found == target->places.end() ? nullptr : &found->second;
    }

    bool end_at(const NodePointer &node) const
    {
        const Target *target = target_of(node);
        return target != nullptr && target->ends_here;
    }

  private:
    struct Target {
        std::unordered_map<long, long> places; // by slot
        bool ends_here = false;
    };

    static const void *key_of(PyObject *node)
    {
        if (torch::autograd::THPCppFunction_Check(node)) {
            return reinterpret_cast<torch::autograd::THPCppFunction *>(node)->cdata.get();
        }
        return node;
    }

    const Target *target_of(const NodePointer &node) const
    {
        const void *key = node.get();
        pybind11::object object;
        if (has_python) { // torch exports nothing that would tell these nodes apart
            object = pybind11::reinterpret_steal<pybind11::object>(torch::autograd::functionToPyObject(node));
            if (!object) {
                throw python_error();
            }
            key = key_of(object.ptr());
        }
        const auto found = targets.find(key);
        return found == targets.end() ? nullptr : &found->second;
    }

    std::unordered_map<const void *, Target> targets;
    bool has_python = false;
};

// consumers(outputs, wanted, mark): the nodes that were made from `mark` on, lie between the outputs and one of the wanted
// edges, and send a gradient along that. Each is its object, the index of that gradient, and the place of the edge.
PyObject *consumers(PyObject *, PyObject *args)
{
    PyObject *outputs, *listed;
    unsigned long long mark;
    if (!PyArg_ParseTuple(args, "O!O!K", &PyList_Type, &outputs, &PyList_Type, &listed, &mark)) {
        return nullptr;
    }
    return attempt([&]() -> PyObject * {
        WantedEdges wanted;
        std::unordered_set<const void *> visited;
        std::vector<NodePointer> waiting;
        const auto visit = [&](const NodePointer &node) {
            if (node && visited.insert(node.get()).second) {
                waiting.push_back(node);
            }
        };
        if (!wanted.read(listed)) {
            return nullptr;
        }
        for (Py_ssize_t i = 0; i < PyList_GET_SIZE(outputs); i++) {
            if (!is_tensor(PyList_GET_ITEM(outputs, i))) {
                return nullptr;
            }
            visit(unpack(PyList_GET_ITEM(outputs, i)).grad_fn());
        }
        auto found = pybind11::reinterpret_steal<pybind11::object>(PyList_New(0));
        while (found && !waiting.empty()) {
            const NodePointer node = std::move(waiting.back());
            waiting.pop_back();
            if (node->sequence_nr() < mark || wanted.end_at(node)) {
                continue; // made before the module ran, so not by it
            }
            for (uint32_t index = 0; index < node->num_outputs(); index++) {
                const auto &next = node->next_edge(index);
                if (!next.function) {
                    continue;
                }
                if (const long *place = wanted.find(next.function, static_cast<long>(next.input_nr))) {
                    PyObject *object = torch::autograd::functionToPyObject(node);
                    const auto consumer = pybind11::reinterpret_steal<pybind11::object>(
                        object == nullptr ? nullptr : Py_BuildValue("NIl", object, index, *place));
                    if (!consumer || PyList_Append(found.ptr(), consumer.ptr())) {
                        return nullptr;
                    }
                }
                visit(next.function);
            }
        }
        return found.release().ptr();
    });
}

PyMethodDef methods[] = {
    {"gradient_edge", gradient_edge, METH_O, "Return the node at which a tensor's gradient arrives, and its output."},
    {"consumers", consumers, METH_VARARGS, "Return the nodes that send gradients along edges."},
    {nullptr},
};

PyModuleDef definition = {PyModuleDef_HEAD_INIT, "torch_access", "What the hooks ask of torch.", -1, methods};

} // namespace

PyMODINIT_FUNC PyInit_torch_access()
{
    hooks_type = reinterpret_cast<PyTypeObject *>(PyType_FromSpec(&hooks_spec)); // both are held for ever
    view_call_type = reinterpret_cast<PyTypeObject *>(PyType_FromSpec(&view_call_spec));
    PyObject *module = hooks_type == nullptr || view_call_type == nullptr ? nullptr : PyModule_Create(&definition);
    PyObject *capsule = module == nullptr ? nullptr : PyCapsule_New(&functions, ACCESS_NAME, nullptr);
    if (capsule == nullptr || PyModule_AddObject(module, "access", capsule)) {
        Py_XDECREF(capsule);
        Py_XDECREF(module);
        return nullptr;
    }
    return module;
}
