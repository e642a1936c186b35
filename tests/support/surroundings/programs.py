"""Programs of training steps, drawn at random, that do around a model what users do.

A program is Python text, so that one that fails can be read, shortened and run by itself. The names that it uses are
those of `Side.begin` in `training.py`. A kind is a function that writes one thing that users do; its name can be left
out of draws.
"""

from __future__ import annotations

import random
import textwrap
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any

from support.modes import BY_KIND

Step = tuple[str, ...]
"""Statements, some of which have several lines."""
Program = tuple[Step, ...]

VOCABULARY = 53
LONGEST = 20  # tokens of a sequence
MODELS = ("llama", "llama", "llama_tied", "gpt2", "blocks")
FROZEN = ("nothing",) * 4 + ("embeddings", "embeddings and head", "below", "head")
SLICES: dict[str, Any] = {"alpha": 0.5, "slice_tokens": 6}
PLANS: tuple[dict[str, Any], ...] = (
    {}, {}, {"alpha": 0.0}, {"alpha": 0.5}, {"alpha": 0.5}, {"alpha": 1.0},
    {"test_mode": BY_KIND, "device_memory": "0.4MiB"},
    SLICES | {"stream_from_host": "none"}, SLICES | {"stream_from_host": "attention"},
    SLICES | {"stream_from_host": "hidden"}, SLICES | {"stream_from_host": "hidden"},
    SLICES | {"stream_from_host": "model"},
)  # fmt: skip
CHUNKS: tuple[Any, ...] = (None, 4, 4, 8, "auto")


@dataclass(frozen=True)
class Session:
    """A model, the way in which it is trained, and programs that run one after the other.

    Attributes:
        model: Name of the model.
        frozen: Which of its weights are not trained.
        entry: "loop" for `MemoLoop`, "manual" or "automatic" for the optimization of a `LightningModule`.
        settings: Arguments of `MemoLoop` or `MemoStrategy`.
        programs: The programs.
        kinds: The kinds that each program has.
        left_at: Number of programs after which the loop is left, and a second one is entered.
    """

    model: str
    frozen: str
    entry: str
    settings: dict[str, Any]
    programs: tuple[Program, ...]
    kinds: tuple[frozenset[str], ...] = field(repr=False)
    left_at: int = 0

    def __str__(self) -> str:
        head = f"model={self.model!r} frozen={self.frozen!r} entry={self.entry!r} left_at={self.left_at}"
        text = [f"{head} settings={self.settings!r}"]
        for number, program in enumerate(self.programs):
            for step, lines in enumerate(program):
                text += [f"# program {number}, step {step}", *lines]
        return "\n".join(text)


@dataclass
class Writer:
    """Writes a step.

    Attributes:
        r: Where choices come from.
        model: Name of the model.
        entry: See `Session`.
        form: The arguments of the model: "mask", "positions", "embeddings". Layers are probed anew for others. With
            "loss only", the model gets labels and returns nothing but the loss, which is used; masks pad on the right.
        lines: What is written.
        ints: Expressions for the integers `[rows, tokens]` that the step has.
        floats: Expressions for the floating-point tensors `[rows, tokens, features]` that it has.
        returns_loss: Whether the model returns a loss.
        kinds: Names of the kinds that are written.
        count: Number of names that were made.
    """

    r: random.Random
    model: str
    entry: str
    form: frozenset[str]
    lines: list[str] = field(default_factory=list)
    ints: list[str] = field(default_factory=list)
    floats: list[str] = field(default_factory=list)
    returns_loss: bool = False
    kinds: set[str] = field(default_factory=set)
    count: int = 0

    @property
    def loss_only(self) -> bool:
        return "loss only" in self.form

    def one_of(self, *forms: str) -> str:
        return self.r.choice(forms)

    def any_float(self, *parts: str) -> str | None:
        """Return one of the floating-point tensors whose expression has one of these parts; any if none are given."""
        names = [e for e in self.floats if not parts or any(part in e for part in parts)]
        return self.r.choice(names) if names else None

    def size(self, least: int = 1) -> str:
        """Return arguments of `tokens`."""
        return f"{self.r.randint(1, 2)}, {self.r.randint(least, LONGEST)}, {self.r.randrange(99)}"

    def write(self, table: dict[str, Kind], weights: dict[str, float] | None = None) -> None:
        """Write one of the kinds that are possible now."""
        names = sorted(table, key=lambda name: self.r.random() / (weights or {}).get(name, 1.0))
        for name in names:
            written = table[name](self)
            if written is not None:
                self.lines += [written] if isinstance(written, str) else written
                self.kinds.add(name)
                return

    def untracked(self, statement: str, always: bool = False) -> str:
        """Return a statement that writes in place, possibly without gradients."""
        if always or self.r.random() < 0.4:
            return f"with torch.no_grad():\n    {statement}"
        return statement


Written = str | list[str] | None
Kind = Callable[[Writer], Written]


def _kinds(*functions: Kind) -> dict[str, Kind]:
    return {function.__name__.replace("_", " "): function for function in functions}


def _forms(text: str) -> tuple[str, ...]:
    """Return the lines of a text."""
    return tuple(textwrap.dedent(text).strip().split("\n"))


def _block(text: str) -> str:
    return textwrap.dedent(text).strip()


# ---- writes

