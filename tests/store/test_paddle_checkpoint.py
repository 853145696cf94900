"""Paddle's own checkpoints: they are read as paddle.load reads them, and no code runs."""

from __future__ import annotations

import pickle
import random
import struct
from collections import OrderedDict
from collections.abc import Callable
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import numpy.typing as npt
import pytest
from typer.testing import CliRunner

import tensortap as tt
from tensortap.cli import app
from tensortap.errors import RunUnreadable, TensortapError

Array = npt.NDArray[Any]


def write(path: Path, value: Any, protocol: int = 4) -> Path:
    path.write_bytes(pickle.dumps(value, protocol))
    return path


def arrays(path: Path) -> dict[str, Array]:
    with tt.open(path) as run:
        return {".".join(filter(None, (r.key.module, r.key.path))): np.array(run.load(r)) for r in run}


def notices(path: Path) -> str:
    with tt.open(path) as run:
        return "\n".join(run.notices)


def same(found: dict[str, Array], expected: dict[str, Array]) -> None:
    assert list(found) == list(expected)
    for name, array in expected.items():
        assert (found[name].dtype, found[name].shape) == (array.dtype, array.shape), name
        assert found[name].tobytes() == array.tobytes(), name


STATE = {
    "fc.weight": np.arange(6, dtype=np.float32).reshape(2, 3),
    "fc.bias": np.array([0.5, np.nan, -np.inf]),
    "half": np.ones((2, 0, 3), np.float16),
    "mask": np.array([[True], [False]]),
    "count": np.array(7),
    "phase": np.array([1 + 2j], np.complex64),
    "wide": np.arange(3000, dtype=np.float64),  # longer than any name
}


# --- what is read --------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("protocol", [2, 3, 4, 5])
def test_arrays_of_every_protocol(tmp_path: Path, protocol: int) -> None:
    same(arrays(write(tmp_path / "a.pdparams", STATE, protocol)), STATE)


@pytest.mark.parametrize("protocol", [2, 4, 5])
def test_arrays_in_every_order(tmp_path: Path, protocol: int) -> None:
    square = np.arange(24, dtype=np.int32).reshape(2, 3, 4)
    state = {
        "columns first": np.asfortranarray(square),
        "turned": square.transpose(1, 2, 0),
        "strided": square[:, ::2, ::-1],
        "big end": square.astype(">i4"),
        "columns first, wide": np.asfortranarray(np.arange(6000.0).reshape(60, 100)),
    }
    expected = {name: np.ascontiguousarray(a).astype(a.dtype.newbyteorder("=")) for name, a in state.items()}
    same(arrays(write(tmp_path / "a.pdparams", state, protocol)), expected)


@pytest.mark.parametrize("name", ["bfloat16", "float8_e4m3fn", "float8_e5m2"])
def test_short_floats_that_numpy_knows_by_ml_dtypes(tmp_path: Path, name: str) -> None:
    state = {"a": np.array([1.5, -2.0], getattr(ml_dtypes, name))}
    same(arrays(write(tmp_path / "a.pdparams", state)), state)


@pytest.mark.parametrize("protocol", [2, 4])
def test_nested_state_of_an_optimizer(tmp_path: Path, protocol: int) -> None:
    """As paddle.save writes it: a tensor within a dict is a pair of its name and an array."""
    state = OrderedDict(
        w_moment1_0=("w_moment1_0", np.ones((2, 3), np.float32)),
        master_weights={"w": ("w_fp32_master_0", np.zeros(4, np.float32))},
        LR_Scheduler={"last_epoch": 3, "last_lr": np.float64(0.25), "milestones": [10, 20], "verbose": False},
    )
    same(
        arrays(write(tmp_path / "a.pdopt", state, protocol)),
        {
            "w_moment1_0": np.ones((2, 3), np.float32),
            "master_weights.w": np.zeros(4, np.float32),
            "LR_Scheduler.last_epoch": np.array(3),
            "LR_Scheduler.last_lr": np.array(0.25),
            "LR_Scheduler.milestones": np.array([10, 20]),
            "LR_Scheduler.verbose": np.array(False),
        },
    )


