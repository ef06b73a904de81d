"""Errors in OpenAI's form."""

from __future__ import annotations

from typing import Any

from starlette.responses import JSONResponse

MOST_MESSAGE = 500
"""Characters of an error's message: it may quote what the client sent."""
MOST_PARAM = 100


class ApiError(Exception):
    """An error that the client is told, with its HTTP status."""

    def __init__(
        self,
        status: int,
        message: str,
        *,
        param: str | None = None,
        code: str | None = None,
        retry_after: int | None = None,
    ) -> None:
        message = message[:MOST_MESSAGE]
        super().__init__(message)
        self.status = status
        self.message = message
        self.param = param and param[:MOST_PARAM]
        self.code = code
        self.retry_after = retry_after

    @property
    def kind(self) -> str:
        """OpenAI's type of the error."""
        if self.status == 429:
            return "rate_limit_error"
        return "server_error" if self.status >= 500 else "invalid_request_error"

    def to_json(self) -> dict[str, Any]:
        """The body of the response."""
        return {"error": {"message": self.message, "type": self.kind, "param": self.param, "code": self.code}}

    def response(self) -> JSONResponse:
        """The response to the client."""
        headers = {} if self.retry_after is None else {"Retry-After": str(self.retry_after)}
        if self.status == 401:
            headers["WWW-Authenticate"] = "Bearer"
        return JSONResponse(self.to_json(), self.status, headers)


def invalid(param: str | None, message: str, code: str = "invalid_value") -> ApiError:
    """An error of the request's own; the message begins with the parameter's name."""
    return ApiError(400, f"{param}: {message}" if param else message, param=param, code=code)


def no_valid_key() -> ApiError:
    """The error of a request without one of the server's keys."""
    return ApiError(401, "no valid API key; send `Authorization: Bearer KEY`", code="invalid_api_key")


def too_many_answers(wanted: int, most: int, choices: int) -> ApiError:
    """The error of a request for more answers than `most`, with `choices` of them per prompt."""
    name = "n" if choices > 1 else "prompt"
    return invalid(name, f"{wanted} answers at once, but this server gives at most {most}; ask for fewer")


def too_long(tokens: str, most: int) -> ApiError:
    """The error of a prompt of so many tokens, if the server takes at most `most`."""
    return invalid(
        None,
        f"the prompt has {tokens} tokens, but this server takes at most {most}; shorten it",
        "context_length_exceeded",
    )
