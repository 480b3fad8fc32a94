"""Reads a multipart form as it arrives: its text parts, and its one file straight into a staged file.

The file is hashed while it is written, the parts may come in any order, and after a refusal the rest of the body is
read and thrown away, so that the caller gets to see the answer.
"""

import hashlib
import json
from collections.abc import AsyncGenerator, Callable
from dataclasses import dataclass
from typing import Any, TypeVar

from python_multipart.multipart import MultipartParser, parse_options_header
from starlette.requests import Request

from tuneship.contract.errors import ApiError, InvalidRequestError
from tuneship.contract.operation import Operation
from tuneship.host.disk_space import check_room
from tuneship.service.context.context import Parts
from tuneship.service.datasets.reading import FILE_LIMIT
from tuneship.service.http.arguments import check_file_media, form_tags
from tuneship.store.blobs import StagedFile

R = TypeVar("R")

# The file and all that stands around it.
FORM_LIMIT = FILE_LIMIT + (1 << 20)
TEXT_PARTS = 16
TEXT_LIMIT = 64 << 10
# Bytes that are collected before a thread parses and writes them.
AT_ONCE = 512 << 10
# Bytes between two looks at the room on the disk.
LOOK_EVERY = 64 << 20


@dataclass(frozen=True)
class Content:
    """What a request carries: fields, perhaps a file, and a digest of both for the idempotency fingerprint."""

    fields: dict[str, Any]
    digest: str = ""
    file: StagedFile | None = None
    body: bytes | None = None
    """JSON that nobody has parsed yet."""


@dataclass(frozen=True)
class Upload:
    """Where a form's file goes, and whose it is."""

    staged: StagedFile
    parts: Parts
    client_id: str

    async def work(self, work: Callable[..., R], *arguments: Any) -> R:
        """Do it in a thread: the event loop has others to serve."""
        return await self.parts.threads.uploads.run(self.client_id, work, *arguments)


async def limited(request: Request, limit: int) -> AsyncGenerator[bytes]:
    """The body as it arrives; cut off at `limit` when its length was not announced."""
    size = 0
    async for block in request.stream():
        size += len(block)
        if size > limit:
            raise _too_large("body", limit)
        yield block


def check_length(request: Request, limit: int) -> int:
    """The announced length, 0 without one. Raises 413 before anything is read."""
    length = request.headers.get("content-length", "")
    announced = int(length) if length.isdigit() else 0
    if announced > limit:
        raise _too_large("body", limit)
    return announced


def _too_large(what: str, limit: int) -> InvalidRequestError:
    return InvalidRequestError(f"the {what} is larger than {limit >> 20} MiB", status=413)


async def read_form(operation: Operation[..., Any], request: Request, upload: Upload) -> Content:
    """The fields of a form; its file is then in the staged file of the upload."""
    announced = check_length(request, FORM_LIMIT)
    media, options = parse_options_header(request.headers.get("content-type", ""))
    if media != b"multipart/form-data" or "content-encoding" in request.headers:
        raise InvalidRequestError("the body must be multipart/form-data", status=415)
    check_room(upload.parts.settings, announced)
    form = _FormReader(options.get(b"boundary", b""), upload.staged)
    await _fill(form, request, upload)
    return await upload.work(_content, operation, form)


async def _fill(form: "_FormReader", request: Request, upload: Upload) -> None:
    """Parse, hash and write the body, a block at a time."""
    pending: list[bytes] = []
    size = read = 0
    async for block in limited(request, FORM_LIMIT):
        pending.append(block)
        size += len(block)
        if size < AT_ONCE:
            continue
        if (read + size) // LOOK_EVERY > read // LOOK_EVERY:
            form.attempt(lambda: check_room(upload.parts.settings))
        await upload.work(form.write, b"".join(pending))
        read += size
        pending, size = [], 0
    await upload.work(form.write, b"".join(pending))