def test_another_learning_rate_is_a_difference(tmp_path: Path) -> None:
    def state(rate: float) -> dict[str, Any]:
        return {"w_moment1_0": ("w_moment1_0", np.ones(3)), "LR_Scheduler": {"last_lr": rate}}

    one, other = write(tmp_path / "a.pdopt", state(0.1)), write(tmp_path / "b.pdopt", state(0.01))
    assert tt.compare(one, one).verdict == "match"
    result = tt.compare(one, other)
    assert result.verdict == "diverged" and "LR_Scheduler.last_lr" in str(result)


def sliced(**changes: Any) -> dict[str, Any]:
    """A tensor of over a gigabyte as protocols 2 and 3 hold it, but smaller."""
    parts = {f"big@@.{at}": np.arange(4 * at, 4 * at + 4, dtype=np.float32) for at in range(3)}
    info = {"OriginShape": (3, 4), "slices": list(parts)} | changes
    return {**parts, "b": np.ones(2), "UnpackBigParamInfor@@": {"big": info}, "StructuredToParameterName@@": {"b": "x"}}


def test_tensors_in_slices(tmp_path: Path) -> None:
    expected = {"b": np.ones(2), "big": np.arange(12, dtype=np.float32).reshape(3, 4)}
    same(arrays(write(tmp_path / "a.pdparams", sliced(), 2)), expected)


@pytest.mark.parametrize(
    "changes",
    [
        {"OriginShape": (3, 5)},
        {"OriginShape": (-3, -4)},
        {"OriginShape": (12.0,)},
        {"OriginShape": None},
        {"slices": ["big@@.0", "gone"]},
        {"slices": ["big@@.0", "big@@.0", "big@@.1"]},
        {"slices": [[], 3]},
        {"slices": []},
        {"slices": "big@@.0"},
        {"slices": ["b", "big@@.0", "big@@.1", "big@@.2"]},
    ],
)
def test_slices_that_do_not_fit(tmp_path: Path, changes: dict[str, Any]) -> None:
    with pytest.raises(RunUnreadable, match=r"a\.pdparams.*(slices of 'big'|UnpackBigParamInfor@@ is damaged)"):
        tt.open(write(tmp_path / "a.pdparams", sliced(**changes), 2))


def test_a_model_next_to_other_entries(tmp_path: Path) -> None:
    state = {"model": {"fc.weight": np.ones(2)}, "opt": {"m": np.ones(3)}, "epoch": 3}
    path = write(tmp_path / "a.pdparams", state)
    same(arrays(path), {"fc.weight": np.ones(2)})
    assert notices(path) == "opt, epoch next to 'model' in the checkpoint: not read"


def test_values_that_are_not_tensors_are_reported(tmp_path: Path) -> None:
    state = {"a": np.ones(2), "note": "text", "by": {"whom": b"bytes", "nobody": None}, "kinds": {"x"}, "more": ["y"]}
    assert notices(write(tmp_path / "a.pdparams", state)) == (
        "note, by.whom, kinds and 1 more: neither tensors nor numbers, so not read"
    )


def test_bytes_after_the_end_are_reported(tmp_path: Path) -> None:
    path = tmp_path / "a.pdparams"
    path.write_bytes(pickle.dumps({"a": np.ones(2)}, 4) + b"more")
    assert notices(path) == "4 bytes follow the checkpoint in its file and were not read"


def test_python_2_wrote_bytes_as_strings(tmp_path: Path) -> None:
    """Checkpoints of Paddle 1 were saved so: opcodes T and U, and names of the modules of that time."""
    long, short = np.arange(2000, dtype=np.float32), np.array([-1], np.float32)

    def array(data: bytes, shape: int) -> bytes:
        size = b"K" + bytes([shape]) if shape < 256 else b"M" + struct.pack("<H", shape)
        text = b"U" + bytes([len(data)]) if len(data) < 256 else b"T" + struct.pack("<i", len(data))
        dtype = b"cnumpy\ndtype\nU\x02f4K\x00K\x01\x87R(K\x03U\x01<NNNJ\xff\xff\xff\xffJ\xff\xff\xff\xffK\x00tb"
        begin = b"cnumpy.core.multiarray\n_reconstruct\ncnumpy\nndarray\nK\x00\x85U\x01b\x87R"
        return begin + b"(K\x01" + size + b"\x85" + dtype + b"\x89" + text + data + b"tb"

    path = tmp_path / "a.pdparams"
    path.write_bytes(b"\x80\x02}(U\x01a" + array(long.tobytes(), 2000) + b"U\x01b" + array(short.tobytes(), 1) + b"u.")
    same(arrays(path), {"a": long, "b": short})


