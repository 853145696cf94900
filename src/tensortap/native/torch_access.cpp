// `TensorAccess` for torch, compiled with the headers of the torch that is installed.
//
// Where it cannot be compiled, the hooks ask Python's attributes and DLPack instead: see `views.h`.

#include "tensor_access.h"

#include <c10/core/GradMode.h>
#include <c10/core/impl/DeviceGuardImplInterface.h>
#include <torch/csrc/autograd/graph_task.h>
#include <torch/csrc/autograd/python_variable.h>

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

PyObject *alias(PyObject *object)
{
    try {
        c10::TensorImpl *tensor = unpack(object).unsafeGetTensorImpl();
        if (!is_usual(*tensor) || tensor->is_inference()) {
            return nullptr;
        }
        return THPVariable_Wrap(at::Tensor(tensor->shallow_copy_and_detach(tensor->version_counter(), false)));
    }
    catch (...) {
        PyErr_Clear();
        return nullptr;
    }
}

int records_gradients() { return c10::GradMode::is_enabled(); }

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

TensorAccess functions = {view,        version, storage,           weak_storage, free_weak_storage, requires_gradient,
                          is_computed, alias,   records_gradients, graph_task,   current_stream};

PyModuleDef definition = {PyModuleDef_HEAD_INIT, "torch_access", "What the hooks ask of torch's tensors.", -1, nullptr};

} // namespace

PyMODINIT_FUNC PyInit_torch_access()
{
    PyObject *module = PyModule_Create(&definition);
    PyObject *capsule = module == nullptr ? nullptr : PyCapsule_New(&functions, ACCESS_NAME, nullptr);
    if (capsule == nullptr || PyModule_AddObject(module, "access", capsule)) {
        Py_XDECREF(capsule);
        Py_XDECREF(module);
        return nullptr;
    }
    return module;
}