INT_WRITES = _forms("""
    {e}.fill_(3)
    {e}[:, :1] = 1
    {e}[0] = 2
    {e}.copy_({e}.flip(1))
    {e}.narrow(1, 0, 1).fill_(1)
    {e}.view(-1)[:3] = 1
    {e}.add_(1).remainder_(50)
    torch._foreach_mul_([{e}], 0)
    {e}.zero_()
    torch.mul({e}, 0, out={e})
    {e}.masked_fill_({e} > 9, 4)
    {e}.t()[-1].fill_(1)
    {e}.detach().fill_(2)
    {e}.select(1, 0).zero_()
    {e}[:, -1:] += 0
    {e}.index_fill_(0, torch.tensor([0]), 1)
    {e}.clamp_(max=5)
    {e}.unbind(0)[0].fill_(1)
    next(iter({e})).fill_(1)
    {e}.resize_({e}.shape).zero_()
""")
INT_WRITES_THROUGH_DATA = ("{e}.data.fill_(1)", "{e}.numpy()[:] = 2")
FLOAT_WRITES = _forms("""
    {e}.mul_(0.5)
    {e}.add_(0.1)
    {e}.fill_(0.3)
    {e}.zero_()
    {e}.exp_()
    {e}[:, 0] = 0.0
    {e}[..., :3] *= 2
    {e}[0].neg_()
    {e}.clamp_(-0.2, 0.2)
    {e}.masked_fill_({e} > 0, 0.0)
    {e}.index_fill_(1, torch.tensor([0]), 0.5)
    {e}.sub_({e}.amax(-1, keepdim=True).detach())
    {e}.copy_({e}.detach().flip(1))
    {e}.detach().mul_(0.5)
    {e}.narrow(1, 0, 1).mul_(2)
    {e}.select(1, 0).zero_()
    {e}.transpose(0, 1)[0].mul_(2)
    {e}.swapaxes(0, 1).mul_(0.5)
    {e}.movedim(1, 0)[0] = 0.1
    {e}.mT.mul_(2)
    {e}.squeeze(0).mul_(2)
    {e}.diagonal().mul_(2)
    {e}.unfold(1, 1, 1).mul_(2)
    {e}.view(-1, {e}.shape[-1])[0] = 0.0
    {e}.flatten()[0] = 2.0
    {e}.unbind(1)[0].mul_(2)
    {e}.chunk(2, 1)[0].mul_(2)
    {e}.split(2, 1)[0].add_(1)
    F.relu({e}, inplace=True)
    F.dropout({e}, 0.0, training=True, inplace=True)
    torch._foreach_mul_([{e}], 2.0)
    torch.mul({e}.detach(), 2, out={e}.detach())
""")
FLOAT_WRITES_THROUGH_DATA = ("{e}.data.mul_(0.5)", "{e}.data[:, 0] = 0")
VIEWS = _forms("""
    {e}[:, :]
    {e}[...]
    {e}[:1]
    {e}[:, 1:]
    {e}.view_as({e})
    {e}.detach()
    {e}.narrow(0, 0, 1)
    {e}.narrow(1, 0, 1)
    {e}.unsqueeze(0)[0]
    {e}.expand(2, -1, -1, -1)[0]
""")
WRITES_OF_VIEWS = ("{e}.mul_(2)", "{e}[0] = 0.0", "{e}.add_(0.1)", "{e}.zero_()", "torch._foreach_mul_([{e}], 2.0)")
WEIGHT_WRITES = ("{e}.mul_(1.01)", "{e}.add_(0.01)", "{e}.copy_({e} * 0.9)", "torch._foreach_mul_([{e}], 0.9)")


def _ints_written(w: Writer, names: tuple[str, ...], forms: tuple[str, ...], always: bool = False) -> Written:
    present = [e for e in w.ints if e in names]
    return w.untracked(w.r.choice(forms).format(e=w.r.choice(present)), always) if present else None


def write_ids(w: Writer) -> Written:
    return _ints_written(w, ("ids", "labels"), INT_WRITES)


def write_mask_or_positions(w: Writer) -> Written:
    return _ints_written(w, ("mask", "positions"), INT_WRITES)


def write_ids_through_data(w: Writer) -> Written:
    return _ints_written(w, ("ids", "labels", "mask", "positions"), INT_WRITES_THROUGH_DATA, always=True)


def _floats_written(w: Writer, part: str) -> Written:
    e = w.any_float(part)
    return None if e is None else w.untracked(w.r.choice(FLOAT_WRITES).format(e=e))


def write_embeddings(w: Writer) -> Written:
    return _floats_written(w, "embeds")


def write_hidden(w: Writer) -> Written:
    return _floats_written(w, "hidden")


def write_logits(w: Writer) -> Written:
    return _floats_written(w, "logits")


def write_floats_through_data(w: Writer) -> Written:
    e = w.any_float()
    return None if e is None else w.untracked(w.r.choice(FLOAT_WRITES_THROUGH_DATA).format(e=e), always=True)


def write_view_of_logits(w: Writer) -> Written:
    e = w.any_float("logits")
    if e is None:
        return None
    name = _view_of(w, e)
    return [w.lines.pop(), w.untracked(w.r.choice(WRITES_OF_VIEWS).format(e=name))]


def write_weight(w: Writer) -> Written:
    return w.untracked(w.r.choice(WEIGHT_WRITES).format(e=_weight(w)), always=True)


def write_weight_through_data(w: Writer) -> Written:
    return f"{_weight(w)}.data.mul_(0.9)"