def test_shown_exported_and_compared_with_a_safetensors_file(tmp_path: Path) -> None:
    from safetensors.numpy import save_file

    state = {"fc.weight": np.arange(6, dtype=np.float32).reshape(2, 3), "fc.bias": np.ones(2, np.float32)}
    path = write(tmp_path / "a.pdparams", state)
    save_file(state, tmp_path / "b.safetensors")
    assert tt.compare(path, tmp_path / "b.safetensors").verdict == "match"
    page = CliRunner().invoke(app, ["show", str(path)])
    assert page.exit_code == 0 and "2 records of 2 distinct tensors" in page.output
    assert (
        CliRunner().invoke(app, ["export", str(path), "--to", "npz", "--out", str(tmp_path / "a.npz")]).exit_code == 0
    )
    assert len(np.load(tmp_path / "a.npz", allow_pickle=False).files) >= 2
    assert CliRunner().invoke(app, ["compare", str(path), str(tmp_path / "b.safetensors")]).exit_code == 0


# --- paddle itself -------------------------------------------------------------------------------------------------
@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """A small model after a step, and its optimizer with master weights and a scheduler."""
    paddle = pytest.importorskip("paddle")
    paddle.seed(0)
    model = paddle.nn.Sequential(paddle.nn.Linear(5, 4), paddle.nn.BatchNorm1D(4), paddle.nn.Linear(4, 2))
    rate = paddle.optimizer.lr.CosineAnnealingDecay(0.1, 10)
    optimizer = paddle.optimizer.AdamW(rate, parameters=model.parameters(), multi_precision=True)
    model.eval()
    model(paddle.ones([3, 5])).sum().backward()
    optimizer.step()
    rate.step()
    return model, optimizer


@pytest.mark.parametrize("protocol", [2, 3, 4])
def test_files_of_paddle_save(tmp_path: Path, trained: Any, protocol: int) -> None:
    import paddle

    model, optimizer = trained
    paddle.save(model.state_dict(), str(tmp_path / "a.pdparams"), protocol=protocol)
    paddle.save(optimizer.state_dict(), str(tmp_path / "a.pdopt"), protocol=protocol)
    same(arrays(tmp_path / "a.pdparams"), {name: tensor.numpy() for name, tensor in model.state_dict().items()})
    expected: dict[str, Array] = {}
    for name, value in paddle.load(str(tmp_path / "a.pdopt"), return_numpy=True).items():
        for key, part in value.items() if isinstance(value, dict) else [("", value)]:
            expected[f"{name}.{key}" if key else name] = np.asarray(part)
    same(arrays(tmp_path / "a.pdopt"), expected)
    assert {"LR_Scheduler.last_lr", "LR_Scheduler.last_epoch"} <= expected.keys()


def test_paddle_reads_slices_the_same(tmp_path: Path) -> None:
    paddle = pytest.importorskip("paddle")
    path = write(tmp_path / "a.pdparams", sliced(), 2)
    loaded = paddle.load(str(path), return_numpy=True)
    same(arrays(path), {name: np.asarray(loaded[name]) for name in ("b", "big")})


