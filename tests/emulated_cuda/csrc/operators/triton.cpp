// Stand-ins for Triton kernels, of liger-kernel and of this project: operators with the names of the kernels and of their
// arguments, see triton_kernels.py. Each rounds, overwrites its inputs and moves bytes as the kernel does.
#include <array>

#include "operators.h"

namespace emulated {
namespace {

using at::Tensor;
using Optional = std::optional<Tensor>;

void rope(const Tensor& q, const Tensor& k, const Tensor& cos, const Tensor& sin, int64_t rotary, bool backward) {
  const InOperator in_operator;
  const int64_t half = rotary / 2;
  const Tensor c = cos.narrow(-1, 0, half).unsqueeze(2), s = sin.narrow(-1, 0, half).unsqueeze(2);
  const Tensor in_q = q.narrow(-1, 0, rotary), in_k = k.narrow(-1, 0, rotary);
  enqueue("_triton_rope", traffic({in_q, in_q, in_k, in_k, c, s}),
          [=, c = host_view(c), s = host_view(s), tensors = std::array{host_view(q), host_view(k)}] {
    for (const Tensor& t : tensors) {
      const Tensor left = t.narrow(-1, 0, half), right = t.narrow(-1, half, half);
      const Tensor x = left.to(s.scalar_type()), y = right.to(s.scalar_type()), sine = backward ? -s : s;
      const Tensor turned = x * c - y * sine;
      right.copy_(y * c + x * sine);
      left.copy_(turned);
    }
  });
}

void swiglu(const Tensor& a, const Tensor& b, const Tensor& c, double multiplier) {
  const InOperator in_operator;
  enqueue("_swiglu_forward_kernel", traffic({a, b, c}),
          [=, a = host_view(a), b = host_view(b), c = host_view(c)] {
    c.copy_(at::silu(a.to(at::kFloat) * multiplier).to(b.scalar_type()) * b);
  });
}

void swiglu_backward(const Tensor& dc, const Tensor& a, const Tensor& b, double multiplier) {
  const InOperator in_operator;
  enqueue("_swiglu_backward_kernel", traffic({dc, a, b, a, b}),
          [=, dc = host_view(dc), a = host_view(a), b = host_view(b)] {
    const Tensor x = a.to(at::kFloat) * multiplier, dy = dc.to(at::kFloat);
    a.copy_(at::silu_backward(dy * b, x) * multiplier);
    b.copy_(dy * at::silu(x));
  });
}

void geglu(const Tensor& a, const Tensor& b, const Tensor& c) {
  const InOperator in_operator;
  enqueue("_geglu_tanh_forward_kernel", traffic({a, b, c}), [a = host_view(a), b = host_view(b), c = host_view(c)] {
    c.copy_(at::gelu(a.to(at::kFloat), "tanh").to(b.scalar_type()) * b);
  });
}

void geglu_backward(const Tensor& dc, const Tensor& a, const Tensor& b) {
  const InOperator in_operator;
  enqueue("_geglu_tanh_backward_kernel", traffic({dc, a, b, a, b}),
          [dc = host_view(dc), a = host_view(a), b = host_view(b)] {
    const Tensor x = a.to(at::kFloat).clone();
    a.copy_(at::gelu_backward((dc * b).to(at::kFloat), x, "tanh"));
    b.copy_(dc * at::gelu(x, "tanh").to(dc.scalar_type()));
  });
}

constexpr int64_t llama = 0;  // the casting mode that rounds the normalised input before it meets the weight

void rms_norm(const Tensor& y, const Tensor& x, const Optional& weight, const Tensor& rstd, double eps, double offset,
              int64_t casting) {
  const InOperator in_operator;
  const Cost cost = traffic({x, y});
  enqueue("_rms_norm_forward_kernel", cost,
          [=, y = host_view(y), x = host_view(x), w = host_view(weight), rstd = host_view(rstd)] {
    const auto type = rstd.scalar_type();
    const Tensor from = x.to(type);
    rstd.copy_(at::rsqrt(from.pow(2).mean(-1) + eps));
    const Tensor normed = (from * rstd.unsqueeze(-1)).to(casting == llama ? x.scalar_type() : type);
    y.copy_(w.defined() ? normed * (w.to(type) + offset) : normed);
  }, {rstd});
}

void rms_norm_backward(const Tensor& dy, const Tensor& dx, const Tensor& x, const Optional& weight, const Tensor& rstd,
                       const Optional& dw, double offset, int64_t casting) {
  const InOperator in_operator;
  const Cost cost = traffic({dy, x, dx, dw.value_or(Tensor())});
  enqueue("_rms_norm_backward_kernel", cost,
          [=, dy = host_view(dy), dx = host_view(dx), x = host_view(x), w = host_view(weight), rstd = host_view(rstd),
           dw = host_view(dw)] {
    const Tensor from = x.to(at::kFloat), r = rstd.unsqueeze(-1);
    if (dw.defined()) {  // a row for each multiprocessor
      const Tensor normed = (from * r).to(casting == llama ? x.scalar_type() : at::kFloat);
      dw.zero_().select(0, 0).copy_((dy * normed).to(at::kFloat).sum(0));
    }
    const Tensor m = w.defined() ? dy * (w.to(at::kFloat) + offset) : dy.to(at::kFloat);
    dx.copy_(r * m - r * r * r * (m * from).mean(-1, true) * from);
  }, {dw.value_or(Tensor())});
}

// ---- of this project

/// What SiLU, or GELU's tanh approximation, takes the sigmoid of.
Tensor bent(const Tensor& x, bool tanh) { return tanh ? (x + x * x * x * 0.044715) * 1.5957691216057308 : x; }

void gated(const Tensor& gate, const Tensor& up, const Tensor& out, bool tanh) {
  const InOperator in_operator;
  enqueue("_gated", traffic({gate, up, out}), [=, x = host_view(gate), y = host_view(up), out = host_view(out)] {
    const Tensor wide = x.to(at::kFloat), activation = wide * at::sigmoid(bent(wide, tanh));
    out.copy_(activation.to(y.scalar_type()).to(at::kFloat) * y.to(at::kFloat));
  });
}

void gated_gradients(const Tensor& dout, const Tensor& gate, const Tensor& up, const Tensor& dgate, const Tensor& dup,
                     bool tanh) {
  const InOperator in_operator;
  enqueue("_gated_gradients", traffic({dout, gate, up, dgate, dup}),
          [=, dy = host_view(dout), from = host_view(gate), y = host_view(up), dx = host_view(dgate), du = host_view(dup)] {
    const Tensor x = from.to(at::kFloat), d = dy.to(at::kFloat), u = bent(x, tanh), s = at::sigmoid(u);
    Tensor slope = x * s * at::sigmoid(-u);
    if (tanh) slope = slope * ((x * x * 0.134145 + 1) * 1.5957691216057308);
    dx.copy_(d * y.to(at::kFloat) * (s + slope));
    du.copy_(d * (x * s));
  });
}

void rotated(const Tensor& x, const Tensor& cos, const Tensor& sin, const Tensor& out, int64_t half, bool backward) {
  const InOperator in_operator;
  const Tensor c = cos.unsqueeze(1), s = sin.unsqueeze(1);
  enqueue("_rotated", traffic({x, out, c, s}),
          [=, x = host_view(x), c = host_view(c), s = host_view(s), out = host_view(out)] {
    const auto part = [half](const Tensor& t, int64_t n) { return t.narrow(-1, n * half, half).to(at::kFloat); };
    const Tensor x1 = part(x, 0), x2 = part(x, 1);
    out.narrow(-1, 0, half).copy_(x1 * part(c, 0) + (backward ? x2 * part(s, 1) : -(x2 * part(s, 0))));
    out.narrow(-1, half, half).copy_(x2 * part(c, 1) + (backward ? -(x1 * part(s, 0)) : x1 * part(s, 1)));
  });
}

}  // namespace

TORCH_LIBRARY(emulated_triton, library) {
  library.def("_gated(Tensor gate, Tensor up, Tensor out, bool TANH) -> ()", gated);
  library.def("_gated_gradients(Tensor dout, Tensor gate, Tensor up, Tensor dgate, Tensor dup, bool TANH) -> ()",
              gated_gradients);
  library.def("_rotated(Tensor x, Tensor cos, Tensor sin, Tensor out, int half, bool BACKWARD) -> ()", rotated);
  library.def("_triton_rope(Tensor q_ptr, Tensor k_ptr, Tensor cos, Tensor sin, int rd, bool BACKWARD_PASS) -> ()", rope);
  library.def("_swiglu_forward_kernel(Tensor a_ptr, Tensor b_ptr, Tensor c_ptr, float gate_multiplier) -> ()", swiglu);
  library.def("_swiglu_backward_kernel(Tensor dc_ptr, Tensor a_ptr, Tensor b_ptr, float gate_multiplier) -> ()",
              swiglu_backward);
  library.def("_geglu_tanh_forward_kernel(Tensor a, Tensor b, Tensor c) -> ()", geglu);
  library.def("_geglu_tanh_backward_kernel(Tensor dc, Tensor a, Tensor b) -> ()", geglu_backward);
  for (const std::string name : {"_rms_norm", "_block_rms_norm"}) {
    const std::string forward = "_forward_kernel(Tensor Y_ptr, Tensor X_ptr, Tensor? W_ptr, Tensor RSTD_ptr, "
                                "float eps, float offset, int casting_mode) -> ()";
    const std::string backward = "_backward_kernel(Tensor dY_ptr, Tensor dX_ptr, Tensor X_ptr, Tensor? W_ptr, Tensor RSTD_ptr, "
                                 "Tensor? dW_ptr, float offset, int casting_mode) -> ()";
    library.def((name + forward).c_str(), rms_norm);
    library.def((name + backward).c_str(), rms_norm_backward);
  }
}

}  // namespace emulated