def write_gradient_of_output(w: Writer) -> Written:
    """A hook that changes a gradient in place."""
    e = w.any_float()
    return None if e is None else f"{e}.register_hook(lambda g: g.mul_(0.5).shape and None)"


def reuse_buffers(w: Writer) -> Written:
    """The next batch is copied into the buffers of this one."""
    return "\n".join(f"{e}.copy_(tokens(*{e}.shape, {w.r.randrange(99)}) % 2)" for e in w.ints) or None


# Plain training is no measure of values that are computed later, as autograd does not notice these writes.
UNTRACKED = frozenset({"write ids through data", "write floats through data", "write weight through data"})
# Nor does it notice writes to what the function of a checkpoint reads by a name, and reads again when it is recomputed.
READ_BY_NAME = frozenset({"write ids", "write mask or positions", "reuse buffers"})


def is_untracked(kinds: frozenset[str], text: str) -> bool:
    """Return whether a program has writes that plain training does not notice.

    Args:
        kinds: What the program does.
        text: The program. Under a dispatch mode, PyTorch's foreach operators do not count the writes of a tensor.
    """
    uncounted = "Dispatched()" in text and "_foreach_mul_" in text
    return uncounted or bool(kinds & UNTRACKED) or ("checkpointed model" in kinds and bool(kinds & READ_BY_NAME))


# ---- views and reads

READS = _forms("""
    {e}.narrow(1, 0, 1).sum()
    {e}.select(1, -1)
    {e}.transpose(1, 2).contiguous()
    {e}.permute(1, 0, 2)
    {e}.chunk(2, 1)[0]
    {e}.split(2, 1)[0]
    {e}.unbind(1)[0]
    {e}.expand(2, *{e}.shape)
    {e}.unsqueeze(0)
    {e}.view_as({e})
    {e}.flatten()
    {e}[..., :4]
    {e}[:, -1]
    {e}[:, ::2]
    {e}.roll(1, 1)
    {e}.index_select(1, torch.tensor([0]))
    {e}.gather(-1, torch.zeros_like({e}[..., :1], dtype=torch.long))
    torch.cat([{e}, {e}], 1)
    torch.stack([{e}, {e}])
    {e}.argmax(-1)
    ({e}.argmax(-1) == ids).float().mean()
    {e}.max(-1).values
    {e}.max()
    {e}.topk(3).values
    {e}.detach().cpu().sort(-1).values
    {e}.softmax(-1)
    {e}.log_softmax(-1)
    {e}.logsumexp(-1)
    {e}.exp().sum(-1)
    {e}.double().sum()
    {e}.sum((0, 1))
    {e}.mean(-1)
    {e}.var(-1)
    {e}.std()
    {e}.norm()
    {e}.cumsum(1)
    F.normalize({e}, dim=-1)
    {e} / {e}.detach().norm()
    {e} @ {e}.transpose(1, 2)
    torch.einsum('btv,btv->bt', {e}, {e})
    torch.where({e} > 0, {e}, 0.0)
    ({e} > 0).float()
    -{e}
    1 - {e}
    abs({e})
    {e} ** 2
    {e}.isnan().any()
    torch.isfinite({e}).all()
    {e}.clone()
    {e}.to(torch.bfloat16).float()
    copy.deepcopy({e}.detach())
    copy.copy({e}.detach())
    {e}.new_zeros(3)
    torch.zeros_like({e})
    torch.tensor({e}.shape)
    torch.utils.data.default_collate([{e}.detach()])
""")
FLAGS = _forms("""
    keep(torch.tensor({e}.requires_grad))
    keep(torch.tensor({e}.grad_fn is None))
    keep(torch.tensor({e}.is_leaf))
    keep(torch.tensor({e}._is_view()))
    keep(torch.tensor({e}.is_contiguous()))
    _ = {e}.requires_grad and {e}.register_hook(keep)
""")


def read(w: Writer) -> Written:
    e = w.any_float()
    return None if e is None else w.untracked(f"keep({w.r.choice(READS).format(e=e)})")


def read_as_numbers(w: Writer) -> Written:
    e, form = w.any_float(), w.one_of("torch.tensor({e}.tolist())", "torch.from_numpy({e}.detach().numpy().copy())")
    return None if e is None else f"keep({form.format(e=e)})"


def _view_of(w: Writer, e: str) -> str:
    stem = "hidden" if "hidden" in e else "logits" if "logits" in e else "embeds"
    w.count += 1
    w.lines.append(f"{stem}{w.count} = {w.r.choice(VIEWS).format(e=e)}")
    return f"{stem}{w.count}"


def view(w: Writer) -> Written:
    """A view that later lines may write into, or read."""
    e = w.any_float()
    if e is None:
        return None
    w.floats.append(_view_of(w, e))
    return []


def flags(w: Writer) -> Written:
    e = w.any_float()
    return None if e is None else w.r.choice(FLAGS).format(e=e)


# ---- hooks and modes

