"""The width that `--tp N` names against the smallest that is found by trying: all servers' rules, and what config.json can say."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from itertools import product
from typing import Any

import pytest

from fse_convert.model.families.width_keys import Share
from fse_convert.plan.plan import Options
from fse_convert.plan.source import Source, describe_source
from fse_convert.plan.width_rounding import needed_widths, stored_widths
from fse_convert.servers.judge import find_any
from fse_convert.servers.subject import Subject
from fse_convert.servers.tensor_parallel import ENGINES, Load, slices
from fse_convert.testing.memory import PROJ, Tensors, checkpoint, expert

pytestmark = pytest.mark.slow
HIDDEN = 256
MOE, TOTAL, OWN = "moe_intermediate_size", "moe_shared_expert_intermediate_size", "shared_expert_intermediate_size"
ONE = "shared_experts_intermediate_size"


@dataclass(frozen=True)
class Model:
    """A model type, where its shared experts stand, how many there are, and how it states their width: key, and of how many."""

    model_type: str
    n_shared: int = 1
    key: str = ""
    of: int = 1
    shared: str = "shared_experts"
    config: dict[str, Any] = field(default_factory=dict)

    def source(self, stores: tuple[str, str], widths: tuple[int, int], quantization: dict[str, Any]) -> Source:
        """One layer of one routed expert, and a shared MLP where its width is not 0."""
        tensors: Tensors = expert("model.layers.0.mlp.experts.0", stores[0], widths[0], HIDDEN, PROJ)
        config = {"num_hidden_layers": 1, "hidden_size": HIDDEN, MOE: widths[0], "num_experts": 1, "n_routed_experts": 1}
        if widths[1]:
            tensors |= expert(f"model.layers.0.mlp.{self.shared}", stores[1], widths[1], HIDDEN, PROJ)
            config |= {"num_shared_experts": self.n_shared, "n_shared_experts": self.n_shared}
            config |= {self.key: widths[1] // self.of} if self.key else {}
        config |= {"model_type": self.model_type, **self.config, **quantization}
        return describe_source(checkpoint(config, tensors))


MODELS = (
    Model("qwen3_moe", 0),
    Model("glm4_moe"),
    Model("glm4_moe", 2),
    Model("glm4_moe", 3),
    Model("laguna", key=OWN, shared="shared_expert"),
    Model("bailing_moe_v2", 2, TOTAL, 2),
    Model("dots3_note", 1, ONE),
    Model("dots3_note", 3, ONE, 3),
    Model("param2moe", 3, TOTAL),
    Model("sarvam_moe", 2, TOTAL, 2),
    Model("bailing_hybrid", 1, TOTAL),
)
FORMATS = ("bf16", "fp8-16", "fp8-32", "mxfp4", "nvfp4")
QUANTIZATION: tuple[dict[str, Any], ...] = (
    {},
    {"quantization_config": {"quant_method": "fp8", "weight_block_size": [64, 64]}},
)
WIDTHS = (96, 160)
TPS = (2, 3, 4)
MOST = 3 * 4 * 64 + 1
"""Three shared experts in blocks of 64 on four ranks: no width grows by as much."""
TAKEN = {Load.WHOLE, Load.PADDED}


def at(about: Subject, routed: int, shared: int) -> Subject:
    """The same model with experts so wide."""
    description = about.description
    layers = tuple(
        replace(d, routed=d.routed and replace(d.routed, width=routed), shared=d.shared and replace(d.shared, width=shared))
        for d in description.layers
    )
    return replace(about, description=replace(description, layers=layers))


def takes(about: Subject, engines: tuple[str, ...], tp: int, width: int, *, shared: bool) -> bool:
    """Whether all servers take a width, of routed or of shared experts alone."""
    tried = at(about, width, width)
    return all(s.load in TAKEN for engine in engines for s in slices(tried, engine, tp) if s.shared is shared)


def can_be_stated(about: Subject, routed: int, shared: int) -> bool:
    """Whether integers under the keys that config.json has can say both widths, however loaders read them."""
    family, n_shared = about.description.family, about.description.n_shared
    assert family
    stated = [w for w in (*family.widths, *family.readings) if any(family.stated(about.config, w.key))]
    values = {key: {w.of(routed, shared, n_shared) for w in stated if w.key == key} for key in {w.key for w in stated}}
    own = any(w.share is not Share.ROUTED for w in family.widths if w in stated)
    return all(len(v) == 1 and None not in v for v in values.values()) and (own or shared == n_shared * routed)


def smallest(about: Subject, options: Options, tp: int) -> tuple[int, int]:
    """The smallest widths that are found by trying all; a server that is named fuses experts of one width."""
    engine = options.target.engine.partition(" ")[0] if options.target else ""
    engines = (engine,) if engine in ENGINES else ENGINES
    stored = stored_widths(about.description)
    ratio, rest = divmod(stored.shared, stored.routed)
    fused = options.target is not None and not rest
    return next(
        (w, s)
        for w in range(stored.routed, stored.routed + MOST)
        if takes(about, engines, tp, w, shared=False)
        for s in range(stored.shared, stored.shared + MOST * max(ratio, 1))
        if (not fused or s == ratio * w) and can_be_stated(about, w, s) and takes(about, engines, tp, s, shared=True)
    )


def shared_widths(model: Model, width: int) -> Iterator[int]:
    """Of the shared MLP: as many routed widths as there are shared experts, and of a key of its own also others."""
    yield model.n_shared * width
    if model.key and model.model_type not in ("sarvam_moe", "bailing_hybrid"):
        yield from (model.of * other for other in (64, 160))


@pytest.mark.parametrize("target", [None, "vllm-0.33-aiter", "sglang-0.5.23-slots"])
@pytest.mark.parametrize("model", MODELS, ids=lambda m: f"{m.model_type} {m.n_shared}")
def test_no_smaller_width_is_taken_by_all_servers(model: Model, target: str | None) -> None:
    tried = 0
    for stores, quantization, width in product(product(FORMATS, FORMATS if model.n_shared else ("",)), QUANTIZATION, WIDTHS):
        for shared in shared_widths(model, width):
            source = model.source(stores, (width, shared), quantization)
            assert source.description.problems == ()
            for tp in TPS:
                options = Options(find_any(target) if target else None, tp=tp)
                found = needed_widths(source.subject, options, stored_widths(source.description))
                case = stores, quantization, width, shared, tp
                assert (found.routed, found.shared) == smallest(source.subject, options, tp), case
                tried += 1
    assert tried >= len(FORMATS) * len(QUANTIZATION) * len(WIDTHS) * len(TPS)
