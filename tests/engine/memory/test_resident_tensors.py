"""What stays on the device by plan: references to what nothing may overwrite, copies of the rest."""

import gc

import pytest
import torch
from support.families import FAMILIES, make_batch
from support.samples.storage_kinds import TOKENS, ByKind, everything
from torch import Tensor

from lightning_memo.engine.layers.call_storage import ResidentTensors
from lightning_memo.engine.memory.saved_storages import NotedTensor


def test_a_whole_tensor_is_kept_without_a_copy() -> None:
    resident, t = ResidentTensors(), torch.rand(3, 4)
    kept, known = resident.keep(t), resident.find(t.T)
    assert isinstance(kept, NotedTensor) and isinstance(known, NotedTensor)
    assert kept.tensor.data_ptr() == known.tensor.data_ptr() == t.data_ptr()
    assert known.tensor.shape == (4, 3)
    assert resident.size_bytes == t.nbytes


def test_a_part_of_a_storage_is_copied() -> None:
    resident, part = ResidentTensors(), torch.rand(6, 4)[:2]
    kept = resident.keep(part)
    assert isinstance(kept, Tensor) and torch.equal(kept, part)
    assert kept.untyped_storage().nbytes() == part.nbytes == resident.size_bytes
    known = resident.find(part[1:])
    assert isinstance(known, Tensor) and torch.equal(known, part[1:]) and known.data_ptr() == kept[1:].data_ptr()


def test_a_change_of_a_kept_tensor_is_told() -> None:
    resident, t = ResidentTensors(), torch.rand(3)
    kept = resident.keep(t)
    t.add_(1)
    assert resident.find(t) is None
    with pytest.raises(RuntimeError, match=r"an activation of mlp, of shape \[3\], was changed in place"):
        kept.unchanged("mlp")


def test_a_change_between_forward_and_backward_ends_the_backward() -> None:
    """Plain training refuses it, too."""
    model, batch = FAMILIES["llama"].build().train(), make_batch(2, TOKENS)
    with ByKind(model) as under_test:
        under_test.profile_step(batch)
        under_test.load_storage(everything(under_test.products))
        loss = model(**batch).loss
        weights = {p.data_ptr() for p in model.parameters()}
        kept = [t.tensor for t in gc.get_objects() if isinstance(t, NotedTensor) and t.tensor.dim() == 3]
        activations = [t for t in kept if t.data_ptr() not in weights]
        assert activations
        activations[-1].mul_(2)
        with pytest.raises(RuntimeError, match=r"an activation of LlamaDecoderLayer, of shape .*, was changed"):
            loss.backward()
