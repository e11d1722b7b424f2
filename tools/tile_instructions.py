"""python tools/tile_instructions.py FILE: whether compiled code has AMX's instructions for int8, as llama.cpp's may.

`make peers-native` prints it on machines with AMX.  It searches the file for the bytes of instructions, so that no
disassembler is needed, and exits with 1 if there are none.
"""

from __future__ import annotations

import re
import sys
from pathlib import Path
from typing import NamedTuple

# VEX prefix of three bytes, opcode, operands (Intel's manual, volume 2): LDTILECFG; TDPB with SSD, SUD, USD, UUD.
_CONFIGURATIONS = re.compile(rb"\xc4[\xc2\xe2]\x78\x49[\x00-\x07\x40-\x47\x80-\x87]", re.DOTALL)
_PRODUCTS = re.compile(
    rb"\xc4\xe2[\x40-\x43\x48-\x4b\x50-\x53\x58-\x5b\x60-\x63\x68-\x6b\x70-\x73\x78-\x7b]\x5e[\xc0-\xff]"
)


class Tiles(NamedTuple):
    """Numbers of instructions in a file."""

    configurations: int
    products: int  # of tiles of int8


def count(file: Path) -> Tiles:
    """Search an object file, a program or a library."""
    code = file.read_bytes()
    return Tiles(len(_CONFIGURATIONS.findall(code)), len(_PRODUCTS.findall(code)))


def main(file: str) -> int:
    """The exit code."""
    found = count(Path(file))
    has_amx = all(found)
    print(f"{Path(file).name}: " + (f"AMX, {found.products} products of tiles" if has_amx else "no AMX"))
    return 0 if has_amx else 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1]))
