"""The samples of a tar that comes as a stream, in the order of the file.

webdataset's own reader takes a broken header, a missing end mark and a cut last sample for the end
of the shard without a word, and reads the files of samples that are only passed over; so this
follows webdataset's format, by Python's tarfile, and not its reader.
"""

from __future__ import annotations

import tarfile
from typing import Protocol

from data_pipelines.sampling import RawSample
from data_pipelines.shard_index import split_name


class ByteStream(Protocol):
    """What a tar is read from."""

    def read(self, count: int, /) -> bytes:
        """The next bytes; fewer at the end alone."""


class TarFaultError(Exception):
    """A tar that ends early, is damaged, or holds another number of samples."""


# Names of every release of Python, but not of its documentation.
_END_MARK = tarfile.EOFHeaderError  # type: ignore[attr-defined]
_NO_HEADER = (tarfile.EmptyHeaderError, tarfile.TruncatedHeaderError)  # type: ignore[attr-defined]


class _Header(tarfile.TarInfo):
    """A header whose damage is an error, where tarfile takes it for the end of the archive."""

    @classmethod
    def fromtarfile(cls, archive: tarfile.TarFile) -> _Header:
        # Not `frombuf`: newer releases of Python read headers past it.
        try:
            return super().fromtarfile(archive)
        except tarfile.HeaderError as error:
            if isinstance(error, _END_MARK):
                raise
            missing = isinstance(error, _NO_HEADER)
            what = "it ends without its end mark" if missing else "a header is broken"
            raise TarFaultError(what) from error


class TarSamples:
    """Reads samples by ascending number; the files of those between are passed over unread.

    Args:
        file: the tar's bytes, from its start; first read for the first sample.
        shard: how samples and messages call the shard.

    Attributes:
        position: number of the next sample in the tar.
    """

    def __init__(self, file: ByteStream, shard: str) -> None:
        self._file, self._shard = file, shard
        self.position = 0
        self._tar: tarfile.TarFile | None = None
        self._info: tarfile.TarInfo | None = None  # the file that comes next

    def take(self, number: int) -> RawSample:
        """The sample with this number, from `position` on. It is whole: what follows it was seen.

        Raises:
            TarFaultError: the tar ends before, or is damaged.
        """
        while True:
            sample = self._next_sample(wanted=self.position == number)
            self.position += 1
            if sample is not None:
                return sample

    def is_at_end(self) -> bool:
        """Whether the end mark follows the sample that was taken last."""
        return self._tar is not None and self._info is None

    def count_rest(self) -> int:
        """Samples that follow; reads to the end.

        Raises:
            TarFaultError: the tar is damaged.
        """
        before = self.position
        while not self.is_at_end():
            self._next_sample(wanted=False)
            self.position += 1
        return self.position - before

    def _next_sample(self, wanted: bool) -> RawSample | None:
        """The next sample; None where it is only passed over."""
        try:
            if self._tar is None:
                self._tar = tarfile.open(fileobj=self._file, mode="r|", tarinfo=_Header)  # type: ignore[call-overload] # noqa: SIM115
                self._advance()
            if self._info is None:
                raise TarFaultError(f"it holds no sample behind its first {self.position}")
            key, members, repeated = split_name(self._info.name)[0], {}, []
            while self._info is not None:
                found, name = split_name(self._info.name)
                if found != key:
                    break
                if wanted:
                    if name in members:
                        repeated.append(name)
                    members[name] = self._read(self._info)
                self._advance()
        except (tarfile.TarError, EOFError) as error:
            raise TarFaultError(f"it ends early or is damaged ({error})") from error
        return RawSample(self._shard, key, members, tuple(repeated)) if wanted else None

    def _read(self, info: tarfile.TarInfo) -> bytes:
        assert self._tar is not None
        file = self._tar.extractfile(info)
        assert file is not None
        return file.read()

    def _advance(self) -> None:
        """Moves to the next file; what is neither file nor end, as a folder, is passed over."""
        assert self._tar is not None
        while True:
            self._info = self._tar.next()
            self._tar.members = []  # type: ignore[attr-defined] # it keeps them all: 1 kB each
            if self._info is None or self._info.isfile():
                return
