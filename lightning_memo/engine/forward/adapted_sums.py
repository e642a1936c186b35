"""The sums of matrix products that LoRA makes of a layer's modules, in a recomputation.

Note: [Sums of products]
The backward of `base(x) + B(A(x)) * scaling` reads `x` and `A(x)`, and none of the terms. If the sum is in storage,
neither the product of the base layer nor that of `B` has to be computed, nor their sum. They are called as before, see
Note: [Answered products], and the stored sum stands for each of the terms, which nothing but the sum may read.

If the adapters have another type than the base layer, the sum is cast to the type of `base(x)`. The cast is a part of
the sum, and what is stored is its output, which has that type: half of the bytes if adapters in fp32 train beside a
base layer in bf16. It stands for terms and sums of both types, because autograd saves none of them.

If the sum is not in storage, each term is computed when it is read. Nothing reads the base layer's product in the last
module of a layer, because the recomputation ends when `A(x)` is computed.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from types import NoneType
from typing import Any

from torch import Tensor, nn


def adapted_modules(layer: nn.Module) -> Iterator[tuple[str, nn.Module, frozenset[int]]]:
    """Yield the modules of a layer that peft's LoRA adapts, with their names and the ids of the terms' weights.

    Left out are modules with a variant of LoRA that reads terms (DoRA), and those whose forward or parts are a user's
    own, which might read terms past PyTorch's operators.
    """
    lora = sys.modules.get("peft.tuners.lora.layer")
    if lora is None:
        return
    for name, module in layer.named_modules():
        if not (isinstance(module, lora.Linear) and type(module).forward is lora.Linear.forward):
            continue
        own = not isinstance(vars(module).get("forward"), (NoneType, SummingForward))
        if own or any(adapter in module.lora_variant for adapter in module.active_adapters):
            continue
        if not any(part._forward_hooks or part._forward_pre_hooks for part in module.modules() if part is not module):
            # Not `term.weight`, which parametrizations compute, and would save for the backward.
            weights = [term._parameters.get("weight") for term in (module.base_layer, *module.lora_B.values())]
            yield name, module, frozenset(id(weight) for weight in weights if type(weight) is nn.Parameter)


@dataclass(frozen=True, slots=True)
class SummingForward:
    """Stands in for the forward of an adapted module.

    Attributes:
        run: Called with the module's own forward, bound to its arguments; returns the output.
        forward: The module's own forward.
    """

    run: Callable[[Callable[[], Tensor]], Tensor]
    forward: Callable[..., Tensor]

    def __call__(self, *args: Any, **kwargs: Any) -> Tensor:
        return self.run(lambda: self.forward(*args, **kwargs))