WEIGHTS = _forms("""
    head.weight
    embed.weight
    norm.weight
    next(layers[0].parameters())
    list(layers[-1].parameters())[2]
""")
OF_WEIGHTS = _forms("""
    register_hook(lambda g: keep(g))
    register_hook(lambda g: g.clamp(-1e-3, 1e-3))
    register_hook(lambda g: g * 2)
    register_post_accumulate_grad_hook(lambda p: keep(p.grad))
    register_post_accumulate_grad_hook(lambda p: p.grad.mul_(0.5).shape and None)
""")
AFTER_FORWARD = _forms("""
    keep(first(out))
    changed(out, lambda t: t * 0.5)
    changed(out, lambda t: t + 0.1)
    changed(out, lambda t: torch.cat([t[:, :-1], t[:, -1:] * 0.5], 1))
    first(out).mul_(0.5).shape and None
""")
BEFORE_FORWARD = _forms("""
    (a[0] * 0.5, *a[1:])
    (a[0] + 0.1, *a[1:])
    keep(a[0])
    a[0].mul_(0.5).shape and None
""")
AFTER_BACKWARD = ("keep(dy[0])", "tuple(None if g is None else g * 0.5 for g in dx)", "keep(dy[0].norm())")


def _weight(w: Writer) -> str:
    return w.r.choice(WEIGHTS)


def _module(w: Writer) -> str:
    return w.one_of("layers[0]", "layers[1]", "layers[-1]", "norm", "head", "embed")


def hook_of_gradient(w: Writer) -> Written:
    e = w.any_float()
    form = w.one_of("keep(g)", "g * 0.5", "keep(g.norm())")
    return None if e is None else f"{e}.register_hook(lambda g: {form})"


def retain_gradient(w: Writer) -> Written:
    e = w.any_float()
    return None if e is None else f"{e}.retain_grad()\nretained.append({e})"


def hook_of_weight(w: Writer) -> Written:
    weight = _weight(w)
    return f"if {weight}.requires_grad:\n    hooks.append({weight}.{w.r.choice(OF_WEIGHTS)})"


def hook_of_forward(w: Writer) -> Written:
    """A hook that looks at what a module returns, or changes it."""
    if w.r.random() < 0.15:
        return "hooks.append(model.register_forward_hook(lambda m, a, out: keep(out.logits)))"
    return f"hooks.append({_module(w)}.register_forward_hook(lambda m, a, out: {w.r.choice(AFTER_FORWARD)}))"


def hook_before_forward(w: Writer) -> Written:
    module = w.one_of("layers[0]", "layers[1]", "norm", "head")
    # PyTorch 2.13 crashes in `register_hook` on hidden states of which a hook of the head has changed a view in place.
    form = w.r.choice(BEFORE_FORWARD[: 3 if module == "head" else 4])
    return f"hooks.append({module}.register_forward_pre_hook(lambda m, a: {form} if a else None))"


def hook_of_backward(w: Writer) -> Written:
    return f"hooks.append({_module(w)}.register_full_backward_hook(lambda m, dx, dy: {w.r.choice(AFTER_BACKWARD)}))"


def hook_before_backward(w: Writer) -> Written:
    form = w.one_of("keep(dy[0])", "(dy[0] * 0.5, *dy[1:])")
    return f"hooks.append({_module(w)}.register_full_backward_pre_hook(lambda m, dy: {form}))"


def hook_of_inner_module(w: Writer) -> Written:
    """A hook that changes what a module inside of a layer returns."""
    module = f"list(layers[{w.one_of('0', '1', '-1')}].children())[{w.one_of('0', '1', '-1')}]"
    form = w.one_of("changed(out, lambda t: t * 0.5)", "changed(out, lambda t: t.tanh())")
    return f"hooks.append({module}.register_forward_hook(lambda m, a, out: {form}))"


SAVED = _forms("""
    saved_tensors_hooks(lambda t: t, lambda t: t)
    saved_tensors_hooks(lambda t: t.clone(), lambda t: t)
    saved_tensors_hooks(lambda t: (t, 1), lambda t: t[0])
    saved_tensors_hooks(lambda t: (t.double(), t.dtype), lambda t: t[0].to(t[1]))
    save_on_cpu(pin_memory=True)
""")
CHANGING_SAVED = _forms("""
    saved_tensors_hooks(lambda t: t * 2 if t.is_floating_point() else t, lambda t: t)
    saved_tensors_hooks(lambda t: t, lambda t: t * 0.5 if t.is_floating_point() else t)
    saved_tensors_hooks(lambda t: t.half().float() if t.is_floating_point() else t, lambda t: t)
    saved_tensors_hooks(lambda t: t + 0.1 * torch.rand_like(t) if t.is_floating_point() else t, lambda t: t)
    saved_tensors_hooks(lambda t: t * 0.5 if t.dim() == 4 else t, lambda t: t)
    saved_tensors_hooks(lambda t: keep(t.double().norm()) or t, lambda t: t)
""")


def around_saved_hooks(w: Writer) -> Written:
    return f"torch.autograd.graph.{w.r.choice(SAVED)}"


def around_changing_saved_hooks(w: Writer) -> Written:
    forms = CHANGING_SAVED[:-1] if w.loss_only else CHANGING_SAVED  # a slice runs before the others are refused
    return f"torch.autograd.graph.{w.r.choice(forms)}"


def around_function_mode(w: Writer) -> Written:
    return "Functions()"


def around_changing_function_mode(w: Writer) -> Written:
    return "ScaledLosses()"


def around_dispatch_mode(w: Writer) -> Written:
    return "Dispatched()"


def around_autocast(w: Writer) -> Written:
    # Without its cache, which in plain training keeps casts of weights that are changed within.
    return 'torch.autocast("cpu", torch.bfloat16, cache_enabled=False)'


def around_autocast_of_forward(w: Writer) -> Written:
    """The loss of logits in bf16 is computed outside."""
    return around_autocast(w)


def around_kernels(w: Writer) -> Written:
    return "torch.nn.attention.sdpa_kernel(torch.nn.attention.SDPBackend.MATH)"


