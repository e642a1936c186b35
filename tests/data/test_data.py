import math
import sysconfig
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
import torch.distributed as dist
from lightning.pytorch import LightningModule, Trainer
from support.processes import run_in_processes
from tokenizers import Tokenizer as BackendTokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import Whitespace
from transformers import PreTrainedTokenizerFast

from lightning_memo.data import TextDataModule, unigram_entropy
from lightning_memo.data.resumable_loader import ChunkDataset, EpochSampler, ResumableLoader
from lightning_memo.data.text_module import CorpusConfig, find_documents, load_corpus, pack
from lightning_memo.data.tokenizer import load_tokenizer


@pytest.fixture
def folder(tmp_path):
    for number in range(20):
        (tmp_path / f"{number:02}.txt").write_text(f"document {number}\n" * 10)
    return tmp_path


def config(folder, **changes):
    return CorpusConfig(path=str(folder), suffix=".txt", **changes)


def documents(tokens, eos=256):
    ends = np.flatnonzero(tokens == eos)
    return [bytes(piece[piece != eos].astype(np.uint8)).decode() for piece in np.split(tokens, ends + 1) if len(piece)]


def test_bytes_are_tokens():
    tokenizer = load_tokenizer(None)
    assert tokenizer.encode("aé").tolist() == list("aé".encode())
    assert tokenizer.eos_id < tokenizer.vocab_size == 257


def test_documents_end_with_eos_and_lie_in_one_part_only(folder):
    corpus = load_corpus(config(folder, val_fraction=0.25), load_tokenizer(None))
    train, val = documents(corpus.train), documents(corpus.val)
    assert len(train) == 15
    assert len(val) == 5
    assert set(train + val) == {f"document {number}\n" * 10 for number in range(20)}


def test_seed_chooses_order_and_split(folder):
    def train_text(seed):
        return load_corpus(config(folder, seed=seed), load_tokenizer(None)).train

    assert np.array_equal(train_text(3), train_text(3))
    assert not np.array_equal(train_text(3), train_text(4))


def test_reading_stops_at_max_bytes(folder):
    corpus = load_corpus(config(folder, max_bytes=1000), load_tokenizer(None))
    text_bytes = sum((tokens != 256).sum() for tokens in (corpus.train, corpus.val))
    assert text_bytes == 1000


def test_excluded_folders_are_left_out_below_the_root_only(tmp_path):
    root = tmp_path / "tests"  # the name of an excluded folder
    for place in (root / "kept", root / "kept" / "tests"):
        place.mkdir(parents=True)
        (place / "a.txt").write_text("a")
    assert find_documents(config(root)) == [root / "kept" / "a.txt"]


def test_default_is_the_standard_library():
    paths = find_documents(CorpusConfig())
    assert Path(sysconfig.get_paths()["stdlib"], "argparse.py") in paths
    assert not any({"test", "site-packages"} & set(path.parts) for path in paths)


@pytest.mark.parametrize("given", ["file", "folder"])
def test_one_file_is_cut_for_validation(given, tmp_path):
    file = tmp_path / "own.txt"
    file.write_text("0123456789" * 20)
    chosen = CorpusConfig(path=str(file)) if given == "file" else config(tmp_path)
    corpus = load_corpus(chosen, load_tokenizer(None))
    assert np.concatenate([corpus.train, corpus.val]).tolist() == [*file.read_bytes(), 256]
    assert len(corpus.val) == round(201 * chosen.val_fraction)


@pytest.mark.parametrize("name", ["own.jsonl", "own.json.gz", "own.parquet"])
def test_records_are_no_text(name, tmp_path):
    (tmp_path / name).write_bytes(b"{}")
    with pytest.raises(ValueError, match=rf"path=.*{name}: a file of records, not text; .*data=documents"):
        find_documents(CorpusConfig(path=str(tmp_path / name)))


def test_broken_encodings_are_read(tmp_path):
    for name in "ab":
        (tmp_path / f"{name}.txt").write_bytes(b"\xff\xfe text")
    assert load_corpus(config(tmp_path), load_tokenizer(None)).train.max() == 256


def test_local_tokenizer_folder(tmp_path):
    backend = BackendTokenizer(WordLevel({"[UNK]": 0, "[EOS]": 1, "hello": 2, "world": 3}, unk_token="[UNK]"))
    backend.pre_tokenizer = Whitespace()
    PreTrainedTokenizerFast(tokenizer_object=backend, eos_token="[EOS]").save_pretrained(tmp_path / "tokenizer")
    tokenizer = load_tokenizer(str(tmp_path / "tokenizer"))
    assert pack(["hello world", "there"], tokenizer).tolist() == [2, 3, 1, 0, 1]
    assert tokenizer.vocab_size == 4


