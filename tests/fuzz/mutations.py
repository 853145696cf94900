"""Mutations of files, by their structure and by their bytes."""

from __future__ import annotations

import json
import os
import random
import socket
import struct
import zipfile
from collections.abc import Callable
from contextlib import suppress
from io import BytesIO
from pathlib import Path
from typing import Any

Dice = random.Random
_INTEGERS = (
    0,
    1,
    -1,
    2,
    7,
    127,
    255,
    2**15,
    2**31 - 1,
    2**31,
    2**32 - 1,
    2**53 + 1,
    2**63 - 1,
    2**63,
    2**64 - 1,
    10**30,
)
_WORDS = (
    "",
    ".",
    "..",
    "../../etc/passwd",
    "/dev/zero",
    "a" * 100_000,
    "." * 5_000,
    "a." * 5_000,
    "\x00",
    "\x1b[31m",
    "=1+1",
    "\u202e",
    "~2",
    "{}",
    "%s%n",
    "nan",
    "object",
    "float128",
    "bfloat16",
    "\udcff",
    "😀" * 50,
)


def mutate(file: Path, dice: Dice) -> str:
    """Change one file in place. Return the name of the mutation."""
    if dice.random() < 0.03:
        return _replace_node(file, dice)
    data = file.read_bytes()
    kinds = [_bytes, _bytes, *_structured(file.name, data)]
    for _ in range(8):
        mutation = dice.choice(kinds)
        with suppress(Exception):  # the mutation may not apply to what this file holds
            changed = mutation(data, dice)
            if changed != data:
                file.write_bytes(changed)
                return mutation.__name__
    file.write_bytes(_bytes(data, dice))
    return "_bytes"


def _structured(name: str, data: bytes) -> list[Callable[[bytes, Dice], bytes]]:
    known: dict[str, list[Callable[[bytes, Dice], bytes]]] = {
        ".json": [_json, _json, _deep],
        ".jsonl": [_lines, _lines],
        ".csv": [_cells, _cells],
        ".toml": [_toml, _toml],
        ".safetensors": [_safetensors, _safetensors],
        ".npy": [_npy, _npy],
        ".npz": [_zip, _zip, _zip],
        ".pt": [_zip, _pickle],
        ".pdparams": [_pickle, _pickle],
        ".pdopt": [_pickle, _pickle],
        ".hdf5": [_hdf5, _hdf5],
        ".arrows": [_arrow, _arrow],
    }
    found = known.get(Path(name).suffix, [])
    if (not found and data[:6] == b"ARROW1") or data[:4] == b"\xff\xff\xff\xff":
        return [_arrow, _arrow]
    return found


# --- any file --------------------------------------------------------------------------------------------------------
def _bytes(data: bytes, dice: Dice) -> bytes:
    changed = bytearray(data)
    if not changed:
        return dice.randbytes(40)
    at = dice.randrange(len(changed))
    choice = dice.randrange(8)
    if choice == 0:
        changed[at] ^= 1 << dice.randrange(8)
    elif choice == 1:
        changed[at : at + 1] = bytes([dice.randrange(256)])
    elif choice == 2:
        del changed[at:]
    elif choice == 3:
        changed += dice.randbytes(dice.randrange(1, 64))
    elif choice == 4:
        size = dice.randrange(1, 256)
        changed[at : at + size] = bytes(len(changed[at : at + size]))
    elif choice == 5:
        form = dice.choice(("<q", "<i", ">q", ">i"))
        limit = 8 * struct.calcsize(form) - 1
        value = dice.choice([each for each in _INTEGERS if -(2**limit) <= each < 2**limit])
        changed[at : at + struct.calcsize(form)] = struct.pack(form, value)
    elif choice == 6:
        other = dice.randrange(len(changed))
        changed[at:at] = changed[other : other + dice.randrange(1, 512)]
    else:
        for _ in range(dice.randrange(1, 20)):
            changed[dice.randrange(len(changed))] = dice.randrange(256)
    return bytes(changed)


def _replace_node(file: Path, dice: Dice) -> str:
    """Replace the file by another one, or by something that is not a regular file."""
    file.unlink()
    choice = dice.choice(("missing", "empty", "fifo", "folder", "socket", "link to a device", "link out", "loop"))
    if choice == "empty":
        file.touch()
    elif choice == "fifo":
        os.mkfifo(file)
    elif choice == "folder":
        file.mkdir()
    elif choice == "socket":
        with socket.socket(socket.AF_UNIX) as server, suppress(OSError):  # a path may be too long for one
            server.bind(str(file))
    elif choice == "link to a device":
        file.symlink_to("/dev/zero")
    elif choice == "link out":
        file.symlink_to("/etc/passwd")
    elif choice == "loop":
        file.symlink_to(file.name)
    return choice


