"""Chat templates: a conversation becomes the prompt that the model was trained on. No torch, no Jinja2.

Templates are written for the Jinja2 that transformers sets up (sandboxed, trim_blocks, lstrip_blocks, loop controls,
its own `tojson`, `raise_exception`, `strftime_now`). minijinja renders them; template_source.py and template_values.py
make up the differences.
"""

import json
import time
from collections.abc import Callable, Mapping, Sequence
from datetime import datetime
from pathlib import Path
from threading import local
from typing import Any, Final

import minijinja

from spark_model import template_values as values
from spark_model.checkpoint import Checkpoint
from spark_model.errors import TemplateError
from spark_model.template_source import METHOD_FILTER, to_minijinja
from spark_model.tokenizer import Tokenizer

# Instructions of minijinja plus about one per 64 characters that are copied. The costliest known template looks back
# over all messages for each one and takes 5 million for 1,000 messages; most take a tenth of that.
FUEL: Final = 20_000_000
# Time that one render may spend until it calls back into Python; fuel does not count what is done there.
DEADLINE_S: Final = 10.0


class ChatTemplate:
    """One model's template, compiled once. `render` may be called from many threads at once."""

    def __init__(
        self,
        source: str,
        *,
        bos_token: str | None = None,
        eos_token: str | None = None,
        special_tokens: Mapping[str, str] | None = None,
        tool_use_source: str | None = None,
        origin: str = "chat template",
    ) -> None:
        """`tool_use_source` renders conversations with tools, where the model has a template of its own for them.

        Tokens that are None stay undefined in the template. Raises TemplateError when a source is no template.
        """
        self.source = source
        self.tool_use_source = tool_use_source
        self.origin = origin
        given = {**(special_tokens or {}), "bos_token": bos_token, "eos_token": eos_token}
        self._tokens = {name: text for name, text in given.items() if text is not None}
        self._render_state = local()
        self._environment = self._create_environment()
        self._compile("default", source)
        if tool_use_source is not None:
            self._compile("tool_use", tool_use_source)

    def render(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        tools: Sequence[Mapping[str, Any]] | None = None,
        add_generation_prompt: bool = True,
        **kwargs: Any,
    ) -> str:
        """The prompt for a conversation of JSON values.

        `kwargs` are the template's own variables (enable_thinking, …). Raises TemplateError with the template's words
        when it refuses the conversation, and when it fails or takes too long.
        """
        name = "tool_use" if tools and self.tool_use_source is not None else "default"
        self._render_state.deadline = time.monotonic() + DEADLINE_S
        try:
            variables = {"documents": None, **self._tokens, **{key: _argument(item) for key, item in kwargs.items()}}
            variables["messages"] = values.freeze(messages)
            variables["tools"] = values.freeze(tools)
            variables["add_generation_prompt"] = add_generation_prompt
            return self._environment.render_template(name, **variables)
        except TemplateError as error:
            raise TemplateError(f"{self.origin}: {error}") from error
        except minijinja.TemplateError as error:
            raise TemplateError(f"{self.origin} cannot render this conversation: {_words(error)}") from error
        except RecursionError as error:
            raise TemplateError(f"{self.origin}: the conversation is nested too deeply") from error
        except Exception as error:  # whatever a method of a Python value raised inside the template
            raise TemplateError(f"{self.origin} cannot render this conversation: {error}") from error

    def _compile(self, name: str, source: str) -> None:
        try:
            self._environment.add_template(name, to_minijinja(source, self.origin))
        except minijinja.TemplateError as error:
            raise TemplateError(f"{self.origin} is not a template that can be used: {_words(error)}") from error

    def _create_environment(self) -> minijinja.Environment:
        environment = minijinja.Environment(trim_blocks=True, lstrip_blocks=True, fuel=FUEL, debug=False)
        functions: dict[str, Callable[..., Any]] = {
            "tojson": values.to_json,
            "replace": values.replace,
            "int": values.to_int,
            "float": values.to_float,
            METHOD_FILTER: values.python_method,
        }
        for name, function in functions.items():
            environment.add_filter(name, self._timed(function))
        for name in ("iterable", "sequence", "number", "integer", "float"):
            environment.add_test(name, self._timed(getattr(values, f"is_{name}")))
        environment.add_global("raise_exception", _raise_exception)
        environment.add_global("strftime_now", self._timed(_strftime_now))
        return environment

    def _timed(self, function: Callable[..., Any]) -> Callable[..., Any]:
        def call(*arguments: Any, **named: Any) -> Any:
            if time.monotonic() > self._render_state.deadline:
                raise TemplateError(f"rendering takes more than {DEADLINE_S:g} s")
            return function(*arguments, **named)

        return call


def load_chat_template(
    checkpoint: Checkpoint,
    tokenizer: Tokenizer,
    *,
    override: Path | None = None,
    overrides_dir: Path | None = None,
) -> ChatTemplate | None:
    """The template that a checkpoint is served with; None if there is none.

    Taken from, in this order: the file `override`; `overrides_dir`/FAMILY.j2 (pass None to leave overrides out); the
    checkpoint's own, where chat_template.jinja goes before tokenizer_config.json or is GGUF metadata.
    Raises TemplateError when the chosen source cannot be read or is no template.
    """
    source, tool_use, origin = tokenizer.chat_template, tokenizer.chat_templates.get("tool_use"), "chat template"
    path = override or _family_override(checkpoint, overrides_dir)
    if path is not None:
        source, tool_use, origin = _read(path), None, str(path)
    if source is None:
        source = tool_use
    if source is None:
        return None
    return ChatTemplate(
        source,
        bos_token=tokenizer.bos_token,
        eos_token=tokenizer.eos_token,
        special_tokens=tokenizer.special_tokens,
        tool_use_source=tool_use,
        origin=origin if path is not None else f"chat template of {checkpoint.name}",
    )


def model_family(checkpoint: Checkpoint) -> str | None:
    """What names a family's override: `model_type` of config.json, `general.architecture` of GGUF."""
    if checkpoint.kind == "gguf":
        from spark_model.gguf import GgufFile

        with GgufFile(checkpoint.path) as file:
            architecture = file.metadata.get("general.architecture")
        return None if architecture is None else str(architecture)
    try:
        config = json.loads((checkpoint.path / "config.json").read_text(encoding="utf-8"))
    except FileNotFoundError:
        return None
    except (OSError, ValueError) as error:
        raise TemplateError(f"{checkpoint.path / 'config.json'} cannot be read: {error}") from error
    family = config.get("model_type") if isinstance(config, dict) else None
    return family if isinstance(family, str) else None


def _family_override(checkpoint: Checkpoint, overrides_dir: Path | None) -> Path | None:
    if overrides_dir is None or not any(overrides_dir.glob("*.j2")):
        return None
    family = model_family(checkpoint)
    return next((path for path in overrides_dir.glob("*.j2") if path.stem == family), None)


def _read(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise TemplateError(f"{path} cannot be read: {error}") from error


def _argument(value: object) -> object:
    """Numbers of the template's own variables stay numbers, so that it can calculate with them."""
    return value if isinstance(value, (int, float)) else values.freeze(value)


def _raise_exception(message: object = "") -> None:
    raise TemplateError(str(message))


def _strftime_now(pattern: str) -> str:
    return datetime.now().strftime(pattern)


def _words(error: minijinja.TemplateError) -> str:
    return error.message.replace("(in default:", "(line ").replace("(in tool_use:", "(line ")
