"""A store in a bucket: S3, Google Cloud Storage or Azure. Only this module imports obstore.

A bucket has no directories: they are the prefixes of names. An object is seen when it is whole, and
is durable then. Requests are not repeated here, but by `RetryingStore`: a store that repeats a
`create` in silence would report its own object as that of another process.
"""

from __future__ import annotations

import builtins
import contextlib
import errno
import functools
import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from datetime import timedelta

from megatron_flashckpt.errors import AlreadyExistsError, ConfigError, StorageError
from megatron_flashckpt.failpoints import hit
from megatron_flashckpt.storage.advice import OBJECTS
from megatron_flashckpt.storage.msc_profile import Bucket
from megatron_flashckpt.storage.object_writer import ObjectWriter
from megatron_flashckpt.storage.scatter_read import KeptFiles, Seen, cut
from megatron_flashckpt.storage.store import Entry, Pace, check_name

#: Kinds of URLs, in the spelling of fsspec.
SCHEMES = ("s3", "gs", "az")
#: Bytes of one request of `get_into`, which hold as much memory beside the destination.
_BLOCK_NBYTES = 16 * 2**20
#: Least bytes of a part of an upload, and the parts that are sent at a time.
_PART_NBYTES, _PARTS_AT_A_TIME = 8 * 2**20, 8
#: Time for which a part is sent again after errors that may pass.
_PART_S = timedelta(minutes=1)
#: Most parts of an upload; S3 has a limit of 10,000.
_MOST_PARTS = 9_000
#: Characters in a name for which a server may store another name: SeaweedFS and Azure take a
#: backslash for a slash.
_UNSAFE = re.compile(r"[\\\x00-\x1f\x7f]")
#: obstore tells the status of an answer, and what the server says, in the text of its errors only.
_STATUS = re.compile(r"status code: (\d{3})")
_ANSWER = re.compile(r"<Code>(\w+)</Code>(?:<Message>(.*?)</Message>)?", re.DOTALL)
_NO_BUCKET = ("NoSuchBucket", "ContainerNotFound")
#: In an error: the address of the service that gives credentials to the machines of a cloud.
_METADATA_SERVICE = re.compile(
    r"/latest/(api/token|meta-data)|/metadata/identity|metadata\.google\.internal"
)
_CREDENTIALS = (
    "check the credentials of this process (for S3: AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY), "
    "and what they permit"
)