def test_uint16_of_paddle_is_read_as_bfloat16(tmp_path: Path) -> None:
    paddle = pytest.importorskip("paddle")
    layer = paddle.nn.Linear(3, 2)
    layer.to(dtype="bfloat16")
    masters = {p.name: p.astype("float32") for p in layer.parameters()}  # an optimizer keeps them on a GPU alone
    paddle.save(layer.state_dict(), str(tmp_path / "a.pdparams"))
    paddle.save({"w_moment": layer.weight, "master_weights": masters}, str(tmp_path / "a.pdopt"))
    found = arrays(tmp_path / "a.pdparams")
    assert found["weight"].dtype == ml_dtypes.bfloat16
    assert np.array_equal(found["weight"].astype(np.float32), layer.weight.astype("float32").numpy())
    assert "weight, bias: saved as uint16, which is how Paddle writes bfloat16" in notices(tmp_path / "a.pdparams")
    slots = {name: array.dtype for name, array in arrays(tmp_path / "a.pdopt").items()}
    assert slots == {"w_moment": ml_dtypes.bfloat16} | {f"master_weights.{name}": np.float32 for name in masters}


def test_float8_is_not_distinguished_from_int8(tmp_path: Path) -> None:
    paddle = pytest.importorskip("paddle")
    paddle.save({"a": paddle.ones([2]).astype("float8_e4m3fn")}, str(tmp_path / "a.pdparams"))
    assert arrays(tmp_path / "a.pdparams")["a"].dtype == np.int8
    assert "a: saved as int8, which is also how Paddle writes float8" in notices(tmp_path / "a.pdparams")


def test_a_dense_tensor_is_read_without_eval(tmp_path: Path) -> None:
    paddle = pytest.importorskip("paddle")
    value = paddle.arange(3, dtype="float32")
    paddle.save([value.value().get_tensor()], str(tmp_path / "a.pdparams"))
    assert b"eval" in (tmp_path / "a.pdparams").read_bytes()
    same(arrays(tmp_path / "a.pdparams"), {"0": np.arange(3, dtype=np.float32)})


# --- what is refused -----------------------------------------------------------------------------------------------
class Call:
    """Pickles as a call of any function with any arguments."""

    def __init__(self, function: Any, *arguments: Any, state: Any = None) -> None:
        self.parts = (function, arguments) if state is None else (function, arguments, state)

    def __reduce__(self) -> Any:
        return self.parts


class Instance:
    """A class of one's own."""


def spiral() -> dict[str, Any]:
    state: dict[str, Any] = {"a": np.ones(2)}
    state["again"] = state
    return state


def nested(depth: int, kind: Callable[[Any], Any]) -> Any:
    value: Any = np.ones(2)
    for _ in range(depth):
        value = kind(value)
    return {"a": value}


def laughs() -> Any:
    """One array under 10 ** 12 names."""
    value: Any = [np.ones(2)] * 10
    for _ in range(11):
        value = [value] * 10
    return {"a": value}


def _reconstruct(*arguments: Any, state: Any = None) -> dict[str, Any]:
    return {"a": Call(np._core.multiarray._reconstruct, *arguments, state=state)}  # type: ignore[attr-defined]


