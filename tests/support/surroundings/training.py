"""Run programs in plain PyTorch and with lightning_memo, compare what they keep, and shorten those that differ."""

from __future__ import annotations

import contextlib
import copy
import gc
import traceback
import warnings
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
import transformers
from lightning.pytorch import LightningModule
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint
from transformers.modeling_outputs import CausalLMOutput

import lightning_memo
from lightning_memo import MemoLoop, MemoStrategy
from support.families import PlainBlock
from support.surroundings.programs import VOCABULARY, Program, Session, Step, draw, is_untracked
from support.trainer_harness import batches, copy_threads, forwards, make_trainer

HIDDEN = 16
# Sums in another order, in fp32; in bf16 the roundings of single values.
BOUND, HALF_BOUND = 1e-5, 5e-2
SMALL = 1e-7  # what is left of sums that cancel
# A stable computation errs as if its weights had been rounded otherwise, which is much where gradients cancel.
NOISE, ROUNDINGS = 2.0**-22, 4.0
_PACKAGE = Path(lightning_memo.__file__).parent


# ---- models


class Blocks(nn.Module):
    """A plain transformer with the signature of Hugging Face's."""

    def __init__(self, layers: int = 3) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCABULARY, HIDDEN)
        self.layers = nn.ModuleList(PlainBlock(HIDDEN, 2) for _ in range(layers))
        self.norm, self.head = nn.LayerNorm(HIDDEN), nn.Linear(HIDDEN, VOCABULARY, bias=False)

    def forward(
        self,
        input_ids: Tensor | None = None,
        inputs_embeds: Tensor | None = None,
        labels: Tensor | None = None,
        output_hidden_states: bool = False,
    ) -> CausalLMOutput:
        x = self.embed(input_ids) if inputs_embeds is None else inputs_embeds
        hidden = [x]
        for layer in self.layers:
            x = layer(x)
            hidden.append(x)
        hidden[-1] = x = self.norm(x)
        logits, loss = self.head(x), None
        if labels is not None:
            loss = F.cross_entropy(logits[:, :-1].reshape(-1, VOCABULARY), labels[:, 1:].reshape(-1))
        return CausalLMOutput(loss=loss, logits=logits, hidden_states=tuple(hidden) if output_hidden_states else None)


def _build(name: str) -> nn.Module:
    if name == "blocks":
        return Blocks()
    if name == "gpt2":
        config: Any = transformers.GPT2Config(
            n_embd=HIDDEN, n_layer=3, n_head=2, vocab_size=VOCABULARY, n_positions=64, attn_pdrop=0.0, resid_pdrop=0.0,
            embd_pdrop=0.0, bos_token_id=0, eos_token_id=0, use_cache=False,
        )  # fmt: skip
    else:
        tied = name == "llama_tied"
        config = transformers.LlamaConfig(
            hidden_size=HIDDEN, num_hidden_layers=3, num_attention_heads=4, num_key_value_heads=2 if tied else 4,
            vocab_size=VOCABULARY, intermediate_size=32, max_position_embeddings=64, use_cache=False,
            tie_word_embeddings=tied, initializer_range=0.1,
        )  # fmt: skip
    model: nn.Module = transformers.AutoModelForCausalLM.from_config(config)
    return model


def _parts(model: Any) -> dict[str, Any]:
    if isinstance(model, Blocks):
        return {"layers": model.layers, "embed": model.embed, "norm": model.norm, "head": model.head}
    inner = model.base_model
    gpt2 = hasattr(inner, "h")
    return {
        "layers": inner.h if gpt2 else inner.layers,
        "embed": model.get_input_embeddings(),
        "norm": inner.ln_f if gpt2 else inner.norm,
        "head": model.get_output_embeddings(),
    }


def _freeze(model: nn.Module, frozen: str) -> None:
    parts = _parts(model)
    off = {
        "nothing": (),
        "embeddings": ("embed",),
        "embeddings and head": ("embed", "head"),
        "below": ("embed",),
        "head": ("head",),
    }[frozen]
    model.requires_grad_(True)
    for name in off:
        parts[name].requires_grad_(False)
    if frozen == "below":
        parts["layers"][0].requires_grad_(False)


# ---- what programs use


@dataclass
class Output:
    """Logits that are computed in a checkpoint."""

    logits: Tensor