def around_device(w: Writer) -> Written:
    return "torch.device('cpu')"


def around_anomaly(w: Writer) -> Written:
    return "torch.autograd.detect_anomaly(check_nan=False)"


# ---- other passes of the model


def evaluate(w: Writer) -> Written:
    guard = w.one_of("torch.no_grad()", "torch.inference_mode()")
    form = w.one_of("logits", "logits.argmax(-1)", "logits[:, -1]", "logits.softmax(-1)")
    lines = [f"with {guard}:\n    keep(model(input_ids=tokens({w.size()})).{form})"]
    return ["model.eval()", *lines, "model.train()"] if w.r.random() < 0.5 else lines


def evaluate_loss(w: Writer) -> Written:
    guard = w.one_of("torch.no_grad()", "torch.inference_mode()")
    call = "keep(model(input_ids=others, labels=others).loss)"
    return f"with {guard}:\n    others = tokens({w.size(2)})\n    {call}"


def evaluate_averaged(w: Writer) -> Written:
    """Averaged weights are swapped in for an evaluation, and out again."""
    evaluation = f"with torch.no_grad():\n    keep(model(input_ids=tokens({w.size()})).logits)"
    if w.r.random() < 0.5:
        return [
            "own = [p.data for p in model.parameters()]",
            "for p in model.parameters():\n    p.data = p.data * 0.9",
            evaluation,
            "for p, data in zip(model.parameters(), own):\n    p.data = data",
        ]
    return [
        "own = [p.detach().clone() for p in model.parameters()]",
        "with torch.no_grad():\n    for p in model.parameters():\n        p.mul_(0.9)",
        evaluation,
        "with torch.no_grad():\n    for p, data in zip(model.parameters(), own):\n        p.copy_(data)",
    ]


def load_weights(w: Writer) -> Written:
    return "model.load_state_dict({name: t.clone() * 0.95 for name, t in model.state_dict().items()})"


def forward_that_is_dropped(w: Writer) -> Written:
    if w.loss_only:
        return f"others = tokens({w.size(2)})\nmodel(input_ids=others, labels=others)"
    return f"model(input_ids=tokens({w.size()}))"


def second_model(w: Writer) -> Written:
    return [
        f"other(input_ids=tokens({w.size()})).logits.square().mean().backward()",
        "keep(other.head.weight.grad)",
        "other.zero_grad()",
    ]


def second_loop(w: Writer) -> Written:
    """A second model in a loop of its own, inside of that of the first."""
    if w.entry != "loop" or w.r.random() < 0.7:
        return None
    return _block(f"""
        with loop_of_other():
            for _ in range(2):
                other(input_ids=tokens({w.size()})).logits.square().mean().backward()
                keep(other.layers[0].qkv.weight.grad)
                other.zero_grad()
    """)


def copied_model(w: Writer) -> Written:
    return f"keep(copy.deepcopy(model)(input_ids=tokens({w.size()})).logits.detach())"


def interrupted(w: Writer) -> Written:
    """An exception in a forward that the loop catches."""
    if w.loss_only:
        return None
    return _block(f"""
        handle = {w.one_of("layers[1]", "norm", "layers[0]")}.register_forward_hook(fail)
        try:
            model(input_ids=tokens({w.size()}))
        except Interrupted:
            keep(torch.ones(1))
        finally:
            handle.remove()
    """)


def interrupted_backward(w: Writer) -> Written:
    if w.loss_only:
        return None
    weight = _weight(w)
    return _block(f"""
        if {weight}.requires_grad:
            handle = {weight}.register_hook(fail)
            try:
                model(input_ids=tokens({w.size()})).logits.square().mean().backward()
            except Interrupted:
                keep(torch.ones(1))
            finally:
                handle.remove()
            optimizer.zero_grad()
    """)


def freeze(w: Writer) -> Written:
    module = w.one_of("layers[0]", "layers[-1]", "embed", "head", "norm", "layers")
    return f"{module}.requires_grad_({w.r.choice((True, False))})"


def collect_garbage(w: Writer) -> Written:
    return "gc.collect()"


# ---- losses


def _logits(w: Writer) -> str:
    return w.r.choice([e for e in w.floats if e.startswith("out.logits")])


def loss_of_model(w: Writer) -> Written:
    return "loss = out.loss" if w.returns_loss else None


SHIFTED = _forms(f"""
    flatten(0, 1), labels[:, 1:].flatten()
    reshape(-1, {VOCABULARY}), labels[:, 1:].reshape(-1)
    transpose(1, 2), labels[:, 1:]
""")
OPTIONS = ("", "", ", weight=class_weights", ", label_smoothing=0.1", ", ignore_index=3", ", reduction='sum'")


def cross_entropy(w: Writer) -> Written:
    if "labels" not in w.ints:
        return None
    arguments = f"{_logits(w)}[:, :-1]{w.one_of('', '.float()')}.{w.r.choice(SHIFTED)}"
    if w.r.random() < 0.2:
        return f"loss = F.cross_entropy({arguments}, reduction='none').mean()"
    return f"loss = F.cross_entropy({arguments}{w.r.choice(OPTIONS)})"


def cross_entropy_of_views(w: Writer) -> Written:
    if "labels" not in w.ints:
        return None
    return [
        "shifted, targets = out.logits[..., :-1, :].contiguous(), labels[..., 1:].contiguous()",
        f"loss = nn.CrossEntropyLoss()(shifted.view(-1, {VOCABULARY}), targets.view(-1))",
    ]


