"""Fields of config.json: a default is that of `transformers`, a change changes the numbers or is refused by name.

tests/data/transformers_defaults.json has the defaults of the configuration classes of transformers 5.23 (those of
NomicBertModel are of the class that nomic-ai/nomic-bert-2048 publishes), without what only training and sampling read.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import msgspec
import numpy as np
import pytest
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st

from shm.checkpoint import Hyper
from stages.worker.checkpoint.gguf import GgufError
from stages.worker.checkpoint.hyperparameters import HyperReader
from stages.worker.checkpoint.ingest import check_head
from stages.worker.huggingface.config import CheckpointDirectoryError
from stages.worker.huggingface.families import FAMILIES
from stages.worker.huggingface.source import HuggingFaceSource
from tests.worker.conftest import TinyGguf
from tools.tiny_gguf import SHAPES
from tools.tiny_hf import write_directory

DEFAULTS: dict[str, dict[str, Any]] = json.loads(
    (Path(__file__).parents[1] / "data/transformers_defaults.json").read_text()
)
ABSENT = object()
SHAPES_OF = {
    "LlamaForCausalLM": "odd",
    "MistralForCausalLM": "windowed",
    "MixtralForCausalLM": "mixtral",
    "Qwen2ForCausalLM": "biased",
    "Qwen2MoeForCausalLM": "qwen2moe",
    "Qwen3ForCausalLM": "qwen3",
    "Qwen3MoeForCausalLM": "qwen3moe",
    "OlmoeForCausalLM": "olmoe",
    "GemmaForCausalLM": "gemma",
    "Gemma2ForCausalLM": "gemma2",
    "Gemma3ForCausalLM": "gemma3",
    "Phi3ForCausalLM": "phi3",
    "GraniteForCausalLM": "granite",
    "GraniteMoeForCausalLM": "granitemoe",
    "GraniteMoeSharedForCausalLM": "granitemoe",
    "Olmo2ForCausalLM": "olmo2",
    "StableLmForCausalLM": "stablelm",
    "Starcoder2ForCausalLM": "starcoder2",
    "GPT2LMHeadModel": "gpt2",
    "BertModel": "bert",
    "NomicBertModel": "nomic-bert",
}
# Sizes, and whether there is a head: the tensors decide where the field is missing.
OF_TENSORS = {"vocab_size", "type_vocab_size", "tie_word_embeddings"}
# Sizes without which nothing is read.
REQUIRED = {"hidden_size", "num_hidden_layers", "num_attention_heads", "intermediate_size"}
REQUIRED |= {"n_embd", "n_layer", "n_head", "n_positions"}
# Defaults that mean that a value follows from other fields.
DERIVED = {"layer_types", "head_dim", "num_key_value_heads", "n_inner", "mlp_only_layers"}


class Read(NamedTuple):
    """What determines the numbers of a model, apart from its weights."""

    hyper: Hyper
    tensors: dict[str, tuple[int, ...]]
    rope: list[bytes]
    pooling: object


def read(directory: Path) -> Read | str:
    """What a directory is read as, or the message of the refusal."""
    try:
        source = HuggingFaceSource(directory)
        check_head(source)
        reader = HyperReader(source)
        hyper = reader.hyper()
        tables = [value.tobytes() for _, value in sorted(reader.rope(hyper).items())]
    except (CheckpointDirectoryError, GgufError) as error:
        return str(error)
    shapes = {name: tensor.shape for name, tensor in source.tensors.items()}
    return Read(hyper, shapes, tables, source.metadata.get("pooling_type"))


class Directories:
    """A directory for each class, whose configuration is written anew for each case."""

    def __init__(self, folder: Path, tiny_gguf: TinyGguf) -> None:
        self._folder, self._tiny_gguf = folder, tiny_gguf
        self._base: dict[str, dict[str, Any]] = {}
        self._whole: dict[str, Read] = {}

    def base(self, name: str) -> dict[str, Any]:
        """The configuration of the class that the weights belong to."""
        if name not in self._base:
            path = write_directory(self._tiny_gguf(SHAPES_OF[name], "F16"), self._folder / name) / "config.json"
            fields = {key: value for key, value in json.loads(path.read_text()).items() if value is not None}
            if FAMILIES[name].context is not None:  # positions are not embedded: so many that a window counts
                fields["max_position_embeddings"] = 8192
            self._base[name] = fields | {"architectures": [name], "model_type": DEFAULTS[name]["model_type"]}
        return self._base[name]

    def whole(self, name: str) -> Read:
        """The model of `base`."""
        if name not in self._whole:
            found = self.read(name)
            assert isinstance(found, Read), found
            self._whole[name] = found
        return self._whole[name]

    def read(self, name: str, **changes: Any) -> Read | str:
        """As `read`, of the class's configuration with some fields changed or `ABSENT`."""
        fields = {key: value for key, value in (self.base(name) | changes).items() if value is not ABSENT}
        (self._folder / name / "config.json").write_text(json.dumps(fields))
        return read(self._folder / name)


