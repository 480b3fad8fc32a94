"""Reads a multipart form as it arrives: its text parts, and its one file straight into a staged file.

The file is hashed while it is written, the parts may come in any order, and after the refusal of a wrong form the rest
of the body is read and thrown away, so that the caller gets to see the answer. Where there is no room for the file, the
answer does not wait for the body.
"""

import hashlib
import json
from collections.abc import AsyncGenerator, Callable
from dataclasses import dataclass
from typing import Any, TypeVar, cast

from python_multipart.multipart import MultipartParser, parse_options_header
from starlette.requests import ClientDisconnect, Request

from tuneship.contract.declaring.operation import Operation
from tuneship.contract.errors import ApiError, InvalidRequestError, QuotaExceeded
from tuneship.service.context.arguments import check_file_media, form_tags
from tuneship.service.context.context import Context
from tuneship.service.context.quotas import check_disk, own_room, reserve
from tuneship.service.context.staged_bytes import SPACE_CHECK_BYTES
from tuneship.service.datasets.reading import FILE_LIMIT
from tuneship.store.files.blobs import StagedFile
from tuneship.store.records import idempotency

R = TypeVar("R")

# The parts of a form around its file take less.
FORM_BYTES = 1 << 20
MAX_FORM_BYTES = FILE_LIMIT + FORM_BYTES
MAX_TEXT_PARTS = 16
MAX_TEXT_BYTES = 64 << 10
# Bytes that are collected before a thread parses and writes them.
BLOCK_BYTES = 512 << 10


@dataclass(frozen=True)
class Content:
    """The content of a request: fields, perhaps a file, and a digest of both for the idempotency fingerprint."""

    fields: dict[str, Any]
    digest: str = ""
    file: StagedFile | None = None
    # JSON that is not parsed yet.
    body: bytes | None = None
    # There was no room for the file: only the stored answer to an earlier request can still be given.
    no_room: QuotaExceeded | None = None


@dataclass(frozen=True)
class Upload:
    """The staged file that receives a form's file, and the request that it belongs to."""

    staged: StagedFile
    context: Context
    request: Request
    operation: Operation[..., Any]

    async def run(self, work: Callable[..., R], *arguments: Any) -> R:
        """Do work in a thread, since the event loop has other requests to serve."""
        threads = self.context.parts.threads.uploads
        return await threads.run(self.context.client_id, work, *arguments)

    def is_repeated(self) -> bool:
        """Whether an answer may be stored for the request: it is given although the room for its file is used up."""
        if not self.operation.takes_idempotency_key:
            return False
        if key := self.request.headers.get("idempotency-key"):
            with self.context.read() as connection:
                return idempotency.is_known(connection, self.context.client_id, key)
        return bool(self.request.state.dialect.retry_count(self.request))


async def limited(request: Request, limit: int) -> AsyncGenerator[bytes]:
    """The body as it arrives. Raises 413 beyond `limit` bytes, even if no length was announced."""
    size = 0
    try:
        async for block in request.stream():
            size += len(block)
            if size > limit:
                raise _too_large("body", limit)
            yield block
    except ClientDisconnect:
        raise InvalidRequestError("the body broke off") from None


def check_length(request: Request, limit: int) -> int:
    """The announced length in bytes, 0 if there is none. Raises 413 before anything is read."""
    length = request.headers.get("content-length", "")
    announced = int(length) if length.isdigit() else 0
    if announced > limit:
        raise _too_large("body", limit)
    return announced


def _too_large(what: str, limit: int) -> InvalidRequestError:
    return InvalidRequestError(f"the {what} is larger than {limit >> 20} MiB", status=413)


async def read_form(upload: Upload) -> Content:
    """The fields of a form; its file is then in the staged file of the upload."""
    operation, request = upload.operation, upload.request
    announced = check_length(request, MAX_FORM_BYTES)
    media, options = parse_options_header(request.headers.get("content-type", ""))
    if media != b"multipart/form-data" or "content-encoding" in request.headers:
        raise InvalidRequestError("the body must be multipart/form-data", status=415)
    form = _FormReader(options.get(b"boundary", b""), upload)

    def begin() -> None:
        form.reserve(announced=max(0, announced - FORM_BYTES))
        check_disk(upload.context)

    await upload.run(begin)

    pending: list[bytes] = []
    size = read = 0
    async for block in limited(request, MAX_FORM_BYTES):
        pending.append(block)
        size += len(block)
        if size < BLOCK_BYTES:
            continue
        if (read + size) // SPACE_CHECK_BYTES > read // SPACE_CHECK_BYTES:
            check_disk(upload.context)
        await upload.run(form.write, b"".join(pending))
        read += size
        pending, size = [], 0
    await upload.run(form.write, b"".join(pending))

    def finished() -> Content:
        form.finish()
        fields: dict[str, Any] = dict(form.texts)
        if "tags" in fields and operation.is_creating:
            fields["tags"] = form_tags(fields["tags"])
        check_file_media(form.file_media, operation.file_media)
        body = operation.body_parameter
        if body is not None and "filename" in body[1].model_fields:
            fields["filename"] = form.file_name
        # The raw body holds a boundary that changes with every retry, so its digest would too.
        text = json.dumps([fields, form.file.content_sha256], sort_keys=True, default=str)
        digest = hashlib.sha256(text.encode()).hexdigest()
        return Content(fields, digest, form.file, no_room=form.no_room)

    return await upload.run(finished)


