"""Errors that clients receive when a request fails: one table of codes, one exception.

Messages never contain a stack trace, a path or a host name.
"""

from __future__ import annotations

from maskfx.errors import MaskfxError

INVALID = "invalid_request_error"
SERVER = "server_error"

# code: (HTTP status, type)
CODES: dict[str, tuple[int, str]] = {
    # the request itself
    "invalid_value": (400, INVALID),
    "missing_parameter": (400, INVALID),
    "unknown_parameter": (400, INVALID),
    "unsupported_parameter": (400, INVALID),
    "malformed_body": (400, INVALID),
    "too_many_fields": (400, INVALID),
    "image_too_large": (400, INVALID),
    "unsupported_image": (400, INVALID),
    "invalid_image_file": (400, INVALID),
    "mask_size_mismatch": (400, INVALID),
    "mask_missing_alpha": (400, INVALID),
    "mask_empty": (400, INVALID),
    "url_input_disabled": (400, INVALID),
    "idempotency_key_reused": (400, INVALID),
    "invalid_api_key": (401, "authentication_error"),
    "host_not_allowed": (403, "permission_error"),
    "origin_not_allowed": (403, "permission_error"),
    "model_not_found": (404, INVALID),
    "template_not_found": (404, INVALID),
    "lora_not_found": (404, INVALID),
    "not_found": (404, INVALID),
    "method_not_allowed": (405, INVALID),
    "request_timeout": (408, INVALID),
    "payload_too_large": (413, INVALID),
    "unsupported_media_type": (415, INVALID),
    "queue_full": (429, "rate_limit_error"),
    # the server
    "generation_failed": (500, SERVER),
    "worker_lost": (500, SERVER),
    "internal_error": (500, SERVER),
    "model_loading": (503, SERVER),
    "no_workers": (503, SERVER),
    "draining": (503, SERVER),
    "deadline_exceeded": (503, SERVER),
    "lora_unavailable": (503, SERVER),
    "out_of_memory": (503, SERVER),
    "out_of_resources": (503, SERVER),
}


class ApiError(MaskfxError):
    """A failed request, with the error that its client receives.

    Args:
        code: A key of `CODES`, which determines HTTP status and type.
        message: A sentence for the client.
        param: The offending parameter, if any.
        retry_after: Seconds after which a retry may succeed, if known.
    """

    def __init__(
        self,
        code: str,
        message: str,
        *,
        param: str | None = None,
        retry_after: float | None = None,
    ) -> None:
        super().__init__(message)
        self.code, self.message = code, message
        self.param, self.retry_after = param, retry_after
        self.status, self.type = CODES[code]

    def body(self) -> dict[str, dict[str, str | None]]:
        """Return the JSON body of the error response."""
        return {
            "error": {
                "message": self.message,
                "type": self.type,
                "param": self.param,
                "code": self.code,
            }
        }


def no_template(id: str) -> ApiError:
    message = f"There is no template {id!r}; GET /v1/templates lists them, POST records one."
    return ApiError("template_not_found", message, param="template_id")


def no_lora(param: str) -> ApiError:
    message = "There is no such LoRA; GET /v1/adapters lists them."
    return ApiError("lora_not_found", message, param=param)