def probable_targets(w: Writer) -> Written:
    return [
        "targets = teacher(input_ids=tokens(*ids.shape, 1)).logits.softmax(-1)",
        f"loss = F.cross_entropy({_logits(w)}.flatten(0, 1), targets.flatten(0, 1))",
    ]


LOG_PROBABILITIES = _forms("""
    loss = -{e}[:, :-1].log_softmax(-1).gather(-1, ids[:, 1:, None]).mean()
    loss = -(F.log_softmax({e}, -1).gather(-1, ids[..., None]).squeeze(-1) * 0.5).exp().mean()
    loss = ({e}.logsumexp(-1) - {e}.gather(-1, ids[..., None]).squeeze(-1)).mean()
    loss = -torch.distributions.Categorical(logits={e}).log_prob(ids).mean()
""")


def log_probabilities(w: Writer) -> Written:
    return w.r.choice(LOG_PROBABILITIES).format(e=_logits(w))


def entropy(w: Writer) -> Written:
    return ["log_p = out.logits.log_softmax(-1)", "loss = (log_p.exp() * log_p).sum(-1).mean()"]


def z_loss(w: Writer) -> Written:
    return "loss = 0.1 * out.logits.logsumexp(-1).square().mean()"


def distillation(w: Writer) -> Written:
    return [
        "with torch.no_grad():\n    targets = teacher(input_ids=tokens(*ids.shape, 1)).logits",
        "loss = F.kl_div(out.logits.log_softmax(-1), targets.softmax(-1), reduction='batchmean')",
    ]


OF_LOGITS = _forms("""
    {e}.square().mean()
    {e}[:, -1].square().mean()
    {e}[..., 5].mean()
    {e}.mean().square()
    {e}.mean(1).square().sum()
    {e}.tanh().sum()
    ({e} * {e}).mean()
    {e}.flatten().norm()
    {e}[:1].sum()
    torch.stack([t.sum() for t in {e}]).square().sum()
""")
OF_HIDDEN = _forms("""
    value({e}).square().mean()
    value({e}.mean(1)).sum()
    value(F.dropout({e}, 0.0, inplace=True)).mean()
    {e}.square().mean()
    {e}[:, -1].square().sum()
    ({e} * {e}.detach()).mean()
""")
IN_CHECKPOINTS = _forms(f"""
    lambda t, y: F.cross_entropy(t.reshape(-1, {VOCABULARY}), y.reshape(-1))
    lambda t, y: -t.log_softmax(-1).gather(-1, y[..., None].clamp(min=0)).mean()
""")


def of_logits(w: Writer) -> Written:
    return f"loss = {w.r.choice(OF_LOGITS).format(e=_logits(w))}"


def of_hidden(w: Writer) -> Written:
    e = w.any_float("hidden")
    return None if e is None else f"loss = {w.r.choice(OF_HIDDEN).format(e=e)}"


def checkpointed(w: Writer) -> Written:
    if "labels" not in w.ints:
        return None
    function, reentrant = w.r.choice(IN_CHECKPOINTS), w.r.choice((True, False))
    return f"loss = checkpoint({function}, out.logits, labels, use_reentrant={reentrant})"


def checkpointed_head(w: Writer) -> Written:
    e, reentrant = w.any_float("hidden"), w.r.choice((True, False))
    return (
        None
        if e is None
        else f"loss = checkpoint(lambda h: head(norm(h)), {e}, use_reentrant={reentrant}).exp().mean()"
    )


def checkpointed_logits(w: Writer) -> Written:
    """A checkpointed function that needs all logits at once."""
    return f"loss = checkpoint(lambda t: t.square().mean(), out.logits, use_reentrant={w.r.choice((True, False))})"


def own_function(w: Writer) -> Written:
    """A loss by an autograd function of the user's."""
    return "loss = Squares.apply(out.logits)"


# ---- backwards


def usual_backward(w: Writer) -> Written:
    return "backward(loss)"


def gradient_then_backward(w: Writer) -> Written:
    """The gradient of one weight, as for adaptive weights of losses, and then a backward."""
    # In slices of the model, gradients of weights in layers are no part of the graph of the loss.
    weight = w.one_of("norm.weight", "head.weight") if w.loss_only else _weight(w)
    gradient = _block(f"""
        if {weight}.requires_grad:
            g, = torch.autograd.grad(loss, [{weight}], retain_graph=True, allow_unused=True)
            if g is not None:
                keep(g)
                loss = loss * (1 + g.norm()).detach()
    """)
    return [gradient, "backward(loss)"]


def gradient_of_input(w: Writer) -> Written:
    e = w.any_float()
    return None if e is None or w.entry != "loop" else f"keep(torch.autograd.grad(loss, [{e}])[0])"


def gradient_of_weights(w: Writer) -> Written:
    if w.entry != "loop":
        return None
    return _block("""
        trained = [p for p in model.parameters() if p.requires_grad]
        for g in torch.autograd.grad(loss, trained, allow_unused=True):
            if g is not None:
                keep(g)
    """)


def backward_into_inputs(w: Writer) -> Written:
    weight = _weight(w)
    return f"if {weight}.requires_grad:\n    loss.backward(inputs=[{weight}])" if w.entry == "loop" else None


def two_backwards(w: Writer) -> Written:
    return ["backward(loss, retain_graph=True)", "backward(loss)"]