class _FormReader:
    """Parses one body as it arrives. The first error is kept, and nothing is stored after it."""

    def __init__(self, boundary: bytes, upload: Upload) -> None:
        self.texts: dict[str, str] = {}
        self.file = upload.staged
        # Why the file is not stored: it is only hashed, to find the stored answer.
        self.no_room: QuotaExceeded | None = None
        self._upload = upload
        # The bytes that the client's files may take, read once a block.
        self._room: int | None = None
        self.file_media: str | None = None
        self.file_name = ""
        self._error: Exception | None = None
        self._files = 0
        self._parts = 0
        self._is_complete = False
        self._header_name = self._header_value = b""
        self._headers: dict[bytes, bytes] = {}
        self._part_name = ""
        # The part's text so far; None within the file.
        self._part_text: bytearray | None = None
        self._parser: MultipartParser | None = None
        if not boundary:
            self._error = InvalidRequestError("the multipart form has no boundary")
            return
        callbacks = {
            "on_part_begin": self._headers.clear,
            "on_header_field": self.on_header_name,
            "on_header_value": self.on_header_value,
            "on_header_end": self.on_header_end,
            "on_headers_finished": self.on_part_begin,
            "on_part_data": self.on_part_data,
            "on_part_end": self.on_part_end,
            "on_end": self.on_end,
        }

        def open_parser() -> None:
            self._parser = MultipartParser(boundary, cast("Any", callbacks))

        self.attempt(open_parser)  # a boundary that is too long is refused like a wrong body

    def attempt(self, work: Callable[[], object]) -> None:
        """Do some work unless an error came before."""
        if self._error is not None:
            return
        try:
            work()
        except QuotaExceeded:
            raise
        except (ApiError, OSError) as error:
            self._error = error
        except ValueError:  # the parser's errors are of this kind
            self._error = InvalidRequestError("the multipart form cannot be parsed")

    def write(self, block: bytes) -> None:
        """Parse the next bytes of the body."""
        parser, self._room = self._parser, None
        if parser is not None:
            self.attempt(lambda: parser.write(block))

    def reserve(self, *, announced: int = 0, arrived: int = 0) -> None:
        """Count bytes of the file against the quota. Raises `QuotaExceeded`, but not for a repeated request."""
        context = self._upload.context
        if self.no_room is not None:
            return
        if 0 < arrived <= context.staged.announced:  # counted already
            context.staged.arrived = arrived
            return
        if self._room is None:
            self._room = own_room(context)
        try:
            reserve(context, self._room, announced=announced, arrived=arrived)
        except QuotaExceeded as no_room:
            if not self._upload.is_repeated():
                raise
            self.no_room = no_room
            self.file.drop()

    def finish(self) -> None:
        """End the form after the last byte of the body. Raises the first error."""
        if self._error is not None:
            raise self._error
        if not self._is_complete:
            raise InvalidRequestError("the multipart form is cut off")
        if self._files == 0:
            raise _one_file()
        self.file.finish()

    # The callbacks of the parser. What they raise becomes the error of the form.

    def on_header_name(self, data: bytes, start: int, end: int) -> None:
        self._header_name += data[start:end]

    def on_header_value(self, data: bytes, start: int, end: int) -> None:
        self._header_value += data[start:end]

    def on_header_end(self) -> None:
        self._headers[self._header_name.lower()] = self._header_value
        self._header_name = self._header_value = b""

    def on_part_begin(self) -> None:
        _, options = parse_options_header(self._headers.get(b"content-disposition"))
        self._part_name = options.get(b"name", b"").decode()
        self._parts += 1
        if not self._part_name or self._parts > MAX_TEXT_PARTS + 1:
            raise InvalidRequestError("the multipart form has a part without name, or too many")
        if self._part_name == "file":
            self._files += 1
            if self._files > 1:
                raise _one_file()
            self.file_name = options.get(b"filename", b"").decode("utf-8", "replace")
            self.file_media = self._headers.get(b"content-type", b"").decode("latin-1")
            self._part_text = None
        elif self._part_name in self.texts:
            raise InvalidRequestError("a form part is given twice")
        else:
            self._part_text = bytearray()

    def on_part_data(self, data: bytes, start: int, end: int) -> None:
        part = memoryview(data)[start:end]
        if self._part_text is None:
            if self.file.size + len(part) > FILE_LIMIT:
                raise _too_large("file", FILE_LIMIT)
            self.reserve(arrived=self.file.size + len(part))
            self.file.write(part)
        elif len(self._part_text) + len(part) > MAX_TEXT_BYTES:
            raise InvalidRequestError(f"a form part is larger than {MAX_TEXT_BYTES >> 10} KiB")
        else:
            self._part_text += part

    def on_part_end(self) -> None:
        if self._part_text is not None:
            self.texts[self._part_name] = self._part_text.decode()

    def on_end(self) -> None:
        self._is_complete = True


def _one_file() -> InvalidRequestError:
    return InvalidRequestError("exactly one part named file is required", param="file")
