// Results are allocated with the geometry that the operator's meta kernel gives. Geometries are kept by the arguments'.
#include "results.h"

#include <c10/cuda/CUDAFunctions.h>

#include <map>
#include <mutex>
#include <sstream>

#include "below.h"
#include "operators.h"

namespace emulated {
namespace {

/// The geometry of a result, and the argument that it is, if it is one.
struct Geometry {
  int argument = -1;
  bool defined = true;
  std::vector<int64_t> sizes, strides;
  at::ScalarType type = at::kFloat;
};

std::mutex mutex;
std::map<std::string, std::vector<Geometry>> known;

at::Tensor on_meta(const at::Tensor& t) {
  if (!t.defined()) return t;
  if (t.is_cpu() && t.dim() == 0) return t;  // meta kernels in Python read the values of numbers
  at::Tensor made = at::detail::empty_strided_meta(t.sizes(), t.strides(), t.scalar_type());
  if (t.unsafeGetTensorImpl()->is_wrapped_number()) made.unsafeGetTensorImpl()->set_wrapped_number(true);
  return made;
}

void append(std::ostream& out, const at::Tensor& t) {
  if (!t.defined()) {
    out << "-;";
    return;
  }
  out << static_cast<int>(t.scalar_type()) << t.is_cuda() << t.unsafeGetTensorImpl()->is_wrapped_number();
  for (int64_t n : t.sizes()) out << ',' << n;
  out << '/';
  for (int64_t n : t.strides()) out << ',' << n;
  out << ';';
}

/// All that the geometry of the results depends on; empty if it is not kept.
std::string key_of(const c10::OperatorHandle& op, const Values& arguments) {
  for (const auto& result : op.schema().returns())
    if (result.type()->kind() != c10::TypeKind::TensorType) return {};
  std::ostringstream key;
  key << op.operator_name() << ':' << static_cast<int>(at::typeMetaToScalarType(at::get_default_dtype())) << ':';
  for (const c10::IValue& value : arguments) {
    if (value.isTensor()) append(key, value.toTensor());
    else if (value.isTensorList())
      for (const at::Tensor& t : value.toTensorVector()) append(key, t);
    else if (value.isOptionalTensorList())
      for (const auto& t : value.toOptionalTensorVector()) append(key, t.has_value() ? *t : at::Tensor());
    else if (value.isGenerator()) key << "g;";
    else if (value.isNone() || value.isInt() || value.isDouble() || value.isBool() || value.isIntList() ||
             value.isDoubleList() || value.isBoolList() || value.isString() || value.isDevice())
      key << value.tagKind() << value << ';';
    else return {};
  }
  return key.str();
}

at::Tensor device_empty(const at::Tensor& like) {
  return at::empty_strided(like.sizes(), like.strides(), like.options().device(at::kCUDA, c10::cuda::current_device()));
}

at::Tensor resized(at::Tensor t, at::IntArrayRef sizes) {
  if (t.sizes() != sizes) t.resize_(sizes);
  return t;
}

Results made_from(const std::vector<Geometry>& geometries, const Values& arguments) {
  Results results;
  for (const Geometry& geometry : geometries) {
    if (geometry.argument >= 0) {
      results.values.push_back(resized(arguments[static_cast<size_t>(geometry.argument)].toTensor(), geometry.sizes));
      results.targets.emplace_back();
    } else if (!geometry.defined) {
      results.values.push_back(at::Tensor());
      results.targets.emplace_back();
    } else {
      const auto options = at::TensorOptions().dtype(geometry.type).device(at::kCUDA, c10::cuda::current_device());
      results.values.push_back(at::empty_strided(geometry.sizes, geometry.strides, options));
      results.targets.push_back(host_view(results.values.back().toTensor()));
    }
  }
  return results;
}

/// All results are arguments that keep their sizes.
bool is_in_place(const c10::FunctionSchema& schema) {
  for (const auto& argument : schema.arguments())
    if (argument.is_out()) return false;
  for (size_t n = 0; n < schema.returns().size(); ++n)
    if (argument_of(schema, n) < 0) return false;
  return true;
}

/// Runs the meta kernel. `origins` gets the argument that each meta tensor stands for.
Values run_on_meta(const c10::OperatorHandle& op, const Values& arguments, std::map<c10::TensorImpl*, at::Tensor>& origins) {
  Below below;
  Values called;
  for (size_t n = 0; n < arguments.size(); ++n) {
    called.push_back(mapped(arguments[n], [&](const at::Tensor& t) {
      at::Tensor made = on_meta(t);
      if (made.defined()) origins[made.unsafeGetTensorImpl()] = t;
      return made;
    }));
    if (arguments[n].isDevice()) called[n] = c10::IValue(c10::Device(at::kMeta));
    else if (is_generator(op.schema().arguments()[n])) called[n] = c10::IValue();
  }
  op.callBoxed(called);
  return called;
}

void keep(const std::string& key, const Values& on_meta, const Values& arguments,
          const std::map<c10::TensorImpl*, at::Tensor>& origins) {
  std::vector<Geometry> geometries;
  for (const c10::IValue& value : on_meta) {
    Geometry geometry;
    const at::Tensor& t = value.toTensor();
    geometry.defined = t.defined();
    if (t.defined()) {
      geometry.sizes = t.sizes().vec();
      geometry.strides = t.strides().vec();
      geometry.type = t.scalar_type();
      if (const auto found = origins.find(t.unsafeGetTensorImpl()); found != origins.end())
        for (size_t n = 0; n < arguments.size(); ++n)
          if (arguments[n].isTensor() && arguments[n].toTensor().is_same(found->second)) geometry.argument = static_cast<int>(n);
    }
    geometries.push_back(std::move(geometry));
  }
  std::lock_guard<std::mutex> lock(mutex);
  known[key] = std::move(geometries);
}

}  // namespace

std::optional<Results> results_ahead(const c10::OperatorHandle& op, const Values& arguments, std::string* error) {
  Results results;
  if (is_in_place(op.schema())) {
    for (size_t n = 0; n < op.schema().returns().size(); ++n)
      results.values.push_back(arguments[static_cast<size_t>(argument_of(op.schema(), n))]);
    return results;
  }
  const std::string key = key_of(op, arguments);
  if (!key.empty()) {
    std::unique_lock<std::mutex> lock(mutex);
    if (const auto found = known.find(key); found != known.end()) {
      const std::vector<Geometry> geometries = found->second;
      lock.unlock();
      return made_from(geometries, arguments);
    }
  }
  std::map<c10::TensorImpl*, at::Tensor> origins;
  Values on_meta;
  try {
    on_meta = run_on_meta(op, arguments, origins);
  } catch (const std::exception& raised) {
    *error = raised.what();
    return std::nullopt;
  }
  if (!key.empty()) keep(key, on_meta, arguments, origins);
  for (const c10::IValue& value : on_meta) {
    results.values.push_back(mapped(value, [&](const at::Tensor& t) {
      results.targets.emplace_back();
      if (!t.defined()) return t;
      const auto found = origins.find(t.unsafeGetTensorImpl());
      if (found != origins.end()) return resized(found->second, t.sizes());
      at::Tensor made = device_empty(t);
      results.targets.back() = host_view(made);
      return made;
    }));
  }
  return results;
}

}  // namespace emulated
