"""What a model keeps of the texts that pass through it, beside its gradients: this would be released without noise."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from torch import Tensor, nn

from rasura.core.interfaces import InputError
from rasura.victims.attributes import Attributes, same_values


@contextmanager
def unwritten(model: nn.Module) -> Iterator[None]:
    """Raises ``InputError`` at the end of the block if its forward passes changed a buffer or a weight of ``model``, or a
    plain attribute of a module with tensors, arrays or fractions. Buffers and attributes are put back first, so that nothing
    of the texts is left in them, whatever the block raised. Whole numbers and text in attributes, such as a count of passes,
    are put back before each pass, and no pass can read what another left there; so they are not refused.

    There are no exceptions for buffers that may not depend on the texts: a counter of passes tells the size of a batch, and
    a table that grows with the longest text tells its length. Such a table can be filled before training.
    """
    before = {name: (buffer, buffer.clone()) for name, buffer in model.named_buffers()}
    versions = {name: (id(p), _version(p)) for name, p in model.named_parameters()}
    changed: list[str] = []
    attributes = Attributes(model)

    def begun(*_: object) -> None:
        attributes.put_back(whole=False)

    hook = model.register_forward_pre_hook(begun)
    try:
        yield
    finally:
        hook.remove()
        kept = attributes.put_back(whole=True)
        after = dict(model.named_buffers())
        for name in {**before, **after}:
            at, _, own = name.rpartition(".")
            if name not in before:
                changed.append(name)
                delattr(model.get_submodule(at), own)
            elif name not in after or not same_values(after[name], before[name][1]):
                changed.append(name)
                # Written in place or replaced: what is there afterwards is the old tensor, with its old values.
                old, values = before[name]
                old.data = values
                setattr(model.get_submodule(at), own, old)
    if changed:
        raise InputError(f"the forward pass writes the buffer {changed[0]}, which no noise protects, and nothing was "
            "released; put the layer in eval mode or remove the buffer. Fill a table that does not depend on texts by one "
            "pass under torch.no_grad() before training")  # fmt: skip
    if kept:
        raise InputError(f"the forward pass keeps figures in the attribute {kept[0]}, which no noise protects, and nothing "
            "was released; do not write it in training. Fill a table that does not depend on texts by one pass under "
            "torch.no_grad() before training")  # fmt: skip
    written = [name for name, p in model.named_parameters() if versions.get(name) != (id(p), _version(p))]
    if written:
        raise InputError(
            f"the forward pass writes the weight {written[0]}, which no noise protects, and nothing was released; "
            "let only the optimizer change weights"
        )


def _version(tensor: Tensor) -> int:
    return -1 if tensor.is_inference() else tensor._version