class Interrupted(Exception):
    """An exception of the user's."""


def fail(*_: Any) -> None:
    raise Interrupted


def first(output: Any) -> Tensor:
    """Return the hidden states in what a module returns."""
    t: Tensor = output[0] if isinstance(output, tuple) else output
    return t


def changed(output: Any, function: Callable[[Tensor], Tensor]) -> Any:
    """Return what a module returns with changed hidden states."""
    return (function(output[0]), *output[1:]) if isinstance(output, tuple) else function(output)


def tokens(rows: int, length: int, seed: int) -> Tensor:
    return torch.randint(0, VOCABULARY, (rows, length), generator=torch.Generator().manual_seed(seed))


class Functions(TorchFunctionMode):
    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return func(*args, **(kwargs or {}))


class ScaledLosses(TorchFunctionMode):
    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        return 2 * result if func is F.cross_entropy else result


class Dispatched(TorchDispatchMode):
    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return func(*args, **(kwargs or {}))


class Squares(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, t: Tensor) -> Tensor:
        ctx.save_for_backward(t)
        return t.square().mean()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        (t,) = ctx.saved_tensors
        return gradient * 2 * t / t.numel()


@dataclass
class Side:
    """A model and its optimizer, with the names that programs use.

    Attributes:
        memo: Whether the model is trained with lightning_memo.
        noise: Relative change of the weights, as by their rounding.
        kept: What the running program has kept, and gradients and weights, in order.
    """

    session: Session
    memo: bool = False
    noise: float = 0.0
    backward: Callable[..., None] = Tensor.backward
    kept: list[tuple[str, Any]] = field(default_factory=list)

    def __post_init__(self) -> None:
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(3)
            self.model, self.teacher, self.other = _build(self.session.model), _build(self.session.model), Blocks()
            self.value = nn.Linear(HIDDEN, 1)
            self.class_weights = torch.rand(VOCABULARY)
            if self.noise:
                with torch.no_grad():
                    for p in self.model.parameters():
                        p.mul_(1 + self.noise * torch.randn_like(p))
        self.teacher.requires_grad_(False)
        _freeze(self.model, self.session.frozen)
        self.initial = copy.deepcopy(self.model.state_dict())
        self.optimizer: Any = torch.optim.SGD([*self.model.parameters(), *self.value.parameters()], lr=0.1)
        self.hooks: list[Any] = []
        self.retained: list[Tensor] = []
        self.names: dict[str, Any] = {}

    def begin(self) -> None:
        """Begin a program."""
        torch.manual_seed(5)
        with torch.no_grad():
            for name, t in self.model.state_dict().items():
                t.copy_(self.initial[name])
            for p in self.value.parameters():
                p.fill_(0.1)
        _freeze(self.model, self.session.frozen)
        self.kept.clear()
        self.names = {
            "torch": torch, "F": F, "nn": nn, "copy": copy, "gc": gc, "checkpoint": checkpoint, "tokens": tokens,
            "fail": fail, "first": first, "changed": changed, "Interrupted": Interrupted, "Functions": Functions,
            "ScaledLosses": ScaledLosses, "Output": Output, "Dispatched": Dispatched, "Squares": Squares,
            "class_weights": self.class_weights, "model": self.model, "teacher": self.teacher, "other": self.other,
            "value": self.value, "optimizer": self.optimizer, "hooks": self.hooks, "retained": self.retained,
            "loop_of_other": self.loop_of_other, "keep": self.keep, "step": self.step, "backward": self.backward,
            **_parts(self.model),
        }  # fmt: skip

    def loop_of_other(self) -> contextlib.AbstractContextManager[Any]:
        """Return a loop for a second model."""
        if not self.memo:
            return contextlib.nullcontext()
        return MemoLoop(self.other, torch.optim.SGD(self.other.parameters(), 0.1), alpha=0.5)

    def keep(self, t: Tensor) -> None:
        self.kept.append(("value", t.detach().clone()))

    def gradients(self) -> dict[str, Tensor]:
        named = [*self.model.named_parameters(), *self.value.named_parameters("value")]
        return {name: p.grad.detach().clone() for name, p in named if p.grad is not None}

    def note_gradients(self) -> None:
        """Keep the gradients, and clip them: weights that grow a thousandfold make rounding errors large."""
        self.kept.append(("gradients", self.gradients()))
        nn.utils.clip_grad_norm_([*self.model.parameters(), *self.value.parameters()], 1.0)

    def step(self) -> None:
        self.note_gradients()
        self.optimizer.step()
        self.optimizer.zero_grad()

    def run(self, step: Step) -> None:
        exec(compile("\n".join(step), "program", "exec"), self.names)

    def end(self, failure: Failure | None) -> Result:
        """End a program, and return what it has kept."""
        during = len(self.kept)
        for handle in self.hooks:
            handle.remove()
        try:
            self.kept += [("value", t.grad.detach().clone()) for t in self.retained if t.grad is not None]
        except RuntimeError as error:
            failure = failure or Failure.of(error)
        if self.session.entry != "loop":  # Lightning leaves gradients until the next backward
            self.optimizer.zero_grad()
        self.kept.append(("gradients", self.gradients()))
        self.kept.append(("gradients", {name: t.clone() for name, t in self.model.state_dict().items()}))
        self.hooks.clear()
        self.retained.clear()
        self.names.clear()
        self.optimizer.zero_grad()
        self.model.train()
        return Result(list(self.kept), during, failure)