# --- values ----------------------------------------------------------------------------------------------------------
def _value(dice: Dice) -> Any:
    return dice.choice(
        (
            dice.choice(_INTEGERS),
            dice.choice(_WORDS),
            None,
            True,
            0.5,
            float("nan"),
            float("inf"),
            -1e308,
            [],
            {},
            [[]],
            [dice.choice(_INTEGERS)] * 3,
            {"a": dice.choice(_WORDS)},
            {dice.choice(_WORDS): 1},
        )
    )


def _change(value: Any, dice: Dice) -> Any:
    """Change one node of nested lists and dicts."""
    if not isinstance(value, dict | list) or not value or dice.random() < 0.15:
        if isinstance(value, int) and not isinstance(value, bool) and dice.random() < 0.5:
            return value + dice.choice((-1, 1, 8, -8, 2**40))
        return _value(dice)
    if isinstance(value, list):
        at = dice.randrange(len(value))
        choice = dice.random()
        if choice < 0.15:
            return value[:at] + value[at + 1 :]
        if choice < 0.3:
            return [*value[:at], value[at], *value[at:]]
        return [*value[:at], _change(value[at], dice), *value[at + 1 :]]
    key = dice.choice(list(value))
    choice = dice.random()
    if choice < 0.15:
        return {name: each for name, each in value.items() if name != key}
    if choice < 0.25:
        return {**value, str(_value(dice)): _value(dice)}
    if choice < 0.35:
        return {(dice.choice(_WORDS) if name == key else name): each for name, each in value.items()}
    return {**value, key: _change(value[key], dice)}


def _text(value: Any) -> bytes:
    return json.dumps(value, ensure_ascii=False).encode("utf-8", "surrogateescape")


def _json(data: bytes, dice: Dice) -> bytes:
    return _text(_change(json.loads(data), dice))


def _deep(data: bytes, dice: Dice) -> bytes:
    depth = dice.choice((500, 5_000, 100_000))
    opening, closing = dice.choice(((b"[", b"]"), (b'{"a":', b"}")))
    nested = opening * depth + b"1" + closing * depth
    return nested if dice.random() < 0.5 else data.rstrip()[:-1] + b',"deep":' + nested + b"}"


def _lines(data: bytes, dice: Dice) -> bytes:
    lines = data.splitlines()
    at = dice.randrange(len(lines))
    choice = dice.random()
    if choice < 0.6:
        lines[at] = _json(lines[at], dice)
    elif choice < 0.7:
        lines[at] = _deep(lines[at], dice)
    elif choice < 0.8:
        del lines[at]
    elif choice < 0.9:
        lines.insert(at, lines[dice.randrange(len(lines))])
    else:
        lines[at] = lines[at][: dice.randrange(len(lines[at]) + 1)]
    return b"\n".join(lines) + dice.choice((b"\n", b""))


def _cells(data: bytes, dice: Dice) -> bytes:
    rows = [line.split(b",") for line in data.splitlines()]
    at = dice.randrange(len(rows))
    choice = dice.random()
    if choice < 0.7:
        rows[at][dice.randrange(len(rows[at]))] = str(_value(dice)).encode("utf-8", "surrogateescape")
    elif choice < 0.8:
        del rows[at]
    elif choice < 0.9:
        rows.insert(at, rows[dice.randrange(len(rows))])
    else:
        rows[at] = rows[at][:-1]
    return b"\n".join(b",".join(row) for row in rows) + b"\n"


def _toml(data: bytes, dice: Dice) -> bytes:
    lines = data.splitlines()
    at = dice.choice([number for number, line in enumerate(lines) if b"=" in line])
    value = _value(dice)
    text = _text(value) if not isinstance(value, dict) and value is not None else b"{ a = 1 }"
    lines[at] = lines[at].split(b"=")[0] + b"= " + text
    return b"\n".join(lines)