def test_ids_of_a_tokenizer_may_have_gaps(tmp_path):
    backend = BackendTokenizer(WordLevel({"[UNK]": 0, "[EOS]": 1, "hello": 90}, unk_token="[UNK]"))
    PreTrainedTokenizerFast(tokenizer_object=backend, eos_token="[EOS]").save_pretrained(tmp_path / "tokenizer")
    tokenizer = load_tokenizer(str(tmp_path / "tokenizer"))
    assert pack(["hello"], tokenizer).max() < tokenizer.vocab_size == 91


def test_unigram_entropy():
    assert unigram_entropy(np.array([7, 7, 7])) == 0
    assert unigram_entropy(np.arange(8)) == pytest.approx(math.log(8))
    assert unigram_entropy(np.array([0, 0, 0, 5])) == pytest.approx(-(0.75 * math.log(0.75) + 0.25 * math.log(0.25)))


def test_chunks_are_contiguous_and_labels_are_the_inputs():
    dataset = ChunkDataset(np.arange(11, dtype=np.int32), seq_len=4)
    assert [item["input_ids"].tolist() for item in (dataset[0], dataset[1])] == [[0, 1, 2, 3], [4, 5, 6, 7]]
    assert len(dataset) == 2
    assert torch.equal(dataset[1]["labels"], dataset[1]["input_ids"])
    assert dataset[0]["input_ids"].dtype == torch.int64


def test_order_depends_on_seed_and_epoch_alone():
    def order(seed, epoch):
        sampler = EpochSampler(50, seed)
        sampler.set_epoch(epoch)
        return list(sampler)

    assert order(1, 2) == order(1, 2)
    assert sorted(order(1, 2)) == list(range(50))
    assert order(1, 2) != order(1, 3)
    assert order(1, 2) != order(2, 2)


def loader(**changes):
    return ResumableLoader(ChunkDataset(np.arange(40, dtype=np.int32), 2), **{"batch_size": 3, "seed": 5, **changes})


def ids(batches):
    return [batch["input_ids"].tolist() for batch in batches]


def test_loader_continues_at_a_saved_position():
    first, second = loader(), loader()
    everything = ids(loader())
    batches = iter(first)
    seen = ids(next(batches) for _ in range(4))
    second.load_state_dict(first.state_dict())
    assert seen + ids(second) == everything
    assert ids(second) == everything, "the next epoch is whole"


def test_position_after_the_last_batch_is_the_next_epochs_first():
    whole, limited = loader(), loader(epoch_batches=2)
    assert len(ids(whole)) == 6
    assert whole.state_dict()["position"] == 0
    batches = iter(limited)
    next(batches)
    assert limited.state_dict()["position"] == 1
    next(batches)
    assert limited.state_dict()["position"] == 0


@pytest.mark.parametrize(("count", "batch_size"), [(2, 3), (3, 2), (6, 1)])
def test_data_parallel_parts_make_up_the_batches_of_one_process(count, batch_size):
    parts = [ids(loader(batch_size=batch_size, rank=rank, count=count)) for rank in range(count)]
    whole = ids(loader(batch_size=6))
    assert [len(part) for part in parts] == [len(whole)] * count == [3] * count
    for step, together in enumerate(whole):
        assert sorted(row for part in parts for row in part[step]) == sorted(together)


def test_number_of_processes_may_change_within_an_epoch():
    one = loader(batch_size=6)
    batches = iter(one)
    next(batches)
    state = one.state_dict()
    rest = [sorted(batch) for batch in ids(batches)]
    parts = [loader(batch_size=3, rank=rank, count=2) for rank in range(2)]
    for part in parts:
        part.load_state_dict(state)
    assert len(rest) == 2
    assert [sorted(a + b) for a, b in zip(*map(ids, parts), strict=True)] == rest
    with pytest.raises(ValueError, match=r"batch_size=6.*batch_size=12"):
        loader(batch_size=6, count=2).load_state_dict(state)


def test_every_process_gets_as_many_batches():
    parts = [loader(batch_size=1, rank=rank, count=7) for rank in range(7)]
    assert [len(part) for part in parts] == [len(ids(part)) for part in parts] == [2] * 7


class Listener(LightningModule):
    """Takes down what it is given."""

    def __init__(self):
        super().__init__()
        self.weight = torch.nn.Parameter(torch.ones(()))
        self.train_batches, self.val_batches = [], []

    def training_step(self, batch):
        self.train_batches.append(batch["input_ids"].tolist())
        return self.weight * 1.0

    def validation_step(self, batch):
        self.val_batches.append(batch["input_ids"].tolist())

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.0)