@dataclass
class Failure:
    """An exception that ended a program: its type, its message, and whether it is a clear line of this package."""

    kind: str
    text: str
    place: str
    clear: bool

    @classmethod
    def of(cls, error: Exception) -> Failure:
        frames = traceback.extract_tb(error.__traceback__)
        last = Path(frames[-1].filename)
        own = _PACKAGE in last.parents and "\n" not in str(error)
        clear = (
            own and type(error) in (ValueError, RuntimeError) and any(mark in str(error) for mark in (":", ";", ","))
        )
        inner = next((f for f in reversed(frames) if _PACKAGE in Path(f.filename).parents), frames[-1])
        name = Path(inner.filename)
        return cls(type(error).__name__, str(error), f"{name.parent.name}/{name.name}:{inner.lineno}", clear)


@dataclass
class Result:
    """What a program kept, and the exception that ended it."""

    kept: list[tuple[str, Any]]
    during: int  # number of those that were kept before the end of the program
    failure: Failure | None


def _run(side: Side, program: Program) -> Result:
    side.begin()
    failure = None
    try:
        for step in program:
            side.run(step)
            if side.session.entry == "automatic":
                side.backward(side.names["loss"])
                side.step()
    except Exception as error:
        failure = Failure.of(error)
    return side.end(failure)


def _run_in_loop(side: Side, programs: Sequence[Program]) -> list[Result]:
    """Run programs in a loop. A refusal when it is entered or left is one of the last program."""
    if not programs:
        return []
    found: list[Result] = []
    try:
        with MemoLoop(side.model, side.optimizer, **side.session.settings):
            found += [_run(side, program) for program in programs[:-1]]
            last = _run(side, programs[-1])
    except Exception as error:
        last = Result([], 0, Failure.of(error))
    return [*found, *[last] * (len(programs) - len(found))]


class Module(LightningModule):
    """Runs the steps of a program as training steps."""

    def __init__(self, side: Side, program: Program) -> None:
        super().__init__()
        self.model, self.value, self._side, self._program = side.model, side.value, [side], program
        self.automatic_optimization = side.session.entry == "automatic"

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor | None:
        (side,) = self._side
        if batch_idx == 0:
            side.backward = self.manual_backward
            side.optimizer = self.optimizers()
            side.begin()
        side.run(self._program[batch_idx])
        return side.names["loss"] if self.automatic_optimization else None

    def on_before_optimizer_step(self, optimizer: Any) -> None:
        if self.automatic_optimization:
            (side,) = self._side
            side.note_gradients()

    def configure_optimizers(self) -> Any:
        return self._side[0].optimizer


def _fit(side: Side, program: Program) -> Result:
    module, failure = Module(side, program), None
    trainer = make_trainer(MemoStrategy(**side.session.settings), max_epochs=1, max_steps=-1)
    try:
        trainer.fit(module, batches([{"number": torch.tensor(n)} for n in range(len(program))]))
    except Exception as error:
        failure = Failure.of(error)
    return side.end(failure)


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield


# ---- verdicts


@dataclass(frozen=True)
class Verdict:
    """What became of a program: "equal", "both raise", "refused", "untracked" or "different"; and why."""

    kind: str
    why: str = ""
    exact: bool = False


def _differ(mine: Tensor, plain: Tensor, bound: float, changed: Tensor | None = None) -> str:
    """Return how a tensor differs from that of plain training; empty if it does not by more than roundings.

    Args:
        mine: The tensor.
        plain: That of plain training.
        bound: Relative error that is allowed.
        changed: That of plain training with weights that were rounded otherwise, which it may be as far from.
    """
    if mine.shape != plain.shape or mine.dtype != plain.dtype:
        return f"{list(mine.shape)} {mine.dtype}, plain {list(plain.shape)} {plain.dtype}"
    a, b = mine.detach().double().flatten(), plain.detach().double().flatten()
    if not torch.equal(a.isfinite(), b.isfinite()):
        return f"{int((~a.isfinite()).sum())} values are not finite, plain {int((~b.isfinite()).sum())}"
    a, b = (t.nan_to_num(0.0, 0.0, 0.0) for t in (a, b))
    error, norm = float((a - b).norm()), float(b.norm())
    rounding = 0.0
    if changed is not None and changed.shape == plain.shape:
        rounding = ROUNDINGS * float((b - changed.detach().double().flatten().nan_to_num(0.0, 0.0, 0.0)).norm())
    if error <= bound * norm + SMALL * max(1, b.numel()) ** 0.5 + rounding:
        return ""
    return f"relative error {error / max(norm, 1e-300):.1e} of norm {norm:.1e}"


def _why_other(mine: Result, plain: Result, bound: float, changed: Result | None = None) -> str:
    """Return the first difference of what both have kept; see `_differ` for `changed`."""
    both = list(zip(mine.kept, plain.kept, strict=False))
    noisy = [] if changed is None or len(changed.kept) != len(plain.kept) else changed.kept
    if mine.failure is not None or plain.failure is not None:  # what follows is cut off, and the end is another one
        both = both[: min(mine.during, plain.during)]
    elif len(mine.kept) != len(plain.kept):
        return f"{len(mine.kept)} values kept, plain {len(plain.kept)}"
    for number, ((kind, a), (kind_of_plain, b)) in enumerate(both):
        if kind != kind_of_plain:
            return f"{kind}, plain {kind_of_plain}"
        e = noisy[number][1] if noisy and noisy[number][0] == kind else None
        if kind == "value":
            why = _differ(a, b, bound, e)
        elif a.keys() != b.keys():
            why = f"without {sorted(b.keys() - a.keys())[:3]}, beyond {sorted(a.keys() - b.keys())[:3]}"
        else:
            why = _differ(_joined(a), _joined(b), bound, None if e is None or e.keys() != b.keys() else _joined(e))
        if why:
            return f"{kind} {number}: {why}"
    return ""


def _joined(tensors: dict[str, Tensor]) -> Tensor:
    return torch.cat([tensors[name].flatten() for name in sorted(tensors)] or [torch.zeros(0)])


def _mutations_allowed(session: Session, program: Program) -> Result:
    """Run in plain PyTorch, with autograd's tensors as they were before they were changed in place.

    PyTorch's `allow_mutation_on_saved_tensors` does not notice that a saved part of a tensor changes with the whole.
    """
    with torch.autograd.graph.saved_tensors_hooks(lambda t: t.detach().clone(), lambda t: t):
        return _run(Side(session), program)


def _verdict(session: Session, number: int, mine: Result, plain: Result) -> Verdict:
    program = session.programs[number]
    text = "\n".join("\n".join(step) for step in program)
    untracked = is_untracked(session.kinds[number], text)
    bound = HALF_BOUND if "autocast" in text or "bfloat16" in text else BOUND
    if plain.failure is not None:
        if mine.failure is None:
            plain_free = _mutations_allowed(session, program)
            if plain_free.failure is None and (why := _why_other(mine, plain_free, bound)) and not untracked:
                return Verdict(
                    "different", f"plain raises {plain.failure.kind} {plain.failure.text[:60]!r}, ours not, and {why}"
                )
        return Verdict("both raise", plain.failure.text)
    if mine.failure is not None:
        if not mine.failure.clear:
            return Verdict(
                "different", f"raises {mine.failure.kind} at {mine.failure.place}: {mine.failure.text[:200]!r}"
            )
        why = _why_other(mine, plain, bound)
        if why:
            return Verdict("untracked" if untracked else "different", f"before a refusal: {why}")
        return Verdict("refused", mine.failure.text)
    why = _why_other(mine, plain, bound)
    if why and bound == BOUND:
        noisy = _run(Side(session, noise=NOISE), program)
        why = _why_other(mine, plain, bound, noisy if noisy.failure is None else None)
    if why and untracked:
        return Verdict("untracked", why)
    return Verdict("different", why) if why else Verdict("equal")


