"""A plan's step as plain PyTorch code that imports no autofit."""

from __future__ import annotations

import re
from textwrap import indent

from autofit.candidate import Candidate
from autofit.errors import ConfigError
from autofit.kept_operators import KEPT_OPERATORS
from autofit.loss_facts import LossFacts
from autofit.recipe_parts import (
    DATA_PARALLEL,
    LIGHT_SPLIT,
    OFFLOADED,
    RECOMPUTE_BLOCKS,
    RECOMPUTED,
    SELECTIVELY_RECOMPUTED,
    SIZES,
    SPLIT_BY_PATH,
    TO_DEVICE,
)

_SLICE = re.compile(r"^(?P<parent>[^\[\]]*)\[(?P<start>\d+):(?P<stop>\d+)\]$")


def to_python(candidate: Candidate, *, target_batch: int, facts: LossFacts | None = None) -> str:
    """Code of a module with `train_step(model, optimizer, batch, …)`, and `recompute_blocks(model)` if any are.

    `facts` says how batches are cut and weighted; what was passed to `tune` as a callable, the code takes as an
    argument. Raises ConfigError when the batch is a list of samples, which the code does not cut.
    """
    facts = facts or LossFacts()
    parts = [
        _head(candidate, target_batch, facts),
        _split(facts),
        SIZES,
        _loss(facts),
        _weight(facts),
        TO_DEVICE,
        _together(candidate),
        _recompute(candidate),
        _step(candidate, facts),
    ]
    return "\n\n\n".join(part.strip("\n") for part in parts if part) + "\n"


def _head(candidate: Candidate, target_batch: int, facts: LossFacts) -> str:
    modes = set(candidate.checkpointing.modes.values())
    tools = []
    contexts = ["contextmanager", "nullcontext"] if modes & {"full", "selective"} else []
    if contexts or candidate.parallelism.mode == "ddp":
        tools.append(f"from contextlib import {', '.join(contexts or ['nullcontext'])}")
    if modes:
        tools.append("from functools import partial")
    checkpoints = [
        *(["CheckpointPolicy"] if "selective" in modes else []),
        *(["checkpoint"] if modes & {"full", "selective"} else []),
        *(["create_selective_checkpoint_contexts"] if "selective" in modes else []),
    ]
    imports = "\n".join(tools) + "\n\n" * bool(tools) + "import torch\n"
    if checkpoints:
        imports += f"from torch.utils.checkpoint import {', '.join(checkpoints)}\n"
    calls = ["recompute_blocks(model) once"] if modes else []
    calls += ["model = together(model)"] if candidate.parallelism.mode == "ddp" else []
    first = f"Call {', '.join(calls)}, then train_step" if calls else "Call train_step"
    whose = " with a rank's share of it" if candidate.parallelism.mode == "ddp" else ""
    return f'''"""{target_batch} samples per optimizer step: {candidate}.

{first} for every batch{whose}. {_about_weights(facts)}
"""

{imports}
MICRO_BATCH_SIZE = {candidate.micro_batch_size}
ACCUMULATION_STEPS = {candidate.accumulation_steps}
'''


def _about_weights(facts: LossFacts) -> str:
    return {
        "samples": "The loss must be a mean over samples.",
        "sum": "The loss must be a sum over samples.",
        "targets": f"The loss must be a mean over the targets that are not {facts.ignore_index}.",
        "own": "The loss must be a mean over what loss_weight(batch) counts.",
    }[facts.weighting]


def _split(facts: LossFacts) -> str:
    splits = facts.splits
    if any(split == "list" for split in splits.values()):
        raise ConfigError(
            "to_python() cannot write code for a batch that is cut as a list of samples (batch_dims='list'). Collate "
            "samples into tensors, or train with plan.train_step."
        )
    if all(split == 0 for split in splits.values()):
        return LIGHT_SPLIT
    return SPLIT_BY_PATH.format(dims=splits)


def _loss(facts: LossFacts) -> str:
    if "compute_loss" in facts.given:
        return ""
    if "loss_fn" in facts.given:
        return '''
def loss_of(model, batch, loss_fn):
    """(inputs..., target) or a dict with the target under one of its usual names: loss_fn(output, target)."""
    if isinstance(batch, dict):
        key = next(key for key in ("labels", "label", "targets", "target", "y") if key in batch)
        return loss_fn(model(**{name: value for name, value in batch.items() if name != key}), batch[key])
    *inputs, target = batch
    return loss_fn(model(*inputs), target)
'''
    return '''
def loss_of(model, batch, loss_fn):
    """(inputs..., target) goes through loss_fn; a dict goes to the model, whose output has the loss."""
    if isinstance(batch, dict):
        return model(**batch).loss
    *inputs, target = batch
    return loss_fn(model(*inputs), target)
'''


def _weight(facts: LossFacts) -> str:
    if facts.weighting != "targets":
        return ""
    shifted = "\n    target = target[..., 1:]  # the first position is not predicted" if facts.shifted else ""
    weighted = facts.class_weights
    counted = "loss_fn.weight[target.where(counted, 0)].mul(counted).sum()" if weighted else "counted.sum()"
    what = "class weights of the targets" if weighted else "targets"
    return f'''
def weight_of(batch, loss_fn):
    """What the loss is a mean over: {what} that are not {facts.ignore_index}."""
    target = batch["labels"] if isinstance(batch, dict) else batch[-1]{shifted}
    counted = target != {facts.ignore_index}
    return float({counted})
'''