# --- binary formats --------------------------------------------------------------------------------------------------
def _safetensors(data: bytes, dice: Dice) -> bytes:
    (size,) = struct.unpack("<Q", data[:8])
    header, rest = json.loads(data[8 : 8 + size]), data[8 + size :]
    choice = dice.random()
    if choice < 0.1:
        return struct.pack("<Q", dice.choice([each for each in _INTEGERS if 0 <= each < 2**64])) + data[8:]
    if choice < 0.2:
        text = _deep(_text(header), dice)
    elif choice < 0.5 and (names := [name for name in header if name != "__metadata__"]):
        entry = header[dice.choice(names)]
        start, end = entry["data_offsets"]
        entry["data_offsets"] = dice.choice(([0, end], [start, end + 4], [end, start], [start, start], [-4, end]))
        text = _text(header)
    else:
        text = _text(_change(header, dice))
    return struct.pack("<Q", len(text)) + text + rest


def _npy(data: bytes, dice: Dice) -> bytes:
    start = 10 if data[6] == 1 else 12
    (size,) = struct.unpack("<H" if start == 10 else "<I", data[8:start])
    descriptions = ("|O", "<f8", "<f4", "<c16", "|V2", "<U1000", "|S0", "<i8", "<f16", "(2,)<f4", "<M8[ns]")
    shapes = (
        "()",
        "(0,)",
        "(-1,)",
        f"({2**62}, 8)",
        f"({2**63},)",
        "(3, 4)",
        "(1,)*100",
        "(1.5,)",
        "('a',)",
        "(4, 0, 2)",
    )
    header = data[start : start + size]
    choice = dice.random()
    if choice < 0.4:
        kind, shape = dice.choice(descriptions), dice.choice(shapes)
        text = f"{{'descr': '{kind}', 'fortran_order': False, 'shape': {shape}, }}".encode()
    elif choice < 0.6:
        text = header.replace(b"False", dice.choice((b"True", b"None", b"__import__('os')")))
    elif choice < 0.8:
        text = b"[" * 50_000 + b"]" * 50_000
    else:
        text = _bytes(header, dice)
    if len(text) > 65_000:
        return data[:6] + b"\x02\x00" + struct.pack("<I", len(text)) + text + data[start + size :]
    return data[:6] + b"\x01\x00" + struct.pack("<H", len(text)) + text + data[start + size :]


def _zip(data: bytes, dice: Dice) -> bytes:
    """Write the archive again with one member changed."""
    target = BytesIO()
    with zipfile.ZipFile(BytesIO(data)) as source, zipfile.ZipFile(target, "w") as copy:
        copy.comment = source.comment
        members = source.infolist()
        chosen = dice.randrange(len(members))
        for at, member in enumerate(members):
            name, content = member.filename, source.read(member)
            if at == chosen:
                choice = dice.random()
                if choice < 0.1:
                    continue
                if choice < 0.2:
                    name = dice.choice(("../out.npy", "/abs.npy", "a" * 1000 + ".npy", name + "/", "input.npy"))
                elif choice < 0.3:
                    copy.writestr(name, content)
                elif choice < 0.4:
                    copy.comment = dice.choice((b"", b"{}", b"\xff" * 100, _bytes(source.comment or b"{", dice)))
                elif content[:6] == b"\x93NUMPY":
                    content = _npy(content, dice)
                elif content[:2] == b"\x80\x02":
                    content = _pickle(content, dice)
                else:
                    content = _bytes(content, dice)
            method = dice.choice((zipfile.ZIP_STORED, zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED))
            copy.writestr(name, content, method)
    return target.getvalue()


_PICKLES = (
    b"cos\nsystem\n(S'true'\ntR.",
    b"cbuiltins\neval\n(V1+1\ntR.",
    b"\x80\x04\x8c\x02os\x8c\x06system\x93\x8c\x04true\x85R.",
    b"\x80\x04" + b"(" * 100_000 + b".",
    b"\x80\x04" + b"]" * 50_000 + b"a" * 49_999 + b".",
    b"\x80\x04}q\x00X\x01\x00\x00\x00ah\x00s.",
    b"\x80\x04]q\x00h\x00a.",
    b"\x80\x04\x8e" + struct.pack("<Q", 2**62) + b"x.",
    b"\x80\x04\x95" + struct.pack("<Q", 2**63) + b"}.",
    b"\x80\x02cnumpy.core.multiarray\n_reconstruct\n(cnumpy\nndarray\n(I-1\ntS'b'\ntR.",
    b"\x80\x02cnumpy\ndtype\n(S'O8'\nI0\nI1\ntR.",
    b"\x80\x05\x97.",
    b"\x80\x02Q.",
)


