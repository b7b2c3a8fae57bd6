"""/v1/models and the tokenizer: /tokenize, /detokenize, /tokenizer_info."""

from __future__ import annotations

from typing import Annotated, Any

from fastapi import APIRouter, Request
from fastapi.responses import Response
from pydantic import Field

from radixrt.errors import InvalidRequest
from radixrt.server.answers import json_response
from radixrt.server.bodies import Name
from radixrt.server.documents import documented
from radixrt.server.native import Segment, encode_segments
from radixrt.server.reading import Body
from radixrt.server.service import Service, service_of

router = APIRouter()


class TokenizeBody(Body):
    """What to encode: a text (control tokens in it count) or segments (they count in template segments only).

    Attributes:
        add_special_tokens: whether a text begins with BOS where the model wants one.
        is_start: of segments: nothing is before them. Some tokenizers put a space before a text's first word.
    """

    model: Name | None = None
    prompt: str | None = None
    segments: Annotated[list[Segment], Field(max_length=4096)] | None = None
    add_special_tokens: bool | None = None
    is_start: bool = True
    return_token_strs: bool | None = None


class DetokenizeBody(Body):
    """Token ids to turn into text; control tokens have none."""

    model: Name | None = None
    tokens: Annotated[list[int], Field(max_length=1 << 20)]


class OpenRoleBody(Body):
    """Which texts the chat template puts around the next message: roles of the earlier ones, and its own."""

    model: Name | None = None
    history: Annotated[tuple[Name, ...], Field(max_length=4096)] = ()
    role: Name


@router.get("/v1/models")
async def list_models(request: Request) -> Response:
    """Give the one model."""
    return json_response({"object": "list", "data": [_model(service_of(request))]})


@router.get("/v1/models/{name:path}")
async def get_model(request: Request, name: str) -> Response:
    """Give the model of this name."""
    service = service_of(request)
    service.check_model(name)
    return json_response(_model(service))


def _model(service: Service) -> dict[str, Any]:
    return {
        "id": service.model_name,
        "object": "model",
        "created": service.created_s,
        "owned_by": "radixrt",
        "max_model_len": service.engine.config.max_context,
    }


@router.post("/tokenize", **documented(TokenizeBody))
async def tokenize(request: Request) -> Response:
    """Encode text."""
    service = service_of(request)
    body = await service.body(request, TokenizeBody)
    service.check_model(body.model)
    tokenizer = service.engine.tokenizer
    if (body.prompt is None) == (body.segments is None):
        raise InvalidRequest("give either prompt or segments", parameter="prompt")
    if body.segments is not None and body.add_special_tokens:
        raise InvalidRequest("add_special_tokens goes with prompt only", parameter="add_special_tokens")

    def made() -> Response:
        if body.segments is not None:
            token_ids = encode_segments(tokenizer, body.segments, is_start=body.is_start)
        else:
            has_special = body.add_special_tokens is not False
            token_ids = tokenizer.encode(body.prompt or "", add_special_tokens=has_special)
        answer: dict[str, Any] = {
            "tokens": token_ids,
            "count": len(token_ids),
            "max_model_len": service.engine.config.max_context,
        }
        if body.return_token_strs:
            answer["token_strs"] = [tokenizer.token_text(token_id) for token_id in token_ids]
        return json_response(answer)

    return await service.in_thread(made)


@router.post("/detokenize", **documented(DetokenizeBody))
async def detokenize(request: Request) -> Response:
    """Decode token ids."""
    service = service_of(request)
    body = await service.body(request, DetokenizeBody)
    service.check_model(body.model)
    num_ids = service.engine.tokenizer.vocab_size
    for token_id in body.tokens:
        if not 0 <= token_id < num_ids:
            raise InvalidRequest(
                f"tokens: token ids must be in [0, {num_ids}), got {token_id}", parameter="tokens"
            )
    text = await service.in_thread(lambda: service.engine.tokenizer.decode(body.tokens))
    return json_response({"prompt": text})


@router.get("/tokenizer_info")
async def tokenizer_info(request: Request) -> Response:
    """Give what a client must know of the tokenizer."""
    service = service_of(request)
    tokenizer = service.engine.tokenizer
    tokens = tokenizer.special_tokens
    return json_response(
        {
            "vocab_size": tokenizer.vocab_size,
            "num_token_ids": service.engine.config.num_token_ids,
            "max_context": service.engine.config.max_context,
            "fingerprint": tokenizer.fingerprint,
            "bos_token": tokens.get("bos_token"),
            "eos_token": tokens.get("eos_token"),
            "pad_token": tokens.get("pad_token"),
            "bos_token_id": tokenizer.bos_id,
            "eos_token_ids": list(tokenizer.eos_ids),
            "start_ids": tokenizer.encode(""),
            "chat_template": None if tokenizer.chat is None else tokenizer.chat.source,
        }
    )


@router.get("/tokenizer")
async def tokenizer_files(request: Request) -> Response:
    """Give all that a client needs to encode and decode by itself: the tokenizer.json and what stands beside it."""
    service = service_of(request)
    tokenizer = service.engine.tokenizer

    def made() -> Response:
        return json_response(
            {
                "tokenizer_json": tokenizer.serialized(),
                "special_tokens": tokenizer.special_tokens,
                "eos_ids": tokenizer.eos_ids,
                "add_bos": tokenizer.add_bos,
                "chat_template": None if tokenizer.chat is None else tokenizer.chat.source,
                "fingerprint": tokenizer.fingerprint,
                "tool_format": service.config.tool_format,
            }
        )

    return await service.in_thread(made)


@router.post("/open_role", **documented(OpenRoleBody))
async def open_role(request: Request) -> Response:
    """Give the template's texts before and after the content of the next message."""
    service = service_of(request)
    body = await service.body(request, OpenRoleBody)
    service.check_model(body.model)
    chat = service.engine.tokenizer.chat
    if chat is None:
        raise InvalidRequest("this model has no chat template", parameter="role")
    history = [{"role": role, "content": ""} for role in body.history]
    before, after = await service.in_thread(lambda: chat.open_role(history, body.role))
    return json_response({"before": before, "after": after})
