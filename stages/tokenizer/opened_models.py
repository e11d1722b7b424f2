"""Vocabulary and chat template of a checkpoint, built from its index and the model's settings once per process."""

from __future__ import annotations

import logging
import threading
from pathlib import Path
from typing import NamedTuple, Self

from pipeline.config.schema import ModelConfig
from pipeline.config.user_home import expand_user
from pipeline.errors import ModelUnavailable, StarlingError
from pipeline.models.vocabularies import WORDPIECE
from pipeline.models.vocabulary_tables import Tables
from pipeline.protocol import messages as m
from shm.checkpoint import CheckpointError, Index, TokenizerData, TokenizerHead, load_index, load_tables
from stages.tokenizer.fallback_templates import fallback_template
from stages.tokenizer.service import TokenizerModel
from stages.tokenizer.template import MAX_SOURCE, ChatTemplate
from stages.tokenizer.vocabulary import TokenizerSpec, Vocabulary

log = logging.getLogger("starling.tokenizer")


class ModelSource(NamedTuple):
    """What a tokenizer is built from: an index file, which is replaced only as a whole, and settings of the model."""

    index_path: Path
    pretokenizer: str = ""  # instead of the file's
    chat_template: str = ""  # a template, or the path of one, instead of the file's
    reasoning: str = "auto"  # as in `ModelConfig`

    @classmethod
    def of(cls, index_path: Path, settings: ModelConfig) -> Self:
        """The source of a model with these settings."""
        return cls(index_path, settings.pretokenizer, settings.chat_template, settings.reasoning)

    @property
    def template_path(self) -> Path | None:
        """The file with the configured template, if it is not in the configuration itself."""
        is_path = self.chat_template and "{" not in self.chat_template
        return expand_user(self.chat_template.removeprefix("file://")) if is_path else None

    def index_identity(self) -> tuple[int, ...]:
        """Differs for an index that was made again. Raises `OSError`."""
        info = self.index_path.stat()
        return info.st_dev, info.st_ino, info.st_size, info.st_mtime_ns

    def written_ns(self) -> tuple[int, ...]:
        """When the files were written, ns since 1970. Raises `OSError` if there is no index."""
        path = self.template_path
        return self.index_path.stat().st_mtime_ns, path.stat().st_mtime_ns if path and path.exists() else 0


MAX_TEMPLATES = 4  # that are kept compiled, of 256 Ki characters each at most

_templates: dict[tuple[object, ...], ChatTemplate] = {}  # the one that was used last comes last
_templates_lock = threading.Lock()
_opened: dict[ModelSource, tuple[tuple[int, ...], TokenizerModel]] = {}  # and the identity of the index
_unusable: dict[ModelSource, tuple[tuple[int, ...], str]] = {}  # when the files were written, and what is wrong


class UnusableModel(ModelUnavailable):
    """A checkpoint's index is damaged or not supported: waiting does not help."""


def open_model(source: ModelSource) -> TokenizerModel:
    """Build vocabulary and template. Raises `ModelUnavailable`, `UnusableModel`.

    The result is cached: versions of a model with the same source share it, and so do `preload` and the stage.  An
    index that was made again is read again: what it describes may differ.  So are files that cannot be used, when they
    have changed.
    """
    if (opened := _find(source)) is not None:
        return opened
    try:
        identity, written_ns = source.index_identity(), source.written_ns()
        known_ns, reason = _unusable.get(source, ((), ""))
        if known_ns == written_ns:
            raise UnusableModel(reason, param="model")
        model = build_model(source)
        _opened[source] = identity, model
    except OSError as error:
        raise ModelUnavailable(str(error), param="model") from None
    except UnusableModel as error:
        if source not in _unusable:
            log.error("a model cannot be used", extra={"path": str(source.index_path), "reason": error.message})
        _unusable[source] = written_ns, error.message
        raise
    _unusable.pop(source, None)
    return model


def build_model(source: ModelSource) -> TokenizerModel:
    """As `open_model`, without its cache. Raises `UnusableModel` and `OSError`, whatever the index holds."""
    path = source.index_path
    try:
        return _build(source, load_index(path), load_tables(path))
    except CheckpointError as error:
        raise UnusableModel(str(error), param="model") from None
    except StarlingError as error:
        raise UnusableModel(error.message, param="model") from None
    except OSError:
        raise
    except Exception as error:  # of the library: the file is not trusted
        what = f"{type(error).__name__}: {error}"
        reason = f"{path}: its vocabulary cannot be used ({what}); remove it to ingest again"
        raise UnusableModel(reason, param="model") from None


def spec_of(data: TokenizerData | TokenizerHead, pretokenizer: str = "") -> TokenizerSpec:
    """What a vocabulary is built from. `pretokenizer`: instead of the file's."""
    lists = data if isinstance(data, TokenizerData) else None
    return TokenizerSpec(
        data.model,
        pretokenizer or data.pre,
        lists.tokens if lists else (),
        lists.types if lists else (),
        lists.merges if lists else (),
        data.bos,
        data.eos,
        data.eot,
        data.add_bos,
        lists.scores if lists else (),
        data.unknown,
        data.add_space_prefix,
        data.revision,
        data.fim,
        data.fim_ends,
        data.charsmap,
        data.merges_spaces,
        data.strips_right,
        data.strips_left,
        data.strips_unicode,
    )