@pytest.fixture(scope="module")
def directories(tmp_path_factory: pytest.TempPathFactory, tiny_gguf: TinyGguf) -> Directories:
    return Directories(tmp_path_factory.mktemp("fields"), tiny_gguf)


def test_every_class_is_tried() -> None:
    # Read as BertModel, some with a head.
    heads = {"BertForMaskedLM", "XLMRobertaModel", "XLMRobertaForMaskedLM"}
    heads |= {"BertForSequenceClassification", "XLMRobertaForSequenceClassification"}
    assert set(SHAPES_OF) == set(FAMILIES) - heads
    assert set(SHAPES_OF) <= set(DEFAULTS)
    assert {SHAPES[shape].architecture for shape in SHAPES_OF.values()} >= {
        one.architecture for one in FAMILIES.values()
    }


@pytest.mark.parametrize("name", SHAPES_OF)
def test_a_field_that_is_left_out_has_the_value_of_the_class(directories: Directories, name: str) -> None:
    """Both are read as the same model, or both are refused, by a field's or a tensor's name."""
    whole = directories.whole(name)
    for key, value in DEFAULTS[name].items():
        if key in OF_TENSORS | REQUIRED or (value is None and key in DERIVED):
            continue
        without = directories.read(name, **{key: ABSENT}) if key in directories.base(name) else whole
        given_ = directories.read(name, **{key: value})
        if isinstance(without, Read) and isinstance(given_, Read):
            assert without == given_, key
        elif isinstance(without, str):
            is_named = key in without or "tensor" in without or not isinstance(given_, Read)
            # Where Gemma's hidden_activation is missing, an odd hidden_act is refused, which the class does not read.
            assert is_named or (key == "hidden_activation" and "hidden_act" in without), (key, without)
        else:
            pytest.fail(f"{key} may be left out, and its default is refused: {given_}")


# ------------------------------------------------------------------ changed fields


def set_to(attribute: str, of: Callable[[Any], Any] = float) -> Callable[[Hyper, Any], Hyper]:
    return lambda hyper, value: msgspec.structs.replace(hyper, **{attribute: of(value)})


def f32(value: float) -> float:
    return float(np.float32(value))


def unchanged(hyper: Hyper, value: Any) -> Hyper:
    return hyper


