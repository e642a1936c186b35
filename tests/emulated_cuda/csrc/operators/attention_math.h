// Attention by its definition, in FP32 (FP64 for FP64 inputs), some rows at a time.
#pragma once
#include "operators.h"

namespace emulated {

/// Query i sees the keys from i + shift - left to i + shift + right; a negative number is no bound.
struct Window {
  int64_t left = -1, right = -1, shift = 0;
};

struct Attention {
  at::Tensor q, k, v;  // [batch, heads, tokens, head_dim]
  at::Tensor bias;     // [batch, heads, queries, keys], or undefined
  Window window;
  double scale = 1, dropout = 0;
  Draw drawn{0, 0};

  /// Pairs of a query and a key that it sees, of one head.
  double pairs() const;
  int64_t groups() const { return q.size(1) / k.size(1); }
};

/// The products of the pairs, two in the forward and five in the backward.
Cost cost_of(const Attention& a, EmulatedKind kind);

/// Writes the output and, if it is defined, the log-sum-exp [batch, heads, queries], which is infinite for queries that see nothing.
void attention_forward(const Attention& a, at::Tensor out, at::Tensor lse);

/// Writes the gradients that are defined.
void attention_backward(const Attention& a, const at::Tensor& dout, const at::Tensor& out, const at::Tensor& lse, at::Tensor dq,
                        at::Tensor dk, at::Tensor dv, at::Tensor dbias);

}  // namespace emulated
