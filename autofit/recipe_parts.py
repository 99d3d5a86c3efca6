"""Pieces of plain PyTorch code that `recipe` puts together."""

from __future__ import annotations

LIGHT_SPLIT = '''
def split(batch, sizes):
    """A tensor, or a tuple, list or dict of them, as consecutive parts of so many samples each."""
    if isinstance(batch, torch.Tensor):
        return torch.split(batch, sizes)
    if hasattr(batch, "items"):
        parts = {key: split(value, sizes) for key, value in batch.items()}
        return [{key: part[i] for key, part in parts.items()} for i in range(len(sizes))]
    parts = [split(value, sizes) for value in batch]
    return [tuple(part[i] for part in parts) for i in range(len(sizes))]


def samples_of(batch):
    if isinstance(batch, torch.Tensor):
        return len(batch)
    return samples_of(next(iter(batch.values())) if hasattr(batch, "items") else batch[0])
'''

SPLIT_BY_PATH = '''
# The dim along which the samples of each part of the batch lie; None: it belongs to the whole batch.
DIMS = {dims}


def split(batch, sizes, path=""):
    """The batch as consecutive parts of so many samples each."""
    if path in DIMS:
        return [batch] * len(sizes) if DIMS[path] is None else torch.split(batch, sizes, DIMS[path])
    named = batch.items() if hasattr(batch, "items") else enumerate(batch)
    parts = {{name: split(value, sizes, f"{{path}}.{{name}}" if path else str(name)) for name, value in named}}
    if hasattr(batch, "items"):
        return [{{name: part[i] for name, part in parts.items()}} for i in range(len(sizes))]
    return [tuple(part[i] for part in parts.values()) for i in range(len(sizes))]


def samples_of(batch, path=""):
    if path in DIMS:
        return None if DIMS[path] is None else batch.shape[DIMS[path]]
    named = batch.items() if hasattr(batch, "items") else enumerate(batch)
    counts = [samples_of(value, f"{{path}}.{{name}}" if path else str(name)) for name, value in named]
    return next((count for count in counts if count is not None), None)
'''

SIZES = '''
def sizes_of(samples):
    """Micro-batches of one batch: as even as possible, none above MICRO_BATCH_SIZE."""
    count = ACCUMULATION_STEPS
    if count > samples or -(-samples // count) != MICRO_BATCH_SIZE:
        count = -(-samples // MICRO_BATCH_SIZE)
    small, larger = divmod(samples, count)
    return [small + 1] * larger + [small] * (count - larger)
'''

TO_DEVICE = """
def to(batch, device):
    if isinstance(batch, torch.Tensor):
        return batch.to(device, non_blocking=True)
    if isinstance(batch, dict):
        return {key: to(value, device) for key, value in batch.items()}
    return tuple(to(value, device) for value in batch) if isinstance(batch, (tuple, list)) else batch
"""

RECOMPUTED = '''
@contextmanager
def own_buffers(modules, inner=nullcontext()):
    """Recomputing must not update BatchNorm's running statistics a second time."""
    kept = [(m, name, b) for top in modules for m in top.modules() for name, b in m._buffers.items() if b is not None]
    for module, name, buffer in kept:
        module._buffers[name] = buffer.clone()
    try:
        with inner:
            yield
    finally:
        for module, name, buffer in kept:
            module._buffers[name] = buffer


def recomputed(forward, modules):
    contexts = lambda: (nullcontext(), own_buffers(modules))
    return partial(checkpoint, forward, use_reentrant=False, context_fn=contexts)
'''

SELECTIVELY_RECOMPUTED = """
# What is not run again: matrix products, convolutions and attention.
KEPT = {{getattr(torch.ops.aten, name, None) for name in {kept}}}


def policy(context, operator, *args, **kwargs):
    kept = operator.overloadpacket in KEPT
    return CheckpointPolicy.MUST_SAVE if kept else CheckpointPolicy.PREFER_RECOMPUTE


def selectively_recomputed(forward, modules):
    def contexts():
        keeping, reusing = create_selective_checkpoint_contexts(policy)
        return keeping, own_buffers(modules, reusing)

    return partial(checkpoint, forward, use_reentrant=False, context_fn=contexts)
"""

OFFLOADED = '''
def offloaded(forward, modules):
    """What the block saves for backward waits in host memory."""

    def run(*args, **kwargs):
        with torch.autograd.graph.save_on_cpu(pin_memory=torch.cuda.is_available()):
            return forward(*args, **kwargs)

    return run
'''

RECOMPUTE_BLOCKS = '''
WAYS = {ways}
BLOCKS = {blocks}
RUNS = {runs}  # of layers of a Sequential: from, up to


def in_turn(steps, x):
    for step in steps:
        x = step(x)
    return x


def recompute_blocks(model):
    """From now on these blocks forget their activations in forward and bring them back in backward."""
    for name, way in BLOCKS.items():
        block = model.get_submodule(name)
        block.forward = WAYS[way](block.forward, [block])
    for name, runs in RUNS.items():
        sequential, steps, position = model.get_submodule(name), [], 0
        layers = list(sequential)
        for start, stop, way in runs:
            steps += layers[position:start]
            steps.append(WAYS[way](partial(in_turn, layers[start:stop]), layers[start:stop]))
            position = stop
        sequential.forward = partial(in_turn, steps + layers[position:])
    for module in model.modules():
        if hasattr(getattr(module, "config", None), "use_cache"):
            module.config.use_cache = False  # a cache would be filled a second time
'''

DATA_PARALLEL = '''
def together(model):
    """The model as all ranks of the process group train it."""
    return torch.nn.parallel.DistributedDataParallel(
        model, gradient_as_bucket_view=True, find_unused_parameters={unused}, static_graph={static}
    )


def share_of(own, device):
    """What makes the mean over ranks that of the whole batch, where this rank's part of it weighs `own`."""
    total = torch.tensor(float(own), device=device)
    torch.distributed.all_reduce(total)
    return torch.distributed.get_world_size() * own / float(total)
'''