def outcome(session: Session) -> list[Verdict]:
    """Run all programs with and without lightning_memo; return the verdict of each."""
    with _quiet():
        plain, mine = Side(session), Side(session, memo=True)
        expected = [_run(plain, program) for program in session.programs]
        if session.entry == "loop":
            found = [
                *_run_in_loop(mine, session.programs[: session.left_at]),
                *_run_in_loop(mine, session.programs[session.left_at :]),
            ]
        else:
            found = [_fit(mine, program) for program in session.programs]
        verdicts = [
            _verdict(session, number, *results) for number, results in enumerate(zip(found, expected, strict=True))
        ]
    left = [*copy_threads(), *forwards(mine.model)]
    if left and session.entry == "loop":
        verdicts[-1] = Verdict("different", f"left behind: {left}")
    return verdicts


def drawn(seed: int) -> Session:
    """Return the session of a seed."""
    sides: list[Side] = []

    def raises(session: Session) -> bool:
        sides.append(Side(session) if not sides else sides[0])
        return _run(sides[0], session.programs[0]).failure is not None

    with _quiet():
        return draw(seed, raises)


def shortest(session: Session, number: int, why: str = "", tries: int = 60) -> Session:
    """Return a short session that ends with the same kind of failure as the program with this number."""
    left = [tries]

    def fails(candidate: Session) -> bool:
        if left[0] == 0:
            return False
        left[0] -= 1
        try:
            last = outcome(candidate)[-1]
        except Exception:
            return False
        return last.kind == "different" and ("raises" in last.why) == ("raises" in why)

    session = replace(
        session, left_at=min(number, session.left_at), programs=session.programs[: number + 1],
        kinds=session.kinds[: number + 1],
    )  # fmt: skip
    alone = replace(session, left_at=0, programs=session.programs[number:], kinds=session.kinds[number:])
    if fails(alone):
        session = alone
    for part in ("programs", "steps"):
        session = _without(session, part, fails)
    return session


def _without(session: Session, part: str, fails: Callable[[Session], bool]) -> Session:
    """Leave out what is not needed, halves first."""
    items = _items(session) if part == "steps" else [(n,) for n in range(len(session.programs))]
    size = max(1, len(items) // 2)
    while True:
        begin = 0
        while begin < len(items):
            kept = items[:begin] + items[begin + size :]
            candidate = _only(session, kept, part)
            if candidate is not None and fails(candidate):
                items = kept
            else:
                begin += size
        if size == 1:
            return _only(session, items, part) or session
        size //= 2


def _items(session: Session) -> list[tuple[int, ...]]:
    return [
        (n, m, k)
        for n, program in enumerate(session.programs)
        for m, step in enumerate(program)
        for k in range(len(step))
    ]


def _only(session: Session, items: list[tuple[int, ...]], part: str) -> Session | None:
    """Return a session of these programs, or these statements of its steps; `None` if nothing would be left."""
    programs = list[tuple[Program, frozenset[str]]]()
    for n, (program, kinds) in enumerate(zip(session.programs, session.kinds, strict=True)):
        if part == "programs":
            kept = program if (n,) in items else ()
        else:
            steps = (tuple(s for k, s in enumerate(step) if (n, m, k) in items) for m, step in enumerate(program))
            kept = tuple(step for step in steps if step)
        if kept:
            programs.append((kept, kinds))
    if not programs or not any(item[0] == len(session.programs) - 1 for item in items):
        return None
    return replace(session, left_at=0, programs=tuple(p for p, _ in programs), kinds=tuple(k for _, k in programs))
