"""The cases: which press, with which parameters, is which policy of kvsieve."""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Callable, Iterator
from unittest import mock

import formulas
import kvpress
import torch
from layer import HEAD_DIM, LAYERS, Inputs, make_inputs
from torch import Tensor


@dataclasses.dataclass
class Case:
    """What kvsieve is asked, and what is expected of it."""

    name: str
    inputs: Inputs
    policy: str
    budget: int
    source: str
    scores: Tensor | None = None  # [B, Hkv, T]
    kept: Tensor | None = None  # [B, Hkv, T], true where a token stays
    outputs: dict[str, Tensor] = dataclasses.field(default_factory=dict)  # other tensors that evict writes
    sink: int = 0  # first tokens whose scores stand for "always stays" and are not compared
    window: int = 0  # last tokens of that kind
    tolerance: float = 2e-5
    notes: str = ""


def score(press: kvpress.ScorerPress, at: Inputs, attention: bool = False) -> Tensor:
    """The press's scores of every token."""
    attentions = at.attention if attention else None
    return press.score(at.module, at.hidden, at.k.clone(), at.v.clone(), attentions, at.kwargs)


def compress(press: kvpress.presses.base_press.BasePress, at: Inputs) -> tuple[Tensor, Tensor]:
    """The keys and values that the press leaves."""
    at.module.masked_key_indices = None
    return press.compress(at.module, at.hidden, at.k.clone(), at.v.clone(), None, at.kwargs)


def positions(rows: Tensor, source: Tensor) -> Tensor:
    """Where in `source` each row of `rows` lies, `[B, H, n]`."""
    same = (rows[..., :, None, :] == source[..., None, :, :]).all(-1)
    assert (same.sum(-1) == 1).all(), "every row that stays is a row of the source"
    return same.int().argmax(-1)


def kept_by(press: kvpress.presses.base_press.BasePress, at: Inputs) -> Tensor:
    """Mask of the tokens that stay, whether the press drops tokens or lists the ones to mask."""
    keys, _ = compress(press, at)
    if at.module.masked_key_indices is not None:
        mask = torch.ones(at.k.shape[:3], dtype=torch.bool)
        mask[at.module.masked_key_indices] = False
        return mask
    return torch.zeros(at.k.shape[:3], dtype=torch.bool).scatter(-1, positions(keys, at.k), True)


def by_position(rows: Tensor, keys: Tensor, at: Inputs) -> Tensor:
    """Rows that lie in the order of `keys`, in the order of positions instead."""
    order = positions(keys, at.k).argsort(-1)
    return rows.gather(2, order[..., None].expand_as(rows))


def removed(at: Inputs, budget: int) -> float:
    """kvpress's compression ratio for a budget in tokens."""
    ratio = 1 - budget / at.tokens
    return next(r for r in (ratio, ratio - 1e-12) if int(at.tokens * (1 - r)) == budget)


@contextlib.contextmanager
def identity_sketch() -> Iterator[None]:
    """Lets LeverageScorePress draw the identity, which is no sketch: its own scale is taken back."""

    def draw(*shape: int, **how: object) -> Tensor:
        return (torch.eye(shape[-1]) * shape[-1] ** 0.5).expand(*shape).clone()

    with mock.patch.object(torch, "randn", draw):
        yield