def part_nbytes(nbytes: int) -> int:
    """Return the bytes of each part of an upload of `nbytes`, but for the last one."""
    return max(_PART_NBYTES, -(-nbytes // _MOST_PARTS))


class ObjectStore:
    """See `storage.store.Store`. Nothing is asked of the server until the first call.

    A killed process may leave an upload that was not completed. Nobody sees its parts, but they are
    paid for until a lifecycle rule of the bucket removes them.
    """

    advice = OBJECTS
    in_order = True
    # S3 bears 5,500 reads per second of one prefix, and each one is paid for.
    pace = Pace(shortest_s=0.5, longest_s=5.0, most_per_s=500)

    def __init__(self, url: str, bucket: Bucket | None = None) -> None:
        """Take credentials, endpoint and time-outs from the environment, as obstore documents them.

        Args:
            bucket: what `url` stands for, and what counts before the environment; None: itself.

        Raises:
            ConfigError: obstore is missing, or does not accept the URL or the environment.
        """
        self.place = url.rstrip("/")
        try:
            from obstore.exceptions import BaseError
            from obstore.store import from_url
        except ModuleNotFoundError as error:
            raise ConfigError(
                f"{url}: object stores need the package obstore: with Python 3.11 or newer, run "
                "'pip install megatron_flashckpt[object]'"
            ) from error
        real, config, allows_http = bucket or Bucket(self.place)
        client = {"allow_http": True} if allows_http else None
        opened = functools.partial(from_url, real, config=dict(config), client_options=client)
        try:
            self._client = opened(retry_config={"max_retries": 0})
            #: For the parts of an upload, which may be repeated without harm.
            self._part_client = opened(retry_config={"retry_timeout": _PART_S})
        except (BaseError, ValueError) as error:
            raise ConfigError(f"{url}: cannot be opened ({_text(error)})") from error

    # ------------------------------------------------------------------ reads

    def get(self, name: str, offset: int = 0, nbytes: int | None = None) -> bytes:
        return bytes(self._read(name, offset, nbytes))

    def get_into(
        self,
        name: str,
        offset: int,
        parts: Sequence[memoryview],
        seen: Seen | None = None,
        kept: KeptFiles | None = None,
    ) -> int:
        wanted = sum(part.nbytes for part in parts)
        filled = 0
        while True:
            block_nbytes = min(wanted - filled, _BLOCK_NBYTES)
            data = self._read(name, offset + filled, block_nbytes)
            rest = data
            for part in cut(parts, filled, filled + data.nbytes):
                part[:], rest = rest[: part.nbytes], rest[part.nbytes :]
                if seen is not None:
                    seen(part)
            filled += data.nbytes
            if filled == wanted or data.nbytes < block_nbytes:
                return filled

    def stat(self, name: str) -> Entry | None:
        self._check(name)
        with self._errors(name, "look at"):
            try:
                return Entry(name, self._client.head(name)["size"], "file")
            except FileNotFoundError:
                is_directory = next(iter(self._client.list(name, chunk_size=1)), None)
        return Entry(name, 0, "directory") if is_directory else None

    def list(self, directory: str, *, sizes: bool = True) -> builtins.list[Entry]:
        if directory:
            self._check(directory)
        with self._errors(directory, "list"):
            listed = self._client.list_with_delimiter(directory)
        entries = {
            name: Entry(name, 0 if sizes else -1, "directory")
            for name in map(_base, listed["common_prefixes"])
        }
        for stored in listed["objects"]:
            if stored["path"] != directory:  # else `<directory>/`, as consoles make for a folder
                name = _base(stored["path"])
                entries[name] = Entry(name, stored["size"] if sizes else -1, "file")
        return sorted(entries.values())

    # ------------------------------------------------------------------ writes

    def put(self, name: str, data: bytes) -> None:
        self._check(name)
        with self._errors(name, "write", writes=True):
            self._client.put(name, data, use_multipart=False)
        hit("object.put")

    def create(self, name: str, data: bytes) -> None:
        from obstore import exceptions

        self._check(name)
        with self._errors(name, "write", writes=True):
            try:
                self._client.put(name, data, mode="create")
            except exceptions.AlreadyExistsError as error:
                # obstore raises it for 409, too: a put that met another put, or a deletion. Then
                # nothing may exist, and the caller has to try again.
                if self.stat(name) is None:
                    raise _storage_error(error, f"{self.place}/{name}", "write") from error
                raise AlreadyExistsError(
                    errno.EEXIST, f"{self.place}/{name}: exists already"
                ) from error
        hit("object.put")

    def writer(self, name: str, nbytes: int) -> ObjectWriter:
        with contextlib.suppress(FileNotFoundError):
            self.get(name, 0, 1)  # an error of HEAD would have no text
            raise AlreadyExistsError(errno.EEXIST, f"{self.place}/{name}: exists already")

        def upload(chunks: Iterator[bytes]) -> None:
            with self._errors(name, "write", writes=True):
                self._part_client.put(
                    name,
                    chunks,
                    chunk_size=part_nbytes(nbytes),
                    max_concurrency=_PARTS_AT_A_TIME,
                )

        return ObjectWriter(f"{self.place}/{name}", nbytes, upload)

    def delete(self, names: Iterable[str]) -> None:
        names = list(names)
        for name in names:
            self._check(name)
        with self._errors("", "delete in", writes=True):
            try:
                self._client.delete(names)
            except FileNotFoundError:  # not from S3, for which a missing object is no error
                for name in names:
                    with contextlib.suppress(FileNotFoundError):
                        self._client.delete(name)

    def discard_unfinished(self, directory: str, is_dead: Callable[[str], bool]) -> None:
        """Do nothing: an incomplete upload has no name, and obstore cannot list uploads."""

    def make_durable(self, name: str) -> None:
        self._check(name)

    # ------------------------------------------------------------------ names, errors

    def _check(self, name: str) -> None:
        check_name(name, self.place)
        if _UNSAFE.search(name):
            raise StorageError(
                errno.EINVAL, f"{name!r}: object stores keep no such name; rename the file"
            )

    def _read(self, name: str, offset: int, nbytes: int | None) -> memoryview:
        """Return the bytes of the range that exist."""
        from obstore import exceptions

        self._check(name)
        with self._errors(name, "read"):
            if nbytes == 0:  # no range of HTTP is empty
                self._client.head(name)
                return memoryview(b"")
            try:
                if nbytes is not None:
                    return memoryview(self._client.get_range(name, start=offset, length=nbytes))
                if offset:
                    result = self._client.get(name, options={"range": {"offset": offset}})
                else:
                    result = self._client.get(name)
                return memoryview(result.bytes())
            except exceptions.GenericError:
                # Servers differ in what they say of a range that begins behind the last byte.
                if self._client.head(name)["size"] <= offset:
                    return memoryview(b"")
                raise

    @contextlib.contextmanager
    def _errors(self, name: str, action: str, *, writes: bool = False) -> Iterator[None]:
        """Turn an error of obstore into a StorageError with fact, place and remedy.

        Args:
            writes: a missing object is a missing bucket. Without it, FileNotFoundError passes.
        """
        from obstore.exceptions import BaseError

        place = f"{self.place}/{name}" if name else self.place
        try:
            yield
        except FileNotFoundError as error:
            if writes or any(code in str(error) for code in _NO_BUCKET):
                raise _storage_error(error, place, action) from error
            raise FileNotFoundError(errno.ENOENT, "does not exist", place) from error
        except BaseError as error:
            raise _storage_error(error, place, action) from error


def _base(path: str) -> str:
    return path.rpartition("/")[2]


def _status(error: Exception) -> int | None:
    """Return the status of the server's answer; None if there was no answer."""
    match = _STATUS.search(str(error))
    return int(match[1]) if match else None


def _text(error: Exception) -> str:
    """Return what obstore says, or the server if it says more, as one line."""
    if answer := _ANSWER.search(str(error)):
        return ": ".join(filter(None, (f"{answer[1]}", answer[2])))
    return " ".join(str(error).partition("\n\nDebug source")[0].split())


def _storage_error(error: Exception, place: str, action: str) -> StorageError:
    """Return the error with the number whose class says whether a repetition may help."""
    text, status = str(error), _status(error)
    if _METADATA_SERVICE.search(text):
        number = errno.ETIMEDOUT
        remedy = f"no credentials are set, and the machine's own service gives none: {_CREDENTIALS}"
    elif status is None:
        number = errno.ETIMEDOUT
        remedy = (
            "no answer: check the network and the endpoint (for S3: AWS_REGION, AWS_ENDPOINT_URL, "
            "and AWS_ALLOW_HTTP=true if that is without TLS)"
        )
    elif status >= 500 or status in (408, 409, 429):
        number, remedy = errno.EBUSY, "the server was busy for too long: try again"
    elif "<Code>ExpiredToken</Code>" in text:
        number, remedy = errno.EACCES, "get new credentials, and start the job again with them"
    elif status in (401, 403):
        number, remedy = errno.EACCES, _CREDENTIALS
    elif status == 404:
        number = errno.EACCES
        remedy = "the bucket does not exist: correct its name, or the endpoint, or create it"
    else:
        number = errno.EINVAL
        remedy = "the server refuses the request: check the endpoint and the region"
    return StorageError(number, f"{place}: cannot {action} ({_text(error)}); {remedy}")
