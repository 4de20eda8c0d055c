"""What a model family is: the names of its experts, and the keys of config.json that hold their sizes."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any

from fse_convert.model.families.width_keys import MOE, Width
from fse_convert.model.moe import Role

W_NAMES = {"w1": Role.GATE, "w3": Role.UP, "w2": Role.DOWN}
PROJ_NAMES = {"gate_proj": Role.GATE, "up_proj": Role.UP, "down_proj": Role.DOWN}
UNGATED = {"up_proj": Role.UP, "down_proj": Role.DOWN}
"""Experts that activate up alone, such as relu2: a zero channel stays zero there too."""
MODEL_LAYERS = r"(?:language_model\.)?model\.(?:language_model\.)?layers"
BARE_LAYERS = r"(?:language_model\.)?(?:model\.)?(?:language_model\.)?layers"
SPARSE = "block_sparse_moe"


@dataclass(frozen=True)
class Sparse:
    """The keys that say which decoder layers have experts; None: the family has no such key.

    Layer i has some from ``first`` to ``last`` if ``i + ahead`` is a multiple of ``step``, unless ``dense`` lists it. ``flags``:
    ``step`` may hold a flag per layer too. ``listed``: a list of the layers with experts, which decides before these. ``words``:
    keys that hold a word or a letter per layer, of which those in `MOE_WORDS` mean experts; they decide before all others, as
    transformers 5 writes ``mlp_layer_types``.
    """

    first: str | None = None
    last: str | None = None
    step: str | None = None
    ahead: int = 0
    dense: str | None = None
    listed: str | None = None
    flags: bool = False
    words: tuple[str, ...] = ("mlp_layer_types",)


MOE_WORDS = frozenset({"sparse", "hash_moe", "moe", "E"})
"""How layers with experts are marked: by transformers 5, and by Nemotron-H (``layers_block_type``, ``hybrid_override_pattern``)."""
EVERY_LAYER = Sparse()
DENSE_PREFIX = Sparse(first="first_k_dense_replace", step="moe_layer_freq")
"""vLLM 0.33 model_executor/models/deepseek_v2.py, and those that follow it."""
STEPPED = Sparse(step="decoder_sparse_step", ahead=1, dense="mlp_only_layers")
"""vLLM 0.33 model_executor/models/qwen2_moe.py:315-320, and those that follow it."""


@dataclass(frozen=True)
class Stack:
    """A tensor that holds projections of all experts of a layer, by its name below the block: ``[E, N, K]``.

    ``roles``: one projection, or gate and up, N / 2 rows each, one after the other or ``interleaved``. ``transposed``: stored as
    ``[E, K, N]``. The layout is the family's and never told from a shape: 2 x width may be the hidden size. ``by_shape``: a loader
    does tell it so, and takes a square matrix for one that is not transposed. ``biased``: loaders build a bias of it.
    """

    name: str
    roles: tuple[Role, ...]
    transposed: bool = False
    interleaved: bool = False
    by_shape: bool = field(default=False, compare=False)
    biased: bool = field(default=False, compare=False)


GATE_UP = (Role.GATE, Role.UP)
STACKED = (Stack("experts.gate_up_proj", GATE_UP), Stack("experts.down_proj", (Role.DOWN,)))
"""transformers 5.24 writes them so wherever it does not save every expert by itself."""
TRANSPOSED = tuple(replace(stack, transposed=True) for stack in STACKED)
"""transformers 5.24 llama4:57-64, conversion_mapping.py:1450-1461 (qwen3_vl_moe)."""


SECTIONS = ("", "text_config", "language_config", "llm_config")
"""Where config.json keeps the text model's keys: at the top level, or nested (vLLM 0.33 transformers_utils/config.py:196)."""


@dataclass(frozen=True)
class Stated:
    """A key that config.json has, and the section that it stands in. ``number``: the one integer that ``value`` means, if any."""

    section: str
    key: str
    value: Any
    number: int | None

    @property
    def path(self) -> str:
        """The key as people write it."""
        return f"{self.section}.{self.key}" if self.section else self.key


NEXTN = "num_nextn_predict_layers"


