"""Puts the parts of a server together: text side, engine, HTTP."""

from pathlib import Path

from spark_model.chat_template import load_chat_template
from spark_model.data import data_folder
from spark_model.detokenizer import IncrementalDetokenizer
from spark_model.facts import read_facts
from spark_model.tokenizer import Tokenizer, load_tokenizer
from spark_server.answer_format import AnswerFormat
from spark_server.config import ServeConfig
from spark_server.engine.supervisor import EngineSupervisor
from spark_server.http.server import serve
from spark_server.messages import fit_template
from spark_server.pipeline import ModelText


def run(config: ServeConfig) -> int:
    """Serve until SIGTERM or Ctrl-C; returns the exit status. Raises SparkError when the server cannot start."""
    return serve(
        config.http,
        create_engine=lambda: EngineSupervisor(config.engine),
        load_text=lambda: load_text(config),
    )


def load_text(config: ServeConfig) -> ModelText:
    """Tokenizer, end tokens and chat template of the model. Raises TokenizerError and TemplateError."""
    tokenizer = load_tokenizer(config.checkpoint)
    overrides: Path | None = data_folder("jinja-templates") if config.http.use_template_overrides else None
    template = load_chat_template(
        config.checkpoint, tokenizer, override=config.http.chat_template, overrides_dir=overrides
    )
    return ModelText(
        tokenizer=tokenizer,
        eos_token_ids=sorted({*tokenizer.eos_token_ids, *read_facts(config.checkpoint).eos_token_ids}),
        vocabulary=_Vocabulary(tokenizer),
        chat_template=None if template is None else fit_template(template),
        answer_format=AnswerFormat(),
    )


class _Vocabulary:
    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer

    def create_detokenizer(self, *, at_start: bool, skip_special: bool) -> IncrementalDetokenizer:
        return IncrementalDetokenizer(self._tokenizer, at_start=at_start, skip_special=skip_special)

    def token_bytes(self, token_id: int) -> bytes:
        return self._tokenizer.join_bytes([token_id], skip_special=False)