F4 = np.dtype(np.float32)
PLAIN = (np.ndarray, (0,), b"b")
REFUSED: dict[str, tuple[Callable[[], Any], str]] = {
    "a function": (lambda: {"a": Call(Path.touch, Path("x"))}, r"refers to (pathlib|builtins\.getattr)"),
    "a builtin": (lambda: {"a": Call(print, "x")}, r"refers to builtins\.print"),
    "eval": (lambda: {"a": Call(eval, "1")}, r"refers to builtins\.eval"),
    "eval of a name": (lambda: {"a": Call(eval, "data", {"data": 3})}, r"refers to builtins\.eval"),
    "getattr": (lambda: {"a": Call(getattr, "x", "upper")}, r"refers to builtins\.getattr"),
    "an instance": (lambda: {"a": Instance()}, r"refers to .*Instance"),
    "an object array": (lambda: {"a": np.array([{}, None])}, "dtype 'O8'"),
    "text": (lambda: {"a": np.array(["x"])}, "dtype 'U1'"),
    "fields": (lambda: {"a": np.zeros(2, [("x", "f4")])}, "dtype 'V4'"),
    "times": (lambda: {"a": np.zeros(2, "M8[s]")}, "dtype 'M8'"),
    "a subclass": (lambda: {"a": np.ma.masked_array([1.0])}, r"refers to numpy\.ma"),
    "a dict that contains itself": (spiral, "contains itself"),
    "nested dicts": (lambda: nested(200, lambda value: {"a": value}), "more than 64 deep"),
    "nested tuples": (lambda: nested(400, lambda value: (value,)), "more than 64 deep"),
    "an array under many names": (laughs, "names the same data so often"),
    "a tuple as a key": (lambda: {((("x",),),): np.ones(2)}, "a key that is neither text nor a number"),
    "a huge number": (lambda: {"a": 1 << 4000}, "an integer of 501 bytes"),
    "two of one name": (lambda: {"a.b": np.ones(2), "a": {"b": np.ones(2)}}, r"are called 'a\.b'"),
    "a number for a name": (lambda: {"1": np.ones(2), 1: np.ones(2)}, "two of its tensors are called 1"),
    "an array without a state": (lambda: _reconstruct(*PLAIN), "never says what is in it"),
    "too few arguments": (lambda: _reconstruct(np.ndarray), "not a plain numpy.ndarray"),
    "no array": (lambda: _reconstruct(int, (0,), b"b"), r"refers to builtins\.(int|long)"),
    "too short": (lambda: _reconstruct(*PLAIN, state=(1, (3,), F4, False, b"1234")), "of 3 float32 has 4 bytes"),
    "too long": (lambda: _reconstruct(*PLAIN, state=(1, (), F4, False, b"12345")), "has 5 bytes"),
    "negative": (lambda: _reconstruct(*PLAIN, state=(1, (-1, -1), F4, False, b"1234")), "impossible shape"),
    "overflowing": (lambda: _reconstruct(*PLAIN, state=(1, (1 << 63, 2), F4, False, b"")), "impossible shape"),
    "no shape": (lambda: _reconstruct(*PLAIN, state=(1, [1], F4, False, b"1234")), "impossible shape"),
    "no dtype": (lambda: _reconstruct(*PLAIN, state=(1, (1,), "f4", False, b"1234")), "names no dtype"),
    "objects": (lambda: _reconstruct(*PLAIN, state=(1, (1,), F4, False, [1])), "are Python objects"),
    "another state": (lambda: _reconstruct(*PLAIN, state={"x": 1}), "a state that NumPy does not write"),
    "a scalar of none": (lambda: {"a": Call(np._core.multiarray.scalar, F4, b"1")}, "has 1 bytes"),  # type: ignore[attr-defined]
    "many axes": (lambda: _reconstruct(*PLAIN, state=(1, (1,) * 40, F4, False, b"1234")), "impossible shape"),
}


@pytest.mark.parametrize("case", REFUSED)
@pytest.mark.parametrize("protocol", [2, 4])
def test_refused_pickles(tmp_path: Path, case: str, protocol: int) -> None:
    make, why = REFUSED[case]
    path = write(tmp_path / "a.pdparams", make(), protocol)
    with pytest.raises(RunUnreadable, match=rf"(?s)a\.pdparams cannot be read as a checkpoint of Paddle: .*{why}"):
        tt.open(path)


