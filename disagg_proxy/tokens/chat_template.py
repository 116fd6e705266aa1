"""Chat templates: the Jinja text in a model's ``tokenizer_config.json`` (or ``chat_template.jinja``),
rendered as transformers does: sandboxed, with ``raise_exception``, ``strftime_now``, ``tojson`` and the names
of special tokens.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from datetime import datetime
from pathlib import Path
from typing import Any

from moonpool.disagg_proxy.setting_error import bad

RENDERED_CHARS_MAX = 64 << 20


class TemplateRefused(Exception):
    """The template does not take these messages, or this model has none."""


class ChatTemplate:
    """Immutable; may be used by several threads."""

    def __init__(self, text: str, names: Mapping[str, str]) -> None:
        """text: the template; names: special tokens such as bos_token -> "<s>".

        Raises ConfigError when jinja2 is missing or the template is none.
        """
        try:
            from jinja2.exceptions import TemplateSyntaxError
            from jinja2.ext import loopcontrols
            from jinja2.sandbox import ImmutableSandboxedEnvironment
        except ImportError as error:
            why = "a local tokenizer needs jinja2: pip install 'moonpool[tokenizer]'"
            raise bad("tokenizer", why) from error
        environment = ImmutableSandboxedEnvironment(
            trim_blocks=True, lstrip_blocks=True, extensions=[loopcontrols]
        )
        environment.filters["tojson"] = _to_json
        environment.globals["raise_exception"] = _raise
        environment.globals["strftime_now"] = _strftime_now
        try:
            self._template = environment.from_string(text)
        except TemplateSyntaxError as error:
            raise bad("tokenizer", f"the model's chat template cannot be read: {error}") from error
        self._names = dict(names)

    @classmethod
    def of_model(cls, folder: Path) -> ChatTemplate | None:
        """The template of a model's folder; None when it has none (a base model)."""
        config = folder / "tokenizer_config.json"
        settings = json.loads(config.read_bytes()) if config.exists() else {}
        text = _template_text(folder, settings)
        if text is None:
            return None
        names = {name: _token_text(settings[name]) for name in settings if name.endswith("_token")}
        return cls(text, {name: token for name, token in names.items() if token is not None})

    def render(self, request: Mapping[str, Any]) -> str:
        """request: the body of /v1/chat/completions. Raises TemplateRefused."""
        extra = request.get("chat_template_kwargs")
        try:
            text = self._template.render(
                **self._names,
                **(extra if isinstance(extra, dict) else {}),
                messages=[_plain(message) for message in request["messages"]],
                tools=request.get("tools"),
                documents=request.get("documents"),
                add_generation_prompt=request.get("add_generation_prompt", True),
            )
        except Exception as error:  # a template is a program of the model's author
            raise TemplateRefused(str(error)) from error
        if len(text) > RENDERED_CHARS_MAX:
            raise TemplateRefused(f"the prompt is longer than {RENDERED_CHARS_MAX} characters")
        return text


def _plain(message: dict[str, Any]) -> dict[str, Any]:
    """A message whose content is a list of text parts, as the text that engines make of it."""
    content = message.get("content")
    if not isinstance(content, list):
        return message
    if any(part.get("type") != "text" for part in content):
        raise TemplateRefused("a part of a message is not text")
    return {**message, "content": "\n".join(part["text"] for part in content)}


def _template_text(folder: Path, settings: Mapping[str, Any]) -> str | None:
    file = folder / "chat_template.jinja"
    if file.exists():
        return file.read_text()
    text = settings.get("chat_template")
    if isinstance(text, list):  # several by name
        text = next((item["template"] for item in text if item["name"] == "default"), None)
    return text if isinstance(text, str) else None


def _token_text(token: object) -> str | None:
    if isinstance(token, dict):
        token = token.get("content")
    return token if isinstance(token, str) else None


def _to_json(value: Any, ensure_ascii: bool = False, indent: int | None = None, **_: Any) -> str:
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent)


def _raise(message: str) -> None:
    raise TemplateRefused(message)


def _strftime_now(form: str) -> str:
    return datetime.now().strftime(form)