def batches_of_a_fit(folder, devices, batch_size):
    """Batches of training, by epoch, and of validation; with Lightning's own strategy."""
    module = Listener()
    trainer = Trainer(
        accelerator="cpu", devices=devices, strategy="ddp" if devices > 1 else "auto", max_epochs=2, logger=False,
        enable_checkpointing=False, enable_progress_bar=False, enable_model_summary=False, num_sanity_val_steps=0,
    )  # fmt: skip
    data = TextDataModule(16, batch_size, path=str(folder), suffix=".txt", val_fraction=0.2)
    trainer.fit(module, datamodule=data)
    half = len(module.train_batches) // 2
    return module.train_batches[:half], module.train_batches[half:], module.val_batches


def batches_of_two_processes(folder):
    assert dist.get_world_size() == 2
    return batches_of_a_fit(folder, 2, 1)


@pytest.mark.slow
def test_lightning_keeps_the_order_under_data_parallelism(folder):
    *epochs, val = batches_of_a_fit(folder, 1, 2)
    *first_epochs, first_val = (parts := run_in_processes(2, batches_of_two_processes, folder))[0]
    *second_epochs, second_val = parts[1]
    assert epochs[0] != epochs[1]
    for whole, first, second in zip(epochs, first_epochs, second_epochs, strict=True):
        assert [sorted(a + b) for a, b in zip(first, second, strict=True)] == [sorted(batch) for batch in whole]
    rows = {tuple(row) for batch in val for row in batch}
    assert rows <= {tuple(row) for batch in first_val + second_val for row in batch}


def test_text_must_suffice_for_all_processes(folder):
    def module():
        return TextDataModule(seq_len=700, batch_size=1, path=str(folder), suffix=".txt", val_fraction=0.5)

    module().setup()
    shared = module()
    shared.trainer = SimpleNamespace(distributed_sampler_kwargs={"rank": 0, "num_replicas": 9}, lightning_module=None)
    with pytest.raises(ValueError, match=r"on 9 data-parallel processes: one batch needs 6300 tokens, the training"):
        shared.setup()


def test_iterating_leaves_the_random_state_alone():
    before = torch.get_rng_state()
    ids(loader())
    assert torch.equal(torch.get_rng_state(), before)


def test_position_of_other_data_is_refused():
    with pytest.raises(ValueError, match=r"batch_size=3.*batch_size=2.*resume with the same data settings"):
        loader(batch_size=2).load_state_dict(loader().state_dict())


def test_batches_of_the_module(folder):
    module = TextDataModule(seq_len=16, batch_size=3, path=str(folder), suffix=".txt", val_fraction=0.2)
    module.setup()
    for batch in (next(iter(module.train_dataloader())), next(iter(module.val_dataloader()))):
        assert {name: tuple(t.shape) for name, t in batch.items()} == {"input_ids": (3, 16), "labels": (3, 16)}
    assert 0 < module.unigram_entropy < math.log(module.vocab_size)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"path": "/nowhere"}, r"path=/nowhere: no such file or folder; give"),
        ({"path": "/nowhere", "tokenizer": "/nowhere"}, r"path=/nowhere: no such file or folder; give"),
        ({"path": "blank"}, r"path=blank: no text in it; give"),
        ({"max_bytes": 0}, r"max_bytes=0: give 1 or more"),
        ({"suffix": ".nothing"}, r"no file ends with suffix=.nothing; set"),
        ({"max_bytes": 100}, r"the validation text has 5; .* more text \(path, max_bytes, val_fraction\)"),
        ({"val_fraction": 0.0}, r"val_fraction=0.0: give a number between"),
        ({"seq_len": 100_000}, r"seq_len=100000 x .*the training text has \d+; lower"),
        ({"seq_len": 500}, r"the validation text has \d+; lower"),
        ({"seq_len": 1}, r"seq_len=1: give 2 or more"),
        ({"batch_size": 0}, r"batch_size=0: give 1 or more"),
        ({"tokenizer": "/nowhere"}, r"tokenizer=/nowhere: no such folder"),
        ({"tokenizer": "."}, r"tokenizer=.: not a Hugging Face tokenizer"),
    ],
)
def test_mistakes_are_named_in_one_line(folder, monkeypatch, changes, message):
    monkeypatch.chdir(folder)
    Path("blank").write_text(" \n")
    with pytest.raises(ValueError, match=message):
        TextDataModule(**{"seq_len": 16, "path": str(folder), "suffix": ".txt", **changes}).setup()
