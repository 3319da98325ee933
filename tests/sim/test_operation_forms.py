"""Forms of an operation give what the operation gives, for every worker by itself."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.func import grad, vmap
from torch.nn import functional

from gossamer import simulate
from gossamer.config.settings import make_settings
from gossamer.errors import ConfigurationError
from gossamer.sim.engine import LoopEngine, VectorEngine
from gossamer.sim.forms.attention import FoldedAttention, RepeatedAttention, can_fold
from gossamer.sim.forms.convolution import FORMS, Geometry, StackedConvolution
from gossamer.sim.forms.operations import (
    FoldedEmbedding,
    FusedCrossEntropy,
    PlainBatchNorm,
    plain_rms_norm,
)
from gossamer.sim.forms.table import FormRow, FormTable, shipped_table
from gossamer.tasks import Task
from gossamer.tasks.flat_model import FlatModel
from gossamer.tasks.task import ACCURACY, Data, cross_entropy
from gossamer.tasks.text import CharacterTransformer
from tiers import every

WORKERS = 3
GEOMETRIES = [  # kernel, stride, padding, dilation
    (3, 2, 1, 1), (3, 1, 1, 1), (1, 1, 0, 1), (1, 2, 0, 1), (5, 1, 2, 1), (5, 1, 0, 1),
    (3, 1, 2, 2),
]  # fmt: skip


def draw(*shape: int) -> Tensor:
    return torch.randn(WORKERS, *shape, dtype=torch.float64)


def assert_same_gradients(
    form: Callable[..., Tensor], reference: Callable[..., Tensor], *given: Tensor
) -> None:
    def gradients(function: Callable[..., Tensor]) -> Any:
        places = tuple(i for i, one in enumerate(given) if one.is_floating_point())
        return grad(lambda *some: function(*some).square().sum(), places)

    together = vmap(gradients(form))(*given)
    for worker in range(WORKERS):
        alone = gradients(reference)(*(one[worker] for one in given))
        for ours, theirs in zip(together, alone, strict=True):
            torch.testing.assert_close(ours[worker], theirs)


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("case", every(1, GEOMETRIES))
def test_a_form_of_a_convolution_is_the_convolution(
    form: str, case: tuple[int, int, int, int]
) -> None:
    """Outputs and both gradients, for every kernel, stride, padding and dilation."""
    kernel, stride, padding, dilation = case
    geometry = Geometry((stride,) * 2, (padding,) * 2, (dilation,) * 2, 1)
    assert_same_gradients(
        lambda x, w: StackedConvolution.apply(x, w, form, geometry.numbers),
        lambda x, w: functional.conv2d(x, w, None, stride, padding, dilation),
        draw(2, 4, 9, 9), draw(5, 4, kernel, kernel),
    )  # fmt: skip


def test_folded_attention_is_attention() -> None:
    """The workers are folded into the samples, forward and backward."""
    query, key, value = (draw(2, 4, 16, 8).float() for _ in range(3))
    assert can_fold(query[0], key[0], value[0], True)
    assert_same_gradients(
        lambda *some: FoldedAttention.apply(*some, True, None)[0],
        lambda *some: functional.scaled_dot_product_attention(*some, is_causal=True),
        query, key, value,
    )  # fmt: skip


@pytest.mark.parametrize("mask_shape", every(1, [(2, 1, 6, 6), (6, 6), (2, 4, 6, 6)]))
def test_attention_with_a_mask_of_each_worker_is_attention(mask_shape: tuple[int, ...]) -> None:
    """Masks may differ between workers and samples, and heads may share keys."""
    query, key, value = draw(2, 4, 6, 8), draw(2, 2, 6, 8), draw(2, 2, 6, 8)
    mask = torch.rand(WORKERS, *mask_shape) < 0.7
    mask[..., 0] = True
    options = {"enable_gqa": True}
    assert_same_gradients(
        lambda q, k, v, m: RepeatedAttention.apply(q, k, v, m, options),
        lambda q, k, v, m: functional.scaled_dot_product_attention(q, k, v, m, enable_gqa=True),
        query, key, value, mask,
    )  # fmt: skip


def test_small_forms_are_their_operations() -> None:
    """An embedding, cross-entropy with ignored targets, BatchNorm, and the RMS norm."""
    words = torch.randint(7, (WORKERS, 2, 5))
    assert_same_gradients(
        lambda w, i: FoldedEmbedding.apply(i, w), lambda w, i: w[i], draw(7, 4), words
    )
    targets = torch.randint(7, (WORKERS, 6))
    targets[:, 0] = -100
    assert_same_gradients(
        lambda s, t: FusedCrossEntropy.apply(s, t, -100)[0], functional.cross_entropy,
        draw(6, 7).float(), targets,
    )  # fmt: skip
    assert_same_gradients(
        lambda x, w, b: PlainBatchNorm.apply(x, w, b, 1e-5)[0],
        lambda x, w, b: functional.batch_norm(x, None, None, w, b, True),
        draw(4, 3, 5, 5).float(), draw(3).float(), draw(3).float(),
    )  # fmt: skip
    assert_same_gradients(
        lambda x, w: plain_rms_norm(x, 1, w, None), lambda x, w: functional.rms_norm(x, (4,), w),
        draw(6, 4), draw(4),
    )  # fmt: skip


def text_task(make_model: Callable[[], nn.Module]) -> Task:
    codes = torch.randint(70, (64, 17), generator=torch.Generator().manual_seed(0))
    data = Data(codes[:, :-1].contiguous(), codes[:, 1:].contiguous())
    return Task(
        name="text", title="text", make_model=make_model, loss=cross_entropy, train=data,
        test=data, metric=ACCURACY, batch=4, epochs=1.0, learning_rates=(0.1,),
    )  # fmt: skip


class Encoder(nn.Module):
    """Torch's own layer, which calls attention, with dropout, where no form would see it."""

    def __init__(self) -> None:
        super().__init__()
        self.words = nn.Embedding(70, 32)
        self.layer = nn.TransformerEncoderLayer(32, 4, 64, 0.1, functional.gelu, batch_first=True)
        self.scores = nn.Linear(32, 70)

    def forward(self, text: Tensor) -> Tensor:
        mask = nn.Transformer.generate_square_subsequent_mask(text.shape[1])
        return self.scores(self.layer(self.words(text), src_mask=mask))


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
@pytest.mark.parametrize(
    "make_model", every(1, [lambda: CharacterTransformer(70, 1, 2, 32, 16), Encoder])
)
@pytest.mark.filterwarnings("error")
def test_transformers_are_evaluated_together_in_every_precision(
    make_model: Callable[[], nn.Module], precision: str
) -> None:
    """No operation falls back to one worker after the other, and the loop has the same rounding."""
    model = FlatModel(text_task(make_model), torch.device("cpu"), seed=0, precision=precision)
    generator = torch.Generator().manual_seed(1)
    given = (
        model.initial + 0.1 * torch.randn(2, model.layout.total, generator=generator),
        model.initial_buffers.repeat(2, 1),
        torch.randint(64, (2, 4), generator=generator),
        torch.arange(2),
    )
    engine = VectorEngine(model, trace_after=0)
    ours, theirs = engine.evaluate(*given), LoopEngine(model).evaluate(*given)
    assert not engine.notices
    assert ours.gradients.dtype == torch.float32
    off = float((ours.gradients - theirs.gradients).norm() / theirs.gradients.norm())
    assert off < (1e-5 if precision == "fp32" else 0.05)