def _build(source: ModelSource, index: Index, tables: Tables) -> TokenizerModel:
    # With tables the lists that they were made from are not decoded.
    t = index.tokenizer_head if tables else index.tokenizer
    vocabulary = Vocabulary(spec_of(t, source.pretokenizer), tables or None)
    template = None
    text = _template_text(source, index, t)
    if text:
        bos, eos = (vocabulary.token_bytes(i).decode("utf-8", "replace") for i in (t.bos, t.eos))
        template = _compiled(text, bos, eos, vocabulary.control_names)
    described = m.Described(
        "",
        "",
        index.digest,
        vocabulary.size,
        index.hyper.context_length,
        vocabulary.eos_ids,
        template is not None,
        index.architecture,
        index.parameters,
        int(source.index_path.stat().st_mtime),
        index.tokenizer_digest,
        tool_format=template.tool_format if template is not None else "",
        pooling=index.pooling,
        width=index.hyper.width,
        end_id=t.eos if index.adds_eos or t.model == WORDPIECE or index.hyper.scores_pairs else -1,
        generates=index.hyper.is_causal,
        fim_ends=vocabulary.fill_in_middle.ends if vocabulary.fill_in_middle is not None else (),
        reasoning=_reasoning(source, template),
        thinking_switches=template.thinking_switches if template is not None else (),
        pair_separator=_pair_separator(t) if index.hyper.scores_pairs else (),
        quantization=index.quantization,
        kv_shape=(index.hyper.n_layers, index.hyper.n_kv_heads, index.hyper.head_dim, index.hyper.kv_window),
        kv_windowed=index.hyper.n_windowed,
        revision=index.revision,
        kv_revision=index.hyper.kv_revision,
    )
    return TokenizerModel(vocabulary, template, described)


def _compiled(text: str, bos: str, eos: str, control_names: dict[str, int]) -> ChatTemplate:
    """The template, compiled, which takes 8 ms: models of one family share it, and one that is loaded again has it."""
    key = text, bos, eos, tuple(sorted(control_names.items()))
    with _templates_lock:  # several threads may build vocabularies
        template = _templates.pop(key, None)
    template = template or ChatTemplate(text, bos, eos, control_names=control_names)
    with _templates_lock:
        if not template.failure:  # that is logged for each model
            _templates[key] = template
        while len(_templates) > MAX_TEMPLATES:
            del _templates[next(iter(_templates))]
    return template


def _pair_separator(t: TokenizerData | TokenizerHead) -> tuple[int, ...]:
    """The tokens between two texts: [SEP] of BERT's vocabularies, `</s></s>` of RoBERTa's."""
    return ((t.eos,) if t.model == WORDPIECE else (t.eos, t.eos)) if t.eos >= 0 else ()


def _reasoning(source: ModelSource, template: ChatTemplate | None) -> tuple[str, ...]:
    """The marks around the model's reasoning: the configured ones, or those of its template."""
    if template is None or source.reasoning == "none":
        return ()
    return template.reasoning if source.reasoning == "auto" else tuple(source.reasoning.split())


def _template_text(source: ModelSource, index: Index, t: TokenizerData | TokenizerHead) -> str:
    """Return the template that applies: the configured one, the file's, or the one of its family; "": none."""
    path = source.template_path
    if path is not None:
        try:
            with path.open(encoding="utf-8") as file:
                return file.read(MAX_SOURCE + 1)
        except (OSError, UnicodeDecodeError) as error:
            raise ModelUnavailable(
                f"models[].chat_template is {source.chat_template[:200]!r}, a file that cannot be read ({error}); "
                f"name a file of UTF-8 text, or give the template itself"
            ) from None
    if not index.hyper.is_causal:
        return ""
    if source.chat_template or t.chat_template:
        return source.chat_template or t.chat_template
    found = fallback_template(index.architecture, index.tokenizer)
    if found is None:
        return ""
    name, text = found
    log.warning(
        "the model file has no chat template; a built-in one is used",
        extra={"path": str(source.index_path), "architecture": index.architecture, "template": name},
    )
    return text


def is_open(source: ModelSource) -> bool:
    """Whether `open_model` would return at once."""
    return _find(source) is not None


def _find(source: ModelSource) -> TokenizerModel | None:
    """The cached model, unless its index has been replaced. One whose index is gone, as during that, stays."""
    found = _opened.get(source)  # once: another thread may remove it
    if found is None:
        return None
    identity, model = found
    try:
        return model if source.index_identity() == identity else None
    except OSError:
        return model


def close_except(digests: set[str]) -> None:
    """Forget the checkpoints of other digests."""
    for models in (_opened, _unusable):
        for source in list(models):  # a copy: a thread that builds a vocabulary may add it meanwhile
            if source.index_path.stem not in digests:
                models.pop(source, None)