def _recompute(candidate: Candidate) -> str:
    modes = candidate.checkpointing.modes
    if not modes:
        return ""
    blocks: dict[str, str] = {}
    runs: dict[str, list[tuple[int, int, str]]] = {}
    for name, mode in modes.items():
        match = _SLICE.match(name)
        if match:
            runs.setdefault(match["parent"], []).append((int(match["start"]), int(match["stop"]), mode))
        else:
            blocks[name] = mode
    for cuts in runs.values():
        cuts.sort()
    used = set(modes.values())
    parts = [RECOMPUTED if used & {"full", "selective"} else ""]
    parts += [SELECTIVELY_RECOMPUTED.format(kept=KEPT_OPERATORS)] if "selective" in used else []
    parts += [OFFLOADED] if "offload" in used else []
    ways = {"full": "recomputed", "selective": "selectively_recomputed", "offload": "offloaded"}
    table = ", ".join(f'"{mode}": {way}' for mode, way in ways.items() if mode in used)
    parts.append(RECOMPUTE_BLOCKS.format(blocks=blocks, runs=runs, ways="{" + table + "}"))
    return "\n\n\n".join(part.strip("\n") for part in parts if part)


def _together(candidate: Candidate) -> str:
    parallelism = candidate.parallelism
    if parallelism.mode == "none":
        return ""
    static = parallelism.static_graph and candidate.accumulation_steps == 1
    return DATA_PARALLEL.format(unused=parallelism.find_unused_parameters and not static, static=static)


def _loop(candidate: Candidate, facts: LossFacts, skipping: str, body: str) -> tuple[str, str]:
    """Code before the first micro-batch, and of all of them; where there are ranks, the last exchanges gradients."""
    if candidate.parallelism.mode == "none":
        return "", f"    for part, weight in zip(parts, weights):\n{skipping}{body}"
    counted = "    counted_parts = [(part, weight) for part, weight in zip(parts, weights) if weight]\n"
    begin = f"{counted}    parts, weights = zip(*counted_parts)\n" if skipping else ""
    ranks = "torch.distributed.get_world_size()"
    begin += f"    share = {ranks if facts.weighting == 'sum' else 'share_of(sum(weights), device)'}\n"
    exchanging = "        with nullcontext() if part is parts[-1] else model.no_sync():\n"
    return begin, f"    for part, weight in zip(parts, weights):\n{exchanging}{indent(body, '    ')}"


def _step(candidate: Candidate, facts: LossFacts) -> str:
    precision = candidate.precision
    setup, forward, deeper = "", "", ""
    scaled, stepped, begin = "loss.backward()", "optimizer.step()", ""
    if precision in ("bfloat16", "float16"):
        forward = f"        with torch.autocast(device.type, dtype=torch.{precision}):\n"
        deeper = "    "
    else:
        mode = "tf32" if precision == "tf32" else "ieee"
        setup = (
            f'torch.backends.cuda.matmul.fp32_precision = "{mode}"\n'
            f'torch.backends.cudnn.conv.fp32_precision = "{mode}"\n'
            f'torch.backends.cudnn.rnn.fp32_precision = "{mode}"\n\n\n'
        )
    if precision == "float16":
        setup = "scaler = None\n\n\n"
        scaled, stepped = "scaler.scale(loss).backward()", "scaler.step(optimizer)\n    scaler.update()"
        begin = "    global scaler\n    scaler = scaler or torch.amp.GradScaler(device.type)\n"
    arguments, loss = _arguments(facts), _called(facts)
    weights, skipping, factor = _factors(facts)
    clear = "optimizer.zero_grad(set_to_none=True)"
    if candidate.parallelism.mode == "ddp":
        factor = f"({factor} * share)"
        if candidate.accumulation_steps > 1:  # they stay in the buckets that are exchanged
            clear = "optimizer.zero_grad(set_to_none=False)"
    body = f"""        part = to(part, device)
{forward}        {deeper}loss = {loss}
        loss = loss * {factor}
        {scaled}
        total = total + loss.detach()
"""
    shared, loop = _loop(candidate, facts, skipping, body)
    return f'''{setup}def train_step(model, optimizer, batch{arguments}):
    """One optimizer step; returns the loss of the whole batch."""
    device = next(model.parameters()).device
{begin}    samples = samples_of(batch)
    sizes = sizes_of(samples)
    parts = split(batch, sizes)
{weights}{shared}    {clear}
    total = 0.0
{loop}    {stepped}
    {clear}
    return total
'''


def _arguments(facts: LossFacts) -> str:
    if "compute_loss" in facts.given:
        loss = ", compute_loss"
    elif "loss_fn" in facts.given:
        loss = ", loss_fn"
    elif facts.default_loss == "cross_entropy" and facts.ignore_index != -100:
        ignoring = f"torch.nn.CrossEntropyLoss(ignore_index={facts.ignore_index})"
        loss = f", loss_fn={ignoring}"
    else:
        loss = f", loss_fn=torch.nn.functional.{facts.default_loss or 'cross_entropy'}"
    if facts.weighting == "own":
        return f", {loss[2:]}, loss_weight" if "=" not in loss else f", loss_weight{loss}"
    return loss


def _called(facts: LossFacts) -> str:
    return "compute_loss(model, part)" if "compute_loss" in facts.given else "loss_of(model, part, loss_fn)"


def _factors(facts: LossFacts) -> tuple[str, str, str]:
    """Code of the weights of the parts, of skipping those without any, and of a loss's factor."""
    if facts.weighting == "samples":
        return "    weights = sizes\n", "", "(weight / samples)"
    if facts.weighting == "sum":
        return "    weights = [1.0] * len(parts)\n", "", "weight"
    weight = "loss_weight(part)" if facts.weighting == "own" else "weight_of(part, loss_fn)"
    weights = f"    weights = [float({weight}) for part in parts]\n    counted = sum(weights)\n"
    skipping = "        if not weight:\n            continue  # every target is ignored: its mean is undefined\n"
    return weights, skipping, "(weight / counted)"