NUMBERS = st.floats(0.0625, 64.0, width=32)
# By field: values, and what they do to the hyper-parameters of a class that reads it.
CHANGES: dict[str, tuple[st.SearchStrategy[Any], Callable[[Hyper, Any], Hyper]]] = {
    "rms_norm_eps": (st.floats(1e-9, 0.5), set_to("norm_eps", f32)),
    "layer_norm_eps": (st.floats(1e-9, 0.5), set_to("norm_eps", f32)),
    "layer_norm_epsilon": (st.floats(1e-9, 0.5), set_to("norm_eps", f32)),
    "norm_epsilon": (st.floats(1e-9, 0.5), set_to("norm_eps", f32)),
    "rope_theta": (st.floats(100, 1e7), set_to("rope_base")),
    "rotary_emb_base": (st.floats(100, 1e7), set_to("rope_base")),
    "max_position_embeddings": (st.integers(1024, 1 << 20), set_to("context_length", int)),
    "embedding_multiplier": (NUMBERS, set_to("embedding_scale", f32)),
    "residual_multiplier": (NUMBERS, set_to("residual_scale", f32)),
    "attention_multiplier": (NUMBERS, set_to("attention_scale", f32)),
    "logits_scaling": (NUMBERS, lambda hyper, value: msgspec.structs.replace(hyper, logit_scale=f32(1 / value))),
    "attn_logit_softcapping": (NUMBERS, set_to("attention_cap", f32)),
    "final_logit_softcapping": (NUMBERS, set_to("logit_cap", f32)),
    # Without an effect on the numbers.
    "attention_dropout": (NUMBERS, unchanged),
    "initializer_range": (NUMBERS, unchanged),
    "use_cache": (st.booleans(), unchanged),
    "torch_dtype": (st.sampled_from(["bfloat16", "float32"]), unchanged),
    "router_aux_loss_coef": (NUMBERS, unchanged),
    "transformers_version": (st.just("4.51.0"), unchanged),
}
# Fields that change the numbers of some class; a graph that cannot follow refuses them by name.
SWITCHES: dict[str, st.SearchStrategy[Any]] = {
    "attention_bias": st.just(True),
    "mlp_bias": st.just(True),
    "use_bias": st.just(False),
    "use_qkv_bias": st.booleans(),
    "qkv_bias": st.just(False),
    "qkv_proj_bias": st.just(True),
    "mlp_fc1_bias": st.just(True),
    "sliding_window": st.integers(16, 64),
    "partial_rotary_factor": st.sampled_from([0.5, 0.25, 0.75]),
    "rotary_emb_fraction": st.sampled_from([0.0, 0.5]),
    "rotary_emb_interleaved": st.just(True),
    "rotary_scaling_factor": st.just(2.0),
    "use_rms_norm": st.just(True),
    "parallel_block": st.just(True),
    "use_parallel_residual": st.just(True),
    "qk_layernorm": st.just(True),
    "query_pre_attn_scalar": st.integers(1, 1000).filter(lambda n: n not in (32, 64, 256)),
    "use_sliding_window": st.just(True),
    "norm_topk_prob": st.booleans(),
    "decoder_sparse_step": st.just(2),
    "mlp_only_layers": st.just([0]),
    "clip_qkv": NUMBERS,
    "hidden_act": st.sampled_from(["relu", "gelu_10", "silu", "gelu_pytorch_tanh"]),
    "hidden_activation": st.sampled_from(["relu", "gelu", "gelu_pytorch_tanh"]),
    "activation_function": st.sampled_from(["relu", "silu"]),
    "scale_attn_by_inverse_layer_idx": st.just(True),
    "scale_attn_weights": st.just(False),
    "is_decoder": st.just(True),
    "position_embedding_type": st.just("relative_key"),
    "vocab_size": st.integers(1, 4000),
    "model_type": st.sampled_from(["llama", "mistral", "qwen2", "bert"]),
    "num_local_experts": st.integers(16, 64),
    "num_experts": st.integers(16, 64),
}


@settings(
    max_examples=60,
    phases=(Phase.generate,),
    deadline=None,
    suppress_health_check=[HealthCheck.function_scoped_fixture],
)
@given(st.sampled_from(sorted(SHAPES_OF)), st.data())
def test_a_changed_field_counts_or_is_refused_by_name(directories: Directories, name: str, data: st.DataObject) -> None:
    reads = DEFAULTS[name].keys() | {"attention_dropout", "use_cache", "torch_dtype", "transformers_version"}
    key = data.draw(st.sampled_from(sorted((CHANGES.keys() | SWITCHES.keys()) & reads)))
    value = data.draw(CHANGES[key][0] if key in CHANGES else SWITCHES[key])
    base, found = directories.whole(name), directories.read(name, **{key: value})
    if isinstance(found, str):
        is_tensor = key in ("max_position_embeddings", "num_local_experts", "num_experts") and "tensor" in found
        assert (
            key.removeprefix("use_") in found
            or is_tensor
            or (key == "max_position_embeddings" and "context_length" in found)
        ), found
    elif key in CHANGES:
        assert found == base._replace(hyper=CHANGES[key][1](base.hyper, value), rope=found.rope)
        assert (found.rope == base.rope) or key in ("rope_theta", "rotary_emb_base", "max_position_embeddings")
    elif value != directories.base(name).get(key, DEFAULTS[name].get(key)):
        # A Qwen model of two layers has no window by itself: max_window_layers is 28.
        counts = ("hidden_act", "hidden_activation", "sliding_window", "use_sliding_window", "partial_rotary_factor")
        assert key in counts, (key, found)
        if key == "sliding_window" and not name.startswith("Qwen"):  # which has none without use_sliding_window
            assert max(found.hyper.windows) == value
        elif key == "partial_rotary_factor":
            assert found.hyper.n_rot == int(base.hyper.head_dim * value)
        else:
            assert found == base, "another name of the same function"