def backward_of_sum(w: Writer) -> Written:
    if w.loss_only:
        return None
    return f"backward(loss + 0.1 * {w.any_float() or 'out.logits'}.square().mean())"


def backward_of_two(w: Writer) -> Written:
    if w.entry != "loop":
        return None
    return "torch.autograd.backward([loss, 0.1 * out.logits.square().mean()])"


def two_losses(w: Writer) -> Written:
    """Two forwards, and two backwards or one."""
    if w.loss_only:
        return None
    forward = f"second = model(input_ids=tokens({w.size()})).logits.square().mean()"
    orders = ["backward(loss)", "backward(second)"], ["backward(second)", "backward(loss)"], ["backward(loss + second)"]
    return [forward, *w.r.choice(orders)]


def backward_in_parts(w: Writer) -> Written:
    """The head by itself, and then the model below."""
    if "out.hidden_states[-1]" not in w.floats:
        return None
    return [
        "h = out.hidden_states[-1].detach().requires_grad_()",
        "backward(head(h).square().mean())",
        "if out.hidden_states[-1].requires_grad:\n    out.hidden_states[-1].backward(h.grad)",
    ]


def no_backward(w: Writer) -> Written:
    return "keep(loss)"


def deleted_before(w: Writer) -> Written:
    return ["del out, loss", "gc.collect()"]


WRITES = _kinds(
    write_ids, write_mask_or_positions, write_ids_through_data, write_embeddings, write_hidden, write_logits,
    write_floats_through_data, write_view_of_logits, write_weight, write_weight_through_data,
    write_gradient_of_output, reuse_buffers,
)  # fmt: skip
LOOKS = _kinds(read, read_as_numbers, view, flags, hook_of_gradient, retain_gradient)
HOOKS = _kinds(
    hook_of_weight, hook_of_forward, hook_before_forward, hook_of_backward, hook_before_backward, hook_of_inner_module
)
AROUND = _kinds(
    around_saved_hooks, around_changing_saved_hooks, around_function_mode, around_changing_function_mode,
    around_dispatch_mode, around_autocast, around_autocast_of_forward, around_kernels, around_device, around_anomaly,
)  # fmt: skip
SAVED_HOOKS = {name: kind for name, kind in AROUND.items() if "saved hooks" in name}
PASSES = _kinds(
    evaluate, evaluate_loss, evaluate_averaged, forward_that_is_dropped, second_model, second_loop, copied_model,
    interrupted, collect_garbage,
)  # fmt: skip
BETWEEN = PASSES | _kinds(load_weights, freeze, interrupted_backward)
LOSSES = _kinds(
    loss_of_model, cross_entropy, cross_entropy_of_views, probable_targets, log_probabilities, entropy, z_loss,
    distillation, of_logits, of_hidden, checkpointed, checkpointed_head,
    checkpointed_logits, own_function,
)  # fmt: skip
BACKWARDS = _kinds(
    usual_backward, gradient_then_backward, gradient_of_input, gradient_of_weights, backward_into_inputs,
    two_backwards, backward_of_sum, backward_of_two, two_losses, backward_in_parts, no_backward, deleted_before,
)  # fmt: skip
LIKELY_LOSSES = {"loss of model": 4.0, "cross entropy": 3.0}
LIKELY_BACKWARDS = {"usual backward": 12.0}


# ---- steps


def _write_batch(w: Writer) -> None:
    rows, length = w.r.randint(1, 3), w.r.choice((LONGEST, w.r.randint(2, LONGEST), w.r.randint(1, LONGEST)))
    if w.r.random() < 0.05:
        length = 1
    is_empty = w.r.random() < 0.06
    if is_empty:
        rows, length = w.r.choice(((0, length), (rows, 0)))
        w.kinds.add("empty batch")
    w.lines.append(f"ids = tokens({rows}, {length}, {w.r.randrange(99)})")
    w.ints.append("ids")
    if w.loss_only or w.r.random() < 0.7:
        w.ints.append("labels")
        w.lines.append("labels = ids.clone()")
        if w.r.random() < 0.3:
            w.lines.append(f"labels[:, :{w.r.randint(1, 3)}] = -100")
    if "mask" in w.form and not is_empty:
        w.ints.append("mask")
        w.lines.append("mask = torch.ones_like(ids)")
        right = f"-{w.r.randint(1, 3)}:"
        padded = w.one_of("", right, right if w.loss_only else f":{w.r.randint(1, 3)}")
        if padded:
            w.lines.append(f"mask[{w.one_of(':', '-1:')}, {padded}] = 0")
            if w.loss_only:
                w.lines.append("labels[mask == 0] = -100")
    if "positions" in w.form:
        w.ints.append("positions")
        w.lines.append("positions = torch.arange(ids.shape[1])[None].repeat(ids.shape[0], 1)")


