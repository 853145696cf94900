"""The same capture on paddle: the same keys as torch on a mirrored model, and paddle's own traps."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import tensortap as tt
from support import mirror
from support.tapping import ALL_KINDS, coverage, everything, values

paddle = pytest.importorskip("paddle")
nn = paddle.nn
recompute = pytest.importorskip("paddle.distributed.fleet.utils").recompute

pytestmark = pytest.mark.filterwarnings("ignore:When training, we now always track")


def batch(seed: int = 1) -> Any:
    return paddle.to_tensor(np.random.default_rng(seed).standard_normal((3, 5, 4)), dtype="float32")


def loss_of(output: Any) -> Any:
    weights = paddle.linspace(0.5, 1.5, output.size).reshape(output.shape)
    return (output * weights).square().mean()


def tapped(model: Any, path: Path, *inputs: Any, **options: Any) -> Any:
    with tt.capture(model, path, **({"keep": "tensors", "kinds": ALL_KINDS} | options)) as tap:
        loss_of(model(*(inputs or (batch(),)))).backward()
        tap.step()
    return tt.open(path), tap


def hooks_on(model: Any) -> int:
    return sum(
        len(layer._forward_pre_hooks) + len(layer._forward_post_hooks) for layer in model.sublayers(include_self=True)
    )


def same(array: Any, tensor: Any) -> bool:
    return np.array_equal(array, tensor.numpy())


def test_the_same_keys_and_numbers_as_torch(tmp_path: Path) -> None:
    torch.manual_seed(0)
    one, two = mirror.torch_model(), mirror.paddle_model()
    mirror.copy_weights(one, two)
    optimizers = (
        torch.optim.SGD(one.parameters(), lr=0.1),
        paddle.optimizer.SGD(learning_rate=0.1, parameters=two.parameters()),
    )
    for model, optimizer, path in zip((one, two), optimizers, (tmp_path / "torch", tmp_path / "paddle"), strict=True):
        kinds = ("input", "output", "grad_input", "grad_output", "param_grad")
        with tt.capture(model, path, keep="tensors", kinds=kinds, optimizer=optimizer):
            for step in range(2):
                for micro in range(2):
                    array = mirror.tokens(10 * step + micro)
                    model(
                        torch.from_numpy(array) if model is one else paddle.to_tensor(array)
                    ).square().mean().backward()
                optimizer.step()
                (optimizer.zero_grad if model is one else optimizer.clear_grad)()
    ours, theirs = tt.open(tmp_path / "torch"), tt.open(tmp_path / "paddle")
    assert [r.key for r in ours.records(phase="forward")] == [r.key for r in theirs.records(phase="forward")]
    assert {r.key for r in ours} == {r.key for r in theirs}
    by_key = {r.key: theirs.load(r) for r in theirs}
    linear = {"Linear"}
    for record in ours:
        left, right = ours.load(record), by_key[record.key]
        if record.key.kind == "param_grad" and record.cls in linear and record.key.path == "weight":
            right = right.T
        assert np.allclose(left, right, rtol=2e-4, atol=2e-6), record.key
    said = {name: row.status for name, row in ((r.module, r) for r in ours.coverage[0])}
    assert said == {row.module: row.status for row in theirs.coverage[0]}


class InPlace(nn.Layer):
    class Relu(nn.Layer):
        def forward(self, x: Any) -> Any:
            return nn.functional.relu_(x)

    def __init__(self) -> None:
        super().__init__()
        self.first, self.act, self.second = nn.Linear(4, 6), InPlace.Relu(), nn.Linear(6, 4)

    def forward(self, x: Any) -> Any:
        return self.second(self.act(self.first(x)))


def test_in_place(run_path: Path) -> None:
    model, x = InPlace(), batch()
    run, _ = tapped(model, run_path, x)
    before = model.first(x)
    assert same(values(run, "output")["first", 0, "0"], before)
    assert same(values(run, "input")["act", 0, "0"], before)
    assert same(values(run, "output")["act", 0, "0"], nn.functional.relu(before))
    before = before.detach()
    before.stop_gradient = False
    after = nn.functional.relu(before)
    after.retain_grads()
    loss_of(model.second(after)).backward()
    assert np.allclose(values(run, "grad_output")["act", 0, "0"], after.grad.numpy())
    assert np.allclose(values(run, "grad_output")["first", 0, "0"], before.grad.numpy())


class Gated(nn.Layer):
    def __init__(self) -> None:
        super().__init__()
        self.gate, self.up, self.down = nn.Linear(4, 8), nn.Linear(4, 8), nn.Linear(8, 4)

    def forward(self, x: Any) -> Any:
        return self.down(nn.functional.sigmoid(self.gate(x)) * self.up(x)) + x.sin()


class Residual(nn.Layer):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.gated, self.drop, self.last = nn.Linear(4, 4), Gated(), nn.Dropout(0.3), nn.Linear(4, 4)

    def forward(self, x: Any) -> Any:
        y = self.first(x)
        return self.last(y + self.drop(self.gated(y)))


@pytest.mark.parametrize("keep", ["summary", "tensors"])
def test_training_is_unchanged(tmp_path: Path, keep: str) -> None:
    def train(path: Path | None) -> list[Any]:
        paddle.seed(5)
        model = Residual()
        optimizer = paddle.optimizer.AdamW(parameters=model.parameters())
        own = set(vars(optimizer))
        tap = path and tt.capture(model, path, keep=keep, kinds=ALL_KINDS, optimizer=optimizer)
        found = []
        for step in range(3):
            loss = loss_of(model(batch(step)))
            loss.backward()
            found += [loss.numpy(), *(p.grad.numpy() for p in model.parameters())]
            optimizer.step()
            optimizer.clear_grad()
        if tap:
            tap.close()
        assert hooks_on(model) == 0 and "step" not in set(vars(optimizer)) - own
        return found + [p.numpy() for p in model.parameters()] + [paddle.rand([4]).numpy()]

    plain, tapped_run = train(None), train(tmp_path / "run")
    assert all(np.array_equal(a, b) for a, b in zip(plain, tapped_run, strict=True))


@pytest.mark.parametrize(("name", "channels", "size"), [("LeNet", 1, 28), ("shufflenet_v2_x0_25", 3, 32)])
def test_training_of_paddles_own_models_is_unchanged(run_path: Path, name: str, channels: int, size: int) -> None:
    def train(path: Path | None) -> list[bytes]:
        paddle.seed(5)
        model = getattr(paddle.vision.models, name)(num_classes=3)
        optimizer = paddle.optimizer.Momentum(learning_rate=0.01, parameters=model.parameters())
        tap = path and tt.capture(model, path, kinds=ALL_KINDS, optimizer=optimizer)
        found = []
        for seed in range(2):
            images = np.random.default_rng(seed).standard_normal((2, channels, size, size))
            loss = loss_of(model(paddle.to_tensor(images, dtype="float32")))
            loss.backward()
            found += [loss.numpy(), *(p.grad.numpy() for p in model.parameters() if p.grad is not None)]
            optimizer.step()
            optimizer.clear_grad()
        if tap:
            tap.close()
            assert {row.status for row in tap.coverage} == {"seen"}
        return [array.tobytes() for array in [*found, *(value.numpy() for value in model.state_dict().values())]]

    assert train(None) == train(run_path)


def test_grad_input_is_the_layers_own_share(run_path: Path) -> None:
    paddle.seed(0)
    model, x = Residual(), batch()
    model.eval()
    run, _ = tapped(model, run_path, x)
    y = model.first(x).detach()
    y.stop_gradient = False
    inner = y.clone()  # a private edge, which the tap itself does not need
    inner.retain_grads()
    loss_of(model.last(y + model.gated(inner))).backward()
    assert np.allclose(values(run, "grad_input")["gated", 0, "0"], inner.grad.numpy(), rtol=1e-5, atol=1e-8)
    assert np.allclose(values(run, "grad_output")["first", 0, "0"], y.grad.numpy(), rtol=1e-5, atol=1e-8)


class Recomputed(nn.Layer):
    def __init__(self, mode: Any) -> None:
        super().__init__()
        self.mode = mode
        self.blocks, self.head = nn.LayerList([Gated(), Gated()]), nn.Linear(4, 4)

    def forward(self, x: Any) -> Any:
        for block in self.blocks:
            x = block(x) if self.mode is None else recompute(block, x, use_reentrant=self.mode)
        return self.head(x)


@pytest.mark.parametrize("reentrant", [True, False])
def test_recompute_gives_the_same_keys_and_bits(tmp_path: Path, reentrant: bool) -> None:
    runs = []
    for mode in (None, reentrant):
        paddle.seed(0)
        x = batch()
        x.stop_gradient = False
        run, tap = tapped(Recomputed(mode), tmp_path / str(mode), x)
        # The root's own share passes through recompute's PyLayer, on which paddle runs no hooks, which is reported.
        runs.append({k: v for k, v in everything(run).items() if (k.module, k.kind) != ("", "grad_input")})
        assert ("cannot be watched" in coverage(tap)[""][1]) == (mode is True)
        assert {row.calls for row in tap.coverage if row.status == "seen"} == {1}
    assert runs[0] == runs[1]


def test_no_grad_frozen_and_unused(run_path: Path) -> None:
    model = Gated()
    for parameter in model.up.parameters():
        parameter.stop_gradient = True
    _, tap = tapped(model, run_path)
    assert coverage(tap)["up"] == ("no gradient", "all its parameters are frozen")
    assert coverage(tap)["gate"][0] == "seen"
    with tt.capture(model, run_path.with_name("b")) as tap, paddle.no_grad():
        model(batch())
        tap.step()
    assert coverage(tap)["down"] == ("no gradient", "ran with autograd off")


@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float64", "int64", "bool", "float8_e4m3fn"])
def test_dtypes(run_path: Path, dtype: str) -> None:
    class Through(nn.Layer):
        def forward(self, x: Any) -> Any:
            return x

    x = batch().astype(dtype)
    with tt.capture(Through(), run_path, keep="tensors", kinds="input") as tap:
        tap._watcher._tree.sites[0].module(x)
        tap.step()
    run = tt.open(run_path)
    record = next(iter(run))
    assert record.dtype == dtype
    bits = run.load(record).view(np.uint8).reshape(-1)
    assert np.array_equal(bits, np.ascontiguousarray(x.numpy()).view(np.uint8).reshape(-1))


def test_sparse_gradients_are_reported(run_path: Path) -> None:
    model = nn.Embedding(7, 4, sparse=True)
    with tt.capture(model, run_path) as tap:
        model(paddle.to_tensor([1, 1, 3])).sum().backward()
        tap.step()
    assert "SelectedRows" in coverage(tap)[""][1]


def test_batch_norm_statistics_are_buffers(run_path: Path) -> None:
    model = nn.BatchNorm1D(4)
    run, _ = tapped(model, run_path, batch().transpose([0, 2, 1]))
    assert {p for _, _, p in values(run, "buffer")} == {"_mean", "_variance"}
    assert {p for _, _, p in values(run, "param")} == {"weight", "bias"}


def test_a_deep_copy_is_silent_and_exceptions_leave_no_hook(run_path: Path) -> None:
    model = Gated()
    with pytest.raises(ZeroDivisionError), tt.capture(model, run_path) as tap:
        copy.deepcopy(model)(batch())
        assert all(row.calls == 0 for row in tap.coverage)
        raise ZeroDivisionError
    assert hooks_on(model) == 0


# --- plain arguments -----------------------------------------------------------------------------------------------
class Takes(nn.Layer):
    def __init__(self) -> None:
        super().__init__()
        self.fc = nn.Linear(4, 4)

    def forward(self, x: Any, *args: Any, **kwargs: Any) -> Any:
        return self.fc(x)


class Gives(nn.Layer):
    def __init__(self, recomputed: bool = False) -> None:
        super().__init__()
        self.first, self.part, self.recomputed = nn.Linear(4, 4), Takes(), recomputed

    def forward(self, x: Any) -> Any:
        x = self.first(x)
        if self.recomputed:
            return recompute(self.part, x, scale=0.5)
        kinds = {"dtype": paddle.bfloat16, "place": paddle.CPUPlace(), "shape": paddle.ones([2, 3]).shape}
        x = self.part(x, None, True, causal=False, scale=float("nan"), **kinds)
        return self.part(x, (x, 3), cut=slice(1))


def test_plain_arguments_are_kept_by_the_same_paths(run_path: Path) -> None:
    run, _ = tapped(Gives(), run_path)
    first, second = [run.arguments(record) for record in run.records(module="part", kind="output")]
    shape = first.pop("shape")
    assert [*shape] == [2, 3]
    assert repr(first) == "{'1': None, '2': True, 'causal': False, 'scale': nan, 'dtype': bfloat16, 'place': cpu}"
    assert (first["dtype"].kind, first["place"].kind) == ("dtype", "device")
    assert repr(second) == "{'1.1': 3, 'cut': a slice object}"


def test_plain_arguments_of_a_recomputed_call_are_kept_once(run_path: Path) -> None:
    run, _ = tapped(Gives(recomputed=True), run_path)
    assert len((run_path / "rank_0" / "calls.jsonl").read_text().splitlines()) == 1
    found = {str(run.arguments(r)) for r in run.records(module="part", kind="grad_output")}
    assert found == {"{'1': 0.5}"}, "recompute itself makes positions of keywords"