def _pickle(data: bytes, dice: Dice) -> bytes:
    choice = dice.random()
    if choice < 0.3:
        return dice.choice(_PICKLES)
    at = dice.randrange(2, len(data))
    if choice < 0.6:
        return (
            data[:at]
            + dice.choice((b"(", b"0", b"1", b"2", b"R", b"b", b"}", b"]", b"N", b"h\x00", b"\x94"))
            + data[at:]
        )
    if choice < 0.8:
        return data[:-1] + dice.choice(_PICKLES)[2:]
    return data[:at] + dice.choice(_PICKLES) + data[at:]


def _hdf5(data: bytes, dice: Dice) -> bytes:
    import h5py
    import numpy as np

    with h5py.File(held := BytesIO(data), "r+") as file:
        names: list[str] = []
        file.visit(names.append)
        name = dice.choice(names)
        group = file if dice.random() < 0.5 else file[name].parent
        choice = dice.randrange(10)
        if choice == 0:
            group.create_dataset("feat_output", (2**36,), "f4", chunks=(1024,))
        elif choice == 1:
            group.create_dataset("external", (1000,), "u1", external=[("/etc/passwd", 0, 1000)])
        elif choice == 2:
            layout = h5py.VirtualLayout((4,), "f4")
            layout[:] = h5py.VirtualSource("/tmp/none.hdf5", "x", (4,))
            group.create_virtual_dataset("feat_input0", layout)
        elif choice == 3:
            group["loop"] = h5py.SoftLink("/")
        elif choice == 4:
            group["out"] = h5py.ExternalLink("/etc/passwd", "/x")
        elif choice == 5:
            file[name].attrs[dice.choice(("module", "phase", "rank", "step", "kind", "dtype"))] = dice.choice(
                (-1, 2**63 - 1, "x" * 1000, b"\xff", np.zeros(3), np.array([b"a", b"b"]))
            )
        elif choice == 6:
            deep = group
            for _ in range(300):
                deep = deep.create_group("g")
        elif choice == 7:
            del file[name]
        elif choice == 8:
            group.create_dataset("words", data=[b"a", "ü".encode()], dtype=h5py.string_dtype())
        else:
            group.create_dataset("compound", (2,), np.dtype([("a", "f4"), ("b", "i8")]))
    return held.getvalue()


def _arrow(data: bytes, dice: Dice) -> bytes:
    """Change one value, column or piece of metadata, and write the stream again."""
    import pyarrow as pa

    table = pa.ipc.open_stream(data).read_all()
    table.validate(full=True)  # Arrow may abort on a table of damaged bytes
    at = dice.randrange(table.num_columns)
    field, choice = table.schema.field(at), dice.random()
    if choice < 0.1:
        table = table.remove_column(at)
    elif choice < 0.2:
        metadata = dict(table.schema.metadata or {})
        metadata[dice.choice([*metadata, b"version"])] = dice.choice((b"", b"-1", b"99", b"\xff", b"1e9"))
        table = table.replace_schema_metadata(metadata)
    elif choice < 0.3:
        table = pa.concat_tables([table, table.slice(dice.randrange(table.num_rows))])
    else:
        values = table.column(at).to_pylist()
        values[dice.randrange(len(values))] = _of_type(field.type, dice)
        table = table.set_column(at, field, pa.array(values, field.type))
    sink = pa.BufferOutputStream()
    with pa.ipc.new_stream(sink, table.schema) as writer:
        writer.write_table(table)
    return sink.getvalue().to_pybytes()


def _of_type(kind: Any, dice: Dice) -> Any:
    import pyarrow as pa

    if pa.types.is_dictionary(kind):
        kind = kind.value_type
    if pa.types.is_integer(kind):
        low, high = (
            (-(2 ** (kind.bit_width - 1)), 2 ** (kind.bit_width - 1))
            if "u" not in str(kind)
            else (0, 2**kind.bit_width)
        )
        return dice.choice([each for each in _INTEGERS if low <= each < high])
    if pa.types.is_floating(kind):
        return dice.choice((float("nan"), float("inf"), -1e300, 0.0))
    if pa.types.is_string(kind) or pa.types.is_large_string(kind):
        return dice.choice([word for word in _WORDS if "\udcff" not in word])
    if pa.types.is_list(kind) or pa.types.is_fixed_size_list(kind):
        return [_of_type(kind.value_type, dice) for _ in range(dice.choice((0, 1, 3, 200)))]
    return None
