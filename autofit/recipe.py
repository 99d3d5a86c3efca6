"""A plan's step as plain PyTorch code that imports no autofit."""

from __future__ import annotations

import re

from autofit.candidate import Candidate

_SLICE = re.compile(r"^(?P<parent>[^\[\]]*)\[(?P<start>\d+):(?P<stop>\d+)\]$")


def to_python(candidate: Candidate, *, target_batch: int) -> str:
    """Code of a module with `train_step(model, optimizer, batch, loss_fn)`, and `recompute_blocks(model)` if any are.

    Micro-batches weigh by their samples, as a loss that is a mean over samples needs it.
    """
    recomputing = candidate.checkpointing.mode != "none"
    parts = [
        _head(candidate, target_batch),
        _SPLIT,
        _recompute(candidate) if recomputing else "",
        _step(candidate),
    ]
    return "\n\n\n".join(part.strip("\n") for part in parts if part) + "\n"


def _head(candidate: Candidate, target_batch: int) -> str:
    recomputing = candidate.checkpointing.mode != "none"
    tools = (
        "from contextlib import contextmanager, nullcontext\nfrom functools import partial\n\n" if recomputing else ""
    )
    use = "from torch.utils.checkpoint import checkpoint\n" if recomputing else ""
    first = "Call recompute_blocks(model) once, then train_step" if recomputing else "Call train_step"
    return f'''"""{target_batch} samples per optimizer step: {candidate}.

{first} for every batch. The loss must be a mean over samples.
"""

{tools}import torch
{use}
MICRO_BATCH_SIZE = {candidate.micro_batch_size}
ACCUMULATION_STEPS = {candidate.accumulation_steps}
'''


_SPLIT = '''
def split(batch, sizes):
    """A tensor, or a tuple, list or dict of them, as consecutive parts of so many samples each."""
    if isinstance(batch, torch.Tensor):
        return torch.split(batch, sizes)
    if hasattr(batch, "items"):
        parts = {key: split(value, sizes) for key, value in batch.items()}
        return [{key: part[i] for key, part in parts.items()} for i in range(len(sizes))]
    parts = [split(value, sizes) for value in batch]
    return [tuple(part[i] for part in parts) for i in range(len(sizes))]


def sizes_of(samples):
    """Micro-batches of one batch: as even as possible, none above MICRO_BATCH_SIZE."""
    count = ACCUMULATION_STEPS
    if count > samples or -(-samples // count) != MICRO_BATCH_SIZE:
        count = -(-samples // MICRO_BATCH_SIZE)
    small, larger = divmod(samples, count)
    return [small + 1] * larger + [small] * (count - larger)


def loss_of(model, batch, loss_fn):
    """(inputs..., target) goes through loss_fn; a dict goes to the model, whose output has the loss."""
    if isinstance(batch, dict):
        return model(**batch).loss
    *inputs, target = batch
    return loss_fn(model(*inputs), target)


def to(batch, device):
    if isinstance(batch, torch.Tensor):
        return batch.to(device, non_blocking=True)
    if isinstance(batch, dict):
        return {key: to(value, device) for key, value in batch.items()}
    return tuple(to(value, device) for value in batch)
'''

_RECOMPUTE = '''
BLOCKS = {blocks}
RUNS = {runs}  # of layers of a Sequential: from, up to


@contextmanager
def own_buffers(modules):
    """Recomputing must not update BatchNorm's running statistics a second time."""
    kept = [(m, name, b) for top in modules for m in top.modules() for name, b in m._buffers.items() if b is not None]
    for module, name, buffer in kept:
        module._buffers[name] = buffer.clone()
    try:
        yield
    finally:
        for module, name, buffer in kept:
            module._buffers[name] = buffer


def recomputed(forward, modules):
    contexts = lambda: (nullcontext(), own_buffers(modules))
    return partial(checkpoint, forward, use_reentrant=False, context_fn=contexts)


def in_turn(steps, x):
    for step in steps:
        x = step(x)
    return x


def recompute_blocks(model):
    """From now on these blocks forget their activations in forward and recompute them in backward."""
    for name in BLOCKS:
        block = model.get_submodule(name)
        block.forward = recomputed(block.forward, [block])
    for name, runs in RUNS.items():
        sequential, steps, position = model.get_submodule(name), [], 0
        layers = list(sequential)
        for start, stop in runs:
            steps += layers[position:start]
            steps.append(recomputed(partial(in_turn, layers[start:stop]), layers[start:stop]))
            position = stop
        sequential.forward = partial(in_turn, steps + layers[position:])
    for module in model.modules():
        if hasattr(getattr(module, "config", None), "use_cache"):
            module.config.use_cache = False  # a cache would be filled a second time
'''


def _recompute(candidate: Candidate) -> str:
    blocks: list[str] = []
    runs: dict[str, list[tuple[int, int]]] = {}
    for name in candidate.checkpointing.blocks:
        match = _SLICE.match(name)
        if match:
            runs.setdefault(match["parent"], []).append((int(match["start"]), int(match["stop"])))
        else:
            blocks.append(name)
    return _RECOMPUTE.format(blocks=blocks, runs=runs)


def _step(candidate: Candidate) -> str:
    precision = candidate.precision
    setup, forward, scaled, stepped = "", "", "loss.backward()", "optimizer.step()"
    indent = ""
    if precision in ("bfloat16", "float16"):
        forward = f"        with torch.autocast(device.type, dtype=torch.{precision}):\n"
        indent = "    "
    if precision == "float16":
        setup = "\n\nscaler = None\n"
        scaled, stepped = "scaler.scale(loss).backward()", "scaler.step(optimizer)\n    scaler.update()"
    else:
        mode = "tf32" if precision == "tf32" else "ieee"
        if not indent:
            setup = (
                f'\n\ntorch.backends.cuda.matmul.fp32_precision = "{mode}"\n'
                f'torch.backends.cudnn.conv.fp32_precision = "{mode}"\n'
                f'torch.backends.cudnn.rnn.fp32_precision = "{mode}"\n'
            )
    begin = (
        "    global scaler\n    scaler = scaler or torch.amp.GradScaler(device.type)\n"
        if precision == "float16"
        else ""
    )
    return f'''{setup}
def train_step(model, optimizer, batch, loss_fn=torch.nn.functional.cross_entropy):
    """One optimizer step; returns the loss of the whole batch."""
    device = next(model.parameters()).device
{begin}    first = next(iter(batch.values())) if hasattr(batch, "items") else batch[0]
    sizes = sizes_of(len(first))
    optimizer.zero_grad(set_to_none=True)
    total = 0.0
    for part, size in zip(split(batch, sizes), sizes):
        part = to(part, device)
{forward}        {indent}loss = loss_of(model, part, loss_fn)
        loss = loss * (size / len(first))
        {scaled}
        total = total + loss.detach()
    {stepped}
    optimizer.zero_grad(set_to_none=True)
    return total
'''