def _write_forward(w: Writer) -> None:
    arguments = ["input_ids=ids"]
    if "embeddings" in w.form:
        w.lines.append(f"embeds = embed(ids){'.detach()' * w.loss_only}")
        if w.r.random() < 0.3 and not w.loss_only:
            w.lines.append("embeds = embeds.detach().requires_grad_()")
        arguments = ["inputs_embeds=embeds"]
        w.floats.append("embeds")
        if w.r.random() < 0.6:
            w.write(WRITES | LOOKS, {"write embeddings": 9.0})
    arguments += [
        f"{name}={e}"
        for e, name in (("labels", "labels"), ("mask", "attention_mask"), ("positions", "position_ids"))
        if e in w.ints
    ]
    if w.r.random() < 0.5 and not w.loss_only:
        arguments.append("output_hidden_states=True")
        w.floats += ["out.hidden_states[0]", "out.hidden_states[1]", "out.hidden_states[-1]"]
    call = f"model({', '.join(arguments)})"
    reentrant = False
    if w.r.random() < 0.02:
        w.kinds.add("checkpointed model")
        whole = w.loss_only or "output_hidden_states=True" in arguments
        reentrant = "embeds" in w.floats and not whole and w.r.random() < 0.7
        if reentrant:
            call = call.replace("inputs_embeds=embeds", "inputs_embeds=e")
            call = f"Output(checkpoint(lambda e: {call}.logits, embeds, use_reentrant=True))"
        else:
            call = f"checkpoint(lambda: {call}, use_reentrant=False)"
    w.lines.append(f"out = {call}")
    w.floats += ["out.logits"] * 2 * (not w.loss_only)
    w.returns_loss = "labels" in w.ints and not reentrant


def _write_around(w: Writer, begin: int, end: int, table: dict[str, Kind]) -> None:
    """Put a context around some lines."""
    written = len(w.lines)
    w.write(table)
    if len(w.lines) > written:
        context = w.lines.pop()
        w.lines[begin:end] = [f"with {context}:\n{textwrap.indent(chr(10).join(w.lines[begin:end]), '    ')}"]


def _write_step(w: Writer) -> None:
    if w.r.random() < 0.25:
        w.write(BETWEEN)
    _write_batch(w)
    begin = len(w.lines)
    if w.r.random() < (0.05 if w.loss_only else 0.2):  # which slices refuse
        w.write(HOOKS)
    _write_forward(w)
    for _ in range(w.r.choice((0, 1, 1, 2))):
        w.write(WRITES | LOOKS | PASSES)
    end_of_forward = len(w.lines)
    if w.loss_only:
        w.lines.append("loss = out.loss")
    else:
        w.write(LOSSES, LIKELY_LOSSES)
    if w.r.random() < 0.25 and not w.loss_only:
        w.lines.append("total = loss")
        w.write(LOSSES)
        w.lines.append("loss = total + 0.3 * loss")
    if w.r.random() < 0.2:
        if w.r.random() < 0.5:
            around = {name: kind for name, kind in AROUND.items() if name != "around autocast"}
            _write_around(w, begin, end_of_forward, around)
        else:
            _write_around(w, begin, len(w.lines), AROUND)
    elif w.r.random() < 0.03:
        _write_around(w, end_of_forward, len(w.lines), SAVED_HOOKS)
    for _ in range(w.r.choice((0, 0, 1, 2))):
        w.write(WRITES | LOOKS | PASSES)
    w.lines.append("keep(loss)")
    if w.entry == "automatic":
        return
    begin = len(w.lines)
    w.write(BACKWARDS, LIKELY_BACKWARDS)
    if w.r.random() < 0.03:
        _write_around(w, begin, len(w.lines), SAVED_HOOKS)
    if w.r.random() < 0.15:
        w.write(WRITES | LOOKS | PASSES)
    if w.r.random() < 0.85:
        w.lines.append("step()")


def draw(seed: int, raises: Callable[[Session], bool]) -> Session:
    """Return the session of a seed.

    Args:
        seed: The seed.
        raises: Tells whether the program of a session raises an exception in plain PyTorch. Few of these are drawn.
    """
    r = random.Random(seed)
    settings = dict(PLANS[seed % len(PLANS)])
    # Fits of Lightning take longer, and a loop does not run the whole model in slices.
    fits = settings.get("stream_from_host") == "model" or r.random() < 0.1
    entry = r.choice(("manual", "automatic")) if fits else "loop"
    settings["loss_chunk_tokens"] = r.choice(CHUNKS)
    model, frozen, form = r.choice(MODELS), r.choice(FROZEN), set[str]()
    if settings.get("stream_from_host") == "model":
        form.add("loss only")
        model = r.choice([name for name in MODELS if name != "blocks"])
    if model != "blocks":
        form |= {"mask"} if r.random() < 0.4 else set()
        form |= {"positions"} if r.random() < 0.25 and model != "gpt2" else set()
    form |= {"embeddings"} if r.random() < 0.3 else set()
    count = r.randint(14, 24) if entry == "loop" else 12 if settings.get("stream_from_host") == "model" else 2
    programs = list[tuple[Program, frozenset[str]]]()
    while len(programs) < count:
        drawn = _draw_program(Writer(r, model, entry, frozenset(form)))
        allowed = r.random() < 0.1
        if allowed or not raises(Session(model, frozen, entry, settings, drawn[:1], drawn[1:])):
            programs.append(drawn)
    left_at = count // 2 if seed % 4 == 1 else 0
    return Session(
        model, frozen, entry, settings, tuple(p for p, _ in programs), tuple(k for _, k in programs), left_at
    )


def _draw_program(like: Writer) -> tuple[Program, frozenset[str]]:
    r, steps, kinds = like.r, list[Step](), set[str]()
    for _ in range(r.choice((1, 1, 2, 2, 3)) if like.entry == "loop" else 3):
        w = replace(like, lines=[], ints=[], floats=[], kinds=set())
        _write_step(w)
        steps.append(tuple(w.lines))
        kinds |= w.kinds
    return tuple(steps), frozenset(kinds)
