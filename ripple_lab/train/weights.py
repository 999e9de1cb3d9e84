"""Files of weights: safetensors that carry a checksum of themselves, read without executing code.

The checksum is the SHA-256 of the whole file with zeros where it stands. It is in the metadata, so
it travels with the file, and other programs read the file as any safetensors.
"""

import hashlib
import json
import re
from pathlib import Path

from safetensors.torch import load, save
from torch import Tensor

from ripple_lab.files import replacing

UNSET = "0" * 64
CHECKSUM = re.compile(rb'"checksum":"sha256:([0-9a-f]{64})"')


class CheckpointError(RuntimeError):
    """A checkpoint that cannot be read: which, why, and what to do."""


def write_weights(path: Path, weights: dict[str, Tensor], metadata: dict[str, str]) -> None:
    """Weights with what is needed to use them: a model by itself.

    The same weights and metadata give the same file byte for byte.
    """
    whole = {name: value.detach().cpu().contiguous() for name, value in weights.items()}
    content = memoryview(save(whole))
    start = _start_of_data(content)
    # safetensors writes metadata in random order; here it is sorted.
    metadata = dict(sorted((metadata | {"checksum": f"sha256:{UNSET}"}).items()))
    header = {"__metadata__": metadata} | json.loads(bytes(content[8:start]))
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)  # data are aligned
    head = len(text).to_bytes(8, "little") + text
    place = CHECKSUM.search(head)
    assert place is not None
    checksum = _checksum(head, content[start:], place).encode()
    with replacing(path) as partial, partial.open("wb") as file:
        file.write(head[: place.start(1)] + checksum + head[place.end(1) :])
        file.write(content[start:])


def read_weights(path: Path) -> tuple[dict[str, Tensor], dict[str, str]]:
    """Weights and metadata as `write_weights` wrote them; those of others have no checksum."""
    try:
        content = path.read_bytes()
        weights = load(content)
        start = _start_of_data(content)
        metadata = json.loads(content[8:start]).get("__metadata__") or {}
    except Exception as error:  # of many kinds: a damaged header may say anything
        raise CheckpointError(
            f"{path} cannot be read as safetensors, it may be cut short: {brief(error)}"
        ) from None
    head = content[:start]
    place = CHECKSUM.search(head)
    claimed = b'"checksum"' in head or b'"sha256:' in head  # damage cannot take both away
    if place and _checksum(head, memoryview(content)[start:], place) == place[1].decode():
        return weights, metadata
    if place or claimed:
        raise CheckpointError(
            f"{path} is damaged: its content does not match the checksum it was written with. "
            "Copy it anew from where it came from, or take another checkpoint"
        )
    return weights, metadata


def misfit(expected: dict[str, Tensor], given: dict[str, Tensor]) -> str:
    """How weights differ from those of a model: how many, and the first of them."""
    both = [name for name in expected if name in given]
    kinds = {
        "missing": [name for name in expected if name not in given],
        "unexpected": [name for name in given if name not in expected],
        "of another shape": [name for name in both if expected[name].shape != given[name].shape],
    }
    return ", ".join(
        f"{len(names)} {kind} ({', '.join(names[:3] + ['…'] * (len(names) > 3))})"
        for kind, names in kinds.items()
        if names
    )


def brief(error: Exception) -> str:
    return (str(error).splitlines() or [type(error).__name__])[0]


def _start_of_data(content: bytes | memoryview) -> int:
    return 8 + int.from_bytes(content[:8], "little")


def _checksum(head: bytes, data: memoryview, place: re.Match[bytes]) -> str:
    zeroed = head[: place.start(1)] + UNSET.encode() + head[place.end(1) :]
    digest = hashlib.sha256(zeroed)
    digest.update(data)
    return digest.hexdigest()
