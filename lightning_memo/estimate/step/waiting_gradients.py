"""Memory of the gradients of weights that wait in the zero-bubble order of a pipeline.

Linear layers keep their input and the gradient of their output on the device, see
`lightning_memo.parallel.pipeline.weight_gradients`.
"""

from __future__ import annotations

from lightning_memo.estimate.inputs.parallelism import Parallelism
from lightning_memo.estimate.memory.saved_by_experts import readers_of_norm
from lightning_memo.estimate.request.estimate_request import Question
from lightning_memo.estimate.request.training_methods import element_bytes, layer_kernels
from lightning_memo.estimate.times.layer_products import LayerProduct, later_products
from lightning_memo.parallel.pipeline.stage_order import most_waiting


def fullest_stages(parallel: Parallelism) -> tuple[int, ...]:
    """Return the stages of a pipeline one of which needs the most memory.

    From each stage to the next one, fewer sequences are in flight and gradients of one more backward wait. For the
    first stage, none wait.
    """
    return tuple(sorted({0, 1, parallel.pp - 1})) if parallel.weights_wait else (0,)


def waiting_bytes(question: Question, parallel: Parallelism) -> int:
    """Return the bytes on a device of a stage for the gradients of weights of all backwards that wait at once."""
    if not parallel.weights_wait:
        return 0
    tokens = question.seq_len // (parallel.tp * parallel.cp)
    of_stage = sum(run.shape.layers * waiting_bytes_per_token(run, parallel.tp) for run in question.runs(parallel))
    return most_waiting(question.stage) * tokens * of_stage // parallel.virtual_pipeline_size


def waiting_bytes_per_token(question: Question, tensor_parallel: int) -> int:
    """Return the bytes that a layer keeps from a backward, for each token that a device keeps between layers.

    Hidden states that tensor-parallel devices gather before a product, and gradients of those that they sum behind
    one, are whole on each device.

    Args:
        question: Question that was asked.
        tensor_parallel: Number of tensor-parallel devices.
    """
    shape = question.shape
    inputs: dict[str, int] = {}
    gradients = 0
    for product in later_products(shape, layer_kernels(question)):
        whole = (1 if product.divides_inputs else tensor_parallel), (1 if product.divides_outputs else tensor_parallel)
        if shape.adapters is None:
            inputs[_input_of(question, product)] = whole[0] * product.inputs
            gradients += whole[1] * product.outputs
        elif shape.adapts(product.role):
            # With dropout before adapters, each has an input of its own.
            inputs[product.role] = whole[0] * product.inputs + tensor_parallel * shape.adapters.rank
            gradients += whole[1] * product.outputs + tensor_parallel * shape.adapters.rank
    return (sum(inputs.values()) + gradients) * element_bytes(question).product


def _input_of(question: Question, product: LayerProduct) -> str:
    """The same name for products that share an input."""
    if product.role in question.shape.attention.readers:
        return "attention"
    return "feed-forward" if product.role in readers_of_norm(question.shape) else product.role
