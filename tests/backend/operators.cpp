// Operators of the accelerator for tests: the CPU's kernels, run on the thread of a stream.
//
// What an operator returns is allocated as its kernel for the "meta" device says, and the host goes
// on. Where there is no such kernel, where shapes depend on values, and where random numbers are
// drawn, the host waits for the result.
#include "device.h"

#include <ATen/ATen.h>
#include <ATen/EmptyTensor.h>
#include <ATen/autocast_mode.h>
#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/native/Resize.h>
#include <ATen/ops/_reshape_alias_native.h>
#include <ATen/ops/alias_native.h>
#include <ATen/ops/as_strided_native.h>
#include <ATen/ops/unfold_native.h>
#include <ATen/ops/view_as_complex_native.h>
#include <ATen/ops/view_as_real_native.h>
#include <ATen/ops/view_native.h>
#include <c10/core/InferenceMode.h>
#include <c10/core/impl/LocalDispatchKeySet.h>
#include <torch/library.h>

#include <map>
#include <mutex>
#include <unordered_set>

namespace backend {
namespace {

using at::Tensor;
using c10::IValue;
using Stack = std::vector<IValue>;

bool is_ours(const Tensor& tensor) {
  return tensor.defined() && tensor.device().type() == c10::DeviceType::PrivateUse1;
}

// A device tensor by its addresses alone, as a kernel gets it.
struct Shape {
  void* bytes;
  std::vector<int64_t> sizes, strides;
  at::ScalarType dtype;
  bool conjugate, negative;

  explicit Shape(const Tensor& tensor)
      : bytes(tensor.numel() ? reachable(tensor.const_data_ptr()) : nullptr),
        sizes(tensor.sizes().vec()),
        strides(tensor.strides().vec()),
        dtype(tensor.scalar_type()),
        conjugate(tensor.is_conj()),
        negative(tensor.is_neg()) {
    size_t needed = tensor.numel() ? at::detail::computeStorageNbytes(
                                         sizes, strides, tensor.itemsize(), tensor.storage_offset())
                                   : 0;
    TORCH_CHECK(
        needed <= tensor.storage().nbytes(),
        "an operator is given a tensor whose storage of ", tensor.storage().nbytes(),
        " bytes is smaller than it");
  }

  Tensor on_the_cpu() const {
    auto options = at::TensorOptions(dtype).device(at::kCPU);
    Tensor made = bytes ? at::from_blob(bytes, sizes, strides, options)
                        : at::empty_strided(sizes, strides, options);
    if (conjugate) {
      made._set_conj(true);
    }
    if (negative) {
      made._set_neg(true);
    }
    return made;
  }
};

// Return a value with each of its tensors, and devices, replaced.
template <typename Replace>
IValue with_tensors(const IValue& value, const Replace& replace, c10::Device device) {
  if (value.isTensor()) {
    return replace(value.toTensor());
  }
  if (value.isTensorList()) {
    c10::List<Tensor> made;
    for (const Tensor& one : value.toTensorVector()) {
      made.push_back(replace(one));
    }
    return made;
  }
  if (value.isOptionalTensorList()) {
    c10::List<std::optional<Tensor>> made;
    for (const auto& one : value.toOptionalTensorVector()) {
      made.push_back(one ? std::optional<Tensor>(replace(*one)) : std::nullopt);
    }
    return made;
  }
  if (value.isDevice()) {
    return device;
  }
  return value;
}

Tensor like(const Tensor& tensor, c10::Device device) {
  return at::empty_strided(tensor.sizes(), tensor.strides(), tensor.options().device(device));
}

// A tensor that torch made of a number stays one.
Tensor number_as(const Tensor& tensor, Tensor made) {
  if (tensor.unsafeGetTensorImpl()->is_wrapped_number()) {
    made.unsafeGetTensorImpl()->set_wrapped_number(true);
  }
  return made;
}

Tensor on_meta(const Tensor& tensor) {
  return is_ours(tensor) ? like(tensor, at::kMeta) : tensor;
}

// A tensor of the host, as it is now.
Tensor host_copy(const Tensor& tensor) {
  c10::InferenceMode off(false); // the stream's thread is not in it
  return tensor.defined() ? number_as(tensor, tensor.clone()) : tensor;
}

// The arguments of one call, for a kernel that runs later.
class Call {
 public:
  Call(const c10::OperatorHandle& op, const Stack& arguments) : op_(op) {
    for (const IValue& value : arguments) {
      held_.push_back(with_tensors(
          value,
          [this](const Tensor& tensor) {
            if (is_ours(tensor)) {
              shapes_.emplace_back(tensor);
            }
            return is_ours(tensor) ? Tensor() : host_copy(tensor);
          },
          at::kCPU));
      ours_.push_back(flags(value));
    }
  }