@pytest.mark.parametrize(
    ("content", "why"),
    [
        (b"", "is empty"),
        (b"x", "does not begin as a pickle"),
        (b"(dp0\n.", "does not begin as a pickle"),  # protocol 0
        (b"\x80\x09N.", "protocol 9"),
        (b"\x80\x04", "cut off"),
        (b"\x80\x04.", "ends before it is complete"),
        (b"\x80\x04N(.", "ends before it is complete"),
        (b"\x80\x040.", "goes back to a mark"),
        (b"\x80\x04h\x07.", "value 7, which it never stored"),
        (b"\x80\x04j\xff\xff\xff\xff.", "value 4,294,967,295"),
        (b"\x80\x04B\xff\xff\xff\xff.", "cut off"),
        (b"\x80\x04\x8e" + b"\xff" * 8, "cut off"),
        (b"\x80\x04\x95" + b"\xff" * 8, "cut off: a frame"),
        (b"\x80\x04\x8b\xff\xff\xff\x7f", "an integer of 2,147,483,647 bytes"),
        (b"\x80\x04\x97.", "NEXT_BUFFER"),
        (b"\x80\x04Q.", "BINPERSID"),
        (b"\x80\x04\x82\x01.", "EXT1"),
        (b"\x80\x04N)\x81.", "NEWOBJ"),
        (b"\x80\x04\xffN.", "does not exist"),
        (b"\x80\x04N)R.", "not a function"),
        (b"\x80\x04NNb.", "not an array"),
        (b"\x80\x04NNa.", "not a list"),
        (b"\x80\x04N(NNu.", "not a dict"),
        (b"\x80\x04}(Nu.", "a key without a value"),
        (b"\x80\x04}]Ns.", "neither text nor a number"),
        (b"\x80\x04cos\nsystem\n.", r"refers to os\.system"),
        (b"\x80\x04\x8c\x02os\x8c\x06system\x93.", r"refers to os\.system"),
        (b"\x80\x04NN\x93.", "a global has no name"),
        (b"\x80\x04c" + b"x" * 600, "does not end"),
        (b"\x80\x04\x8c\x02\xff\xff.", "cannot be decoded"),
        (b"\x80\x04I12x\n.", "text in place of a number"),
        (b"\x80\x04cnumpy\nndarray\n)R.", r"calls numpy\.ndarray"),
        (b"\x80\x04N.", "holds no tensors"),
        (b"\x80\x04}.", "holds no tensors"),
    ],
)
def test_instructions_that_make_no_sense(tmp_path: Path, content: bytes, why: str) -> None:
    path = tmp_path / "a.pdparams"
    path.write_bytes(content)
    with pytest.raises(RunUnreadable, match=rf"(?s)a\.pdparams.*{why}"):
        tt.open(path)


def test_invalid_text_raises_when_it_is_read(tmp_path: Path) -> None:
    """Protocol 2 holds bytes as text, which is decoded when an array is loaded."""
    path = write(tmp_path / "a.pdparams", {"a": np.full(2000, 200, np.uint8)}, 2)
    path.write_bytes(path.read_bytes().replace("\xc8".encode() * 2000, "\xc8".encode() * 1999 + b"\xc8\xc8"))
    with pytest.raises(RunUnreadable, match=r"a\.pdparams"), tt.open(path) as run:
        list(run)


def test_a_file_cut_off_anywhere(tmp_path: Path) -> None:
    whole = pickle.dumps({"fc.weight": np.ones((2, 3), np.float32), "lr": {"last": 0.5}}, 4)
    path = tmp_path / "a.pdparams"
    for size in range(len(whole)):
        path.write_bytes(whole[:size])
        with pytest.raises(RunUnreadable, match=r"a\.pdparams"):
            tt.open(path)


@pytest.mark.parametrize("protocol", [2, 4, 5])
def test_damage_anywhere_is_one_error_or_none(tmp_path: Path, protocol: int) -> None:
    """Seeded mutations: bytes changed, parts doubled, dropped or copied. All tensors load, or one error is raised."""
    state = {
        **{name: STATE[name] for name in ("fc.weight", "half", "count", "wide")},
        "slots": OrderedDict(m=("m", np.ones(3, np.float32)), rate={"last": 0.5, "steps": [1, 2]}),
    }
    whole, draw, path = pickle.dumps(state, protocol), random.Random(protocol), tmp_path / "a.pdparams"
    outcomes = {"opened": 0, "refused": 0}
    for _ in range(400):
        data = bytearray(whole)
        for _ in range(draw.choice((1, 1, 2, 5))):
            at, other = draw.randrange(len(data)), draw.randrange(len(data))
            length = draw.randrange(1, 40)
            change = draw.randrange(4)
            if change == 0:
                data[at] = draw.randrange(256)
            elif change == 1:
                data[at:at] = data[other : other + length]
            elif change == 2:
                del data[at : at + length]
            else:
                data[at : at + length] = data[other : other + length]
        path.write_bytes(data)
        try:
            arrays(path)
            outcomes["opened"] += 1
        except TensortapError as error:
            assert "a.pdparams" in str(error)
            outcomes["refused"] += 1
    assert min(outcomes.values()) > 10, outcomes