def scorer_cases(at: Inputs, budget: int) -> Iterator[Case]:
    """Presses that score tokens and need nothing but one layer."""
    ratio = removed(at, budget)

    def case(
        policy: str,
        press: kvpress.ScorerPress,
        *,
        attention: bool = False,
        with_scores: bool = True,
        **more: object,
    ) -> Case:
        source = type(press).__name__
        scores = score(press, at, attention)
        # Presses that read attention weights take them from the layer, which `compress` does not show them here.
        kept = formulas.kept_positions(scores, budget) if attention else kept_by(press, at)
        name = policy.replace(":", "-").replace(",", "-").replace("=", "")
        return Case(f"{at.name}/{name}", at, policy, budget, source, scores if with_scores else None, kept, **more)

    yield case("knorm", kvpress.KnormPress(ratio))
    yield case("keydiff", kvpress.KeyDiffPress(ratio))
    no_scores = {"with_scores": False, "notes": "kvpress scores 1 and 0; only the kept positions are compared"}
    yield case("streaming-llm:sink=4", kvpress.StreamingLLMPress(ratio, n_sink=4), **no_scores)
    yield case("streaming-llm:sink=0", kvpress.StreamingLLMPress(ratio, n_sink=0), **no_scores)
    for window, kernel in [(64, 5), (16, 5), (8, 7), (16, 1)]:
        press = kvpress.SnapKVPress(ratio, window_size=window, kernel_size=kernel)
        if window < budget:
            yield case(f"snapkv:window={window},kernel={kernel}", press, window=window)
    yield case("tova", kvpress.TOVAPress(ratio), window=1)
    yield case("observed-attention", kvpress.ObservedAttentionPress(ratio), attention=True)
    for future, covariance, vnorm, epsilon in [
        (512, True, True, 0.0),
        (512, False, True, 0.0),
        (512, True, False, 0.0),
        (64, True, True, 0.01),
    ]:
        text = f"future={future},sink=4,covariance={covariance},vnorm={vnorm},epsilon={epsilon}".lower()
        press = kvpress.ExpectedAttentionPress(ratio, future, 4, covariance, vnorm, epsilon)
        yield case(f"expected-attention:{text}", press, sink=4)
    for lag, cross in [(32, False), (32, True), (128, False)]:
        press = kvpress.LagKVPress(ratio, n_sink=4, lag_size=lag, cross_scoring=cross)
        parts = (at.tokens - 4) // lag
        protected = at.tokens - 4 - (parts - 1) * lag if parts >= 2 else 0
        notes = "" if parts >= 2 else "shorter than the sinks and two partitions: kvpress falls back to recency"
        text = f"lagkv:sink=4,lag={lag},cross={cross}".lower()
        yield case(text, press, sink=4, window=protected, notes=notes)
    for leverage, text in [("kv_product", "kv"), ("key", "key"), ("value", "value"), ("kv_avg", "avg")]:
        press = kvpress.CURPress(ratio, num_sinks=4, leverage_type=leverage, local_window_size=16)
        yield case(f"cur:sink=4,window=16,leverage={text}", press, sink=4)
    yield case("cap:tau=5,future=512,sink=4", kvpress.CapPress(ratio), sink=4, tolerance=1e-4)
    yield case("cap:tau=2,future=64,sink=8", kvpress.CapPress(ratio, 2.0, 64, 8), sink=8, tolerance=1e-4)
    for first, epsilon in [(0.5, 1e-4), (0.25, 0.01)]:
        press = kvpress.CriticalKVPress(kvpress.SnapKVPress(ratio, 16, 5), epsilon, first)
        notes = "scores of the first stage are the largest float: such tokens stay and are not compared"
        yield case(
            f"snapkv:window=16,kernel=5+critical:first={first},epsilon={epsilon}", press, window=16, notes=notes
        )
    if at.hidden.shape[0] == 1:
        yield from one_sequence_cases(at, ratio, case)


def one_sequence_cases(at: Inputs, ratio: float, case: Callable[..., Case]) -> Iterator[Case]:
    """Presses that mix the sequences of a batch: compared for one sequence, where that makes no difference."""
    for chunk in (64, 256):
        press = kvpress.NonCausalAttnPress(ratio, chunk_size=chunk)
        yield case(f"non-causal:chunk={chunk}", press, tolerance=1e-4)
    exact = "Gaussian sketch replaced by the identity, so sketch=0 means no sketch"
    with identity_sketch():
        press = kvpress.LeverageScorePress(ratio, sketch_dimension=HEAD_DIM)
        yield case("leverage:sketch=0", press, tolerance=1e-4, notes=exact)
        for text, blending, chunk in [("sketch=0", None, 256), ("sketch=0,chunk=64,blend=0.35", 0.35, 64)]:
            press = kvpress.CompactorPress(ratio, sketch_dimension=HEAD_DIM, blending=blending, chunk_size=chunk)
            yield case(f"compactor:{text}", press, sink=8, window=4, tolerance=1e-4, notes=exact)
    filters = kvpress.QFilterPress(ratio)
    filters.q_filters = formulas.q_filters(at.q, at.k.shape[1])[None]
    notes = "filters are made from the queries of the file, as the authors make them"
    yield case("qfilters", filters, tolerance=1e-4, notes=notes)


