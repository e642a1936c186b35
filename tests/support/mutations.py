"""Random damage of files and folders, as disks, networks and killed programs do it."""

from __future__ import annotations

import random
from pathlib import Path


def damage_file(path: Path, chance: random.Random) -> str:
    """Damage a file, and return what was done to it."""
    data = bytearray(path.read_bytes())
    size = len(data)
    at, length = chance.randrange(size), chance.choice([1, 4, 64, 4096])
    other = chance.randrange(size)
    kind = chance.choice(["bit", "byte", "zeros", "noise", "cut", "gap", "repeat", "swap", "append", "empty"])
    if kind == "bit":
        data[at] ^= 1 << chance.randrange(8)
    elif kind == "byte":
        data[at] = (data[at] + chance.randrange(1, 256)) % 256
    elif kind == "zeros":
        data[at : at + length] = bytes(len(data[at : at + length]))
    elif kind == "noise":
        data[at : at + length] = chance.randbytes(len(data[at : at + length]))
    elif kind == "cut":
        del data[at:]
    elif kind == "gap":
        del data[at : at + length]
    elif kind == "repeat":
        data[at:at] = data[at : at + length]
    elif kind == "swap":
        first, second = bytes(data[at : at + 64]), bytes(data[other : other + 64])
        data[at : at + len(second)], data[other : other + len(first)] = second, first
    elif kind == "append":
        data += chance.randbytes(length)
    else:
        data.clear()
    path.write_bytes(data)
    return f"{kind} of {path.name} at {at} of {size}, {length} bytes, {other}"


def damage_folder(folder: Path, chance: random.Random) -> str:
    """Damage one file of a folder, remove one, or exchange two, and return what was done."""
    files = sorted(path for path in folder.rglob("*") if path.is_file())
    kind = chance.choice(["file"] * 8 + ["remove", "exchange"])
    if kind == "file":
        return damage_file(chance.choice(files), chance)
    first, second = chance.sample(files, 2)
    if kind == "remove":
        first.unlink()
        return f"{first.name} is removed"
    spare = folder / "spare"
    first.replace(spare)
    second.replace(first)
    spare.replace(second)
    return f"{first.name} and {second.name} are exchanged"
