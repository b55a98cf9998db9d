"""Uploads: a multipart form, whose file goes to disk as it arrives."""

from __future__ import annotations

from collections import Counter
from typing import BinaryIO

from python_multipart.exceptions import FormParserError
from python_multipart.multipart import MultipartParser, parse_options_header

from h2o_flexgen.server.errors import ApiError

#: the most bytes of all fields that are no file
FIELD_BYTES = 1 << 16
#: the longest file name
NAME_LENGTH = 255


class Form:
    """The form of an upload, which is fed with pieces of the body. A file that is too large is read to its end, and
    not written: some clients read no response before they have sent everything.

    Args:
        content_type: of the request.
        file: where the file goes.
        most: the most bytes that it may have.

    Attributes:
        fields: the other fields.
        filename: a label, without folders; "" before the file.

    Raises:
        ApiError: it is no multipart form.
    """

    def __init__(self, content_type: str, file: BinaryIO, most: int):
        kind, options = parse_options_header(content_type)
        if kind != b"multipart/form-data" or not options.get(b"boundary"):
            raise ApiError(400, "an upload is multipart/form-data with the fields file and purpose")
        self.file = file
        self.most = most
        self.fields: dict[str, bytes] = {}
        self.filename = ""
        self._sizes = Counter()
        self._is_whole = False
        names = "part_begin header_field header_value header_end headers_finished part_data end".split()
        callbacks = {f"on_{name}": getattr(self, f"_on_{name}") for name in names}
        try:
            self._parser = MultipartParser(options[b"boundary"], callbacks)
        except FormParserError as e:
            raise _malformed(e) from None

    def feed(self, data: bytes) -> None:
        """Raises ApiError if it is malformed, and OSError if the file cannot be written."""
        try:
            self._parser.write(data)
        except FormParserError as e:
            raise _malformed(e) from None

    def check(self) -> None:
        """Raises ApiError if the form was cut short, lacks its file, or the file is empty or too large."""
        if not self._is_whole:
            raise ApiError(400, "the form ends too early")
        if self._sizes["file"] > self.most:
            message = f"the file is too large: at most {self.most} bytes, which --max-upload of the server sets"
            raise ApiError(413, message, param="file", code="file_too_large")
        if not self._sizes["file"]:
            raise ApiError(400, "file is missing or empty", param="file")
        if self.fields.get("purpose") != b"batch":
            raise ApiError(400, "purpose must be batch", param="purpose")

    # what the parser calls

    def _on_part_begin(self) -> None:
        self._headers: dict[bytes, bytes] = {}
        self._header = b""
        self._value = b""

    def _on_header_field(self, data: bytes, start: int, end: int) -> None:
        self._header += data[start:end]

    def _on_header_value(self, data: bytes, start: int, end: int) -> None:
        self._value += data[start:end]

    def _on_header_end(self) -> None:
        self._headers[self._header.lower()] = self._value
        self._header = b""
        self._value = b""

    def _on_headers_finished(self) -> None:
        _, options = parse_options_header(self._headers.get(b"content-disposition"))
        self._name = options.get(b"name", b"").decode("utf-8", "replace")
        if b"filename" in options:
            if self._name != "file" or self.filename:
                raise ApiError(400, "an upload has one file, in the field file", param=self._name)
            self.filename = label(options[b"filename"])
        elif self._name in self.fields or self._name == "file":
            raise ApiError(400, f"{self._name} must be given once, and file with a file name", param=self._name)
        elif self._name != "purpose":
            raise ApiError(400, f"{self._name} is not supported: leave it out", param=self._name)
        else:
            self.fields[self._name] = b""

    def _on_part_data(self, data: bytes, start: int, end: int) -> None:
        kind = "field" if self._name in self.fields else "file"
        self._sizes[kind] += end - start
        if kind == "file" and self._sizes[kind] <= self.most:
            self.file.write(data[start:end])
        elif kind == "field":
            if self._sizes[kind] > FIELD_BYTES:
                raise ApiError(413, "the fields of the form are too large")
            self.fields[self._name] += data[start:end]

    def _on_end(self) -> None:
        self._is_whole = True


def _malformed(error: FormParserError) -> ApiError:
    return ApiError(400, f"the form is malformed: {error}")


def label(filename: bytes) -> str:
    """A file name without folders and control characters, to show to people."""
    name = filename.decode("utf-8", "replace").replace("\\", "/").rpartition("/")[2]
    return "".join(filter(str.isprintable, name))[:NAME_LENGTH].strip(" .") or "unnamed"