def allocation_cases(at: Inputs, budget: int) -> Iterator[Case]:
    """Wrappers that decide how many tokens each head, chunk or layer keeps. Only kept positions are compared."""
    ratio = removed(at, budget)

    def snapkv() -> kvpress.SnapKVPress:
        return kvpress.SnapKVPress(ratio, window_size=16, kernel_size=5)

    def expected() -> kvpress.ExpectedAttentionPress:
        return kvpress.ExpectedAttentionPress(ratio, epsilon=0.01)

    def case(name: str, policy: str, press: kvpress.presses.base_press.BasePress, notes: str = "") -> Case:
        source = type(press).__name__
        return Case(f"{at.name}/{name}", at, policy, budget, source, kept=kept_by(press, at), notes=notes)

    snap = "snapkv:window=16,kernel=5"
    spread = "expected-attention:future=512,sink=4,covariance=true,vnorm=true,epsilon=0.01"
    for floor in (0.2, 0.9):
        yield case(f"ada-snapkv-{floor}", f"{snap}+ada:floor={floor}", kvpress.AdaKVPress(snapkv(), floor))
        yield case(f"ada-expected-{floor}", f"{spread}+ada:floor={floor}", kvpress.AdaKVPress(expected(), floor))
    if at.hidden.shape[0] > 1:
        return
    press = kvpress.CriticalAdaKVPress(snapkv(), 0.2, 1e-4, 0.5)
    policy = f"{snap}+critical:first=0.5,epsilon=0.0001+ada:floor=0.2"
    yield case("critical-ada-snapkv", policy, press)
    chunks = "whole chunks: the partial last chunk counts as one, so the number kept can miss the ratio; the budget is what stays"
    for name, policy, scorer in [
        ("chunkkv-knorm", "knorm", kvpress.KnormPress(ratio)),
        ("chunkkv-snapkv-aligned", "snapkv:window=20,kernel=5", kvpress.SnapKVPress(ratio, 20, 5)),
        ("chunkkv-snapkv", snap, snapkv()),
    ]:
        for length in (20, 24):
            press = kvpress.ChunkKVPress(scorer, chunk_length=length)
            kept = kept_by(press, at)
            yield Case(f"{at.name}/{name}-{length}", at, f"{policy}+chunkkv:length={length}", int(kept[0, 0].sum()),
                       type(press).__name__, kept=kept, notes=chunks)  # fmt: skip
    for layer in (0, 3, LAYERS - 1):
        at.module.layer_idx = layer
        press = kvpress.PyramidKVPress(ratio, window_size=8, kernel_size=5, beta=20)
        policy = f"snapkv:window=8,kernel=5+pyramid:beta=20,layer={layer},layers={LAYERS}"
        yield case(f"pyramid-{layer}", policy, press, "the budget is the mean of the layers")
    at.module.layer_idx = 0
    yield case("blocks-keydiff", "keydiff+blocks:size=40", kvpress.BlockPress(kvpress.KeyDiffPress(ratio), 40))
    for threshold in (0.2, 0.9):
        press = kvpress.SimLayerKVPress(lazy_threshold=threshold, n_last=1, n_recent=64, n_initial=4)
        policy = f"simlayerkv:threshold={threshold},sink=4,recent=64,last=1"
        kept = kept_by(press, at)
        notes = "decides by itself; the budget is what stays" + (" (everything)" if kept.all() else "")
        yield Case(f"{at.name}/simlayer-{threshold}", at, policy, int(kept[0, 0].sum()), type(press).__name__,
                   kept=kept, notes=notes)  # fmt: skip


def action_cases(at: Inputs, budget: int) -> Iterator[Case]:
    """Presses that change what stays: merged values, turned keys, fewer channels."""
    ratio = removed(at, budget)
    for scorer, press in [
        ("knorm", kvpress.KnormPress(ratio)),
        ("snapkv:window=16,kernel=5", kvpress.SnapKVPress(ratio, 16, 5)),
    ]:
        merging = kvpress.MergingPress(press)
        keys, values = compress(merging, at)
        outputs = {"values": by_position(values, keys, at)}
        name = f"{at.name}/merge-{scorer.partition(':')[0]}"
        yield Case(name, at, f"{scorer}+merge", budget, "MergingPress", kept=kept_by(merging, at), outputs=outputs)
    rerotation = kvpress.KeyRerotationPress(kvpress.StreamingLLMPress(ratio, n_sink=4))
    keys, values = compress(rerotation, at)
    kept = torch.zeros(at.k.shape[:3], dtype=torch.bool).scatter(-1, positions(values, at.v), True)
    yield Case(f"{at.name}/rerotate", at, "streaming-llm:sink=4+rerotate", budget, "KeyRerotationPress",
               kept=kept, outputs={"keys": keys})  # fmt: skip
    think = kvpress.ThinKPress(key_channel_compression_ratio=0.4, window_size=32)
    keys, _ = compress(think, at)
    channels = (keys != 0).any(2)
    width = int(channels[0, 0].sum())
    assert (channels.sum(-1) == width).all()
    listed = channels.nonzero()[:, 2].reshape(*channels.shape[:2], width)
    yield Case(f"{at.name}/think", at, "think:ratio=0.4,window=32", at.tokens, "ThinKPress",
               outputs={"channels": listed}, notes="no token goes; these channels of the keys stay")  # fmt: skip