  // Run the CPU's kernel, on a stream's thread.
  Stack operator()(const std::map<size_t, Tensor>& instead = {}) const {
    at::AutoDispatchBelowADInplaceOrView below;
    Stack stack;
    size_t next = 0;
    for (size_t i = 0; i < held_.size(); ++i) {
      size_t which = 0;
      Tensor other;
      if (auto found = instead.find(i); found != instead.end()) {
        other = found->second;
      }
      stack.push_back(with_tensors(
          held_[i],
          [&](const Tensor& tensor) {
            bool is_shape = ours_[i][which++];
            if (!is_shape) {
              return tensor;
            }
            const Shape& shape = shapes_[next++];
            return other.defined() ? other : shape.on_the_cpu();
          },
          at::kCPU));
    }
    op_.callBoxed(&stack);
    return stack;
  }

 private:
  // Which tensors of an argument are the device's.
  static std::vector<bool> flags(const IValue& value) {
    std::vector<bool> found;
    with_tensors(
        value,
        [&](const Tensor& tensor) {
          found.push_back(is_ours(tensor));
          return tensor;
        },
        at::kCPU);
    return found;
  }

  c10::OperatorHandle op_;
  Stack held_;
  std::vector<Shape> shapes_;
  std::vector<std::vector<bool>> ours_;
};

std::vector<Tensor> tensors_of(const IValue& value) {
  std::vector<Tensor> found;
  with_tensors(
      value,
      [&](const Tensor& tensor) {
        found.push_back(tensor);
        return tensor;
      },
      at::kCPU);
  return found;
}

bool writes(const c10::Argument& argument) {
  return argument.alias_info() && argument.alias_info()->isWrite();
}

bool is_output(const c10::Argument& argument, const IValue& value) {
  return writes(argument) && argument.kwarg_only() && value.isTensor();
}

void resize_output(const Tensor& tensor, at::IntArrayRef sizes) {
  if (is_ours(tensor) && tensor.sizes() != sizes) {
    tensor.resize_(sizes);
  }
}

// Return what the operator returns on the "meta" device; nothing if that is not known.
std::optional<Stack> results_of(const c10::OperatorHandle& op, const Stack& arguments) {
  static std::mutex mutex;
  static auto* unknown = new std::unordered_set<c10::OperatorName>;
  {
    std::lock_guard<std::mutex> lock(mutex);
    if (unknown->count(op.operator_name())) {
      return std::nullopt;
    }
  }
  Stack stack;
  for (const IValue& value : arguments) {
    stack.push_back(with_tensors(value, on_meta, at::kMeta));
  }
  try {
    op.callBoxed(&stack);
  } catch (const c10::NotImplementedError&) {
    std::lock_guard<std::mutex> lock(mutex);
    unknown->insert(op.operator_name());
    return std::nullopt;
  } catch (const std::exception&) { // the CPU's kernel says what is wrong, or knows the shape
    return std::nullopt;
  }
  return stack;
}

void copy_results(const std::vector<Tensor>& results, const std::vector<Shape>& targets) {
  TORCH_INTERNAL_ASSERT(results.size() == targets.size());
  for (size_t i = 0; i < results.size(); ++i) {
    targets[i].on_the_cpu().copy_(results[i]);
  }
}

// The tensors that are new in what an operator returned.
std::vector<Tensor> fresh(const c10::FunctionSchema& schema, const Stack& returned) {
  std::vector<Tensor> found;
  for (size_t i = 0; i < returned.size(); ++i) {
    if (!schema.returns()[i].alias_info()) {
      for (const Tensor& one : tensors_of(returned[i])) {
        if (one.defined()) {
          found.push_back(one);
        }
      }
    }
  }
  return found;
}

// Return the results for torch: new tensors of the device, and arguments that were written.
Stack on_the_device(
    const c10::FunctionSchema& schema, const Stack& returned, const Stack& arguments) {
  Stack made;
  size_t written = 0;
  for (size_t i = 0; i < returned.size(); ++i) {
    const auto* alias = schema.returns()[i].alias_info();
    if (alias) {
      TORCH_CHECK(alias->isWrite(), "the backend for tests has no ", schema.name());
      while (!writes(schema.arguments()[written])) {
        ++written;
      }
      made.push_back(arguments[written++]);
    } else {
      made.push_back(with_tensors(
          returned[i],
          [](const Tensor& one) {
            return one.defined() ? like(one, c10::DeviceType::PrivateUse1) : one;
          },
          c10::DeviceType::PrivateUse1));
    }
  }
  return made;
}

std::vector<Shape> shapes_of(const std::vector<Tensor>& tensors) {
  return {tensors.begin(), tensors.end()};
}

// Run the operator while the host waits.
Stack at_once(const c10::OperatorHandle& op, const Stack& arguments) {
  const auto& schema = op.schema();
  Call call(op, arguments);
  std::map<size_t, Tensor> outputs; // which may get another size
  for (size_t i = 0; i < arguments.size(); ++i) {
    if (is_output(schema.arguments()[i], arguments[i])) {
      c10::InferenceMode off(false);
      outputs[i] = like(arguments[i].toTensor(), at::kCPU);
    }
  }
  Stack returned;
  std::exception_ptr failure;
  enqueue(current_stream(), [&] {
    try {
      returned = call(outputs);
    } catch (...) {
      failure = std::current_exception();
    }
  });
  wait(current_stream());
  if (failure) {
    std::rethrow_exception(failure);
  }
  for (auto& [i, result] : outputs) {
    resize_output(arguments[i].toTensor(), result.sizes());
    arguments[i].toTensor().copy_(result);
  }
  Stack made = on_the_device(schema, returned, arguments);
  auto results = fresh(schema, returned);
  auto targets = shapes_of(fresh(schema, made));
  enqueue(current_stream(), [=] { copy_results(results, targets); });
  return made;
}

void fallback(const c10::OperatorHandle& op, torch::jit::Stack* stack) {
  at::AutoDispatchBelowADInplaceOrView below;
  const auto& schema = op.schema();
  size_t count = schema.arguments().size();
  Stack arguments(stack->end() - count, stack->end());
  torch::jit::drop(*stack, count);
  // In evaluation, batch norm returns less on the CPU than on the "meta" device.
  bool waits = op.hasTag(at::Tag::nondeterministic_seeded) ||
      schema.name() == "aten::native_batch_norm";
  bool only_writes = true;
  for (const IValue& value : arguments) {
    for (const Tensor& one : tensors_of(value)) {
      TORCH_CHECK(
          !one.defined() || is_ours(one) || !one.dim() || value.isOptionalTensorList(),
          schema.name(), ": Expected all tensors to be on the same device, and one is on the host");
    }
  }
  for (const auto& one : schema.returns()) {
    only_writes &= one.alias_info() != nullptr;
    waits |= one.type()->kind() != c10::TypeKind::TensorType &&
        one.type()->kind() != c10::TypeKind::ListType;
  }
  for (size_t i = 0; i < count; ++i) { // may be the user's, who leaves the size to the operator
    waits |= is_output(schema.arguments()[i], arguments[i]) && !arguments[i].toTensor().numel();
  }
  std::optional<Stack> returned;
  if (!waits) {
    returned = only_writes ? Stack(schema.returns().size()) : results_of(op, arguments);
  }
  Stack made;
  if (!returned) {
    made = at_once(op, arguments);
  } else {
    made = on_the_device(schema, *returned, arguments);
    auto targets = shapes_of(fresh(schema, made));
    enqueue(current_stream(), [op, call = Call(op, arguments), targets] {
      copy_results(fresh(op.schema(), call()), targets);
    });
  }
  for (IValue& value : made) {
    stack->push_back(std::move(value));
  }
}

// Copies

Tensor& copy_(Tensor& self, const Tensor& source, bool non_blocking) {
  if (!self.numel()) {
    return self;
  }
  Tensor from = source.expand_as(self);
  bool out = !is_ours(self), in = !is_ours(from);
  if (!out && !in) {
    enqueue(current_stream(), [to = Shape(self), from = Shape(from)] {
      to.on_the_cpu().copy_(from.on_the_cpu());
    });
    return self;
  }
  const Tensor& host = out ? self : from;
  TORCH_CHECK(host.device().type() == c10::DeviceType::CPU, "no copies to ", host.device());
  bool pinned = is_pinned(host.const_data_ptr());
  c10::InferenceMode off(false);
  if (in && !pinned) {
    from = from.clone(); // the caller may write it as soon as this returns
  }
  // By its address alone: it stays, as the host waits, or keeps pinned memory until it is copied.
  Tensor shared = out || pinned
      ? at::from_blob(
            const_cast<void*>(host.const_data_ptr()), host.sizes(), host.strides(),
            at::TensorOptions(host.scalar_type()))
      : from;
  shared._set_conj(host.is_conj());
  shared._set_neg(host.is_neg());
  if (out) {
    enqueue(current_stream(), [shared, from = Shape(from)] {
      shared.copy_(from.on_the_cpu());
    });
  } else {
    enqueue(current_stream(), [shared, to = Shape(self)] { to.on_the_cpu().copy_(shared); });
  }
  if (!non_blocking || (out && !pinned)) {
    wait(current_stream());
  }
  return self;
}

Tensor copy_from(const Tensor& self, const Tensor& target, bool non_blocking) {
  Tensor to = target;
  copy_(to, self, non_blocking);
  return target;
}

Tensor copy_from_and_resize(const Tensor& self, const Tensor& target) {
  target.resize_(self.sizes());
  return copy_from(self, target, false);
}

at::Scalar local_scalar_dense(const Tensor& self) {
  return self.cpu().item();
}

// What the CPU has no kernel for

Tensor histc(const Tensor& self, int64_t bins, const at::Scalar& low, const at::Scalar& high) {
  static const auto op = c10::Dispatcher::singleton().findSchemaOrThrow("aten::histc", "");
  Stack stack{self.to(at::kFloat), bins, low, high};
  fallback(op, &stack);
  return stack[0].toTensor().to(self.scalar_type());
}

using Gates = std::tuple<Tensor, Tensor, Tensor>;

Gates lstm_cell(
    const Tensor& input, const Tensor& hidden, const Tensor& cell,
    const std::optional<Tensor>& input_bias, const std::optional<Tensor>& hidden_bias) {
  Tensor sum = input + hidden;
  for (const auto& bias : {input_bias, hidden_bias}) {
    sum = bias && bias->defined() ? sum + *bias : sum;
  }
  auto part = sum.chunk(4, 1);
  Tensor i = part[0].sigmoid(), f = part[1].sigmoid(), g = part[2].tanh(), o = part[3].sigmoid();
  Tensor next = f * cell + i * g;
  return {o * next.tanh(), next, at::cat({i, f, g, o}, 1)};
}

Gates lstm_cell_backward(
    const std::optional<Tensor>& grad_hidden, const std::optional<Tensor>& grad_cell,
    const Tensor& cell, const Tensor& next, const Tensor& gates, bool has_bias) {
  auto part = gates.chunk(4, 1);
  const Tensor &i = part[0], &f = part[1], &g = part[2], &o = part[3];
  Tensor high = next.tanh(), to_next = at::zeros_like(cell), to_o = at::zeros_like(o);
  if (grad_hidden && grad_hidden->defined()) {
    to_o = *grad_hidden * high;
    to_next = *grad_hidden * o * (1 - high * high);
  }
  if (grad_cell && grad_cell->defined()) {
    to_next = to_next + *grad_cell;
  }
  Tensor to_gates = at::cat(
      {to_next * g * i * (1 - i), to_next * cell * f * (1 - f), to_next * i * (1 - g * g),
       to_o * o * (1 - o)},
      1);
  return {to_gates, to_next * f, has_bias ? to_gates.sum(0) : Tensor()};
}

// Memory and shapes

constexpr c10::DispatchKeySet KEYS(c10::DispatchKey::PrivateUse1);

Tensor empty(
    at::IntArrayRef sizes, std::optional<at::ScalarType> dtype, std::optional<at::Layout>,
    std::optional<at::Device>, std::optional<bool>, std::optional<at::MemoryFormat> format) {
  return at::detail::empty_generic(
      sizes, allocator(), KEYS, dtype.value_or(at::get_default_dtype_as_scalartype()), format);
}

Tensor empty_strided(
    at::IntArrayRef sizes, at::IntArrayRef strides, std::optional<at::ScalarType> dtype,
    std::optional<at::Layout>, std::optional<at::Device>, std::optional<bool>) {
  return at::detail::empty_strided_generic(
      sizes, strides, allocator(), KEYS, dtype.value_or(at::get_default_dtype_as_scalartype()));
}

void grow(const Tensor& self) {
  size_t needed = self.numel() ? at::detail::computeStorageNbytes(
                                     self.sizes(), self.strides(), self.itemsize(),
                                     self.storage_offset())
                               : 0;
  if (needed > self.storage().nbytes()) {
    resize(self.storage().unsafeGetStorageImpl(), needed);
  }
}

const Tensor& resize_(
    const Tensor& self, at::IntArrayRef sizes, std::optional<at::MemoryFormat> format) {
  self.unsafeGetTensorImpl()->set_sizes_contiguous(sizes);
  if (format) {
    self.unsafeGetTensorImpl()->empty_tensor_restride(*format);
  }
  grow(self);
  return self;
}

Tensor& set_storage(
    Tensor& self, at::Storage storage, int64_t offset, at::IntArrayRef sizes,
    at::IntArrayRef strides) {
  TORCH_CHECK(storage.device() == self.device(), "set_: a storage of ", storage.device());
  std::vector<int64_t> dense = strides.vec();
  if (!strides.data()) {
    dense = at::detail::defaultStrides(sizes);
  }
  self.unsafeGetTensorImpl()->set_storage_keep_dtype(std::move(storage));
  self.unsafeGetTensorImpl()->set_sizes_and_strides(sizes, dense, offset);
  grow(self);
  return self;
}

Tensor& set_whole(Tensor& self, at::Storage storage) {
  int64_t count = storage.nbytes() / self.itemsize();
  return set_storage(self, std::move(storage), 0, {count}, {1});
}

Tensor& set_tensor(Tensor& self, const Tensor& source) {
  return set_storage(
      self, source.storage(), source.storage_offset(), source.sizes(), source.strides());
}

Tensor& set_none(Tensor& self) {
  at::Storage none(
      at::Storage::use_byte_size_t(), 0, allocator()->allocate(0), allocator(), true);
  return set_storage(self, std::move(none), 0, {0}, {1});
}

void record_stream(Tensor& self, at::Stream stream) {
  c10::impl::getDeviceGuardImpl(c10::DeviceType::PrivateUse1)
      ->recordDataPtrOnStream(self.storage().data_ptr(), stream);
}

} // namespace

TORCH_LIBRARY_IMPL(_, PrivateUse1, m) {
  m.fallback(torch::CppFunction::makeFromBoxedFunction<&fallback>());
}

TORCH_LIBRARY_IMPL(aten, PrivateUse1, m) {
  m.impl("empty.memory_format", &empty);
  m.impl("empty_strided", &empty_strided);
  m.impl("as_strided", &at::native::as_strided_tensorimpl);
  m.impl("view", &at::native::view);
  m.impl("_reshape_alias", &at::native::_reshape_alias);
  m.impl("unfold", &at::native::unfold);
  m.impl("view_as_real", &at::native::view_as_real);
  m.impl("view_as_complex", &at::native::view_as_complex);
  // Those that torch would compose of others, in place of the CPU's kernels.
  for (const char* name : {"native_layer_norm", "native_layer_norm_backward"}) {
    m.impl(name, torch::CppFunction::makeFromBoxedFunction<&fallback>());
  }
  m.impl("resize_", &resize_);
  m.impl("set_.source_Storage_storage_offset", &set_storage);
  m.impl("set_.source_Storage", &set_whole);
  m.impl("set_.source_Tensor", &set_tensor);
  m.impl("set_", &set_none);
  m.impl("copy_", &copy_);
  m.impl("_copy_from", &copy_from);
  m.impl("_copy_from_and_resize", &copy_from_and_resize);
  m.impl("_local_scalar_dense", &local_scalar_dense);
  m.impl("record_stream", &record_stream);
  m.impl("histc", &histc);
  m.impl("_thnn_fused_lstm_cell", &lstm_cell);
  m.impl("_thnn_fused_lstm_cell_backward_impl", &lstm_cell_backward);
}

using namespace at::autocast;
using at::autocast::CastPolicy;

TORCH_LIBRARY_IMPL(_, AutocastPrivateUse1, m) {
  m.fallback(torch::CppFunction::makeFallthrough());
}

TORCH_LIBRARY_IMPL(aten, AutocastPrivateUse1, m) {
#define LOWER(...) KERNEL_PRIVATEUSEONE(__VA_ARGS__, lower_precision_fp)
#define FLOAT(...) KERNEL_PRIVATEUSEONE(__VA_ARGS__, fp32)
  AT_FORALL_LOWER_PRECISION_FP(LOWER)
  AT_FORALL_FP32(FLOAT)
}

} // namespace backend