def test_a_table_gives_the_form_of_the_nearest_shape() -> None:
    """On the same kind of device, in doublings; nothing is known of other types of device."""
    rows = [
        FormRow("cuda 9.0", "convolution", "bf16", {"inputs": size}, form, {})
        for size, form in ((16, "grouped"), (512, "unfolded"))
    ]
    table, gpu = FormTable(rows), torch.device("cpu")
    assert table.form("convolution", gpu, "bf16", {"inputs": 64}) is None
    near = FormTable([FormRow("cpu", r.operation, r.precision, r.shape, r.form, {}) for r in rows])
    assert near.form("convolution", gpu, "bf16", {"inputs": 64}) == "grouped"
    assert near.form("convolution", gpu, "tf32", {"inputs": 128}) == "unfolded"
    assert near.fingerprint != table.fingerprint


def test_every_form_of_the_shipped_table_exists() -> None:
    """And the one that is named was the fastest when it was measured."""
    rows = [row for row in shipped_table().rows if row.operation == "convolution"]
    assert rows
    for row in rows:
        assert row.form in FORMS
        assert row.microseconds[row.form] == min(row.microseconds.values())


def test_events_do_not_depend_on_the_precision() -> None:
    """The digest is the same, and the parameters are not."""
    runs = [
        simulate("digits-mlp", "ad_psgd", epochs=0.5, precision=one) for one in ("fp32", "bf16")
    ]
    assert runs[0].summary["digest"] == runs[1].summary["digest"]
    assert runs[0].summary["parameters_digest"] != runs[1].summary["parameters_digest"]
    assert [run.settings.precision for run in runs] == ["fp32", "bf16"]


@pytest.mark.wide
@pytest.mark.parametrize("method", ["all_reduce", "ad_psgd"])
def test_bf16_learns_as_much_as_32_bits(method: str) -> None:
    """The mean accuracy of three seeds lies in the interval of the seeds of fp32."""
    found = {
        precision: [
            simulate("digits-mlp", method, epochs=4, seed=seed, precision=precision).summary
            for seed in range(3)
        ]
        for precision in ("fp32", "bf16")
    }
    exact = torch.tensor([run["accuracy"] for run in found["fp32"]])
    half = 4.3 * float(exact.std()) / 3**0.5
    rough = torch.tensor([run["accuracy"] for run in found["bf16"]])
    assert abs(float(rough.mean() - exact.mean())) <= max(half, 0.01)


@pytest.mark.parametrize(
    ("precision", "said"), [("fp8", "fp8"), ("tf32", "the device cpu has no tf32")]
)
def test_a_precision_that_cannot_be_is_refused(precision: str, said: str) -> None:
    """In one sentence, before anything is computed."""
    with pytest.raises(ConfigurationError, match=said):
        make_settings("digits-mlp", "ad_psgd", "equal-8", precision=precision)
    assert make_settings("digits-mlp", "ad_psgd", "equal-8").precision == "fp32"