def cam_case(at: Inputs, budget: int) -> Case:
    """CAM with the draws of the input file: token i is merged where its draw is below its probability."""
    accumulated = at.attention.sum(2).reshape(at.k.shape[0], at.k.shape[1], -1, at.tokens).mean(2)
    press = kvpress.CAMPress(kvpress.KnormPress(), target_size=budget, merge_budget=8)
    press.layer_step_counts[0] = at.tokens - budget
    press._running_attn_sum[0] = accumulated.clone()
    kept = formulas.kept_positions(score(kvpress.KnormPress(), at), budget)
    draws = torch.rand(1, 1, at.tokens, 1)
    at.extra["draws"] = draws
    candidates = (~kept).nonzero()[:, 2]

    def below(chance: Tensor) -> Tensor:
        return (draws[0, 0, candidates, 0] < chance).to(chance)

    with mock.patch.object(torch, "bernoulli", below):
        keys, values = press.compress(at.module, at.hidden, at.k.clone(), at.v.clone(), accumulated, at.kwargs)
    outputs = {"values": by_position(values, keys, at)}
    return Case(f"{at.name}/cam", at, "knorm+cam:window=8", budget, "CAMPress", kept=kept, outputs=outputs,
                notes="accumulated attention: all queries of the file, mean over the group; draws [1, 1, T, 1]")  # fmt: skip


def other_sources(at: Inputs, budget: int) -> Iterator[Case]:
    """Public formulas outside kvpress."""
    for mix in (0.1, 0.07):
        scores = formulas.r_kv(at.q, at.k, mix=mix)
        yield Case(f"{at.name}/r-kv-{mix}", at, f"r-kv:lambda={mix}", budget, "R-KV r1_kv.py (formula)", scores,
                   formulas.kept_positions(scores, budget), window=8)  # fmt: skip
    scores = formulas.snapkv_factory(at.q, at.k)
    yield Case(f"{at.name}/snapkv-factory", at, "snapkv@factory", budget, "KVCache-Factory SnapKVCluster (formula)",
               scores, formulas.kept_positions(scores, budget), window=8)  # fmt: skip
    scores = at.attention.sum(2).reshape(*at.k.shape[:2], -1, at.tokens).mean(2)
    scores[..., -8:] = scores.max() + 1
    yield Case(f"{at.name}/h2o", at, "h2o:window=8", budget, "KVCache-Factory H2OKVCluster (formula)",
               scores, formulas.kept_positions(scores, budget), window=8)  # fmt: skip
    scores = formulas.snapkv_frontier(at.q, at.k, window=32, kernel=21, local=16, sink=4)
    policy = "snapkv@frontier:window=32,kernel=21,local=16,sink=4"
    yield Case(f"{at.name}/snapkv-frontier", at, policy, budget, "sparse-frontier SnapKVCompression (formula)",
               scores, formulas.kept_positions(scores, budget), sink=4, window=16)  # fmt: skip


def all_cases() -> list[Case]:
    """Every case, with inputs that are shared between them."""
    one = make_inputs("one", 1, batch=1, q_heads=4, kv_heads=2, tokens=160, theta=10000.0)
    two = make_inputs("two", 2, batch=2, q_heads=4, kv_heads=2, tokens=150, theta=500000.0)
    long = make_inputs("long", 3, batch=1, q_heads=4, kv_heads=2, tokens=300, theta=10000.0)
    mqa = make_inputs("mqa", 4, batch=1, q_heads=2, kv_heads=1, tokens=96, theta=10000.0)
    cases: list[Case] = []
    for at, budget in [(one, 80), (two, 60), (long, 75)]:
        cases += [*scorer_cases(at, budget), *other_sources(at, budget)]
    for at, budget in [(one, 80), (two, 60)]:
        cases += allocation_cases(at, budget)
    cases += action_cases(one, 40)
    cases.append(cam_case(mqa, 48))
    return cases