def _content(operation: Operation[..., Any], form: "_FormReader") -> Content:
    form.finish()
    fields: dict[str, Any] = dict(form.texts)
    if "tags" in fields and operation.is_creating:
        fields["tags"] = form_tags(fields["tags"])
    check_file_media(form.file_media)
    # Names, values and the file's digest: the raw body holds a boundary that changes with every try.
    text = json.dumps([fields, form.file.content_sha256], sort_keys=True, default=str)
    return Content(fields, hashlib.sha256(text.encode()).hexdigest(), form.file)


class _FormReader:
    """One body on its way in. The first refusal is kept, and nothing is stored after it."""

    def __init__(self, boundary: bytes, staged: StagedFile) -> None:
        self.texts: dict[str, str] = {}
        self.file = staged
        self.file_media: str | None = None
        self._refusal: Exception | None = None
        self._files = 0
        self._parts = 0
        self._is_whole = False
        self._header = [b"", b""]
        self._headers: dict[bytes, bytes] = {}
        self._name = ""
        self._text: bytearray | None = None
        """The part's content so far; None within the file."""
        self._parser: MultipartParser | None = None
        self.attempt(lambda: self._open(boundary))

    def _open(self, boundary: bytes) -> None:
        if not boundary:
            raise InvalidRequestError("the multipart form has no boundary")
        self._parser = MultipartParser(
            boundary,
            {
                "on_part_begin": self._headers.clear,
                "on_header_field": lambda data, start, end: self._head(0, data[start:end]),
                "on_header_value": lambda data, start, end: self._head(1, data[start:end]),
                "on_header_end": self._end_header,
                "on_headers_finished": self._begin_part,
                "on_part_data": self._take,
                "on_part_end": self._end_part,
                "on_end": self._end,
            },
        )

    def attempt(self, work: Callable[[], object]) -> None:
        """Do it unless something was refused before."""
        if self._refusal is not None:
            return
        try:
            work()
        except (ApiError, OSError) as refusal:
            self._refusal = refusal
        except ValueError:  # the parser's errors are of this kind
            self._refusal = InvalidRequestError("the multipart form cannot be parsed")

    def write(self, block: bytes) -> None:
        """Parse the next bytes of the body."""
        parser = self._parser
        if parser is not None:
            self.attempt(lambda: parser.write(block))

    def finish(self) -> None:
        """Nothing more comes. Raises what was wrong."""
        if self._refusal is not None:
            raise self._refusal
        if not self._is_whole:
            raise InvalidRequestError("the multipart form is cut off")
        if self._files == 0:
            raise _one_file()
        self.file.finish()

    def _head(self, side: int, data: bytes) -> None:
        self._header[side] += data

    def _end_header(self) -> None:
        name, value = self._header
        self._headers[name.lower()] = value
        self._header = [b"", b""]

    def _begin_part(self) -> None:
        _, options = parse_options_header(self._headers.get(b"content-disposition"))
        self._name = options.get(b"name", b"").decode()
        self._parts += 1
        if not self._name or self._parts > TEXT_PARTS + 1:
            raise InvalidRequestError("the multipart form has a part without name, or too many")
        if self._name == "file":
            self._files += 1
            if self._files > 1:
                raise _one_file()
            self.file_media = self._headers.get(b"content-type", b"").decode("latin-1")
            self._text = None
        elif self._name in self.texts:
            raise InvalidRequestError("a form part is given twice")
        else:
            self._text = bytearray()

    def _take(self, data: bytes, start: int, end: int) -> None:
        part = memoryview(data)[start:end]
        if self._text is None:
            if self.file.size + len(part) > FILE_LIMIT:
                raise _too_large("file", FILE_LIMIT)
            self.file.write(part)
        elif len(self._text) + len(part) > TEXT_LIMIT:
            raise InvalidRequestError(f"a form part is larger than {TEXT_LIMIT >> 10} KiB")
        else:
            self._text += part

    def _end_part(self) -> None:
        if self._text is not None:
            self.texts[self._name] = self._text.decode()

    def _end(self) -> None:
        self._is_whole = True


def _one_file() -> InvalidRequestError:
    return InvalidRequestError("exactly one part named file is required", param="file")