@dataclass(frozen=True)
class Family:
    """One way of naming a MoE model's experts and of writing their sizes into config.json.

    * ``name``: of the family, for people and for ``--family``.
    * ``model_types``: what config.json says as ``model_type``.
    * ``source``: the loaders that the row was read from.
    * ``layers``: what stands before a decoder layer's number, a regular expression.
    * ``mtp``: the same of an MTP layer; None where they are numbered on from the decoder layers (DeepSeek-V3).
    * ``block``: the MoE block behind the number, a regular expression; empty where experts are the layer's own.
    * ``shared``: the module of the shared experts; empty in a family that has none.
    * ``beside``: the shared experts stand beside the block, not inside it.
    * ``routed_names``, ``shared_names``: the names of an expert's projections.
    * ``widths``: every key from which some loader builds experts; ``readings``: other readings of those keys by some loader, which
      must come to the same. Both from `fse_convert.model.families.width_keys`.
    * ``depth_keys``, ``n_routed_keys``, ``n_shared_keys``: names of the number of decoder layers, of routed and of shared experts;
      without a name for shared experts there is one.
    * ``hidden_key``: the length of the experts' input.
    * ``lists``: per what loaders take lists of widths and numbers of experts: ``layer``, ``modality``, or empty for none.
    * ``stacked``: tensors that hold all routed experts of a layer, where some release has them.
    * ``fused``: gate and up of a shared MLP as one matrix, ``[2 S, H]``, by its name below the module.
    * ``mtp_key``: the number of MTP layers; ``mtp_assumed``: the number that config classes take where that key is missing.
    * ``gated``: a gate of its own scales the shared expert's output.
    * ``sparse``: which layers have experts; None where that is not known.
    * ``mtp_routed_key``: the number of routed experts of MTP layers, where it has a key of its own.
    * ``refused``: why experts are not padded, and what to do instead.
    """

    name: str
    model_types: tuple[str, ...]
    source: str
    layers: str = MODEL_LAYERS
    mtp: str | None = None
    block: str = "mlp"
    shared: str = "shared_experts"
    beside: bool = False
    routed_names: Mapping[str, Role] = field(default_factory=lambda: PROJ_NAMES)
    shared_names: Mapping[str, Role] = field(default_factory=lambda: PROJ_NAMES)
    widths: tuple[Width, ...] = MOE
    readings: tuple[Width, ...] = ()
    depth_keys: tuple[str, ...] = ("num_hidden_layers",)
    n_routed_keys: tuple[str, ...] = ("n_routed_experts", "num_local_experts")  # an alias in transformers' classes, which wins
    n_shared_keys: tuple[str, ...] = ("n_shared_experts",)
    hidden_key: str = "hidden_size"
    lists: str = ""
    stacked: tuple[Stack, ...] = ()
    fused: tuple[Stack, ...] = ()
    mtp_key: str | None = NEXTN
    mtp_assumed: int = 1
    gated: bool = False
    sparse: Sparse | None = DENSE_PREFIX
    mtp_routed_key: str | None = None
    refused: tuple[str, str] | None = None

    @property
    def example(self) -> str:
        """The prefix of a MoE block, with ``N`` for the layer's number and without the parts that only some releases have."""
        layers, block = re.sub(r"\(\?:[^)]*\)\?", "", self.layers).replace("\\", ""), self.block.partition("|")[0]
        return f"{layers}.N.{block}".rstrip(".")

    @property
    def mtp_keys(self) -> tuple[str, ...]:
        """Every name of the number of MTP layers: transformers 5.24 has a second one (deepseek_v3:78, glm4_moe:87)."""
        return (NEXTN, "num_mtp_layers") if self.mtp_key == NEXTN else tuple(filter(None, (self.mtp_key,)))

    @cached_property
    def pattern(self) -> re.Pattern[str]:
        """Matches the prefix of a MoE block, ``layers.3.ffn``: groups layer, number, mtp, block."""
        mtp = f"(?P<mtp>{self.mtp})" if self.mtp else "(?P<mtp>(?!))"
        block = rf"(?:\.(?P<block>{self.block}))" + ("?" if self.beside else "") if self.block else "(?P<block>)"
        return re.compile(rf"(?P<layer>(?:{mtp}|{self.layers})\.(?P<number>\d+)){block}")

    def section(self, config: Mapping[str, Any]) -> str:
        """Name of the config section that holds the width of a routed expert; empty for the top level."""
        return next((name for name in SECTIONS for w in self.widths if place(config, name).get(w.key) is not None), "")

    def stated(self, config: Mapping[str, Any], *keys: str | None) -> Iterator[Stated]:
        """Yield every statement of some keys that mean the same, those in the section that holds the widths first."""
        for name in dict.fromkeys((self.section(config), *SECTIONS)):
            for key in keys:
                if key and (value := place(config, name).get(key)) is not None:
                    yield Stated(name, key, value, self._number(key, value))

    def value(self, config: Mapping[str, Any], key: str | None) -> object:
        """Read a key wherever it stands; None when absent."""
        return next((s.value for s in self.stated(config, key)), None)

    def number(self, config: Mapping[str, Any], *keys: str | None) -> int | None:
        """Read an integer under any of its names; None when absent or not an integer."""
        return next((s.number for s in self.stated(config, *keys)), None)

    def per_layer(self, config: Mapping[str, Any]) -> str:
        """Name a list that states widths layer by layer (``block_configs`` of Nemotron-H puzzles); empty where there is none."""
        keys = {w.key for w in self.widths}
        lists = ((key, v) for name in SECTIONS for key, v in place(config, name).items() if isinstance(v, list))
        return next((key for key, v in lists if any(isinstance(block, Mapping) and keys & block.keys() for block in v)), "")

    def shared_count(self, config: Mapping[str, Any]) -> int:
        """Return the number of shared experts per layer: 0 where the key is null, one where the config does not say."""
        written = self.number(config, *self.n_shared_keys)
        if written is not None:
            return written
        null = any(place(config, name).get(key, 1) is None for name in SECTIONS for key in self.n_shared_keys)
        return 0 if null else 1

    def _number(self, key: str, value: object) -> int | None:
        """Return an integer: itself, a list of equal ones (one per layer), the sum of a list per modality; None of others."""
        if isinstance(value, list) and value and all(type(v) is int for v in value):
            if self.lists == "modality" and key in (*self.n_routed_keys, *self.n_shared_keys):
                return sum(value)
            value = value[0] if len(set(value)) == 1 else None
        return value if type(value) is int else None


def place(config: Mapping[str, Any], section: str) -> Mapping[str, Any]:
    """Return a section of config.json, the whole of it for an empty name; empty where there is none."""
    found = config.get(section) if section else config
    return found if isinstance(found, Mapping) else {}
